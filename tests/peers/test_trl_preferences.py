"""Our losses on pairs equal those of TRL's own trainers on the same tensors, with their gradients.

Nothing of TRL is re-implemented here: `DPOTrainer._compute_loss`, `CPOTrainer.cpo_loss` (SimPO) and
`ORPOTrainer.odds_ratio_loss` run on log-probabilities that ours gets too. A whole training by `DPOTrainer` on
conversations equals ours as well. Needs `trl` (`make test-peers`).
"""

from __future__ import annotations

import copy
import importlib
import json
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
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.examples.encode import ExampleRenderer, encode_pairs
from cohort.examples.rows import read_pairs
from cohort.learner.local import LocalLearner
from cohort.loops.dpo import make_pair_batch
from cohort.loops.learning import annotate
from cohort.models.files import load_folder
from cohort.text import Tokenizer
from cohort.types import Group, Provenance
from tests.helpers.chat_templates import write_tokenizer
from tests.peers.trl_chats import NOTHING_AFTER, save_llama, say
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


# ---- a whole training ----------------------------------------------------------------------------------------------

CHATS = [
    {
        "prompt": [say("user", question)],
        "chosen": [say("assistant", better)],
        "rejected": [say("assistant", worse)],
    }
    for question, better, worse in [
        ("What is three and four?", "The answer is <answer>7</answer>", "12"),
        ("one", "word", "The user in one word.\n\n  12  "),
        ("x " * 30, "12 " * 40, "helpful assistant"),
        ("é 世界 🙂", "Use the tool", "Use the sum"),
    ]
]


def compare_tokens(groups: list[Group], prepared: Any) -> None:
    """Asserts that TRL's rows have the tokens of our pairs, and that the answers are the targets."""
    for group, row in zip(groups, prepared, strict=True):
        for sample, name in zip(group.samples, ("chosen_ids", "rejected_ids"), strict=True):
            tokens = [*group.prompt.tokens, *sample.tokens]
            targets = sum(p == Provenance.TARGET for p in sample.provenance)
            assert tokens == row["prompt_ids"] + row[name]
            # TRL also counts tokens that both answers begin with as a part of the answers.
            assert targets == len(row[name]) and sample.provenance[-targets:] == [int(Provenance.TARGET)] * targets


@pytest.mark.parametrize("nll", [0.0, 0.2])
def test_a_whole_training_equals_trl(nll: float, tmp_path: Path) -> None:
    """Four steps of AdamW on all pairs, from the rows to the weights. TRL pads, ours shares prompts; all in fp32."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = save_llama(tmp_path / "weights")
    folder = write_tokenizer(tmp_path / "words", NOTHING_AFTER, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    kinds = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, nll]} if nll else {"loss_type": ["sigmoid"]}
    args = trl.DPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        max_length=None,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=len(CHATS),
        max_steps=4,
        logging_steps=1,
        beta=0.3,
        **kinds,
    )
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32),
        args=args,
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(CHATS),
    )
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    framing = ExampleRenderer(tokenizer=Tokenizer.load(folder), template="chat", system="")
    groups = encode_pairs(read_pairs(str(file), "train", ()), framing, 1024, "error", "error").groups
    compare_tokens(groups, trainer.train_dataset)

    trainer.train()
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    decoder = load_folder(weights).decoder
    start = {name: tensor.clone() for name, tensor in decoder.named_weights()}
    reference = copy.deepcopy(decoder).requires_grad_(False)
    learner = LocalLearner(
        decoder, LearnerConfig(dtype="float32"), OptimConfig(lr=1e-3), num_updates=4, reference=reference
    )
    loss = PreferenceLoss(Sigmoid(beta=0.3, nll=nll))
    annotate(learner, groups, loss.needs(groups), Provenance.TARGET)
    ours = [learner.update(make_pair_batch(groups), loss).metrics for _ in range(4)]
    assert ours[3]["loss"] < ours[0]["loss"] - 0.05
    for name, other in (
        ("loss", "loss"),
        ("reward/margin", "rewards/margins"),
        ("reward/accuracy", "rewards/accuracies"),
        ("reward/chosen", "rewards/chosen"),
    ):
        # Every pair is a tie at first: half right by our count, wrong by TRL's.
        first = 1 if name == "reward/accuracy" else 0
        expected = [entry[other] for entry in theirs]
        assert [metrics[name] for metrics in ours][first:] == pytest.approx(expected[first:], rel=1e-3, abs=1e-4), name
    state = trainer.model.state_dict()
    for name, tensor in learner.weights():
        moved = (state[name] - start[name]).abs().max()
        assert moved > 1e-4 and (tensor - state[name]).abs().max() <= 2e-3 * moved, name
