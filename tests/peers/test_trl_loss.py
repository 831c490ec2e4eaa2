"""Our loss and advantages equal those of TRL's own GRPOTrainer on the same tensors.

Nothing of TRL is re-implemented here: its `_compute_loss` and `_generate_and_score_completions` run on a tiny
random Llama, and ours gets the log-probabilities that they computed. Needs `trl`, which has its own
environment (`make test-peers`); with COHORT_REQUIRE_PEERS=1 a missing peer is a failure instead of a skip.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.algos import build_algorithm
from cohort.algos.inputs import LossInputs
from cohort.config.schema import GRPO
from cohort.types import Group, Prompt, Provenance, Sample

pytestmark = pytest.mark.peers

if os.environ.get("COHORT_REQUIRE_PEERS") == "1":
    trl: Any = importlib.import_module("trl")
else:
    trl = pytest.importorskip("trl", reason="the TRL peer has its own environment: make test-peers")

VOCAB, PROMPT, COMPLETION, ROWS = 64, 5, 7, 6
LENGTHS = [7, 3, 1, 6, 7, 4]  # sampled tokens of the rows
AGGREGATE = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of 64 words, saved as TRL wants to find it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,  # large enough that log-probabilities differ visibly
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_trainer(folder: Path, reward: Any = None, **settings: Any) -> Any:
    from datasets import Dataset

    args = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        num_generations=settings.pop("num_generations", 2),
        max_completion_length=COMPLETION,
        use_bias_correction_kl=False,  # the KL term as in the paper, which is what we have
        **settings,
    )
    trainer = trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(3, 15)]}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = settings.get("gradient_accumulation_steps", 1)
    return trainer


@dataclass
class Rows:
    """A padded batch as TRL's `_compute_loss` takes it; prompts left-padded, completions right-padded."""

    inputs: dict[str, Tensor]

    def part(self, rows: slice) -> Rows:
        whole = ("num_items_in_batch",)
        return Rows({k: v if k in whole else v[rows] for k, v in self.inputs.items()})


def make_rows(trainer: Any, *, old: float = 0.0, ref: float = 0.0, masked: tuple[int, ...] = ()) -> Rows:
    """Random rows. `old` and `ref` are how far those policies are from the current one, in logprobs."""
    rng = torch.Generator().manual_seed(1)
    prompt_mask = torch.ones(ROWS, PROMPT, dtype=torch.int64)
    prompt_mask[1, :2] = 0
    prompt_mask[4, :3] = 0
    completion_mask = torch.tensor([[int(t < n) for t in range(COMPLETION)] for n in LENGTHS])
    completion_mask[list(masked)] = 0
    inputs = {
        "prompt_ids": torch.randint(3, VOCAB, (ROWS, PROMPT), generator=rng) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(3, VOCAB, (ROWS, COMPLETION), generator=rng),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.4, 0.0, -0.8, 2.0, -1.5]),
        "num_items_in_batch": completion_mask.sum(),
    }
    with torch.no_grad():
        now, _ = current(trainer, Rows(inputs))
    if old:
        inputs["old_per_token_logps"] = now + old * torch.randn(now.shape, generator=rng)
    if ref:
        inputs["ref_per_token_logps"] = now + ref * torch.randn(now.shape, generator=rng)
    return Rows(inputs)


def current(trainer: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """TRL's own per-token logprobs and entropies, with their graph."""
    x = rows.inputs
    ids = torch.cat([x["prompt_ids"], x["completion_ids"]], dim=1)
    mask = torch.cat([x["prompt_mask"], x["completion_mask"]], dim=1)
    logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, COMPLETION, compute_entropy=True
    )
    return logprobs, entropy


def ours(trainer: Any, rows: Rows, config: GRPO, num_tokens: int, num_samples: int) -> tuple[Tensor, Any]:
    """The flat form of the same rows, through our algorithm."""
    x = rows.inputs
    logprobs, entropy = current(trainer, rows)
    keep = x["completion_mask"].bool()  # [rows, COMPLETION]
    lengths = keep.sum(1, keepdim=True).expand_as(keep)[keep]  # [T]
    algo = build_algorithm(config, COMPLETION)

    def flat(name: str) -> Tensor | None:
        return x[name][keep] if name in x else None

    return algo.loss(
        LossInputs(
            logprobs=logprobs[keep],
            entropy=entropy[keep],
            old_logprobs=flat("old_per_token_logps"),
            ref_logprobs=flat("ref_per_token_logps"),
            sampler_logprobs=logprobs[keep].detach(),
            advantages=x["advantages"][:, None].expand_as(keep)[keep],
            weights=algo.weigh(lengths, num_tokens, num_samples).float(),
            segments=torch.arange(len(keep))[:, None].expand_as(keep)[keep],
        )
    )


