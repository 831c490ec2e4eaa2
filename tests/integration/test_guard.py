"""Processes that a grader starts end with their worker, however the worker or the run ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cohort.scoring import process
from cohort.scoring.pool import ScoringPool
from cohort.scoring.wire import Limits
from cohort.system.guard import WATCH_SECONDS
from cohort.system.kernel import list_children
from cohort.tasks.base import make_plain_answer
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Row
from tests.helpers import without_linux

# The processes that its answers leave behind write their ids into files. In a test that fails they end after a minute.
GRADER = """
import os, signal, subprocess, threading, time
from cohort.tasks.base import Verdict, task

def sleep_as(file, **options):
    subprocess.Popen(["sh", "-c", 'echo $$ > "$0.new"; mv "$0.new" "$0"; exec sleep 60', file], **options)

@task("leaves")
class Leaves:
    def rows(self, split): yield {"x": 1}
    def prompt(self, row): return [{"role": "user", "content": "?"}]

    def score(self, row, answer):
        for word in answer.text.split():
            getattr(self, word)(os.path.join(row["folder"], word))
        while not all(os.path.exists(os.path.join(row["folder"], word)) for word in row["left"]):
            time.sleep(0.001)
        for word in row["then"]:
            getattr(self, word)()
        return {"correct": 1}

    def program(self, file): sleep_as(file)
    def session(self, file): sleep_as(file, start_new_session=True)
    def orphan(self, file):
        if os.fork() == 0:
            os.setsid()
            sleep_as(file, start_new_session=True)
            os._exit(0)
        os.wait()
    def hang(self): signal.pause()
    def crash(self): os.kill(os.getpid(), signal.SIGSEGV)
    def kill_guard(self): os.kill(os.getppid(), signal.SIGKILL); signal.pause()
    def stop_guard(self): os.kill(os.getppid(), signal.SIGSTOP); signal.pause()
    def odd_signal(self): os.kill(os.getpid(), 40)
    def hoard(self):
        hoard = []
        while True:
            hoard.append(b"x" * (1 << 20))
            time.sleep(0.001)
    def fork_in_thread(self):
        read, write = os.pipe()
        def start():
            if os.fork() == 0:
                os.close(write)
                os._exit(len(os.read(read, 1)))
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        # The child ends only now, and with 1, unless the end of its thread has killed it.
        os.write(write, b"!")
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
"""
EVERY_KIND = ("program", "session", "orphan")
OWNER = """
import os, sys
from cohort.system.guard import WATCH_SECONDS
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import make_plain_answer
from cohort.tasks.ref import TaskRef

pool = ScoringPool(TaskRef(name="leaves", path=sys.argv[1]))
left = sys.argv[4:]
row = {"id": "0", "folder": sys.argv[2], "left": left, "then": []}
pool.score([(row, make_plain_answer(" ".join(left)))])
if sys.argv[3] == "forks" and os.fork() == 0:
    sys.stdout.close()
    sys.stdin.read()  # holds every pipe of its parent open
    os._exit(0)
print("ready", flush=True)
if sys.argv[3] != "returns":
    sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "leaves.py").write_text(GRADER)
    return str(tmp_path / "leaves.py")


@pytest.fixture
def pool(file: str) -> Iterator[ScoringPool]:
    with ScoringPool(TaskRef(name="leaves", path=file), limits=Limits(seconds=1.0, memory_mb=64)) as made:
        yield made


def make_item(folder: Path, *then: str, left: tuple[str, ...] = EVERY_KIND) -> tuple[Row, Answer]:
    """Returns an answer whose grader leaves a process of each kind of `left`, and `then` does what these say."""
    row = {"id": "0", "folder": str(folder), "left": left, "then": then}
    return row, make_plain_answer(" ".join(left))


def read_pids(folder: Path, left: tuple[str, ...] = EVERY_KIND) -> list[int]:
    """Returns the ids of the processes that the grader left."""
    return [int((folder / name).read_text()) for name in left]


