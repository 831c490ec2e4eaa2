"""Short runs of the bundled model by the real command line, in processes of their own, and what they leave."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.tasks.stream import TaskStream
from tests.helpers.struck_command import Strike

if TYPE_CHECKING:
    import pytest  # which a benchmark that uses this does without

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
# Evaluates at 0, 3, 6, saves at 2, 3 (the best so far), 4, 6, and draws some of its 24 prompts a second time.
SMALL = shlex.split(
    "--steps=6 --batch.prompts=6 --batch.samples=4 --sampling.max-tokens=24 --task.train-size=24 --task.test-size=12"
    " --eval.problems=12 --eval.every=3 --save.every=2 --threads=1"
)
STORY = ("command", "run", "checkpoint")  # events that tell of the run's life, not of its training
Done = subprocess.CompletedProcess[str]


def command(args: Sequence[object], orders: Sequence[object] = ()) -> list[str]:
    """`cohort ARGS`, through `tests.helpers.struck_command` where something is ordered to happen to it."""
    program = ["tests.helpers.struck_command", *map(str, orders), "--"] if orders else ["cohort"]
    return [sys.executable, "-m", *program, *map(str, args)]


def start(*args: object, at: Path, orders: Sequence[object] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(args, orders), cwd=at, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def cohort(*args: object, at: Path, orders: Sequence[object] = (), **options: Any) -> Done:
    """The command to its end: as the child of a process that has imported torch, which saves two seconds.

    With `options`, which are subprocess.run's, in a process of its own.
    """
    if not options:
        from tests.helpers.fork_server import shared_server

        return shared_server().run(*args, at=at, orders=orders)  # type: ignore[return-value]
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False, **options}
    return subprocess.run(command(args, orders), cwd=at, env=ENV, **options)


def only_run(folder: Path) -> Path | None:
    """The run made in a folder, once it is one."""
    found = [path.parent for path in folder.glob("runs/*/config.yaml")]
    assert len(found) <= 1
    return found[0] if found else None


def next_args(folder: Path, settings: Sequence[str] = SMALL, recipe: str = "quickstart") -> list[str]:
    """Resume the run of a folder, or start one where a kill came before there was any."""
    run = only_run(folder)
    return ["resume", str(run.relative_to(folder))] if run else ["train", recipe, *settings]


def workers_of(pid: int) -> list[int]:
    """The scoring workers that process `pid` started and that are alive, whoever is their parent now."""
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
    """Whether the kernel has taken the workers of a dead process with it; it needs a moment."""
    deadline = time.monotonic() + patience
    while workers_of(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Census:
    """How a whole run goes: for every place the number of lines of each call, and its seconds."""

    lengths: dict[str, list[int]]
    seconds: float

    def strike(self, place: str, call: int, rng: random.Random) -> Strike:
        """A SIGKILL at a random line of a call; a call that turns out shorter is struck at its end."""
        lengths = self.lengths[place]
        return Strike(SIGKILL, place, call, rng.randint(1, max(1, lengths[min(call, len(lengths)) - 1])))

    def random_strike(self, rng: random.Random) -> Strike:
        """A SIGKILL at a random line of a random call of a random place."""
        place = rng.choice(sorted(name for name, lengths in self.lengths.items() if lengths))
        return self.strike(place, rng.randint(1, len(self.lengths[place])), rng)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def shared_reference(factory: pytest.TempPathFactory) -> tuple[Path, Census]:
    """`reference`, made once for all processes of a test session."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reference"
    folder.mkdir(exist_ok=True)
    record = folder / "record.json"
    with _alone(folder / "lock"):
        if not record.exists():
            _, census = reference(folder)
            record.write_text(json.dumps(asdict(census)))
    run = only_run(folder)
    assert run is not None
    return run, Census(**json.loads(record.read_text()))


def reference(folder: Path, settings: Sequence[str] = SMALL, recipe: str = "quickstart") -> tuple[Path, Census]:
    """The run that nobody disturbs, and its census."""
    begin = time.monotonic()
    file = folder / "census.json"
    done = cohort("train", recipe, *settings, at=folder, orders=[f"census={file}"])
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    run = only_run(folder)
    assert run is not None
    return run, Census(json.loads(file.read_text()), time.monotonic() - begin)


def remains(run: Path) -> dict[str, Any]:
    """All that a run leaves, apart from clock times, row ids, its name and the story of its interruptions."""
    files = {str(p.relative_to(run)): p for p in sorted(run.rglob("*")) if p.is_file()}
    left: dict[str, Any] = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        # readers come and go beside the database, and metrics.jsonl has clock times
        if name not in (".lock", "run.md", "metrics.jsonl") and not name.startswith("run.db")
    }
    left["run.md"] = files["run.md"].read_text().replace(run.name, "RUN") if "run.md" in files else ""
    lines = [json.loads(line) for line in files["metrics.jsonl"].read_text().splitlines()]
    left["metrics.jsonl"] = [
        (line["step"], {k: v for k, v in line["metrics"].items() if not k.startswith("time/")}) for line in lines
    ]
    return left | rows(run / "run.db")


def rows(database: Path) -> dict[str, Any]:
    """Everything in run.db that another run with the same settings must have too, in order of step and place."""
    with Reader(database) as reader:
        metrics = [(m.step, m.name, repr(m.value)) for m in reader.metrics() if not m.name.startswith("time/")]
        events = [(e.step, e.kind, e.text) for e in reader.events() if e.kind not in STORY]
        prompts = {p.id: _fields(p) for p in reader.prompts()}
        groups = {g.id: {**_fields(g), "prompt": prompts[g.prompt]["prompt_id"]} for g in reader.groups()}
        samples = [
            {**_fields(s), "group": groups[s.group]["position"], "advantage": repr(s.advantage)}
            for s in reader.samples()
        ]
    return {
        "metrics": sorted(metrics),
        "events": events,
        "prompts": sorted(prompts.values(), key=lambda p: p["prompt_id"]),
        "groups": sorted(groups.values(), key=lambda g: (g["step"], g["position"])),
        "samples": sorted(samples, key=lambda s: (s["step"], s["group"], s["position"])),
    }


def _fields(row: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name not in ("id", "time")}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names under which two runs' remains differ."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


class _Silent:
    """Renders every prompt as nothing: the order of prompts needs no tokenizer."""

    tokens: tuple[int, ...] = ()
    provenance: tuple[int, ...] = ()
    forced_text = ""

    def render(self, messages: Any, tools: Any = None) -> _Silent:
        return self


def prompts_are_accounted_for(run: Path) -> bool:
    """Whether the surviving history has every (prompt, visit) of the stream once, in order, trained or excluded."""
    config = RunDirectory.open(run).config
    with Reader(run / "run.db") as reader:
        prompts = {p.id: p.prompt_id for p in reader.prompts()}
        groups = sorted(reader.groups(), key=lambda g: (g.step, g.position))
        trained = {s.group for s in reader.samples() if s.advantage != 0}
    stream = TaskStream(config.task, _Silent(), config.seed)  # type: ignore[arg-type]
    due = [(p.id, p.visit) for p in stream.next(config.steps * config.batch.prompts)]
    return (
        [(prompts[g.prompt], g.visit) for g in groups] == due
        and len(set(due)) == len(due)
        and all((g.id in trained) != bool(g.excluded) for g in groups)
    )