def gradient(trainer: Any, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trainer.model.parameters()))])


def assert_equal(trainer: Any, theirs: Tensor, mine: Tensor) -> None:
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-6)
    their_grad, my_grad = gradient(trainer, theirs), gradient(trainer, mine)
    assert their_grad.abs().max() > 1e-3  # there is something to compare
    assert (their_grad - my_grad).abs().max() <= 1e-5 * their_grad.abs().max()


CASES = {
    "on-policy": ({}, {}),
    "several epochs": ({}, {"old": 0.3}),
    "clip higher": ({"clip_high": 0.28}, {"old": 0.3}),
    "kl": ({"kl": 0.04}, {"ref": 0.5}),
    "all of them": ({"clip_low": 0.1, "clip_high": 0.3, "kl": 0.1}, {"old": 0.4, "ref": 0.5}),
    "masked rows": ({"kl": 0.1}, {"old": 0.3, "ref": 0.5, "masked": (1, 3)}),
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
        beta=config.kl,
    )
    rows = make_rows(trainer, **distances)
    theirs = trainer._compute_loss(trainer.model, rows.inputs)
    mine, tally = ours(trainer, rows, config, int(rows.inputs["completion_mask"].sum()), ROWS)
    assert_equal(trainer, theirs, mine)

    said = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    metrics = tally.to_metrics()
    assert metrics["entropy"] == pytest.approx(said["entropy"], rel=1e-5)
    assert metrics["clip/low"] == pytest.approx(said["clip_ratio/low_mean"], abs=1e-6)
    assert metrics["clip/high"] == pytest.approx(said["clip_ratio/high_mean"], abs=1e-6)
    if config.kl:
        assert metrics["kl/ref"] == pytest.approx(said["kl"], rel=1e-4)
    if "old" in distances:
        assert metrics["clip/low"] > 0 and metrics["clip/high"] > 0  # the case clips at both ends


def test_entropy_bonus_equals_trl(model_folder: Path) -> None:
    # TRL's bonus is a token mean for every loss type, ours follows the aggregation: compared where they meet
    trainer = make_trainer(model_folder, loss_type="bnpo", entropy_coef=0.02)
    rows = make_rows(trainer, old=0.3)
    config = GRPO(aggregate="token", entropy=0.02)
    mine, _ = ours(trainer, rows, config, sum(LENGTHS), ROWS)
    assert_equal(trainer, trainer._compute_loss(trainer.model, rows.inputs), mine)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_accumulated_microbatches_equal_trl(model_folder: Path, loss_type: str) -> None:
    """Equal row counts, where TRL's accumulation is exact (its "bnpo" divides by each one's tokens)."""
    trainer = make_trainer(model_folder, loss_type=loss_type, gradient_accumulation_steps=2)
    rows = make_rows(trainer, old=0.3)
    halves = [rows.part(slice(0, 3)), rows.part(slice(3, 6))]
    theirs = torch.stack([trainer._compute_loss(trainer.model, half.inputs) for half in halves]).sum()
    config = GRPO(aggregate=AGGREGATE[loss_type])  # type: ignore[arg-type]
    mine = torch.stack([ours(trainer, half, config, sum(LENGTHS), ROWS)[0] for half in halves]).sum()
    assert_equal(trainer, theirs, mine)
    assert mine.item() == pytest.approx(ours(trainer, rows, config, sum(LENGTHS), ROWS)[0].item(), rel=1e-5)


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

    groups = [group(rewards[:3]), group(rewards[3:])]
    graded = build_algorithm(GRPO(scale=scale), COMPLETION).advantages(groups)  # type: ignore[arg-type]
    mine = [s.advantage for g in graded for s in g.samples]
    assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert graded[1].samples[2].masked == "failed"


def group(rewards: list[float | None]) -> Group:
    def sample(reward: float | None) -> Sample:
        failure = "unscorable" if reward is None else ""
        sampled = {"tokens": [3], "provenance": [int(Provenance.SAMPLED)], "sampler_logprobs": [-1.0]}
        return Sample(**sampled, reward=reward, failure=failure)  # type: ignore[arg-type]

    prompt = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[3], provenance=[0])
    return Group(prompt=prompt, samples=[sample(r) for r in rewards])
