"""The measurements of docs/benchmarks.md and docs/results.md that need a GPU, as a list of steps that runs by itself.

    PYTHONPATH=src python3 benchmarks/on_gpu.py --list                      # the steps, and what each would need
    setsid python3 benchmarks/on_gpu.py --folder F --group new > F.log 2>&1 &    # in the background
    python3 benchmarks/on_gpu.py --folder F --status --wait 300             # a line per step, after at most 300 s
    python3 benchmarks/on_gpu.py --folder F --pack results.tar.gz           # logs and outputs, without models

Every step has a folder below F with its log, its outputs ({out}) and its state. Steps start in the order of the list.
One that measures time runs alone; others run beside each other, as far as no earlier one waits. A step that takes
longer than its minutes is ended, with all that it started. A second call skips the steps that are done and repeats
those that failed. The optimizer's part of checkpoints is removed when a step is done: it would fill the disk.

What a step needs is named by the environment: COHORT_QWEN and COHORT_SMOLLM2 (GGUF files, which the step `models`
converts, or folders), COHORT_DATA (a folder with data sets) and COHORT_PEERS (the PYTHONPATH of vLLM and TRL). A step
whose needs are not named, whose script is not there, or which comes after one that has failed, is left out and says
why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Placeholder -> environment variable.
NEEDS = {"qwen": "COHORT_QWEN", "smollm2": "COHORT_SMOLLM2", "data": "COHORT_DATA", "peers": "COHORT_PEERS"}
# Placeholder -> the model's name in recipes and commands.
MODELS = {"qwen": "qwen2.5-coder-1.5b", "smollm2": "smollm2-135m"}
PAUSE = 0.2  # seconds between two looks at the steps that run
GRACE = 10.0  # seconds that a step has to end after a signal
TOGETHER = 3  # steps that run beside each other at most
LARGEST = 8 << 20  # bytes of a file that `--pack` takes
LEFT_OUT = {"models", "checkpoints", "rollouts"}  # folders that it leaves out
STATE, LOG, PID = "state.json", "log", "campaign.pid"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measurement. Words of `command` and `env` may have {out}, {python} and the placeholders of NEEDS."""

    name: str
    command: str  # split at spaces
    minutes: float
    group: str = "again"  # new = no number in docs/ yet
    alone: bool = True  # whether it measures time
    after: tuple[str, ...] = ()  # steps without which it makes no sense
    env: Mapping[str, str] = field(default_factory=dict)


def benchmark(text: str) -> str:
    """Returns a command for a script in benchmarks/, given its name and flags."""
    return "{python} benchmarks/" + text


