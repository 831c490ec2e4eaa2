"""Groups -> microbatches under a token budget, a group's prompt stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cohort.clock import stage
from cohort.data.batch import Batch, Block, Layout, Microbatch, Minibatch
from cohort.errors import ConfigError
from cohort.types import CONSTANT_REWARD, Group, Provenance, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Samples that share one copy of their prompt: a group, or a part of one that exceeds the budget."""

    prompt: list[int]
    samples: list[tuple[int, Sample]]  # (segment number, sample)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(len(s.tokens) for _, s in self.samples)


@stage("pack")
def pack(
    groups: Sequence[Group],
    token_budget: int,
    minibatches: int = 1,
    share: bool = True,
    loss_on: Provenance = Provenance.SAMPLED,
) -> Batch:
    """Split the groups into minibatches and each into microbatches of at most `token_budget` tokens.

    Groups of constant reward are counted in the denominators and not packed: their gradient is exactly zero, their
    share of the mean is not. Masked and empty samples count as samples, without tokens.
    """
    counts: Counter[str] = Counter()
    packed: list[Minibatch] = []
    segment = 0
    for part in range(minibatches):
        chosen = groups[part * len(groups) // minibatches : (part + 1) * len(groups) // minibatches]
        units: list[Unit] = []
        num_samples = num_tokens = 0
        for group in chosen:
            members: list[tuple[int, Sample]] = []
            for sample in group.samples:
                length = sum(1 for p in sample.provenance if p == loss_on)
                fate = _fate(group, sample, length)
                counts[fate] += 1
                num_samples += fate not in ("failed", "excluded")
                num_tokens += length if fate in ("packed", "no_signal") else 0
                if fate == "packed":
                    members.append((segment, sample))
                segment += 1
            units += _units(group.prompt.tokens, members, token_budget, share)
        micro = [_microbatch(bin, loss_on) for bin in fit(units, token_budget)]
        packed.append(Minibatch(microbatches=micro, num_samples=num_samples, num_tokens=num_tokens))
    return Batch(minibatches=packed, counts=dict(counts))


def _fate(group: Group, sample: Sample, length: int) -> str:
    if sample.failure:
        return "failed"
    if group.excluded not in ("", CONSTANT_REWARD):
        return "excluded"
    if sample.masked:
        return "masked"
    if not length:
        return "empty"
    return "no_signal" if group.excluded else "packed"


def _units(prompt: list[int], members: list[tuple[int, Sample]], budget: int, share: bool) -> list[Unit]:
    """One unit if the group fits and sharing is on; otherwise as few as fit."""
    units: list[Unit] = []
    if members and not prompt:
        raise ConfigError("a sample has no token before it: nothing can predict its first one; give it a prompt")
    for member in members:
        size = len(prompt) + len(member[1].tokens)
        if size > budget:
            raise ConfigError(
                f"a sample of {len(prompt)} prompt + {len(member[1].tokens)} completion tokens exceeds "
                f"learner.token_budget = {budget}; raise it to at least {size}"
            )
        if share and units and units[-1].num_tokens + len(member[1].tokens) <= budget:
            units[-1].samples.append(member)
        else:
            units.append(Unit(prompt=prompt, samples=[member]))
    return units


def fit(units: Sequence[Unit], budget: int) -> list[list[Unit]]:
    """First-fit decreasing: few microbatches, well filled. Deterministic: ties keep their order."""
    bins: list[list[Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda u: -u.num_tokens):
        for i, free in enumerate(room):
            if unit.num_tokens <= free:
                bins[i].append(unit)
                room[i] -= unit.num_tokens
                break
        else:
            bins.append([unit])
            room.append(budget - unit.num_tokens)
    return bins


def _microbatch(units: Sequence[Unit], loss_on: Provenance) -> Microbatch:
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    source: list[int] = []
    chosen: list[tuple[int, Sample, list[int]]] = []
    for unit in units:
        start, size = len(tokens), len(unit.prompt)
        tokens += unit.prompt
        positions += range(size)
        alone = len(unit.samples) == 1  # then prompt and completion are one plain sequence
        if not alone:
            spans.append((start, size, start, 0))
        for segment, sample in unit.samples:
            at = [i for i, p in enumerate(sample.provenance) if p == loss_on]
            first, length = len(tokens), at[-1]  # the last target and what follows it predict nothing
            tokens += sample.tokens[:length]
            positions += range(size, size + length)
            spans.append((start, size + length, start, 0) if alone else (first, length, start, size))
            source += [first + i - 1 if i else start + size - 1 for i in at]
            chosen.append((segment, sample, at))
    num = [len(at) for _, _, at in chosen]
    return Microbatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        layout=layout(spans, len(tokens)),
        source=torch.tensor(source),
        targets=_flat(chosen, lambda s: s.tokens, torch.int64),
        segments=_repeat([segment for segment, _, _ in chosen], num),
        lengths=_repeat(num, num),
        advantages=_repeat([s.advantage for _, s, _ in chosen], num),
        sampler_logprobs=_flat(chosen, lambda s: s.sampler_logprobs),
        old_logprobs=_optional(chosen, lambda s: s.old_logprobs),
        ref_logprobs=_optional(chosen, lambda s: s.ref_logprobs),
    )


def _repeat(values: list[int] | list[float], counts: list[int]) -> Tensor:
    """A sample's value for each of its tokens."""
    return torch.from_numpy(np.repeat(np.array(values), counts))


def _flat(chosen, values, dtype: torch.dtype = torch.float64) -> Tensor:  # type: ignore[no-untyped-def]
    return torch.tensor([values(s)[i] for _, s, at in chosen for i in at], dtype=dtype)


def _optional(chosen, values) -> Tensor | None:  # type: ignore[no-untyped-def]
    present = [values(s) is not None for _, s, _ in chosen]
    assert all(present) or not any(present), "some samples of a batch are annotated and some are not"
    return _flat(chosen, values) if any(present) else None


WASTE = 0.25  # share of padded query-key pairs in a block worth a call less
CALL = 8192  # pairs computed in about the time that a call itself costs

Span = tuple[int, int, int, int]
"""(start, length, start of the shared prompt, its length): a run of tokens that sees that prompt and itself."""


def layout(spans: Sequence[Span], num_tokens: int) -> Layout:
    """Batch spans of similar shape, so that padding wastes little and calls are few."""
    blocks: list[Block] = []
    order = np.empty(num_tokens, dtype=np.int64)
    taken = 0
    for members in _similar(sorted((s for s in spans if s[1]), key=lambda s: (s[1] + s[3], s[1]))):
        start, length, shared, size = np.array(members).T[:, :, None]  # [b, 1] each
        lq, lk = int(length.max()), int((length + size).max())
        column, row = np.arange(lk), np.arange(lq)
        own = start + np.minimum(column - size, length - 1)
        keys = np.where(column < size, shared + column, own)  # [b, Lk]
        queries = start + np.minimum(row, length - 1)  # [b, Lq]
        real = row < length
        order[queries[real]] = (taken + np.arange(len(members))[:, None] * lq + row)[real]
        taken += len(members) * lq
        tensors = (torch.from_numpy(a) for a in (queries, keys, size[:, 0].copy()))
        blocks.append(Block(**dict(zip(("queries", "keys", "offsets"), tensors, strict=True))))
    return Layout(blocks=blocks, order=torch.from_numpy(order))


def _similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Cut a sorted list of spans where padding would cost more than the calls it saves."""
    out: list[list[Span]] = []
    lq = lk = area = 0
    for span in spans:
        _, length, _, size = span
        q, k = max(lq, length), max(lk, length + size)
        true = area + length * (length + size)
        if out and (len(out[-1]) + 1) * q * k <= (1 + WASTE) * true + CALL:
            out[-1].append(span)
            lq, lk, area = q, k, true
        else:
            out.append([span])
            lq, lk, area = length, length + size, length * (length + size)
    return out
