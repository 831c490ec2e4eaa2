"""A folder of many runs, made quickly: finished ones, ones under way, and ones that are damaged in every way.

Databases are copies of a few templates, which the real writer of run.db has made.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cohort.config.document import dump_config
from cohort.config.load import load_config
from cohort.run.store.db import Store

# Metrics of a step of the quickstart have such names; there are about sixty.
_METRICS = ("reward/mean", "length/mean", "groups/dead", "loss", "grad_norm", "entropy", "lr", "time/step")
_OTHERS = tuple(f"importance/part_{i}" for i in range(52))
_RECIPES = ("quickstart", "tiny_dr_grpo", "tiny_countdown", "gsm8k_again", "tiny_sft")
_DATABASE = ("run.db", "run.db-wal", "run.db-shm")
_NAMES = (
    "\x1b[31mred\x1b[0m",
    "right\u202etleft",
    "line\nbreak",
    "表表表",
    "-rf --json",
    "$(reboot)",
    "%s %n",
    "a" * 180,
)


@dataclass
class ManyRuns:
    """A folder of runs, and the state that each must have, by the path of the run below the folder."""

    folder: Path
    states: dict[str, str] = field(default_factory=dict)


def write_run_database(
    path: Path, steps: int, ending: str = "finished", *, seed: int = 0, keep_log: bool = False
) -> None:
    """Writes a run.db of so many steps. `ending` is the text of the last event; "" = there is none, as after a kill.

    With `keep_log` the newest steps are in the log beside it, as a killed process leaves them.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder, "run.db"))
        # The templates need not survive a power cut.
        store._db.execute("PRAGMA synchronous=OFF")
        store.write_event(0, "command", f"cohort train quickstart --seed {seed}")
        store.write_event(0, "run", "started")
        for step in range(steps + 1):
            if step:
                level = step / (steps + 1) * 0.8 + rng.uniform(0, 0.2)
                values = {"reward/mean": level, "loss": 1 - level, "time/step": 0.5}
                store.write_step(step, {name: values.get(name, rng.random()) for name in (*_METRICS, *_OTHERS)})
            if step % 10 == 0 or step == steps:
                store.write_evaluation(step, {"eval/accuracy": min(1.0, 0.2 + 0.6 * step / (steps + 1))})
        if ending:
            store.write_event(steps, "run", ending)
        if not keep_log:
            store.close()
        for name in _DATABASE:
            if Path(folder, name).exists():
                shutil.copyfile(Path(folder, name), path.with_name(name))
        if keep_log:
            store.close()


def write_lock_file(run: Path, *, pid: int | None = None, host: str | None = None) -> None:
    """Writes the lock file of a run, as the process that holds it or has held it would."""
    holder = {"pid": pid or os.getpid(), "host": host or socket.gethostname(), "since": "2026-01-31T18:00:00+00:00"}
    (run / ".lock").write_text(json.dumps(holder))


