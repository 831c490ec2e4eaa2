"""A sweep that is killed at random moments and resumed ends with the same table as one that was not, byte for byte."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.command_line import ENV, command, differences, remains

SMALL = shlex.split(
    "--steps 3 --batch.samples 4 --sampling.max-tokens 24 --task.train-size 300 --eval.problems 16 --save.every 1"
    " --threads 1 --name s"
)
SEED = 20261116  # of the moments of the kills


def start(at: Path, *args: str) -> subprocess.Popen[bytes]:
    """Starts a command in a process group of its own. Its output goes to a file, because it is not read."""
    with open(at / "output.txt", "ab") as output:
        return subprocess.Popen(command(args), cwd=at, env=ENV, stdout=output, stderr=output, start_new_session=True)


def list_workers(at: Path) -> list[int]:
    """Returns the process ids of living workers of the sweep below a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            continue
        if b"cohort.sweep.worker" in words and str(at).encode() in b"\0".join(words):
            found.append(int(entry.name))
    return found


def require_no_workers(at: Path, patience: float = 20.0) -> None:
    """Fails if a worker of the sweep below a folder still lives after so many seconds."""
    deadline = time.monotonic() + patience
    while workers := list_workers(at):
        assert time.monotonic() < deadline, f"alive after their parent: {workers}"
        time.sleep(0.01)


def run_undisturbed(at: Path, args: list[str]) -> float:
    """Runs a sweep to its end, and returns the seconds that one of its runs took."""
    at.mkdir()
    begin = time.monotonic()
    assert start(at, *args).wait(timeout=600) == 0, (at / "output.txt").read_text()
    return (time.monotonic() - begin) / len(list(at.glob("runs/s/results/*.json")))


def kill_at_random_moments(at: Path, args: list[str], num_kills: int, earliest: float, latest: float) -> int:
    """Starts a sweep, kills and resumes it, and lets it end. Returns how often it was killed while it ran.

    Each process lives for a random time between `earliest` and `latest` seconds. Every second kill is of the process
    group, the others of the parent alone: both must end the worker.
    """
    at.mkdir()
    rng = random.Random(SEED)
    killed = 0
    for number in range(num_kills):
        # Every third process makes two runs at once.
        resume = ["resume", "runs/s", *(["--jobs", "2"] if number % 3 == 2 else [])]
        process = start(at, *(resume if (at / "runs/s/sweep.yaml").exists() else args))
        try:
            process.wait(timeout=rng.uniform(earliest, latest))
        except subprocess.TimeoutExpired:
            killed += 1
        (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        require_no_workers(at)
    args = ["resume", "runs/s"] if (at / "runs/s/sweep.yaml").exists() else args
    assert start(at, *args).wait(timeout=600) == 0, (at / "output.txt").read_text()
    return killed


def require_same_sweeps(original: Path, other: Path) -> None:
    """Fails unless two sweeps have the same tables, byte for byte, and the same files of their runs."""
    for name in ("sweep.json", "sweep.md"):
        first, second = ((at / "runs/s" / name).read_bytes() for at in (original, other))
        assert first == second, name
        assert str(original).encode() not in first
    runs = sorted(path.parent.name for path in original.glob("runs/s/*/config.yaml"))
    assert runs == sorted(path.parent.name for path in other.glob("runs/s/*/config.yaml"))
    for run in runs:
        # The card names the command and the path, which has the folder of the test.
        left = [remains(at / "runs/s" / run) | {"run.md": ""} for at in (original, other)]
        assert differences(*left) == [], run


def test_a_sweep_killed_twice_ends_the_same(tmp_path: Path) -> None:
    args = ["sweep", "quickstart", "--optim.lr", "1e-4,1e-3", "--batch.prompts", "4", *SMALL]
    seconds = run_undisturbed(tmp_path / "a", args)
    # The first half of such a short run is its start.
    assert kill_at_random_moments(tmp_path / "b", args, 2, 0.6 * seconds, 1.2 * seconds) == 2
    require_same_sweeps(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_a_sweep_killed_at_ten_random_moments_ends_the_same(tmp_path: Path) -> None:
    """2 x 2 settings x 2 seeds of the quickstart, with a rule that stops some of the runs."""
    args = ["sweep", "quickstart", "--optim.lr", "1e-4,1e-3", "--batch.prompts", "4,6", "--seeds", "2", *SMALL]
    args += ["--stop-below", "reward/mean", "0.4", "at", "2"]
    seconds = run_undisturbed(tmp_path / "a", args)
    assert kill_at_random_moments(tmp_path / "b", args, 10, 0.1 * seconds, 1.6 * seconds) == 10
    require_same_sweeps(tmp_path / "a", tmp_path / "b")
    table = json.loads((tmp_path / "a/runs/s/sweep.json").read_text())
    assert {run["state"] for run in table["runs"]} == {"done", "stopped"}
