"""Our loss and advantages equal those of TRL's own GRPOTrainer on the same tensors.

Nothing of TRL is re-implemented here: its `_compute_loss` and `_generate_and_score_completions` run on a tiny
random Llama, and ours gets the log-probabilities that they computed. Needs `trl`, which has its own
environment (`make test-peers`); with COHORT_REQUIRE_PEERS=1 a missing peer is a failure instead of a skip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.algos import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO
from tests.peers.trl_rows import (
    AGGREGATE,
    COMPLETION,
    assert_equal,
    make_group,
    make_rows,
    make_trainer,
    ours,
    save_model,
)

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny-llama"))


CASES = {
    "on-policy": ({}, {}),
    "several epochs": ({}, {"old": 0.3}),
    "clip higher": ({"clip_high": 0.28}, {"old": 0.3}),
    "kl": ({"kl": KLConfig(weight=0.04)}, {"ref": 0.5}),
    "all of them": ({"clip_low": 0.1, "clip_high": 0.3, "kl": KLConfig(weight=0.1)}, {"old": 0.4, "ref": 0.5}),
    "masked rows": ({"kl": KLConfig(weight=0.1)}, {"old": 0.3, "ref": 0.5, "masked": (1, 3)}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss_type", AGGREGATE)
def test_loss_and_gradient_equal_trl(model_folder: Path, loss_type: str, case: str) -> None:
    settings, distances = CASES[case]
    config = GRPO(aggregate=AGGREGATE[loss_type], **settings)  # type: ignore[arg-type]
    trainer = make_trainer(
        model_folder,
        loss_type=loss_type,
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        beta=config.kl.weight,
    )
    rows = make_rows(trainer, **distances)
    theirs = trainer._compute_loss(trainer.model, rows.inputs)
    mine, tally = ours(trainer, rows, config)
    assert_equal(trainer, theirs, mine)

    their_metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    metrics = tally.to_metrics()
    assert metrics["entropy"] == pytest.approx(their_metrics["entropy"], rel=1e-5)
    assert metrics["clip/low"] == pytest.approx(their_metrics["clip_ratio/low_mean"], abs=1e-6)
    assert metrics["clip/high"] == pytest.approx(their_metrics["clip_ratio/high_mean"], abs=1e-6)
    if config.kl.weight:
        assert metrics["kl/ref"] == pytest.approx(their_metrics["kl"], rel=1e-4)
    if "old" in distances:
        # The case clips at both ends.
        assert metrics["clip/low"] > 0 and metrics["clip/high"] > 0


def test_entropy_bonus_equals_trl(model_folder: Path) -> None:
    # TRL's bonus is a token mean for every loss type, ours follows the aggregation: compared where they meet
    trainer = make_trainer(model_folder, loss_type="bnpo", entropy_coef=0.02)
    rows = make_rows(trainer, old=0.3)
    config = GRPO(aggregate="token", entropy=0.02)
    mine, _ = ours(trainer, rows, config)
    assert_equal(trainer, trainer._compute_loss(trainer.model, rows.inputs), mine)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_accumulated_microbatches_equal_trl(model_folder: Path, loss_type: str) -> None:
    """Equal row counts, where TRL's accumulation is exact (its "bnpo" divides by each one's tokens)."""
    trainer = make_trainer(model_folder, loss_type=loss_type, gradient_accumulation_steps=2)
    rows = make_rows(trainer, old=0.3)
    halves = [rows.part(slice(0, 3)), rows.part(slice(3, 6))]
    theirs = torch.stack([trainer._compute_loss(trainer.model, half.inputs) for half in halves]).sum()
    config = GRPO(aggregate=AGGREGATE[loss_type])  # type: ignore[arg-type]
    mine = torch.stack([ours(trainer, half, config, rows.num_tokens)[0] for half in halves]).sum()
    assert_equal(trainer, theirs, mine)
    assert mine.item() == pytest.approx(ours(trainer, rows, config)[0].item(), rel=1e-5)


@pytest.mark.parametrize(("scale_rewards", "scale"), [("group", "std"), ("none", "none")])
def test_advantages_equal_trl(model_folder: Path, scale_rewards: str, scale: str) -> None:
    """Two groups of three, then one whose second sample could not be scored: TRL's None is our failure."""
    rewards: list[float | None] = [1.0, 0.0, 0.25, 0.3, -2.0, None]

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        assert len(completions) == len(rewards)
        return rewards

    trainer = make_trainer(model_folder, reward, num_generations=3, scale_rewards=scale_rewards)
    batch = [{"prompt": prompt} for prompt in ("w3 w4", "w5 w6 w7") for _ in range(3)]
    theirs = trainer._generate_and_score_completions(batch)["advantages"].tolist()

    groups = [make_group(rewards[:3]), make_group(rewards[3:])]
    graded = build_algorithm(GRPO(scale=scale), COMPLETION).advantages(groups)  # type: ignore[arg-type]
    mine = [s.advantage for g in graded for s in g.samples]
    assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert graded[1].samples[2].masked == "failed"