@contextmanager
def hold_lock(run: Path) -> Iterator[None]:
    """Holds the lock of a run during the block, as the process that trains it does."""
    write_lock_file(run)
    with open(run / ".lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


class RunMaker:
    """Makes runs in a folder. Runs that are under way are held by this process until `close`."""

    def __init__(self, folder: Path, num_templates: int = 12) -> None:
        self.made = ManyRuns(folder)
        self._templates = Path(tempfile.mkdtemp(prefix="cohort-templates-"))
        self._configs = {name: dump_config(load_config(name)) for name in _RECIPES}
        self._steps = [5 + 15 * i for i in range(num_templates)]
        self._held: list[int] = []

    def make_all(self, num: int) -> ManyRuns:
        """Makes `num` runs: of every twenty, nine are done, and each of the others has something of its own."""
        kinds: list[Callable[[Path, int], str]] = [
            self.make_running,
            self.make_killed,
            partial(self.make_ended, ending="stopped by SIGINT", state="stopped"),
            partial(self.make_ended, ending="stopped by OutOfMemoryError; go on with: x", state="crashed"),
            self.make_truncated,
            self.make_without_config,
            self.make_empty,
            self.make_garbage,
            self.make_huge,
            self.make_on_other_machine,
            self.make_without_database,
        ]
        self.made.folder.mkdir(parents=True, exist_ok=True)
        for i in range(num):
            name = (
                f"{_NAMES[i // 20 % len(_NAMES)]}-{i}"
                if i % 20 == 19
                else f"2026-11-{1 + i % 28:02d}-quickstart-{i:04d}"
            )
            # Some are in a folder of their own, as the runs of a sweep.
            path = self.made.folder / ("sweep" if i % 10 == 8 else "") / name
            path.mkdir(parents=True)
            state = kinds[i % 20](path, i) if i % 20 < len(kinds) else self.make_done(path, i)
            self.made.states[str(path.relative_to(self.made.folder))] = state
        return self.made

    def close(self) -> None:
        """Frees the locks, and removes the templates."""
        for descriptor in self._held:
            os.close(descriptor)
        shutil.rmtree(self._templates)

    def make_done(self, path: Path, i: int) -> str:
        return self.make_ended(path, i, ending="finished", state="done")

    def make_ended(self, path: Path, i: int, *, ending: str, state: str) -> str:
        """Makes a run that ended with an event. It is at its last step only if it is done."""
        steps = self._copy_database(path, i, ending)
        self._write_config(path, i, steps if state == "done" else steps + 10)
        (path / ".lock").write_text(json.dumps({"pid": 1, "host": socket.gethostname(), "since": ""}))
        return state

    def make_running(self, path: Path, i: int) -> str:
        self.make_ended(path, i, ending="", state="running")
        write_lock_file(path)
        descriptor = os.open(path / ".lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._held.append(descriptor)
        return "running"

    def make_killed(self, path: Path, i: int) -> str:
        steps = self._copy_database(path, i, "", keep_log=True)
        self._write_config(path, i, steps + 10)
        return "crashed"

    def make_truncated(self, path: Path, i: int) -> str:
        self.make_done(path, i)
        os.truncate(path / "run.db", 5000 + 997 * i % 20_000)
        return "broken"

    def make_without_config(self, path: Path, i: int) -> str:
        self.make_done(path, i)
        (path / "config.yaml").unlink()
        return "broken"

    def make_empty(self, path: Path, i: int) -> str:
        if i % 40 < 20:
            for name in ("rollouts", "checkpoints", "eval"):
                (path / name).mkdir()
        return "empty"

    def make_garbage(self, path: Path, i: int) -> str:
        self.make_done(path, i)
        broken = (
            "",
            "\x00\x01",
            "a: &x [*x]\n",
            "- 1\n- 2\n",
            "steps: {",
            "steps: 1\nsteps: 2\n",
            "\ufeff{}",
            "[" * 99,
        )
        (path / "config.yaml").write_text(broken[i // 20 % len(broken)])
        return "broken"

    def make_huge(self, path: Path, i: int) -> str:
        """Makes a run whose metrics are as large, small or odd as numbers can be."""
        store = Store(path / "run.db")
        store._db.execute("PRAGMA synchronous=OFF")
        values = (1e308, -1e308, math.inf, math.nan, 5e-324, 0.0)
        for step, value in enumerate(values, start=1):
            store.write_step(step, {"reward/mean": value, "loss": -value})
        store.write_evaluation(6, {"eval/accuracy": math.nan})
        store.write_event(6, "run", "finished")
        store.close()
        self._write_config(path, i, 6)
        return "done"

    def make_on_other_machine(self, path: Path, i: int) -> str:
        self.make_ended(path, i, ending="", state="running?")
        write_lock_file(path, pid=1, host="elsewhere")
        return "running?"

    def make_without_database(self, path: Path, i: int) -> str:
        self.make_done(path, i)
        if i % 40 < 20:
            (path / "run.db").unlink()
        else:
            (path / "run.db").write_bytes(b"")
        return "broken"

    def _copy_database(self, path: Path, i: int, ending: str, *, keep_log: bool = False) -> int:
        """Copies a template, which is made when it is first needed, and returns its number of steps."""
        steps = self._steps[i % len(self._steps)]
        template = self._templates / f"{steps}-{ending[:20].replace(' ', '_')}-{keep_log}"
        if not template.exists():
            template.mkdir()
            write_run_database(template / "run.db", steps, ending, seed=i, keep_log=keep_log)
        for file in template.iterdir():
            shutil.copyfile(file, path / file.name)
        return steps

    def _write_config(self, path: Path, i: int, steps: int) -> None:
        text = self._configs[_RECIPES[i % len(_RECIPES)]]
        for name, value in (("steps", steps), ("seed", i), ("  lr", f"{1 + i % 7}.0e-05")):
            before, _, after = text.partition(f"\n{name}: ")
            text = f"{before}\n{name}: {value}\n{after.partition(chr(10))[2]}"
        (path / "config.yaml").write_text(text)


@contextmanager
def many_runs(folder: Path, num: int) -> Iterator[ManyRuns]:
    """Yields a folder of `num` runs, of which some are under way during the block."""
    maker = RunMaker(folder)
    try:
        yield maker.make_all(num)
    finally:
        maker.close()
