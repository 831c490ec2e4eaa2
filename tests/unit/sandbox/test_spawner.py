"""The supervisor of a program: what it answers if the program never started."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from cohort.sandbox import spawner
from cohort.sandbox.records import ProgramLimits
from cohort.sandbox.root import RootPlan


@pytest.fixture(autouse=True)
def no_end_of_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the supervisor, which is the process of the tests here, from ending all of its children."""
    monkeypatch.setattr(spawner, "end_orphans", lambda: None)


def watch(folder: Path, executable: str) -> dict[str, object]:
    """Returns the answer of a supervisor for an empty program, run without a sandbox by an interpreter."""
    plan = RootPlan(executable=executable, shown=(), links=(), hidden=())
    fds = tuple(os.open("/dev/null", os.O_RDWR) for _ in range(4))
    spec = spawner.ProgramSpec(isolated=False, limits=ProgramLimits(), source=b"", driver=b"", plan=plan, fds=fds)
    here, there = socket.socketpair()
    with here, there:
        return spawner.watch_program(there, spec, str(folder))


def test_an_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    answer = watch(tmp_path, str(tmp_path / "none"))
    assert "No such file" in str(answer["error"])


@pytest.mark.parametrize("name", ["run_init", "start_program"])
def test_a_process_that_is_killed_before_the_program_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the machine runs out of memory: the program did nothing, so it has no outcome."""
    monkeypatch.setattr(spawner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert watch(tmp_path, "/dev/null") == {"error": "its first process was ended before the program started"}
