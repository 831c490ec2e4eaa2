"""Ranks that are killed, or asked to stop: all end with a clear line, nothing is left, and the run can be resumed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cohort.system.kernel import list_children
from tests.helpers.command_line import SMALL, start
from tests.helpers.made_once import make_once
from tests.helpers.processes import PATIENCE, list_family, wait_until_gone
from tests.helpers.rank_runs import read_metrics, read_tensors

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")


def find_rank(launcher: int, rank: int) -> int:
    """Returns the process id of a rank that a launcher has started."""
    for pid in list_children(launcher):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"there is no rank {rank}")


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Reads what a run prints until it has done a step."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(f"the run ended before step {step}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nothing disturbed."""

    def make(folder: Path) -> None:
        """Makes the run."""
        process = start("train", "quickstart", *SMALL, "--name", "run", "--ranks", 2, at=folder)
        assert process.wait(300) == 0, process.stderr.read() if process.stderr else ""

    run = make_once(tmp_path_factory, "whole_on_two_ranks", make) / "runs" / "run"
    assert "--ranks 2" in (run / "run.md").read_text(), "the card has the command as it was typed"
    return run


def resume_and_compare(folder: Path, whole: Path) -> None:
    """Resumes the run below `folder` on two ranks, and compares it with the whole one, bit for bit."""
    process = start("resume", "run", "--ranks", 2, at=folder)
    assert process.wait(300) == 0, process.stderr.read() if process.stderr else ""
    assert read_metrics(folder / "runs" / "run") == read_metrics(whole)
    ours, theirs = read_tensors(folder / "runs" / "run", 6), read_tensors(whole, 6)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(tensor) for name, tensor in theirs.items())


def strike(folder: Path, who: str, after: int, wait: float = 0.0) -> tuple[float, str]:
    """Starts a run on two ranks and kills "0", "1" or the "launcher" after a step and some seconds.

    Returns the seconds until all processes had ended, and what was printed to stderr.
    """
    process = start("train", "quickstart", *SMALL, "--name", "run", "--ranks", 2, at=folder)
    wait_for_step(process, after)
    time.sleep(wait)
    family = list_family(process.pid)
    assert len(family) >= 4, "two ranks, each with a scoring worker"
    os.kill(process.pid if who == "launcher" else find_rank(process.pid, int(who)), signal.SIGKILL)
    seconds = wait_until_gone(family)
    text = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == (-signal.SIGKILL if who == "launcher" else 2)
    return seconds, text


def test_a_killed_rank_ends_all_and_the_run_resumes_bit_for_bit(tmp_path: Path, whole: Path) -> None:
    _, text = strike(tmp_path, "1", after=3)
    lines = [line for line in text.splitlines() if line.startswith("cohort: ")]
    assert re.search(r"rank 0 lost the other ranks during .+ in step \d", lines[0])
    assert "rank 1 of 2 was ended by SIGKILL" in lines[1] and len(lines) == 2
    resume_and_compare(tmp_path, whole)


def test_a_signal_lets_the_step_finish_on_all_ranks(tmp_path: Path, whole: Path) -> None:
    """It goes to a rank that does not lead, as a scheduler might do it."""
    process = start("train", "quickstart", *SMALL, "--name", "run", "--ranks", 2, at=tmp_path)
    wait_for_step(process, 1)
    os.kill(find_rank(process.pid, 1), signal.SIGTERM)
    out, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "stopped after step" in out
    resume_and_compare(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["0", "launcher"])
def test_whoever_is_killed_everything_ends(who: str, tmp_path: Path, whole: Path) -> None:
    _, text = strike(tmp_path, who, after=3)
    expected = "what started it has ended" if who == "launcher" else "rank 0 of 2 was ended by SIGKILL"
    assert expected in text
    resume_and_compare(tmp_path, whole)


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path, whole: Path) -> None:
    """During rollouts, updates and checkpoints: this run saves after almost every step."""
    rng = random.Random(0)
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        strike(folder, rng.choice(("0", "1", "launcher")), after=rng.randint(1, 3), wait=rng.uniform(0, 0.15))
        resume_and_compare(folder, whole)
