"""Rows of random tokens for TRL's trainers, and the same rows as flat vectors for our losses.

TRL's own code computes the log-probabilities on a tiny random Llama; our code gets these numbers. With
COHORT_REQUIRE_PEERS=1 a missing peer is a failure instead of a skip.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.algos import Algorithm, build_algorithm
from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.config.algos import Policy
from cohort.types import Group, Prompt, Provenance, Sample

VOCAB, PROMPT, COMPLETION, ROWS = 64, 5, 7, 6
# Sampled tokens per row.
LENGTHS = [7, 3, 1, 6, 7, 4]
# Rows per prompt. They follow each other.
SIBLINGS = 2
AGGREGATE = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}


def peer(name: str) -> Any:
    """Returns a module of another library. Skips the test module where it is not installed."""
    if os.environ.get("COHORT_REQUIRE_PEERS") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason="peers have their own environment: make test-peers")


trl = peer("trl")


def save_model(folder: Path) -> Path:
    """Saves a tiny random Llama with a tokenizer of 64 words in a folder that TRL can load. Returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
        # Weights are large enough that log-probabilities differ visibly.
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_trainer(folder: Path, reward: Any = None, kind: str = "GRPO", **settings: Any) -> Any:
    """Returns TRL's GRPOTrainer or RLOOTrainer, ready to compute a loss."""
    from datasets import Dataset

    if kind == "GRPO":
        # The KL term of the paper, as in our loss.
        settings["use_bias_correction_kl"] = False
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        num_generations=settings.pop("num_generations", SIBLINGS),
        max_completion_length=COMPLETION,
        **settings,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
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
    """A padded batch for TRL's `_compute_loss`: prompts are padded on the left, completions on the right."""

    inputs: dict[str, Tensor]

    def part(self, rows: slice) -> Rows:
        """Returns some of the rows, with the token count of the whole batch."""
        whole = ("num_items_in_batch",)
        return Rows({k: v if k in whole else v[rows] for k, v in self.inputs.items()})

    @property
    def num_tokens(self) -> int:
        """The number of completion tokens."""
        return int(self.inputs["completion_mask"].sum())


def make_rows(
    trainer: Any,
    *,
    old: float = 0.0,
    ref: float = 0.0,
    masked: tuple[int, ...] = (),
    lengths: Sequence[int] = LENGTHS,
) -> Rows:
    """Returns random rows. `old` and `ref` are the spread of those policies' logprobs around the current ones."""
    rng = torch.Generator().manual_seed(1)
    prompt_mask = torch.ones(ROWS, PROMPT, dtype=torch.int64)
    prompt_mask[1, :2] = 0
    prompt_mask[4, :3] = 0
    completion_mask = torch.tensor([[int(t < n) for t in range(COMPLETION)] for n in lengths])
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


def current(trainer: Any, rows: Rows, model: Any = None) -> tuple[Tensor, Tensor]:
    """Returns per-token logprobs and entropies that TRL computes, with gradients. With `model` entropies are None."""
    x = rows.inputs
    ids = torch.cat([x["prompt_ids"], x["completion_ids"]], dim=1)
    mask = torch.cat([x["prompt_mask"], x["completion_mask"]], dim=1)
    logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
        model or trainer.model, ids, mask, x["completion_ids"].shape[1], compute_entropy=model is None
    )
    return logprobs, entropy


def flat_inputs(trainer: Any, rows: Rows, algo: Algorithm, num_tokens: int) -> LossInputs:
    """Returns the rows without padding, as inputs of our losses. `num_tokens` is the count over all microbatches."""
    x = rows.inputs
    logprobs, entropy = current(trainer, rows)
    keep = x["completion_mask"].bool()  # [rows, longest]
    size = keep.sum(1)
    group = size.view(-1, SIBLINGS).sum(1).repeat_interleave(SIBLINGS) if len(size) % SIBLINGS == 0 else size

    def flat(name: str) -> Tensor | None:
        return x[name][keep] if name in x else None

    def spread(of_row: Tensor) -> Tensor:
        return of_row[:, None].expand_as(keep)[keep]

    sampler = flat("sampling_per_token_logps")
    totals = Totals(num_tokens=num_tokens, num_samples=ROWS, num_prompts=ROWS // SIBLINGS)
    return LossInputs(
        logprobs=logprobs[keep],
        entropy=entropy[keep],
        old_logprobs=flat("old_per_token_logps"),
        ref_logprobs=flat("ref_per_token_logps"),
        sampler_logprobs=logprobs[keep].detach() if sampler is None else sampler,
        advantages=spread(x["advantages"]),
        weights=algo.weigh_tokens(Lengths(sample=spread(size), group=spread(group)), totals).to(logprobs.dtype),
        segments=spread(torch.arange(len(keep))),
    )


def ours(trainer: Any, rows: Rows, config: Policy, num_tokens: int | None = None) -> tuple[Tensor, Any]:
    """Returns loss and tally of our algorithm on the rows."""
    algo = build_algorithm(config, COMPLETION)
    return algo.loss(flat_inputs(trainer, rows, algo, num_tokens or rows.num_tokens))


def gradient(trainer: Any, loss: Tensor) -> Tensor:
    """Returns the gradient on all parameters of the trainer's model, as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trainer.model.parameters()))])


def assert_equal(trainer: Any, theirs: Tensor, mine: Tensor, tolerance: float = 1e-5) -> None:
    """Compares the values of two losses, and their gradients on every parameter."""
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=min(tolerance, 1e-6))
    assert_equal_gradient(trainer, theirs, mine, tolerance)


def assert_equal_gradient(trainer: Any, theirs: Tensor, mine: Tensor, tolerance: float) -> None:
    """Compares the gradients of two losses, relative to the largest entry."""
    their_grad, my_grad = gradient(trainer, theirs), gradient(trainer, mine)
    largest = float(their_grad.abs().max())
    # The gradient is not zero, so the comparison means something.
    assert largest > 1e-3
    torch.testing.assert_close(my_grad, their_grad, rtol=0.0, atol=tolerance * largest)


def make_group(rewards: Sequence[float | None], num_tokens: int = 1) -> Group:
    """Returns a group with one sample per reward. None = the sample could not be scored."""

    def sample(reward: float | None) -> Sample:
        failure = "unscorable" if reward is None else ""
        sampled: dict[str, Any] = {
            "tokens": [3] * num_tokens,
            "provenance": [int(Provenance.SAMPLED)] * num_tokens,
            "sampler_logprobs": [-1.0] * num_tokens,
        }
        return Sample(**sampled, reward=reward, failure=failure)

    prompt = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[3], provenance=[0])
    return Group(prompt=prompt, samples=[sample(r) for r in rewards])
