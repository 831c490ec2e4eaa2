"""A real run that is killed at bad moments and resumed ends with the same files as one that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command_line import (
    ENV,
    ROOT,
    SMALL,
    Census,
    cohort,
    differences,
    next_args,
    no_worker_is_left,
    only_run,
    prompts_are_accounted_for,
    remains,
    shared_reference,
    start,
    workers_of,
)
from tests.helpers.fork_server import ForkServer, shared_server
from tests.helpers.struck_command import Strike

# Each story is one run. It lists (place, call) at which the first process is killed, then the process that resumes the
# run, and so on. The line within the call is random. Checkpoints are saved after steps 2, 3, 4 and 6. A step has two or
# more calls of "rollout" and "scoring", depending on the speed of the graders.
STORIES = {
    "checkpoint": [("creation", 1), ("checkpoint", 2), ("recovery", 1), ("prune", 2)],
    "scoring": [("scoring", 6), ("rollout", 8), ("rollout_file", 3), ("finish", 1)],
    "step": [("update", 3), ("evaluation", 1), ("database", 3), ("evaluation_rows", 1)],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Census]:
    return shared_reference(tmp_path_factory)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    yield shared_server()


def assert_same(run: Path | None, original: Path) -> None:
    assert run is not None
    assert differences(remains(run), remains(original)) == []
    assert prompts_are_accounted_for(run)


def test_4_10_the_reference_is_what_is_compared(undisturbed: tuple[Path, Census]) -> None:
    """The comparison covers weights, moments, rows of every kind, rollouts and evaluations, and none is empty."""
    original, census = undisturbed
    left = remains(original)
    moments = [left[f"checkpoints/step-{step:06d}/optimizer.safetensors"] for step in (4, 6)]
    assert len(moments[0]) == 64 and moments[0] != moments[1]
    assert "checkpoints/step-000006/model/model.safetensors" in left and "rollouts/step-000004.safetensors" in left
    assert [name for name in left if name.startswith("eval/")] == [f"eval/step-{s:06d}.json" for s in (0, 3, 6)]
    assert {(step, name) for step, name, _ in left["metrics"]} >= {(s, "loss") for s in range(1, 7)}
    assert len(left["groups"]) == 36 and len(left["samples"]) == 144 and len(left["prompts"]) == 24
    assert {g["visit"] for g in left["groups"]} == {0, 1}
    assert prompts_are_accounted_for(original)
    # A run executes every place but the one of given answers.
    assert all(lengths for place, lengths in census.lengths.items() if place != "held_out")


@pytest.mark.parametrize("story", STORIES)
def test_4_10_killed_anywhere_and_resumed_it_ends_the_same(
    story: str, undisturbed: tuple[Path, Census], server: ForkServer, tmp_path: Path
) -> None:
    original, census = undisturbed
    rng = random.Random(story)
    for place, call in STORIES[story]:
        strike = census.strike(place, call, rng)
        ended = server.run(*next_args(tmp_path), at=tmp_path, orders=[strike])
        assert ended.returncode == -signal.SIGKILL, f"{strike} did not happen: {ended}"
        assert no_worker_is_left(ended.pid)
    done = cohort(*next_args(tmp_path), at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(only_run(tmp_path), original)


def test_4_10_no_worker_survives_its_parent(undisturbed: tuple[Path, Census], tmp_path: Path) -> None:
    """The run is stopped in the middle of scoring, so that there are workers that could survive."""
    original, _ = undisturbed
    strike = Strike(signal.SIGSTOP, "scoring", 8, 3)
    process = start(*next_args(tmp_path), at=tmp_path, orders=[strike])
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    assert workers_of(process.pid)
    # A stopped process still holds the lock.
    run = only_run(tmp_path)
    assert run is not None
    again = next_args(tmp_path)
    second = cohort(*again, at=tmp_path)
    assert second.returncode == 2 and f"is being written by process {process.pid} on " in second.stderr
    assert second.stderr.count("\n") == 1
    process.kill()
    process.communicate()
    assert no_worker_is_left(process.pid)
    assert cohort(*again, at=tmp_path).returncode == 0
    assert_same(run, original)


def test_4_10_a_run_keeps_its_thread_count(tmp_path: Path) -> None:
    """`threads: 0` means all cores. A resume takes the number from the checkpoint, not from the machine."""
    kill = Strike(signal.SIGKILL, "update", 3, 1)
    settings = [setting for setting in SMALL if not setting.startswith(("--threads", "--steps"))]
    struck = cohort(*next_args(tmp_path, [*settings, "--steps=3"]), at=tmp_path, orders=[kill])
    assert struck.returncode == -signal.SIGKILL
    run = only_run(tmp_path)
    assert run is not None
    state = run / "checkpoints" / "step-000002" / "state.json"
    numbers = json.loads(state.read_text())["numbers"]
    assert numbers["threads"] == len(os.sched_getaffinity(0))
    changed = json.loads(state.read_text())
    changed["numbers"]["threads"] = numbers["threads"] + 1  # as if it came from a machine with one core more
    del changed["crc32"]  # a checkpoint of an earlier version has no checksum of its own
    state.write_text(json.dumps(changed))
    assert cohort("resume", run, at=tmp_path).returncode == 0
    last = json.loads((run / "checkpoints" / "step-000003" / "state.json").read_text())
    assert last["numbers"]["threads"] == numbers["threads"] + 1


@pytest.mark.slow
def test_4_10_a_campaign_of_random_kills(tmp_path: Path) -> None:
    """Kills at random places and moments. `benchmarks/kill_campaign.py` itself does a hundred."""
    script = [sys.executable, str(ROOT / "benchmarks" / "kill_campaign.py"), "--kills", "30", "--seed", "1"]
    done = subprocess.run(script, env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 kills" in done.stdout and "identical: yes" in done.stdout
