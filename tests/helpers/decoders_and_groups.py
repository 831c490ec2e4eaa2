"""Small random decoders and groups that the tests share."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.batch import Batch, Minibatch
from cohort.data.pack import make_batch, pack
from cohort.models.config import ModelConfig, Rope
from cohort.models.decoder import Attend, Decoder, initialise
from cohort.types import Finish, Group, Prompt, Provenance, Sample

_numbers = count()
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def small_config(**changes) -> ModelConfig:
    head_dim = changes.get("head_dim", 8)
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 61,
        "hidden": 32,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "ff": 40,
        "norm_eps": 1e-5,
        "rope": Rope(inv_freq=tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))),
        "max_positions": 512,
        "tied": True,
    }
    return ModelConfig(**{**values, **changes})


def small_decoder(dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 0.3, **changes) -> Decoder:
    """Weights large enough that a wrong context changes log-probabilities visibly."""
    decoder = Decoder(small_config(**changes))
    initialise(decoder, seed, std)
    return decoder.to(dtype)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The plain form: one sequence, [T, K, g, D], written out."""
    T, _, g, D = q.shape
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)  # [T, H, D]
    scores = torch.einsum("qhd,khd->hqk", q.flatten(1, 2), k) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).view(q.shape)


def one_sequence() -> Attend:
    return lambda layer, q, k, v: causal(q, k, v)


def naive_logprobs(decoder: Decoder, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """One sequence at a time, all logits, log_softmax: the definition the fast paths are held to."""
    tokens = torch.tensor([*prompt, *completion])
    hidden = decoder(tokens, torch.arange(len(tokens)), one_sequence())
    logprobs = F.log_softmax(decoder.logits(hidden) / temperature, dim=-1)
    at = torch.arange(len(prompt), len(tokens))
    return logprobs[at - 1, tokens[at]]


def make_sample(tokens: list[int], provenance: list[int] | None = None, **values) -> Sample:
    values = {"finish": Finish.STOP, "sampler_logprobs": [0.0] * len(tokens), **values}
    return Sample(tokens=tokens, provenance=provenance or [Provenance.SAMPLED] * len(tokens), **values)


def make_group(prompt: list[int], samples: list[Sample], id: str = "") -> Group:
    """With an id of its own, unless one is given."""
    id = id or f"group {next(_numbers)}"
    marks = [Provenance.PROMPT] * len(prompt)
    p = Prompt(task="t", id=id, visit=0, row={"id": id}, messages=[], tokens=prompt, provenance=marks)
    return Group(prompt=p, samples=samples)


def random_groups(num_groups: int = 3, group_size: int = 4, seed: int = 0, longest: int = 9) -> list[Group]:
    """Groups of unequal lengths with advantages of both signs."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(61) for _ in range(n)]

    return [
        make_group(
            tokens(rng.randint(1, 7)),
            [make_sample(tokens(rng.randint(1, longest)), advantage=rng.uniform(-2, 2)) for _ in range(group_size)],
            id=str(n),
        )
        for n in range(num_groups)
    ]


@dataclass(frozen=True)
class Packed:
    """A batch and the minibatches that a learner makes of it."""

    groups: list[Group]
    batch: Batch
    minibatches: list[Minibatch]

    @property
    def counts(self) -> dict[str, int]:
        return self.batch.fates

    def places(self, minibatch: int = 0) -> list[int]:
        """The samples of a minibatch, counted over all groups."""
        number = {id: place for place, id in enumerate(id for g in self.groups for id in g.ids())}
        found = {n for micro in self.minibatches[minibatch].microbatches for n in micro.segments.tolist()}
        return sorted(number[self.batch.ids[n]] for n in found)


def packed(
    groups: list[Group], token_budget: int, minibatches: int = 1, share: bool = True, loss_on: int = Provenance.SAMPLED
) -> Packed:
    """Groups cut into microbatches as a learner with this budget cuts them."""
    batch = make_batch(groups, minibatches, Provenance(loss_on))
    return Packed(groups, batch, pack(batch, token_budget, share))
