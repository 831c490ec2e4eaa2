"""Small random decoders and groups, shared by many tests."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.batch import Batch, Minibatch
from cohort.data.pack import make_batch, pack
from cohort.models.config import ModelConfig, Rope
from cohort.models.decoder import Attend, Decoder, initialise
from cohort.models.shards import TensorSpec
from cohort.types import Finish, Group, Prompt, Provenance, Sample

_numbers = count()  # for ids of groups
# Largest difference that the numerics contract allows, by type.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def small_config(**changes) -> ModelConfig:
    """Returns the shape of a Llama of two layers with these changes. Three query heads share a KV head."""
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
    """Returns a random decoder. Its weights are large enough that a wrong context changes log-probabilities visibly."""
    decoder = Decoder(small_config(**changes))
    initialise(decoder, seed, std)
    return decoder.to(dtype)


class GivenWeights:
    """Weights of a learner in another process: names and tensors. It counts how often they are read."""

    module = None

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        self.tensors = tensors
        self.num_reads = 0

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in self.tensors}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.num_reads += 1
        return iter(self.tensors)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention within one sequence, written out: q [T, K, g, D], k, v [T, K, D] -> [T, K, g, D]."""
    T, _, g, D = q.shape
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)  # [T, H, D]
    scores = torch.einsum("qhd,khd->hqk", q.flatten(1, 2), k) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).view(q.shape)


def plain_attention() -> Attend:
    """Returns the `attend` function of a decoder for one sequence."""
    return lambda layer, q, k, v: causal_attention(q, k, v)


def naive_logprobs(decoder: Decoder, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """Returns the log-probabilities [T] of a completion from all logits of one sequence, by log_softmax.

    This is the definition that all faster ways are compared with.
    """
    tokens = torch.tensor([*prompt, *completion])
    hidden = decoder(tokens, torch.arange(len(tokens)), plain_attention())
    logprobs = F.log_softmax(decoder.logits(hidden) / temperature, dim=-1)
    places = torch.arange(len(prompt), len(tokens))
    return logprobs[places - 1, tokens[places]]


def make_sample(tokens: list[int], provenance: list[int] | None = None, **values) -> Sample:
    """Returns a sample of these tokens, all of them sampled unless `provenance` says otherwise."""
    values = {"finish": Finish.STOP, "sampler_logprobs": [0.0] * len(tokens), **values}
    return Sample(tokens=tokens, provenance=provenance or [Provenance.SAMPLED] * len(tokens), **values)


def make_group(prompt: list[int], samples: list[Sample], id: str = "") -> Group:
    """Returns a group with these prompt tokens and samples. Without `id` it gets one that no other group has."""
    id = id or f"group {next(_numbers)}"
    marks = [Provenance.PROMPT] * len(prompt)
    p = Prompt(task="t", id=id, visit=0, row={"id": id}, messages=[], tokens=prompt, provenance=marks)
    return Group(prompt=p, samples=samples)


def random_groups(num_groups: int = 3, group_size: int = 4, seed: int = 0, longest: int = 9) -> list[Group]:
    """Returns groups of unequal lengths, with advantages of both signs."""
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
class PackedGroups:
    """A batch and the minibatches that a learner makes of it."""

    groups: list[Group]
    batch: Batch
    minibatches: list[Minibatch]

    @property
    def counts(self) -> dict[str, int]:
        """How many samples were packed, masked, empty and so on."""
        return self.batch.fates

    def sample_places(self, minibatch: int = 0) -> list[int]:
        """Returns the samples in the microbatches of a minibatch, as indices counted over all groups."""
        place_of = {id: place for place, id in enumerate(id for g in self.groups for id in g.ids())}
        numbers = {n for micro in self.minibatches[minibatch].microbatches for n in micro.segments.tolist()}
        return sorted(place_of[self.batch.ids[n]] for n in numbers)


def pack_groups(
    groups: list[Group], token_budget: int, minibatches: int = 1, share: bool = True, loss_on: int = Provenance.SAMPLED
) -> PackedGroups:
    """Returns groups cut into microbatches in the way that a learner with this token budget cuts them."""
    batch = make_batch(groups, minibatches, Provenance(loss_on))
    return PackedGroups(groups, batch, pack(batch, token_budget, share))
