"""Groups -> a batch of plain arrays; a batch -> microbatches under a token budget, a group's prompt stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cohort.data.batch import Batch, Counts, Floats, Ints, Microbatch, Minibatch
from cohort.data.layout import Layout, Span
from cohort.errors import ConfigError
from cohort.fates import Fate
from cohort.system.clock import stage
from cohort.types import Group, Provenance, Sample, SampleId

LEAST_SAVED = 0.02  # of the tokens

# ---- groups -> batch -------------------------------------------------------------------------------------------------


@stage("pack")
def make_batch(groups: Sequence[Group], minibatches: int = 1, loss_on: Provenance = Provenance.SAMPLED) -> Batch:
    """The samples of these groups that have a gradient, divided into `minibatches` optimizer steps.

    Groups of constant reward are counted in the denominators and left out: their gradient is exactly zero, their share
    of the mean is not. Masked and empty samples count as samples, without tokens.
    """
    fates: Counter[str] = Counter()
    counts: list[Counts] = []
    rows: list[_Row] = []
    prompts: list[Ints] = []
    for index, chosen in enumerate(_divided(groups, minibatches)):
        num_samples = num_tokens = num_prompts = 0
        for n in chosen:
            group, before = groups[n], num_samples
            prompts.append(np.array(group.prompt.tokens, dtype=np.int64))
            for id, sample in zip(group.ids(), group.samples, strict=True):
                targets = _targets(sample, loss_on)
                fate = _fate(group, sample, len(targets))
                fates[fate] += 1
                num_samples += fate not in ("failed", "excluded")
                num_tokens += len(targets) if fate in ("packed", "no_signal") else 0
                if fate == "packed":
                    rows.append(_Row(id, len(prompts) - 1, index, targets, sample))
            num_prompts += num_samples > before
        counts.append(Counts(num_samples=num_samples, num_tokens=num_tokens, num_prompts=num_prompts))
    if len({row.id for row in rows}) < len(rows):
        raise ValueError("two samples of a batch have the same id (task, prompt, visit, sample)")
    return Batch(
        ids=[row.id for row in rows],
        group=[row.group for row in rows],
        minibatch=[row.minibatch for row in rows],
        prompts=prompts,
        tokens=[np.array(row.sample.tokens, dtype=np.int64) for row in rows],
        targets=[row.targets for row in rows],
        advantages=[_advantages(row.sample) for row in rows],
        sampler_logprobs=[np.array(row.sample.sampler_logprobs, dtype=np.float64) for row in rows],
        old_logprobs=[_optional(row.sample.old_logprobs) for row in rows],
        ref_logprobs=[_optional(row.sample.ref_logprobs) for row in rows],
        counts=counts,
        fates=dict(fates),
    )


class _Row(NamedTuple):
    """A sample that has a gradient, and its places."""

    id: SampleId
    group: int  # index of its prompt
    minibatch: int
    targets: Ints
    sample: Sample


def _divided(groups: Sequence[Group], parts: int) -> list[list[int]]:
    """Indices of the groups of each minibatch: as many that count in every one, and those used again spread evenly."""
    counting = [n for n, g in enumerate(groups) if g.excluded.counts]
    by_origin = [[n for n in counting if bool(groups[n].reused) == reused] for reused in (False, True)]
    place = {n: (i + 0.5) / len(row) for row in by_origin for i, n in enumerate(row)}
    order = sorted(counting, key=place.__getitem__)
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    divided = [order[a:b] for a, b in pairwise(cuts)]
    divided[0] += [n for n in range(len(groups)) if n not in place]  # only to be counted
    return divided


def _fate(group: Group, sample: Sample, num_targets: int) -> str:
    if sample.failure:
        return "failed"
    if not group.excluded.counts:
        return "excluded"
    if sample.masked:
        return "masked"
    if not num_targets:
        return "empty"
    return "no_signal" if group.excluded is not Fate.TRAINED else "packed"


def _targets(sample: Sample, loss_on: Provenance) -> Ints:
    """Where in the sample the tokens lie that the loss may touch."""
    return np.flatnonzero(np.array(sample.provenance) == int(loss_on))


def _advantages(sample: Sample) -> Floats:
    if sample.token_advantages is not None:
        return np.array(sample.token_advantages, dtype=np.float64)
    return np.full(len(sample.tokens), sample.advantage, dtype=np.float64)


def _optional(values: list[float] | None) -> Floats | None:
    return None if values is None else np.array(values, dtype=np.float64)


# ---- batch -> microbatches -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Samples that share one copy of their prompt: a group, or a part of one that exceeds the budget."""

    prompt: Ints
    samples: list[int]  # their numbers in the batch
    num_tokens: int  # of the prompt and the samples


def pack(batch: Batch, token_budget: int, share: bool = True) -> list[Minibatch]:
    """Every minibatch of the batch, cut into microbatches of at most `token_budget` tokens."""
    return [pack_minibatch(batch, index, token_budget, share) for index in range(batch.num_minibatches)]


def pack_minibatch(batch: Batch, index: int, token_budget: int, share: bool = True) -> Minibatch:
    """One minibatch of the batch, cut into microbatches of at most `token_budget` tokens.

    `share` stores a group's prompt once, where that saves enough.
    """
    groups: dict[int, list[int]] = {}
    for n in batch.members(index):
        groups.setdefault(batch.group[n], []).append(n)
    shared = share and pays(batch, groups)
    units = [u for group, members in groups.items() for u in _units(batch, group, members, token_budget, shared)]
    group_lengths = {group: sum(len(batch.targets[n]) for n in members) for group, members in groups.items()}
    return Minibatch(
        batch=batch,
        index=index,
        microbatches=[_microbatch(batch, bin, group_lengths) for bin in fit(units, token_budget)],
        share=share,
        longest=max((_size(batch, n) for members in groups.values() for n in members), default=0),
    )


