"""Our losses on pairs equal those of TRL's own trainers on the same tensors, with their gradients.

Nothing of TRL is re-implemented here: `DPOTrainer._compute_loss`, `CPOTrainer.cpo_loss` (SimPO) and
`ORPOTrainer.odds_ratio_loss` run on log-probabilities that ours gets too. Needs `trl` (`make test-peers`).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.algos.aggregate import Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.preferences import PreferenceLoss
from cohort.config.preferences import IPO, ORPO, Hinge, PairLoss, Robust, Sigmoid, SimPO
from tests.peers.trl_rows import VOCAB, save_model, trl

pytestmark = pytest.mark.peers

PAIRS, WIDTH, PROMPT = 4, 9, 3
# Tokens of the better answers, then of the worse ones.
LENGTHS = [6, 2, 5, 1, 3, 6, 4, 2]


def draw(seed: int) -> Tensor:
    """Returns log-probabilities [2 P, WIDTH - 1] of the tokens after the first of each row; 0 outside of answers."""
    generator = torch.Generator().manual_seed(seed)
    values = -3.0 * torch.rand(2 * PAIRS, WIDTH - 1, generator=generator, dtype=torch.float64)
    return values * make_mask()[:, 1:]


def make_mask() -> Tensor:
    """Returns which tokens [2 P, WIDTH] belong to answers: 1 or 0."""
    places = torch.arange(WIDTH)
    return torch.stack([((places >= PROMPT) & (places < PROMPT + n)).long() for n in LENGTHS])


def compute_ours(config: PairLoss, policy: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns our loss and its gradient on `policy`, whose first rows are the better answers."""
    mask = make_mask()[:, 1:].bool()
    order = [row for pair in range(PAIRS) for row in (pair, PAIRS + pair)]
    leaf = policy.clone().requires_grad_()
    flat = torch.cat([leaf[row][mask[row]] for row in order])
    ones = torch.ones_like(flat)
    inputs = LossInputs(
        logprobs=flat,
        entropy=ones,
        old_logprobs=None,
        ref_logprobs=None if reference is None else torch.cat([reference[row][mask[row]] for row in order]),
        sampler_logprobs=ones,
        advantages=ones,
        weights=ones,
        segments=torch.tensor([n for n, row in enumerate(order) for _ in range(LENGTHS[row])]),
        totals=Totals(
            num_tokens=sum(LENGTHS),
            num_samples=2 * PAIRS,
            num_prompts=PAIRS,
            num_first_tokens=sum(LENGTHS[:PAIRS]),
        ),
        num_samples=2 * PAIRS,
    )
    loss, _ = PreferenceLoss(config).loss(inputs)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], tolerance: float = 1e-12) -> None:
    assert theirs[1].abs().max() > 1e-3
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() <= tolerance, (mine, other)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny-llama"))


DPO_CASES: dict[str, tuple[PairLoss, dict[str, Any]]] = {
    "sigmoid": (Sigmoid(beta=0.3), {"loss_type": ["sigmoid"], "beta": 0.3}),
    "sigmoid per token": (
        Sigmoid(beta=0.7, length_normalize=True),
        {"loss_type": ["sigmoid_norm"], "beta": 0.7},
    ),
    "sigmoid with imitation": (
        Sigmoid(beta=0.2, nll=0.1),
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.1], "beta": 0.2},
    ),
    "hinge": (Hinge(beta=0.4), {"loss_type": ["hinge"], "beta": 0.4}),
    "ipo": (IPO(beta=0.5), {"loss_type": ["ipo"], "beta": 0.5}),
    "robust": (
        Robust(beta=0.3, label_smoothing=0.2),
        {"loss_type": ["robust"], "beta": 0.3, "label_smoothing": 0.2},
    ),
}


@pytest.mark.parametrize("case", DPO_CASES)
def test_dpo_equals_trl(case: str, model_folder: Path) -> None:
    from datasets import Dataset

    config, settings = DPO_CASES[case]
    words = [f"w{i}" for i in range(3, 8)]
    rows = Dataset.from_dict({"prompt": words, "chosen": words[::-1], "rejected": words})
    args = trl.DPOConfig(
        output_dir=str(model_folder / "out"), use_cpu=True, bf16=False, report_to=[], max_length=None, **settings
    )
    trainer = trl.DPOTrainer(model=str(model_folder), args=args, train_dataset=rows)
    trainer.precompute_ref_logps = True
    policy, reference = draw(1), draw(2)
    leaf = policy.clone().requires_grad_()

    def model(**inputs: Any) -> SimpleNamespace:
        """Stands in for the model: TRL's loss gets these log-probabilities."""
        zeros = torch.zeros(2 * PAIRS, WIDTH - 1, dtype=torch.float64)
        # The others are for metrics.
        return SimpleNamespace(log_probs=leaf, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None)

    chosen, rejected = reference.sum(1).chunk(2)
    inputs = {
        "input_ids": torch.randint(3, VOCAB, (2 * PAIRS, WIDTH)),
        "attention_mask": torch.ones(2 * PAIRS, WIDTH, dtype=torch.long),
        "completion_mask": make_mask(),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    theirs = trainer._compute_loss(model, inputs, False)
    [gradient] = torch.autograd.grad(theirs, leaf)
    assert_same(compute_ours(config, policy, reference), (theirs.detach(), gradient * make_mask()[:, 1:]))


def average(values: Tensor) -> Tensor:
    """Returns the mean over the tokens of each answer [2 P]."""
    return values.sum(1) / torch.tensor(LENGTHS)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_equals_trl(smoothing: float) -> None:
    cpo = importlib.import_module("trl.experimental.cpo.cpo_trainer")
    settings = SimpleNamespace(
        beta=2.0,
        simpo_gamma=0.8,
        label_smoothing=smoothing,
        loss_type="simpo",
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    policy = draw(3)
    leaf = policy.clone().requires_grad_()
    losses, _, _ = cpo.CPOTrainer.cpo_loss(settings, *average(leaf).chunk(2))
    [gradient] = torch.autograd.grad(losses.mean(), leaf)
    ours = compute_ours(SimPO(beta=2.0, gamma=0.8, label_smoothing=smoothing), policy, None)
    assert_same(ours, (losses.mean().detach(), gradient * make_mask()[:, 1:]))


def test_orpo_equals_trl() -> None:
    orpo = importlib.import_module("trl.experimental.orpo.orpo_trainer")
    settings = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    policy = draw(4)
    leaf = policy.clone().requires_grad_()
    losses, *_ = orpo.ORPOTrainer.odds_ratio_loss(settings, *average(leaf).chunk(2))
    theirs = -losses.mean()
    [gradient] = torch.autograd.grad(theirs, leaf)
    # TRL computes in float32.
    ours = compute_ours(ORPO(beta=0.4, nll=0.0), policy, None)
    assert_same(ours, (theirs.detach(), gradient * make_mask()[:, 1:]), tolerance=1e-6)
