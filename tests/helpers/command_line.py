"""Runs of the bundled model through the real command line, in other processes, and what they leave on disk."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.tasks.stream import TaskStream
from tests.helpers.made_once import make_once
from tests.helpers.struck_command import Strike

if TYPE_CHECKING:
    import pytest  # which a benchmark that uses this does without

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
# Evaluates after steps 0, 3 and 6. Saves after 2, 3 (the best so far), 4 and 6. Visits some of its 24 prompts twice.
SMALL = shlex.split(
    "--steps=6 --batch.prompts=6 --batch.samples=4 --sampling.max-tokens=24 --task.train-size=24 --task.test-size=12"
    " --eval.problems=12 --eval.every=3 --save.every=2 --threads=1"
)
LIFE_EVENTS = ("command", "run", "extension", "checkpoint")  # about starts and checkpoints, not about training
Done = subprocess.CompletedProcess[str]


def command(args: Sequence[object], orders: Sequence[object] = ()) -> list[str]:
    """Returns the words of the command `cohort ARGS`, run by `tests.helpers.struck_command` if there are `orders`."""
    program = ["tests.helpers.struck_command", *map(str, orders), "--"] if orders else ["cohort"]
    return [sys.executable, "-m", *program, *map(str, args)]


def start(*args: object, at: Path, orders: Sequence[object] = ()) -> subprocess.Popen[str]:
    """Starts `cohort ARGS` in the folder `at`, and does not wait for its end."""
    return subprocess.Popen(
        command(args, orders), cwd=at, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def cohort(*args: object, at: Path, orders: Sequence[object] = (), **options: Any) -> Done:
    """Runs `cohort ARGS` in the folder `at` to its end.

    Without `options` it is a child of a process that has imported torch, which saves two seconds. With `options`, which
    are those of subprocess.run, it is a new process.
    """
    if not options:
        from tests.helpers.fork_server import shared_server

        return shared_server().run(*args, at=at, orders=orders)  # type: ignore[return-value]
    options = {"env": ENV, "capture_output": True, "text": True, "timeout": 300, "check": False, **options}
    return subprocess.run(command(args, orders), cwd=at, **options)


def only_run(folder: Path) -> Path | None:
    """Returns the only run below a folder; None if there is none yet."""
    found = [path.parent for path in folder.glob("runs/*/config.yaml")]
    assert len(found) <= 1
    return found[0] if found else None


def next_args(folder: Path, settings: Sequence[str] = SMALL, recipe: str = "quickstart") -> list[str]:
    """Returns the arguments that resume the run below a folder, or that start one if there is none yet."""
    run = only_run(folder)
    return ["resume", str(run.relative_to(folder))] if run else ["train", recipe, *settings]


def workers_of(pid: int) -> list[int]:
    """Returns the process ids of living scoring workers that the process `pid` started, even if it has ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:  # it ended while we looked
            continue
        if b"cohort.scoring.worker" in words and words[-1] == str(pid).encode():
            found.append(int(entry.name))
    return found