def longest_sample(batch: Batch) -> int:
    """Tokens of the longest sample with its prompt: no microbatch can be smaller."""
    return max((_size(batch, n) for n in range(len(batch.ids))), default=0)


def pays(batch: Batch, groups: Mapping[int, Sequence[int]]) -> bool:
    """Whether computing a prompt once per group is worth a second call of attention."""
    alone = sum(_size(batch, n) for members in groups.values() for n in members)
    saved = sum(len(batch.prompts[group]) * (len(members) - 1) for group, members in groups.items())
    return saved > LEAST_SAVED * alone


def with_old_logprobs(minibatch: Minibatch, old: Mapping[int, Floats]) -> Minibatch:
    """The same microbatches with old log-probabilities: `old` has those of every sample [T], by its number."""
    batch = minibatch.batch
    micros = []
    for micro in minibatch.microbatches:
        order = torch.unique_consecutive(micro.segments).tolist()
        micros.append(replace(micro, old_logprobs=_joined([old[n][batch.targets[n]] for n in order])))
    return replace(minibatch, microbatches=micros)


def _size(batch: Batch, n: int) -> int:
    return len(batch.prompts[batch.group[n]]) + len(batch.tokens[n])


def _units(batch: Batch, group: int, members: Sequence[int], budget: int, share: bool) -> list[Unit]:
    """One unit if the group fits and sharing is on; otherwise as few as fit."""
    units: list[Unit] = []
    prompt = batch.prompts[group]
    if not len(prompt):
        raise ConfigError("a sample has no token before it: nothing can predict its first one; give it a prompt")
    for n in members:
        num = len(batch.tokens[n])
        if len(prompt) + num > budget:
            raise ConfigError(
                f"a sample of {len(prompt)} prompt + {num} completion tokens exceeds "
                f"learner.token_budget = {budget}; raise it to at least {len(prompt) + num}"
            )
        if share and units and units[-1].num_tokens + num <= budget:
            last = units[-1]
            units[-1] = replace(last, samples=[*last.samples, n], num_tokens=last.num_tokens + num)
        else:
            units.append(Unit(prompt=prompt, samples=[n], num_tokens=len(prompt) + num))
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


def _microbatch(batch: Batch, units: Sequence[Unit], group_lengths: Mapping[int, int]) -> Microbatch:
    stream = _Stream()
    source: list[Ints] = []
    chosen = [n for unit in units for n in unit.samples]
    for unit in units:
        size = len(unit.prompt)
        # The last target and what follows it predict nothing: a sample of one target has no input of its own.
        inputs = {n: batch.tokens[n][: batch.targets[n][-1]] for n in unit.samples}
        shared = len(unit.samples) > 1 and any(map(len, inputs.values()))
        # One sample, or several without inputs of their own, are one plain sequence with the prompt.
        own = inputs[unit.samples[0]][:0] if shared else max(inputs.values(), key=len)
        start = stream.add(np.concatenate([unit.prompt, own]), 0)
        for n in unit.samples:
            first = start + size
            if shared and len(inputs[n]):
                first = stream.add(inputs[n], size, (start, size))
            at = batch.targets[n]
            source.append(np.where(at > 0, first + at - 1, start + size - 1))
    num = [len(batch.targets[n]) for n in chosen]
    return Microbatch(
        tokens=_joined(stream.tokens),
        positions=_joined(stream.positions),
        layout=Layout(spans=stream.spans, num_tokens=stream.num),
        source=_joined(source),
        targets=_joined([batch.tokens[n][batch.targets[n]] for n in chosen]),
        segments=_repeat(chosen, num),
        lengths=_repeat(num, num),
        group_lengths=_repeat([group_lengths[batch.group[n]] for n in chosen], num),
        advantages=_joined([batch.advantages[n][batch.targets[n]] for n in chosen]),
        sampler_logprobs=_joined([batch.sampler_logprobs[n][batch.targets[n]] for n in chosen]),
        old_logprobs=_chosen(batch, batch.old_logprobs, chosen),
        ref_logprobs=_chosen(batch, batch.ref_logprobs, chosen),
    )


class _Stream:
    """Tokens end to end."""

    def __init__(self) -> None:
        self.tokens: list[Ints] = []
        self.positions: list[Ints] = []
        self.spans: list[Span] = []
        self.num = 0

    def add(self, tokens: Ints, position: int, prompt: tuple[int, int] | None = None) -> int:
        """Append a span whose first token stands at `position`; returns where it begins."""
        start, length = self.num, len(tokens)
        self.tokens.append(tokens)
        self.positions.append(np.arange(position, position + length))
        self.spans.append(Span(start, length, *(prompt or (start, 0))))
        self.num += length
        return start


def _joined(parts: Sequence[Ints] | Sequence[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _repeat(values: list[int], counts: list[int]) -> Tensor:
    """A sample's value for each of its tokens."""
    return torch.from_numpy(np.repeat(np.array(values), counts))


def _chosen(batch: Batch, values: Sequence[Floats | None], chosen: Sequence[int]) -> Tensor | None:
    """Of these samples' targets, [N]; None where the samples have none."""
    present = [(n, v) for n in chosen if (v := values[n]) is not None]
    assert len(present) in (0, len(chosen)), "some samples of a batch are annotated and some are not"
    return _joined([v[batch.targets[n]] for n, v in present]) if present else None
