"""A run with its engine in one process and its learner in another is the run in one process, bit for bit.

Between the processes there is nothing but the one serialisation, and weights are copied. Whatever were passed behind
its back (a record written into, a function in a batch, shared storage) would be missing there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cohort.config.kinds import RL
from cohort.config.load import load
from cohort.jobs import life
from cohort.jobs.build import assemble
from tests.helpers.other_processes import assemble_apart

FEW = ["--steps=3", "--batch.prompts=8", "--batch.samples=4", "--eval.problems=24", "--threads=1", "--device=cpu"]
STEERED = [
    *("--algo.kl.weight=0.1", "--algo.kl.target=0.001", "--algo.entropy=0.01", "--algo.entropy-target=0.4"),
    *("--learner.minibatches=2", "--learner.epochs=2"),
]
NOT_COMPARED = ("time/", "rollouts/")


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: repr(value) for name, value in row["metrics"].items() if not name.startswith(NOT_COMPARED)}
        for row in rows
    ]


def weights(run: Path) -> bytes:
    [file] = sorted(run.glob("checkpoints/*/model/model.safetensors"))[-1:]
    return file.read_bytes()


def optimizer(run: Path) -> bytes:
    [file] = sorted(run.glob("checkpoints/*/optimizer.safetensors"))[-1:]
    return file.read_bytes()


def check(config: RL, tmp_path: Path) -> None:
    alone = life.start(config, assemble, tmp_path / "alone", "plain", ())
    apart = life.start(config, assemble_apart, tmp_path / "apart", "plain", ())
    assert len(metrics(alone)) == config.steps + 2  # with the evaluations before and after
    assert metrics(apart) == metrics(alone)
    assert weights(apart) == weights(alone)
    assert optimizer(apart) == optimizer(alone)


def test_engine_and_learner_elsewhere_change_no_bit(tmp_path: Path) -> None:
    """With all that passes between them: annotations of both policies, several updates, steered coefficients."""
    check(load("quickstart", [*FEW, *STEERED]), tmp_path)
    [run] = (tmp_path / "apart").iterdir()
    for name in ("kl/weight", "entropy/weight"):
        assert len({row[name] for row in metrics(run) if name in row}) > 1, f"{name} was not steered"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], STEERED], ids=["plain", "steered"])
def test_the_whole_quickstart_elsewhere_changes_no_bit(flags: list[str], tmp_path: Path) -> None:
    check(load("quickstart", ["--threads=1", "--device=cpu", *flags]), tmp_path)
