"""Groups -> microbatches under a token budget, a group's prompt stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cohort.clock import stage
from cohort.data.batch import Batch, Microbatch, Minibatch
from cohort.data.layout import Layout, Span
from cohort.errors import ConfigError
from cohort.types import Group, Provenance, Sample

LEAST_SAVED = 0.02  # of the tokens


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
    first = [0, *accumulate(len(g.samples) for g in groups)]  # each group's first segment
    for chosen in _divided(groups, minibatches):
        members: list[tuple[list[int], list[tuple[int, Sample]]]] = []  # (prompt, samples) of each group
        num_samples = num_tokens = num_prompts = 0
        for n in chosen:
            group = groups[n]
            members.append((group.prompt.tokens, []))
            before = num_samples
            for segment, sample in enumerate(group.samples, first[n]):
                length = sample.provenance.count(int(loss_on))
                fate = _fate(group, sample, length)
                counts[fate] += 1
                num_samples += fate not in ("failed", "excluded")
                num_tokens += length if fate in ("packed", "no_signal") else 0
                if fate == "packed":
                    members[-1][1].append((segment, sample))
            num_prompts += num_samples > before
        repacked = partial(_microbatches, members, share, loss_on)
        packed.append(
            Minibatch(
                microbatches=repacked(token_budget),
                num_samples=num_samples,
                num_tokens=num_tokens,
                num_prompts=num_prompts,
                longest=max((len(p) + len(s.tokens) for p, row in members for _, s in row), default=0),
                token_budget=token_budget,
                repacked=repacked,
            )
        )
    return Batch(minibatches=packed, counts=dict(counts), samples=[s for g in groups for s in g.samples])


def _divided(groups: Sequence[Group], parts: int) -> list[list[int]]:
    """Indices of the groups of each minibatch: as many that count in every one, and those used again spread evenly."""
    counting = [n for n, g in enumerate(groups) if g.excluded.counts]
    of_age = {old: [n for n in counting if (groups[n].reused > 0) == old] for old in (False, True)}
    place = {n: (i + 0.5) / len(row) for row in of_age.values() for i, n in enumerate(row)}
    order = sorted(counting, key=place.__getitem__)
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    divided = [order[a:b] for a, b in pairwise(cuts)]
    divided[0] += [n for n in range(len(groups)) if n not in place]  # only to be counted
    return divided


def _microbatches(
    members: Sequence[tuple[list[int], list[tuple[int, Sample]]]], share: bool, loss_on: Provenance, token_budget: int
) -> list[Microbatch]:
    share = share and pays(members)
    units = [unit for prompt, samples in members for unit in _units(prompt, samples, token_budget, share)]
    group_lengths = {  # by sample
        segment: total
        for _, samples in members
        for total in [sum(s.provenance.count(int(loss_on)) for _, s in samples)]
        for segment, _ in samples
    }
    return [_microbatch(bin, loss_on, group_lengths) for bin in fit(units, token_budget)]


def pays(members: Sequence[tuple[list[int], list[tuple[int, Sample]]]]) -> bool:
    """Is it worth a second call of attention to compute prompts once a group?"""
    alone = sum((len(prompt) + len(s.tokens)) for prompt, samples in members for _, s in samples)
    saved = sum(len(prompt) * (len(samples) - 1) for prompt, samples in members if samples)
    return saved > LEAST_SAVED * alone


def _fate(group: Group, sample: Sample, length: int) -> str:
    if sample.failure:
        return "failed"
    if not group.excluded.counts:
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


def _microbatch(units: Sequence[Unit], loss_on: Provenance, group_lengths: Mapping[int, int]) -> Microbatch:
    stream = _Stream()
    chosen: list[_Chosen] = []
    source: list[np.ndarray] = []
    for unit in units:
        row = [_Chosen(segment, sample, _targets(sample, loss_on)) for segment, sample in unit.samples]
        size, shared = len(unit.prompt), len(row) > 1 and any(c.num_inputs for c in row)
        # one sample, or several without inputs of their own, are one plain sequence with the prompt
        own = [] if shared else max((c.inputs for c in row), key=len)
        start = stream.add(unit.prompt + own, 0)
        for c in row:
            first = start + size
            if shared and c.num_inputs:
                first = stream.add(c.inputs, size, (start, size))
            source.append(np.where(c.at > 0, first + c.at - 1, start + size - 1))
        chosen += row
    num = [len(c.at) for c in chosen]
    return Microbatch(
        tokens=_joined(stream.tokens),
        positions=_joined(stream.positions),
        layout=Layout(spans=stream.spans, num_tokens=stream.num),
        source=_joined(source),
        targets=_flat(chosen, lambda s: s.tokens, np.int64),
        segments=_repeat([c.segment for c in chosen], num),
        lengths=_repeat(num, num),
        group_lengths=_repeat([group_lengths[c.segment] for c in chosen], num),
        advantages=_repeat([c.sample.advantage for c in chosen], num),
        sampler_logprobs=_flat(chosen, lambda s: s.sampler_logprobs),
        old_logprobs=_optional(chosen, lambda s: s.old_logprobs),
        ref_logprobs=_optional(chosen, lambda s: s.ref_logprobs),
    )


class _Chosen(NamedTuple):
    """A sample and which of its tokens are targets."""

    segment: int
    sample: Sample
    at: np.ndarray

    @property
    def num_inputs(self) -> int:
        """The last target and what follows it predict nothing: a sample of one target has no input of its own."""
        return int(self.at[-1])

    @property
    def inputs(self) -> list[int]:
        return self.sample.tokens[: self.num_inputs]


class _Stream:
    """Tokens end to end."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.spans: list[Span] = []
        self.num = 0

    def add(self, tokens: list[int], position: int, prompt: tuple[int, int] | None = None) -> int:
        """Append a span whose first token stands at `position`; returns where it begins."""
        start, length = self.num, len(tokens)
        self.tokens.append(np.array(tokens))
        self.positions.append(np.arange(position, position + length))
        self.spans.append(Span(start, length, *(prompt or (start, 0))))
        self.num += length
        return start


def _targets(sample: Sample, loss_on: Provenance) -> np.ndarray:
    return np.flatnonzero(np.array(sample.provenance) == int(loss_on))


def _joined(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _repeat(values: list[int] | list[float], counts: list[int]) -> Tensor:
    """A sample's value for each of its tokens."""
    return torch.from_numpy(np.repeat(np.array(values), counts))


def _flat(chosen: list[_Chosen], values: Callable[[Sample], Any], dtype: type = np.float64) -> Tensor:
    return _joined([np.array(values(c.sample), dtype)[c.at] for c in chosen])


def _optional(chosen: list[_Chosen], values: Callable[[Sample], Any]) -> Tensor | None:
    present = [values(c.sample) is not None for c in chosen]
    assert all(present) or not any(present), "some samples of a batch are annotated and some are not"
    return _flat(chosen, values) if any(present) else None
