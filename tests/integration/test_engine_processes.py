"""Runs that sample in engine processes: the same results as without, bit for bit, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cohort.config.load import load_config
from tests.helpers.command_line import SMALL, shared_reference, start
from tests.helpers.processes import list_family, wait_until_gone
from tests.helpers.rank_runs import read_metrics, read_tensors
from tests.helpers.small_runs import built_job, run_steps

ELSEWHERE = ["--engine.place", "process"]
PROCESS = "cohort.engines.fleet.worker"


def find_engines(pid: int) -> list[int]:
    """Returns the engine processes below a process, without their guards."""
    found = []
    for child in list_family(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        if PROCESS.encode() in words and PROCESS.encode() in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0"):
            found.append(child)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that samples in its own process."""
    return shared_reference(tmp_path_factory)[0]


def equals(run: Path, other: Path) -> bool:
    """Returns whether two runs have the same metrics and the same weights, bit for bit.

    The metrics that only engines elsewhere have do not count.
    """
    ours, theirs = read_tensors(run, 6), read_tensors(other, 6)
    assert ours.keys() == theirs.keys()
    metrics = [[m for m in read_metrics(path).items() if not m[0][1].startswith("sync/")] for path in (run, other)]
    return metrics[0] == metrics[1] and all(ours[name].equal(tensor) for name, tensor in theirs.items())


def test_a_run_with_an_engine_process_equals_the_run_without_and_goes_on_without(tmp_path: Path, whole: Path) -> None:
    """Stopped after some steps, it is resumed by an engine in its own process: the bits are the same there too."""
    process = start("train", "quickstart", *SMALL, "--name", "run", *ELSEWHERE, at=tmp_path)
    wait_for(process, "step 2/")
    [engine] = find_engines(process.pid)
    process.send_signal(signal.SIGINT)
    out, text = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in text and "stopped after step" in out
    wait_until_gone([engine])
    process = start("resume", "run", "--engine.place", "here", at=tmp_path)
    assert process.wait(300) == 0, process.stderr.read() if process.stderr else ""
    assert equals(tmp_path / "runs" / "run", whole)


def wait_for(process, beginning: str) -> None:  # type: ignore[no-untyped-def]
    """Reads what a run prints up to the first line that begins so."""
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"no line begins with {beginning}: {process.stderr.read()}")


def test_an_engine_process_that_is_killed_costs_time_and_nothing_else(tmp_path: Path, whole: Path) -> None:
    settings = [*SMALL, *ELSEWHERE, "--engine.replicas", "2"]
    process = start("train", "quickstart", *settings, "--name", "run", at=tmp_path)
    wait_for(process, "step 1/")
    os.kill(find_engines(process.pid)[0], signal.SIGKILL)
    out, text = process.communicate(timeout=300)
    assert process.returncode == 0, text
    assert "of 2 (cpu) was ended by SIGKILL: it is started again (1 of 3 restarts)" in out
    ours, theirs = read_metrics(tmp_path / "runs" / "run"), read_metrics(whole)
    # The samples are the same; the last bits of their log-probabilities may differ.
    for name in ("reward/mean", "length/mean"):
        assert [v for k, v in ours.items() if k[1] == name] == [v for k, v in theirs.items() if k[1] == name]


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    settings = [*SMALL, *ELSEWHERE, "--engine.replicas", "2"]
    process = start("train", "quickstart", *settings, "--name", "run", at=tmp_path)
    wait_for(process, "step 1/")
    family = list_family(process.pid)
    folders = [w for pid in family for w in read_words(pid) if "cohort-weights-" in w]
    assert len(folders) == 1 and len(find_engines(process.pid)) == 2
    process.kill()
    process.communicate(timeout=60)
    assert wait_until_gone(family) < 20
    deadline = time.monotonic() + 20
    while Path(folders[0]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


@pytest.mark.parametrize(
    "words",
    [
        ["tiny_calculator", "--batch.prompts", "3", "--batch.samples", "3", "--turns.max-turns", "3"],
        ["quickstart", "--learner.lora.rank", "2", "--batch.prompts", "4", "--batch.samples", "3"],
        ["quickstart", "--engine.weights", "packed", "--batch.prompts", "4", "--batch.samples", "3"],
    ],
    ids=["conversations", "adapters", "packed"],
)
def test_steps_are_the_same_bit_for_bit(words: list[str]) -> None:
    recipe, *flags = words
    common = [*flags, "--threads", "1", "--sampling.max-tokens", "24", "--eval.problems", "2"]
    runs = []
    for place in ("here", "process"):
        extra = ELSEWHERE if place == "process" else []
        with built_job(load_config(recipe, [*common, *extra])) as job:
            job.sync.send(0)
            runs.append([groups for groups, _ in run_steps(job, 2)])
    assert runs[0] == runs[1]


def test_two_ranks_have_engine_processes_of_their_own(tmp_path: Path, whole: Path) -> None:
    process = start("train", "quickstart", *SMALL, "--name", "run", *ELSEWHERE, "--ranks", 2, at=tmp_path)
    wait_for(process, "step 1/")
    assert len(find_engines(process.pid)) == 2
    _, text = process.communicate(timeout=300)
    assert process.returncode == 0, text
    ours, theirs = read_metrics(tmp_path / "runs" / "run"), read_metrics(whole)
    [first], [other] = ([v for k, v in m.items() if k == (1, "reward/mean")] for m in (ours, theirs))
    assert first == other