SHAPE = "--model qwen2.5-0.5b --weights random --prompts 64 --samples 8 --prompt-tokens 256 --completion-tokens 512"
# The settings of the recipe coder_calculator, for `cohort eval`.
CALCULATOR = (
    "--task.min-terms 3 --task.max-terms 6 --task.max-digits 4 --task.parentheses True --task.negatives True "
    "--task.spaces True --task.keep 10 100000000 --task.instructions True"
)
# ---- the steps, in the order in which they run -----------------------------------------------------------------------
# A new measurement is an entry here. {peers} in a command, or in PYTHONPATH, gives it vLLM and TRL.
PEERS = {"PYTHONPATH": "{pythonpath}:{peers}"}
DATA = {"COHORT_DATA": "{data}"}
STEPS = (
    Step(name="models", command=benchmark("on_gpu.py --convert {out}"), minutes=2, group="new", alone=False),
    # Beside each other: what is right, and what is learned.
    Step(
        name="tests",
        command="{python} -m pytest tests/gpu -q -p no:cacheprovider -p no:xdist --durations=10",
        minutes=8,
        group="new",
        alone=False,
        after=("models",),
        env={"COHORT_SMOLLM2": "{smollm2}"} | DATA,
    ),
    Step(
        name="calculator",
        command=benchmark(
            "real_result.py coder_calculator calculator --model {qwen} --out {out}/result --minutes 3.5 --shows 3 "
            "--eval-flags CALCULATOR_EVAL --eval.problems 32"
        ),
        minutes=8,
        group="new",
        alone=False,
        after=("models",),
    ),
    # Preferences on UltraFeedback.
    Step(
        name="ultrafeedback",
        command=benchmark(
            "preference_result.py --model {qwen} --data {data}/preference_ultrafeedback_{split}.jsonl --out {out} "
            "--drop-checkpoints -- --data.max-tokens 2049 --data.too-long skip --batch.pairs 16 --passes 3 "
            "--optim.lr 5e-6 --optim.warmup 10 --eval.every 62 --save.every 1000 --save.keep-last 1 "
            "--save.keep-best False"
        ),
        minutes=7,
        group="new",
        alone=False,
        after=("models",),
    ),
    # Alone: what is fast.
    Step(
        name="turns",
        command=benchmark("turn_speed.py --recipe coder_calculator --model {folder}/calculator/result/last"),
        minutes=2,
        group="new",
        after=("calculator",),
    ),
    Step(
        name="engines",
        command=benchmark(
            "engines_in_training.py --recipe coder_gsm8k --model {qwen} --steps 10 --problems 8 --memory 0.4 "
            "--engines native NATIVE_PROCESS vllm --devices cuda:0 --out {out}/engines.json "
            "--set batch.prompts=64 engine.slots=512"
        ),
        minutes=8,
        group="new",
        after=("models",),
        env=PEERS | DATA,
    ),
    Step(name="ranks", command=benchmark("ranks_gpu.py --out {out}/ranks.json"), minutes=5, group="new"),
    # SFT and DPO against TRL.
    Step(
        name="given-vs-trl",
        command=benchmark("given_vs_trl.py --trl-pythonpath {peers} --seconds 120 --out {out}/given.json"),
        minutes=8,
        group="new",
    ),
    Step(
        name="layouts",
        command=benchmark(
            "layouts.py --shape qwen2.5-0.5b --device cuda --dtype bfloat16 --prompt-tokens 512 --answer-tokens 128 "
            "--answers 2 --size 32 --steps 2 --repeats 2 --budget 16384 --markdown"
        ),
        minutes=2,
        group="new",
    ),
    # Curves of small recipes: docs/results.md. Steps are counted there, not seconds.
    Step(
        name="small-recipes",
        command=benchmark("small_recipes.py --device gpu --out {out}/small --runs {out}/runs"),
        minutes=16,
        alone=False,
        after=("models",),
        env=DATA,
    ),
    # What docs/benchmarks.md and docs/results.md have already.
    Step(
        name="engine-vs-vllm",
        command=benchmark("engine_vs_vllm.py --vllm-pythonpath {peers} --out {out}/engine.json"),
        minutes=30,
    ),
    Step(
        name="step-vs-trl",
        command=benchmark("step_vs_trl.py --shape qwen2.5-0.5b --trl-pythonpath {peers} --out {out}/step.json"),
        minutes=20,
    ),
    Step(name="learner", command=f"{{python}} -m cohort bench learner {SHAPE}", minutes=3),
    Step(name="memory", command=benchmark("memory_table.py --measure --models qwen2.5-0.5b qwen2.5-1.5b"), minutes=6),
    Step(
        name="sampler-gap",
        command=benchmark("sampler_gap.py {smollm2} qwen2.5-0.5b --vllm-pythonpath {peers}"),
        minutes=6,
        alone=False,
        after=("models",),
    ),
    Step(
        name="countdown-smollm2",
        command=benchmark("countdown_smollm2.py {smollm2} --out {out}/countdown"),
        minutes=5,
        alone=False,
        after=("models",),
    ),
    Step(
        name="gsm8k",
        command=benchmark("real_result.py coder_gsm8k gsm8k --model {qwen} --out {out}/result --minutes 15 --greedy"),
        minutes=25,
        alone=False,
        after=("models",),
        env=DATA,
    ),
    Step(
        name="countdown",
        command=benchmark(
            "real_result.py coder_countdown countdown --model {qwen} --out {out}/result --minutes 15 "
            "--eval-flags COUNTDOWN_EVAL"
        ),
        minutes=25,
        alone=False,
        after=("models",),
    ),
)
# Words of commands that have spaces.
WORDS = {
    "CALCULATOR_EVAL": f"--limit 256 --slots 256 --max-tokens 256 --max-turns 4 --call-format tags {CALCULATOR}",
    "COUNTDOWN_EVAL": "--slots 1024 --max-tokens 1024 --task.data {data}/countdown_{split}.jsonl "
    "--task.instructions True --task.think True",
    "NATIVE_PROCESS": "native, 1 process",
}


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class State:
    """What became of a step. It is a file in the folder of the step."""

    name: str
    state: str = "waiting"  # waiting, running, done, failed, ended (by its limit or a signal), left out
    seconds: float = 0.0
    began: float = 0.0
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the step will not change its state in this call."""
        return self.state not in ("waiting", "running")


@dataclass(kw_only=True)
class Running:
    """A step whose process has been started."""

    step: Step
    process: subprocess.Popen[bytes]
    began: float


class Campaign:
    """Steps that run in a folder. `values` has what placeholders stand for."""

    def __init__(self, steps: Sequence[Step], folder: Path, values: Mapping[str, str]) -> None:
        self.steps = list(steps)
        self.folder = folder
        self.values = values
        self.states = {step.name: read_state(folder, step.name) for step in steps}

    def run(self) -> bool:
        """Runs all steps that are not done. Returns whether all are done afterwards."""
        for name, state in self.states.items():
            if state.state != "done":
                self._note(State(name=name))
        running: list[Running] = []
        try:
            while running or any(not state.is_over for state in self.states.values()):
                running = [one for one in running if not self._finish(one)]
                self._start_next(running)
                time.sleep(PAUSE)
        finally:
            for one in running:
                end_family(one.process)
                self._note_end(one, "ended", "the campaign was stopped")
        return all(state.state == "done" for state in self.states.values())

    def _start_next(self, running: list[Running]) -> None:
        """Starts steps as far as those that run allow it, in order, and adds them to `running`."""
        for step in self.steps:
            if self.states[step.name].state != "waiting":
                continue
            if reason := self._find_hindrance(step):
                self._note(State(name=step.name, state="left out", reason=reason))
                print(describe(self.states[step.name], self.folder), flush=True)
                continue
            if any(name in self.states and not self.states[name].is_over for name in step.after):
                continue
            is_blocked = step.alone or len(running) >= TOGETHER or any(one.step.alone for one in running)
            if running and is_blocked:
                return
            running.append(self._start(step))

    def _find_hindrance(self, step: Step) -> str:
        """Returns why a step cannot be run; "" = it can be."""
        words = " ".join([*(WORDS.get(word, word) for word in step.command.split()), *step.env.values()])
        missing = [NEEDS[name] for name in NEEDS if f"{{{name}}}" in words and not self.values.get(name)]
        if missing:
            return f"{missing[0]} is not set"
        scripts = [word for word in step.command.split() if word.startswith("benchmarks/")]
        if absent := [script for script in scripts if not (ROOT / script).is_file()]:
            return f"there is no {absent[0]}"
        # A step of an earlier call counts too.
        before = [self.states.get(name) or read_state(self.folder, name) for name in step.after]
        failed = [one.name for one in before if one.state != "done" and (one.is_over or one.name not in self.states)]
        return f"{failed[0]} is not done" if failed else ""

    def _start(self, step: Step) -> Running:
        """Starts a step in a process group of its own."""
        out = self.folder / step.name
        # What an attempt before has left there.
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        values = {**self.values, "folder": str(self.folder), "out": str(out), "python": sys.executable}
        command = [fill(WORDS.get(word, word), values) for word in step.command.split()]
        environment = os.environ | {"PYTHONPATH": values["pythonpath"]}
        environment |= {name: fill(text, values) for name, text in step.env.items()}
        print(f"{step.name}: {' '.join(command)}", flush=True)
        with (out / LOG).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        began = time.time()
        self._note(State(name=step.name, state="running", began=began))
        return Running(step=step, process=process, began=began)

    def _finish(self, one: Running) -> bool:
        """Returns whether a step has ended. Ends it after its minutes, and notes what became of it."""
        code = one.process.poll()
        if code is None and time.time() - one.began < 60 * one.step.minutes:
            return False
        if code is None:
            end_family(one.process)
            self._note_end(one, "ended", f"it took longer than {one.step.minutes:g} minutes")
        else:
            # What it has left behind would disturb the next step.
            end_family(one.process)
            for file in (self.folder / one.step.name).rglob("optimizer*.safetensors"):
                file.unlink()
            self._note_end(one, "failed" if code else "done", f"exit status {code}" if code else "")
        return True

    def _note_end(self, one: Running, state: str, reason: str) -> None:
        """Notes that a step has ended, and prints its line."""
        seconds = time.time() - one.began
        self._note(State(name=one.step.name, state=state, seconds=seconds, began=one.began, reason=reason))
        print(describe(self.states[one.step.name], self.folder), flush=True)

    def _note(self, state: State) -> None:
        """Keeps a state, also as a file."""
        self.states[state.name] = state
        file = self.folder / state.name / STATE
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps(asdict(state)))
        aside.replace(file)


def fill(word: str, values: Mapping[str, str]) -> str:
    """Returns a word with placeholders replaced. Braces around other words stay, as in gsm8k_{split}.jsonl.

    >>> fill("{data}/gsm8k_{split}.jsonl", {"data": "d"})
    'd/gsm8k_{split}.jsonl'
    """
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all of its group: first with SIGTERM, after GRACE seconds with SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_state(folder: Path, name: str) -> State:
    """Returns the state of a step as its file has it; waiting, if there is none."""
    file = folder / name / STATE
    return State(**json.loads(file.read_text())) if file.is_file() else State(name=name)


def describe(state: State, folder: Path) -> str:
    """Returns the line of a step: name, state, seconds, and why it ended or what it printed last."""
    seconds = time.time() - state.began if state.state == "running" else state.seconds
    log = folder / state.name / LOG
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    text = f"{state.name:16} {state.state:9} {seconds:6.0f} s"
    return " | ".join([text, *(part for part in (state.reason, last[:120]) if part)])


@contextlib.contextmanager
def being_the_only_one(folder: Path) -> Iterator[None]:
    """Context in which no other campaign runs in the folder. Raises SystemExit if one does."""
    file = folder / PID
    if file.is_file() and is_alive(int(file.read_text())):
        raise SystemExit(f"a campaign runs in {folder} already, as process {file.read_text()}: use --status.")
    file.write_text(str(os.getpid()))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Returns whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def wait_for_end(folder: Path, steps: Sequence[Step], seconds: float) -> None:
    """Waits until all steps are over, or the campaign has ended, at most so many seconds."""
    begin = time.monotonic()
    while (spent := time.monotonic() - begin) < seconds:
        file = folder / PID
        # A campaign that was started just now has written nothing yet.
        has_ended = spent > GRACE and not file.is_file()
        if has_ended or all(read_state(folder, step.name).is_over for step in steps):
            return
        time.sleep(PAUSE)


# ---- models and results ----------------------------------------------------------------------------------------------


def convert_models(out: Path) -> None:
    """Converts the models that the environment names as GGUF files, and makes links to their folders in `out`.

    Recipes find them by their names: the folder of models that were fetched has links too.
    """
    from cohort.models.catalog import pull
    from cohort.system.cache import cache_root

    for name, known in MODELS.items():
        source = os.environ.get(NEEDS[name], "")
        link = out / name
        if source and not link.exists():
            folder = pull(source, lambda what, share: None) if source.endswith(".gguf") else Path(source)
            link.symlink_to(folder.resolve())
            fetched = cache_root() / "models" / known
            if not fetched.exists():
                fetched.parent.mkdir(parents=True, exist_ok=True)
                fetched.symlink_to(folder.resolve())
            print(f"{name}: {folder}", flush=True)


def find_values(folder: Path) -> dict[str, str]:
    """Returns what placeholders stand for: those of NEEDS as far as the environment says it, and {pythonpath}."""
    values = {name: os.environ.get(variable, "") for name, variable in NEEDS.items()}
    for name in MODELS:
        if values[name]:
            values[name] = str((folder / "models" / name).absolute())
    paths = [ROOT / "src", *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    # Steps run in another folder.
    return values | {"pythonpath": os.pathsep.join(dict.fromkeys(str(path.absolute()) for path in paths))}


def pack(folder: Path, file: Path) -> None:
    """Writes logs and outputs of all steps into a tar file, without models, rollouts and large files."""
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            is_small = path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST
            if is_small and LEFT_OUT.isdisjoint(parts) and path != file:
                archive.add(path, arcname=str(Path(*parts)))
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


def choose_steps(steps: Sequence[Step], only: Sequence[str], group: str) -> list[Step]:
    """Returns the steps with these names or, if none are given, of this group; "" = all. Ends at an unknown name."""
    if unknown := set(only) - {step.name for step in steps}:
        raise SystemExit(f"there is no step {min(unknown)}; --list names them all.")
    if only:
        # In the order of the caller.
        return [next(step for step in steps if step.name == name) for name in only]
    return [step for step in steps if not group or step.group == group]


def main(argv: list[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Runs steps, or tells of them. Returns 0 if all that were asked for are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("on_gpu"), help="where steps have their folders")
    parser.add_argument("--group", choices=["new", "again"], default="", help="run this part of the steps")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="run these steps, in this order")
    parser.add_argument("--list", action="store_true", help="say what would run")
    parser.add_argument("--status", action="store_true", help="say what became of each step")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that --status waits for the end")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="collect logs and outputs")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    if a.convert:
        convert_models(a.convert)
        return 0
    if a.pack:
        pack(a.folder, a.pack)
        return 0
    chosen = choose_steps(steps, a.only, a.group)
    if a.list:
        for step in chosen:
            print(f"{step.name:16} {step.group:6} {step.minutes:4g} min {'alone' if step.alone else ''}")
        return 0
    if a.status:
        wait_for_end(a.folder, chosen, a.wait)
        states = [read_state(a.folder, step.name) for step in chosen]
        print("\n".join(describe(state, a.folder) for state in states))
        return 0 if all(state.state == "done" for state in states) else 1
    a.folder.mkdir(parents=True, exist_ok=True)
    folder = a.folder.absolute()
    # So that the steps are ended too.
    signal.signal(signal.SIGTERM, raise_stop)
    with being_the_only_one(folder):
        campaign = Campaign(chosen, folder, find_values(folder))
        is_done = campaign.run()
    print("\n".join(describe(state, folder) for state in campaign.states.values()))
    return 0 if is_done else 1


def raise_stop(number: int, frame: Any) -> None:
    """Ends the program at a signal, through its `finally` clauses."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
