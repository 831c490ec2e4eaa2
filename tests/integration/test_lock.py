"""One writer per run: a second one is refused with the name of the first, and the end of a process frees the lock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.errors import RunError
from cohort.run.directory import RunDirectory
from tests.helpers.pretend_run import collect_remains, run_to_end, small_run

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}

# Holds the lock in the middle of a step, with a child process, as a run with scoring workers does.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from cohort.run.directory import RunDirectory
from tests.helpers.pretend_run import run_to_end
def during(step):
    if step == 3:
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
        print(child.pid, flush=True)
        sys.stdin.read()
run_to_end(RunDirectory.open(Path(sys.argv[1])), during=during)
"""


@pytest.fixture
def locked_run(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    directory.unlock()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory.path)],
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = next(int(line) for line in process.stdout if line.strip().isdigit())
    yield directory, process, child
    if process.poll() is None:
        process.kill()
    process.communicate()  # closes the pipe on which the child waits


def test_a_second_writer_is_refused_naming_the_first(locked_run):
    directory, process, _ = locked_run
    second = RunDirectory.open(directory.path)
    with pytest.raises(RunError) as refused:
        run_to_end(second)
    message = str(refused.value)
    assert f"process {process.pid} on {socket.gethostname()} since 20" in message and "\n" not in message
    assert process.poll() is None


def test_kill_frees_the_run_though_a_child_lives_on(locked_run, tmp_path):
    directory, process, child = locked_run
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(child, 0)  # raises if the child is gone
    reference = RunDirectory.create(tmp_path, small_run(), "reference")
    run_to_end(reference)
    run_to_end(RunDirectory.open(directory.path))
    assert collect_remains(directory) == collect_remains(reference)


def test_the_same_process_may_not_write_twice(tmp_path):
    first = RunDirectory.create(tmp_path, small_run(), "a")
    first.lock()  # has no effect: it has the lock
    second = RunDirectory.open(first.path)
    with pytest.raises(RunError, match=f"process {os.getpid()} "):
        second.lock()
    first.unlock()
    second.lock()
    assert (first.path / ".lock").exists()
