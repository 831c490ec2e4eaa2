"""A run that does not train a model: four numbers take the place of the weights. Everything else of the run is real.

python -m tests.helpers.pretend_run DIRECTORY          starts or resumes it
python -m tests.helpers.pretend_run DIRECTORY kill N   the same, and kills itself at the N-th line of the watched files
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import cohort
from cohort.config.kinds import RL
from cohort.config.schema import BatchConfig, EvalConfig, SaveConfig
from cohort.evaluation.records import EvalAnswer, EvalItem, Evaluation
from cohort.jobs import rl
from cohort.logs.view import View, make_view
from cohort.loops.stats import compute_rollout_metrics
from cohort.run.checkpoint import Checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.job import StepRecord, make_step_record
from cohort.run.life import Run
from cohort.run.store.reader import Reader
from cohort.run.store.records import RunDescription
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts
from cohort.tasks.base import get_task
from cohort.types import Finish, Group, Prompt, Provenance, Sample
from tests.helpers.evaluations import eval_setting

PACKAGE = Path(cohort.__file__).parent
# The files whose lines `LineCounter` counts: all that write a run.
WATCHED = (
    *(str(PACKAGE / part) for part in ("run", "system/disk.py")),
    shutil.__file__,  # where directories are removed file by file
)


def small_run(**changes: Any) -> RL:
    """Returns the config of a run of six steps, with evaluations after 3 and 6 and checkpoints every 2 steps."""
    values: dict[str, Any] = {
        "recipe": "pretend",
        "steps": 6,
        "task": get_task("arithmetic")(),
        "batch": BatchConfig(prompts=2, samples=2),
        "eval": EvalConfig(every=3),
        "save": SaveConfig(every=2, keep_last=2),
    }
    return RL(**{**values, **changes})


TWO_TURNS = (
    {"role": "assistant", "content": "a call"},
    {"role": "tool", "name": "look", "content": "a result"},
    {"role": "assistant", "content": "an answer"},
)


def pretend_groups(seed: int, num_groups: int = 2, group_size: int = 2) -> list[Group]:
    """Returns groups with every field filled. Equal seeds give equal groups; logprobs are float32 numbers."""
    rng = random.Random(seed)

    def floats(n: int) -> list[float]:
        return torch.tensor([rng.uniform(-3, 0) for _ in range(n)]).tolist()

    def sample(index: int) -> Sample:
        n = rng.randint(1, 8)
        return Sample(
            tokens=[rng.randrange(50_000) for _ in range(n)],
            provenance=[Provenance.SAMPLED] * n,
            sampler_logprobs=floats(n),
            versions=[(0, seed)],
            finish=rng.choice([Finish.STOP, Finish.LENGTH]),
            text=f"answer {rng.randrange(100)}",
            parts={"correct": float(index == 0), "format": rng.random()},
            reward=float(index == 0) + rng.random(),
            old_logprobs=floats(n),
            advantage=rng.uniform(-1, 1),
            # The second sample of every group has two turns.
            messages=[dict(message) for message in TWO_TURNS] if index == 1 else [],
            turn_calls=[{"ok": 1}, {}] if index == 1 else [],
            calls={"ok": 1} if index == 1 else {},
        )

    return [
        Group(
            prompt=Prompt(
                task="arithmetic",
                id=str(rng.randrange(4)),  # few ids, so that prompts repeat
                visit=seed,
                row={"id": "x", "numbers": [1, 2]},
                messages=[{"role": "user", "content": f"what is {position}?"}],
                tokens=[1, 2, 3],
                provenance=[Provenance.PROMPT] * 3,
            ),
            samples=[sample(i) for i in range(group_size)],
        )
        for position in range(num_groups)
    ]


class PretendJob:
    """A job that trains four numbers with momentum, so that a lost or repeated step changes the result."""

    def __init__(self, config: RL | None = None) -> None:
        self.config = config or small_run()
        self.weights = torch.zeros(4)
        self.momentum = torch.zeros(4)
        self.cursor = 0

    def describe(self) -> RunDescription:
        return rl.describe_run(self.config)

    def suggest_commands(self, run: Path, step: int) -> list[list[str]]:
        return rl.suggest_commands(self.config, run, step)

    def describe_extension(self, step: int, old_steps: int, new_steps: int) -> str:
        return ""

    def step(self, step: int, groups: Sequence[Group]) -> StepRecord:
        """Trains on the groups, and returns the record of the step."""
        return make_step_record(step, groups, self.update(groups))

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Moves the four numbers, and returns metrics."""
        gradient = torch.tensor([s.advantage for g in groups for s in g.samples][:4])
        self.momentum = 0.9 * self.momentum + gradient
        self.weights = self.weights - 0.1 * self.momentum
        self.cursor += len(groups)
        return compute_rollout_metrics(groups) | {
            "loss": self.weights.sum().item(),
            "grad_norm": gradient.norm().item(),
        }

    measure = None

    def evaluate(self, step: int) -> Evaluation:
        accuracy = min(1.0, 0.1 * step + abs(self.weights[0].item()) % 0.1)
        answer = EvalAnswer(text="2", finish="stop", num_tokens=3, correct=1.0, parts={"correct": 1.0}, reason="ok")
        item = EvalItem(id="0", messages=[{"role": "user", "content": "1+1"}], prompt="1+1", answers=[answer])
        return Evaluation(
            setting=eval_setting(step=step, num_problems=1),
            accuracy=accuracy,
            low=accuracy - 0.05,
            high=accuracy + 0.05,
            mean_tokens=3.0,
            finishes={"stop": 1},
            items=[item],
        )

    def prepare(self, run: Path) -> list[tuple[str, str]]:
        return []

    def make_checkpoint(self, step: int) -> Checkpoint:
        numbers = {"threads": torch.get_num_threads()}
        return Checkpoint(step=step, cursor=self.cursor, optimizer={"w.momentum": self.momentum}, numbers=numbers)

    def write_model(self, folder: Path) -> None:
        folder.mkdir()
        save_file({"w": self.weights}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    def restore(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.model is not None
        self.weights = load_file(checkpoint.model / "model.safetensors")["w"]
        self.momentum = checkpoint.optimizer["w.momentum"]
        self.cursor = checkpoint.cursor


def run_to_end(
    directory: RunDirectory, view: View | None = None, during: Callable[[int], None] = lambda step: None
) -> PretendJob:
    """Starts or resumes a run, does all its steps and returns the job. `during` is called inside every step."""
    config = directory.config
    assert isinstance(config, RL)
    job = PretendJob(config)
    with Run(directory, config, job, view or make_view("plain")) as run:
        for step in run.steps():
            record = job.step(step, pretend_groups(step))
            during(step)
            run.end_step(step, record)
        run.finish()
    return job


def run_in_child(path: Path, kill_at: int) -> int:
    """Does a run to its end in a forked process that kills itself at the given line. Returns its wait status."""
    pid = os.fork()
    if pid == 0:
        directory = RunDirectory.open(path)
        with LineCounter(kill_at):
            run_to_end(directory, make_view("plain", io.StringIO()))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def collect_remains(directory: RunDirectory) -> dict[str, Any]:
    """Returns everything that a run wrote, except times, ids and events that tell of interruptions."""
    with Reader(directory.database) as reader:
        metrics = [(m.step, m.name, m.value) for m in reader.read_metrics() if not m.name.startswith("time/")]
        prompts = {p.id: (p.step, p.task, p.prompt_id) for p in reader.read_prompts()}
        groups = [(g.step, g.position, prompts[g.prompt], g.visit, g.reward_mean) for g in reader.read_groups()]
        samples = [(s.step, s.position, s.text, s.reward, s.advantage) for s in reader.read_samples()]
        turns = [(t.step, t.number, t.num_tokens, t.finish, t.calls, t.text, t.reply) for t in reader.read_turns()]
    rollouts = {
        s: load_rollouts(directory.rollouts / f"step-{s:06d}.safetensors")
        for s in list_rollout_steps(directory.rollouts)
    }
    newest = max(directory.checkpoints.glob("step-*"))
    return {
        "metrics": sorted(metrics),
        "prompts": sorted(prompts.values()),
        "groups": groups,
        "samples": samples,
        "turns": turns,
        "rollouts": rollouts,
        "evaluations": directory.load_evaluations(),
        "model": (newest / "model" / "model.safetensors").read_bytes(),
        "optimizer": (newest / "optimizer.safetensors").read_bytes(),
        "state": {k: v for k, v in json.loads((newest / "state.json").read_text()).items() if k != "files"},
        "left over": sorted(p.name for p in directory.path.rglob(".*") if p.name != ".lock"),
    }


class LineCounter:
    """Counts the executed lines of the watched files, and kills this process at line `kill_at` (-1 = never)."""

    def __init__(self, kill_at: int = -1) -> None:
        self.count = 0
        self.kill_at = kill_at

    def __enter__(self) -> LineCounter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, what: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(WATCHED) else None

    def _line(self, frame: FrameType, what: str, _: Any) -> Any:
        if what == "line":
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


def open_or_create(path: Path) -> RunDirectory:
    """Returns the run in `path`, which is created if it does not exist."""
    return RunDirectory.open(path) if path.exists() else RunDirectory.create(path.parent, small_run(), path.name)


def main(args: list[str]) -> None:
    torch.set_num_threads(1)
    directory = open_or_create(Path(args[0]))
    with LineCounter(int(args[2]) if len(args) > 2 else -1):
        run_to_end(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
