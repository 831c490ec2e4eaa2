"""A run whose engine and learner have processes of their own equals, bit for bit, the run in one process.

Only records in the format of `cohort.serialize` and copies of weights pass between the processes. A hidden channel (a
record that is changed in place, a function in a batch, shared storage) would not work there, and the runs would differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cohort.config.kinds import RL
from cohort.config.load import load_config
from cohort.jobs.build import build_rl_job
from cohort.jobs.start import start_run
from tests.helpers.other_processes import build_separate_job

FEW = ["--steps=3", "--batch.prompts=8", "--batch.samples=4", "--eval.problems=24", "--threads=1", "--device=cpu"]
STEERED = [
    *("--algo.kl.weight=0.1", "--algo.kl.target=0.001", "--algo.entropy=0.01", "--algo.entropy-target=0.4"),
    *("--learner.minibatches=2", "--learner.epochs=2"),
]
NOT_COMPARED = ("time/", "rollouts/")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: repr(value) for name, value in row["metrics"].items() if not name.startswith(NOT_COMPARED)}
        for row in rows
    ]


def read_weights(run: Path) -> bytes:
    [file] = sorted(run.glob("checkpoints/*/model/model.safetensors"))[-1:]
    return file.read_bytes()


def read_optimizer(run: Path) -> bytes:
    [file] = sorted(run.glob("checkpoints/*/optimizer.safetensors"))[-1:]
    return file.read_bytes()


def check_equal_runs(config: RL, tmp_path: Path) -> None:
    """Trains a config in one process and in three, and asserts that metrics, weights and optimizer are equal."""
    alone = start_run(config, build_rl_job, tmp_path / "alone", "plain", ())
    apart = start_run(config, build_separate_job, tmp_path / "apart", "plain", ())
    assert len(read_metrics(alone)) == config.steps + 2  # with the evaluations before and after
    assert read_metrics(apart) == read_metrics(alone)
    assert read_weights(apart) == read_weights(alone)
    assert read_optimizer(apart) == read_optimizer(alone)


def test_engine_and_learner_elsewhere_change_no_bit(tmp_path: Path) -> None:
    """The config uses everything that passes between them: annotations, several updates, coefficients with targets."""
    check_equal_runs(load_config("quickstart", [*FEW, *STEERED]), tmp_path)
    [run] = (tmp_path / "apart").iterdir()
    for name in ("kl/weight", "entropy/weight"):
        assert len({row[name] for row in read_metrics(run) if name in row}) > 1, f"{name} was not steered"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], STEERED], ids=["plain", "steered"])
def test_the_whole_quickstart_elsewhere_changes_no_bit(flags: list[str], tmp_path: Path) -> None:
    check_equal_runs(load_config("quickstart", ["--threads=1", "--device=cpu", *flags]), tmp_path)