def is_running(pid: int) -> bool:
    """Returns whether a process lives; one that has ended and is not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pids: list[int], within: float = 20.0) -> list[int]:
    """Waits until the processes have ended, and returns those that have not after `within` seconds."""
    deadline = time.monotonic() + within
    while (running := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return running


def test_a_closed_pool_leaves_nothing(pool: ScoringPool, tmp_path: Path) -> None:
    (outcome,) = pool.score([make_item(tmp_path)])
    assert outcome.parts == {"correct": 1.0}
    left = read_pids(tmp_path)
    assert all(map(is_running, left))
    pool.close()
    # The guard has ended them before `close` returns.
    assert not any(map(is_running, left))


@pytest.mark.parametrize(
    ("then", "failure"),
    [
        ("hang", "took longer than 1 s"),
        ("crash", "was ended by SIGSEGV"),
        ("odd_signal", "was ended by signal 40"),
        ("hoard", "MemoryError"),
    ],
)
def test_a_worker_that_fails_leaves_nothing(pool: ScoringPool, tmp_path: Path, then: str, failure: str) -> None:
    """Nothing of its first try is left when the second has begun, and nothing of the second at its end."""
    (outcome,) = pool.score([make_item(tmp_path, then)])
    assert failure in outcome.failure
    pool.close()
    assert not wait_for_end(read_pids(tmp_path))


@pytest.mark.parametrize("end", ["killed", "returns", "forks"])
@pytest.mark.parametrize("system", ["linux", "other"])
def test_nothing_survives_the_run(file: str, tmp_path: Path, end: str, system: str) -> None:
    """An owner that is killed cannot clean up. Without Linux's calls an orphan in its own session is not covered."""
    left = EVERY_KIND if system == "linux" else ("program", "session")
    env = dict(os.environ)
    program = OWNER
    if system == "other":
        folder = str(without_linux.make_folder(tmp_path))
        env["PYTHONPATH"] = os.pathsep.join([folder, env.get("PYTHONPATH", "")])
        program = (
            "from cohort.scoring import process\n"
            "make = process.make_worker_environment\n"
            "def make_without(names=()):\n"
            "    environment = make(names)\n"
            f"    return {{**environment, 'PYTHONPATH': {folder + os.pathsep!r} + environment['PYTHONPATH']}}\n"
            "process.make_worker_environment = make_without\n"
        ) + OWNER
    owner = subprocess.Popen(
        [sys.executable, "-c", program, file, str(tmp_path), end, *left],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None and owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    if end != "returns":
        assert all(map(is_running, read_pids(tmp_path, left)))
        owner.kill()
    owner.wait()
    assert not wait_for_end(read_pids(tmp_path, left))
    owner.stdin.close()
    owner.stdout.close()


@pytest.mark.parametrize(
    ("then", "failure"),
    [("kill_guard", "SIGKILL"), pytest.param("stop_guard", "took longer than 1 s", marks=pytest.mark.slow)],
)
def test_a_grader_that_attacks_its_guard_is_replaced(
    pool: ScoringPool, tmp_path: Path, then: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GUARD_SECONDS", 0.5)
    pool.score([make_item(tmp_path, left=())])
    guard = pool._workers[0].guard_pid
    (worker,) = list_children(guard)
    outcome, after = pool.score([make_item(tmp_path, then, left=()), make_item(tmp_path, left=())])
    assert failure in outcome.failure
    assert after.parts == {"correct": 1.0}
    assert not wait_for_end([guard, worker])


def test_a_fork_outlives_the_thread_that_made_it(pool: ScoringPool, tmp_path: Path) -> None:
    (outcome,) = pool.score([make_item(tmp_path, "fork_in_thread", left=())])
    assert (outcome.failure, outcome.parts) == ("", {"correct": 1.0})


def test_a_pool_outlives_the_thread_that_made_it(file: str, tmp_path: Path) -> None:
    item = make_item(tmp_path, left=())

    def start() -> ScoringPool:
        pool = ScoringPool(TaskRef(name="leaves", path=file))
        pool.score([item])  # the worker is there
        return pool

    with ThreadPoolExecutor(1) as executor:
        pool = executor.submit(start).result()
    with pool:
        assert pool.score([item])[0].parts == {"correct": 1.0}
        assert pool.num_restarts == 0


def test_memory_is_bounded_where_the_kernel_does_not_do_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_linux.use_in_workers(without_linux.make_folder(tmp_path), monkeypatch)
    with ScoringPool(TaskRef(name="leaves", path=file), limits=Limits(seconds=30.0, memory_mb=64)) as pool:
        hoarder, honest = pool.score([make_item(tmp_path, "hoard", left=()), make_item(tmp_path, left=())])
    assert "MiB of memory, which is more than it may" in hoarder.failure
    assert honest.parts == {"correct": 1.0}


def test_a_guard_looks_at_memory_now_and_then_only(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts a program to look. The end of that program must not make it look again at once."""
    (tmp_path / "bin").mkdir()
    looks = tmp_path / "looks"
    (tmp_path / "bin" / "ps").write_text(f'#!/bin/sh\necho "$*" >> "{looks}"\nexec "{shutil.which("ps")}" "$@"\n')
    (tmp_path / "bin" / "ps").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    without_linux.use_in_workers(without_linux.make_folder(tmp_path), monkeypatch)
    begin = time.monotonic()
    with ScoringPool(TaskRef(name="leaves", path=file), limits=Limits(seconds=0.6)) as pool:
        pool.score([make_item(tmp_path, "hang", left=())])
    seconds = time.monotonic() - begin
    num_looks = looks.read_text().count("rss=")
    assert 1 <= num_looks <= seconds / WATCH_SECONDS + 3


def test_a_guard_needs_no_signal_to_notice_a_worker_that_ended_at_once(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    with ScoringPool(TaskRef(name="leaves", path=str(tmp_path / "gone.py"))) as pool:
        guard = pool._workers[0].guard_pid
        assert not wait_for_end([guard])
        assert pool._workers[0].kill().how == "was ended by SIGTERM"
        pool._workers.clear()