def no_worker_is_left(pid: int, patience: float = 20.0) -> bool:
    """Returns whether all scoring workers of a dead process end within `patience` seconds."""
    deadline = time.monotonic() + patience
    while workers_of(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Census:
    """What a whole run executes: per place the number of lines of each call, and the seconds of the run."""

    lengths: dict[str, list[int]]
    seconds: float

    def strike(self, place: str, call: int, rng: random.Random) -> Strike:
        """Returns a SIGKILL at a random line of a call. If the call is shorter, it comes at its end."""
        lengths = self.lengths[place]
        return Strike(SIGKILL, place, call, rng.randint(1, max(1, lengths[min(call, len(lengths)) - 1])))

    def random_strike(self, rng: random.Random) -> Strike:
        """Returns a SIGKILL at a random line of a random call of a random place."""
        place = rng.choice(sorted(name for name, lengths in self.lengths.items() if lengths))
        return self.strike(place, rng.randint(1, len(self.lengths[place])), rng)


def shared_reference(factory: pytest.TempPathFactory) -> tuple[Path, Census]:
    """Returns what `reference` returns. The run is made once for all processes of a test session."""

    def make(folder: Path) -> None:
        """Makes the run, and records its census."""
        _, census = reference(folder)
        (folder / "record.json").write_text(json.dumps(asdict(census)))

    folder = make_once(factory, "reference", make)
    run = only_run(folder)
    assert run is not None
    return run, Census(**json.loads((folder / "record.json").read_text()))


def reference(folder: Path, settings: Sequence[str] = SMALL, recipe: str = "quickstart") -> tuple[Path, Census]:
    """Makes a run that is not disturbed, and returns it with its census."""
    begin = time.monotonic()
    file = folder / "census.json"
    done = cohort("train", recipe, *settings, at=folder, orders=[f"census={file}"])
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    run = only_run(folder)
    assert run is not None
    return run, Census(json.loads(file.read_text()), time.monotonic() - begin)


def remains(run: Path) -> dict[str, Any]:
    """Returns everything that a run wrote, except times, row ids, its name and events that tell of interruptions."""
    files = {str(p.relative_to(run)): p for p in sorted(run.rglob("*")) if p.is_file()}
    left: dict[str, Any] = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        # Readers of the database create files beside it, and metrics.jsonl contains times.
        if name not in (".lock", "run.md", "metrics.jsonl") and not name.startswith("run.db")
    }
    left["run.md"] = files["run.md"].read_text().replace(run.name, "RUN") if "run.md" in files else ""
    lines = [json.loads(line) for line in files["metrics.jsonl"].read_text().splitlines()]
    left["metrics.jsonl"] = [
        (line["step"], {k: v for k, v in line["metrics"].items() if not k.startswith("time/")}) for line in lines
    ]
    return left | rows(run / "run.db")


def rows(database: Path) -> dict[str, Any]:
    """Returns everything in run.db that an equal run must have too, in order of step and position."""
    with Reader(database) as reader:
        metrics = [(m.step, m.name, repr(m.value)) for m in reader.read_metrics() if not m.name.startswith("time/")]
        events = [(e.step, e.kind, e.text) for e in reader.read_events() if e.kind not in LIFE_EVENTS]
        prompts = {p.id: _fields(p) for p in reader.read_prompts()}
        groups = {g.id: {**_fields(g), "prompt": prompts[g.prompt]["prompt_id"]} for g in reader.read_groups()}
        samples = [
            {**_fields(s), "group": groups[s.group]["position"], "advantage": repr(s.advantage)}
            for s in reader.read_samples()
        ]
    return {
        "metrics": sorted(metrics),
        "events": events,
        "prompts": sorted(prompts.values(), key=lambda p: p["prompt_id"]),
        "groups": sorted(groups.values(), key=lambda g: (g["step"], g["position"])),
        "samples": sorted(samples, key=lambda s: (s["step"], s["group"], s["position"])),
    }


def _fields(row: Any) -> dict[str, Any]:
    """Returns the fields of a row without its id and time."""
    return {name: value for name, value in asdict(row).items() if name not in ("id", "time")}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Returns the names of what differs between the remains of two runs."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


class _EmptyRenderer:
    """Renders every prompt to no tokens: the order of prompts does not depend on them."""

    tokens: tuple[int, ...] = ()
    provenance: tuple[int, ...] = ()
    forced_text = ""

    def render(self, messages: Any, tools: Any = None) -> _EmptyRenderer:
        return self


def prompts_are_accounted_for(run: Path) -> bool:
    """Returns whether every (prompt, visit) of the prompt stream is recorded once, in order, as trained or excluded."""
    config = RunDirectory.open(run).config
    with Reader(run / "run.db") as reader:
        prompts = {p.id: p.prompt_id for p in reader.read_prompts()}
        groups = sorted(reader.read_groups(), key=lambda g: (g.step, g.position))
        trained = {s.group for s in reader.read_samples() if s.advantage != 0}
    stream = TaskStream(config.task, _EmptyRenderer(), config.seed)  # type: ignore[arg-type]
    due = [(p.id, p.visit) for p in stream.next_prompts(config.steps * config.batch.prompts)]
    return (
        [(prompts[g.prompt], g.visit) for g in groups] == due
        and len(set(due)) == len(due)
        and all((g.id in trained) != bool(g.excluded) for g in groups)
    )
