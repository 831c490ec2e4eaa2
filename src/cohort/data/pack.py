"""Packing in two steps: groups become a batch of plain arrays, and a batch becomes microbatches within a token budget.

A microbatch stores the prompt of a group once where that saves enough tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from cohort.world import ONE_PROCESS, World

# Prompts are shared where that saves more than this share of the tokens. Shared prompts need a second attention call.
MIN_SAVED_SHARE = 0.02

# ---- groups -> batch -------------------------------------------------------------------------------------------------


@stage("pack")
def make_batch(
    groups: Sequence[Group],
    minibatches: int = 1,
    loss_on: Provenance = Provenance.SAMPLED,
    *,
    whole_groups: bool = False,
    world: World = ONE_PROCESS,
) -> Batch:
    """Returns the samples of these groups that train, divided into `minibatches` optimizer steps, and their counts.

    `groups` are those of this rank of `world`, each with its place among the groups of all ranks in `order`. The groups
    of all ranks are divided into minibatches as if one process had them.

    The loss may touch tokens of the provenance `loss_on` only; samples without such tokens are empty. Left out are
    failed, masked and empty samples, and all samples of excluded groups. Some of these count in the denominators:
    masked and empty ones as samples without tokens, those of groups without gradient (constant reward, no gain) with
    their tokens. With `whole_groups` the samples of a group stay together in every microbatch, those of higher
    advantage first. Raises ValueError where two of the returned samples have the same id.
    """
    fates: Counter[str] = Counter()
    counts: list[Counts] = []
    rows: list[_Row] = []
    prompts: list[Ints] = []
    for index, chosen in enumerate(_divide_groups(groups, minibatches, world)):
        num_samples = num_tokens = num_prompts = num_first_tokens = 0
        for n in chosen:
            group = groups[n]
            num_before = num_samples
            prompts.append(np.array(group.prompt.tokens, dtype=np.int64))
            members = list(zip(group.ids(), group.samples, strict=True))
            if whole_groups:
                # The better sample of a pair comes first. Given pairs have no advantages, and keep their order.
                members.sort(key=lambda member: -member[1].advantage)
            for i, (id, sample) in enumerate(members):
                targets = _find_targets(sample, loss_on)
                fate = _classify_sample(group, sample, len(targets))
                fates[fate] += 1
                num_samples += fate not in ("failed", "excluded")
                num_counted = len(targets) if fate in ("packed", "no_signal") else 0
                num_tokens += num_counted
                num_first_tokens += num_counted if i == 0 else 0
                if fate == "packed":
                    rows.append(_Row(id, len(prompts) - 1, index, targets, sample))
            # A prompt counts if at least one of its samples does.
            num_prompts += num_samples > num_before
        counts.append(
            Counts(
                num_samples=num_samples,
                num_tokens=num_tokens,
                num_prompts=num_prompts,
                num_first_tokens=num_first_tokens,
            )
        )
    if len({row.id for row in rows}) < len(rows):
        raise ValueError(
            "two samples of a batch have the same id (task, prompt, visit, sample); each group may occur once"
        )
    return Batch(
        ids=[row.id for row in rows],
        group=[row.group for row in rows],
        minibatch=[row.minibatch for row in rows],
        prompts=prompts,
        tokens=[np.array(row.sample.tokens, dtype=np.int64) for row in rows],
        targets=[row.targets for row in rows],
        advantages=[_token_advantages(row.sample) for row in rows],
        sampler_logprobs=[np.array(row.sample.sampler_logprobs, dtype=np.float64) for row in rows],
        old_logprobs=[_to_array_or_none(row.sample.old_logprobs) for row in rows],
        ref_logprobs=[_to_array_or_none(row.sample.ref_logprobs) for row in rows],
        counts=counts,
        fates=dict(fates),
        whole_groups=whole_groups,
    )


class _Row(NamedTuple):
    """A sample that has a gradient, and where it belongs."""

    id: SampleId
    group: int  # index of its prompt
    minibatch: int
    targets: Ints  # indices of the tokens that the loss may touch
    sample: Sample


def _divide_groups(groups: Sequence[Group], parts: int, world: World) -> list[list[int]]:
    """Returns one list of indices into `groups` per minibatch; `parts` is the number of minibatches.

    Groups that count in the loss's denominators are divided evenly, to within one, over all ranks. Those that were
    sampled in an earlier step (`Group.reused`) are spread evenly too. All other groups go to the first minibatch.
    """
    if world.size == 1 or parts == 1:
        return _divide_counted([(g.excluded.is_counted, bool(g.reused)) for g in groups], parts)
    own = [(g.order, g.excluded.is_counted, bool(g.reused)) for g in groups]
    everything = sorted(entry for part in world.gather(own) for entry in part)
    divided = _divide_counted([(is_counted, is_reused) for _, is_counted, is_reused in everything], parts)
    index_of = {group.order: n for n, group in enumerate(groups)}
    orders = [[everything[n][0] for n in chosen] for chosen in divided]
    return [[index_of[order] for order in chosen if order in index_of] for chosen in orders]


def _divide_counted(groups: Sequence[tuple[bool, bool]], parts: int) -> list[list[int]]:
    """Returns the same for groups of which only is known whether they count, and whether they are reused."""
    counting = [n for n, (is_counted, _) in enumerate(groups) if is_counted]
    # New and reused groups each spread over 0 .. 1 by their order; sorting by that place mixes both evenly.
    by_origin = [[n for n in counting if groups[n][1] == reused] for reused in (False, True)]
    place = {n: (i + 0.5) / len(row) for row in by_origin for i, n in enumerate(row)}
    order = sorted(counting, key=place.__getitem__)
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    divided = [order[a:b] for a, b in pairwise(cuts)]
    # The other groups go to the first minibatch, only so that `Batch.fates` counts their samples.
    divided[0] += [n for n in range(len(groups)) if n not in place]
    return divided


def _classify_sample(group: Group, sample: Sample, num_targets: int) -> str:
    """Returns the first that applies of "failed", "excluded", "masked", "empty", "no_signal" and "packed".

    It is the key for counts in `Batch.fates`. "excluded" means a group that does not count in the denominators,
    "no_signal" one that does but has no gradient. `num_targets` is the number of tokens that the loss may touch. Only
    "packed" samples are in the batch.
    """
    if sample.failure:
        return "failed"
    if not group.excluded.is_counted:
        return "excluded"
    if sample.masked:
        return "masked"
    if not num_targets:
        return "empty"
    return "no_signal" if group.excluded is not Fate.TRAINED else "packed"


def _find_targets(sample: Sample, loss_on: Provenance) -> Ints:
    """Returns the indices of the sample's tokens that the loss may touch: those of provenance `loss_on`, ascending."""
    return np.flatnonzero(np.array(sample.provenance) == int(loss_on))


def _token_advantages(sample: Sample) -> Floats:
    """Returns one advantage per token [T]: those set per token, or else the sample's advantage for every token."""
    if sample.token_advantages is not None:
        return np.array(sample.token_advantages, dtype=np.float64)
    return np.full(len(sample.tokens), sample.advantage, dtype=np.float64)


def _to_array_or_none(values: list[float] | None) -> Floats | None:
    """Returns a list as a float64 array, and None for None."""
    return None if values is None else np.array(values, dtype=np.float64)


# ---- batch -> microbatches -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PackUnit:
    """Samples that share one copy of their prompt: a group, or a part of a group that exceeds the token budget."""

    prompt: Ints
    samples: list[int]  # their numbers in the batch
    num_tokens: int  # of the prompt and the samples


def pack(batch: Batch, token_budget: int, share: bool = True) -> list[Minibatch]:
    """Returns every minibatch of the batch, cut into microbatches of at most `token_budget` tokens.

    With `share`, samples of a group share a copy of their prompt, if that saves enough tokens. A minibatch without
    samples has no microbatches. Raises ConfigError for an empty prompt and for a sample that, with its prompt, exceeds
    the budget.
    """
    return [pack_minibatch(batch, index, token_budget, share) for index in range(batch.num_minibatches)]


def pack_minibatch(batch: Batch, index: int, token_budget: int, share: bool = True) -> Minibatch:
    """Returns minibatch `index` of the batch, cut into microbatches of at most `token_budget` tokens.

    With `share`, samples of a group share a copy of their prompt, if that saves enough tokens. A group that exceeds the
    budget has several copies. Without samples there are no microbatches. Raises ConfigError for an empty prompt and for
    a sample that, with its prompt, exceeds the budget; where groups must stay whole, for a group that does.
    """
    groups = _collect_groups(batch, batch.sample_numbers(index))
    shared = share and sharing_pays(batch, groups)
    longest = _find_longest(batch, groups, shared)
    if batch.whole_groups and longest > token_budget:
        raise ConfigError(
            f"samples that are compared with each other have {longest} tokens with their prompt, which exceeds the "
            f"token budget of {token_budget} tokens per microbatch; start again with at least {longest} (cohort train: "
            "--learner.token_budget)."
        )
    bundles: list[list[PackUnit]] = []
    for group, members in groups.items():
        units = _make_units(batch, group, members, token_budget, shared)
        bundles += [units] if batch.whole_groups else [[unit] for unit in units]
    group_lengths = {group: sum(len(batch.targets[n]) for n in members) for group, members in groups.items()}
    return Minibatch(
        batch=batch,
        index=index,
        microbatches=[_make_microbatch(batch, bin, group_lengths) for bin in fit_into_bins(bundles, token_budget)],
        share_prompts=share,
        longest_sample=longest,
    )


def longest_sample(batch: Batch) -> int:
    """Returns the number of tokens of the longest sample and its prompt; 0 for an empty batch.

    A token budget must be at least that large. Where groups must stay whole, it is the longest group, without sharing.
    """
    return _find_longest(batch, _collect_groups(batch, range(len(batch.ids))), shared=False)


def _find_longest(batch: Batch, groups: Mapping[int, Sequence[int]], shared: bool) -> int:
    """Returns the number of tokens of the longest sample and its prompt, or of the longest group if it must stay whole.

    `groups` maps the index of a group's prompt to the numbers of its samples. With `shared` a whole group has one copy
    of its prompt.
    """
    if not batch.whole_groups:
        return max((_num_tokens(batch, n) for members in groups.values() for n in members), default=0)
    sizes = [sum(_num_tokens(batch, n) for n in members) for members in groups.values()]
    if shared:
        copies = [len(batch.prompts[group]) * (len(members) - 1) for group, members in groups.items()]
        sizes = [size - saved for size, saved in zip(sizes, copies, strict=True)]
    return max(sizes, default=0)


def _collect_groups(batch: Batch, numbers: Iterable[int]) -> dict[int, list[int]]:
    """Returns the samples `numbers` by the index of their group's prompt."""
    groups: dict[int, list[int]] = {}
    for n in numbers:
        groups.setdefault(batch.group[n], []).append(n)
    return groups


def sharing_pays(batch: Batch, groups: Mapping[int, Sequence[int]]) -> bool:
    """Returns whether one copy of each prompt per group saves more than MIN_SAVED_SHARE of all tokens.

    Smaller savings are not worth a second attention call. `groups` maps the index of a group's prompt to the numbers of
    the group's samples.
    """
    without_sharing = sum(_num_tokens(batch, n) for members in groups.values() for n in members)
    saved = sum(len(batch.prompts[group]) * (len(members) - 1) for group, members in groups.items())
    return saved > MIN_SAVED_SHARE * without_sharing


def with_old_logprobs(minibatch: Minibatch, old: Mapping[int, Floats]) -> Minibatch:
    """Returns a copy of the minibatch with old log-probabilities in its microbatches, replacing those it had.

    `old` maps sample numbers to one log-probability per token [T]. It must have every sample of the minibatch.
    """
    batch = minibatch.batch
    micros = []
    for micro in minibatch.microbatches:
        order = torch.unique_consecutive(micro.segments).tolist()
        micros.append(replace(micro, old_logprobs=_concatenate([old[n][batch.targets[n]] for n in order])))
    return replace(minibatch, microbatches=micros)


def _num_tokens(batch: Batch, n: int) -> int:
    """Returns the number of tokens of sample number `n` and its prompt."""
    return len(batch.prompts[batch.group[n]]) + len(batch.tokens[n])


def _make_units(batch: Batch, group: int, members: Sequence[int], budget: int, share: bool) -> list[PackUnit]:
    """Returns the samples of a group as units: sets of samples that share one copy of the prompt within the budget.

    `group` is the index of the prompt, `members` are the samples' numbers. With `share` each sample, in order, joins
    the last unit if it fits and else begins a new one; without, each sample is a unit. Raises ConfigError for an empty
    prompt, and for a sample that exceeds the budget together with the prompt.
    """
    units: list[PackUnit] = []
    prompt = batch.prompts[group]
    if not len(prompt):
        raise ConfigError(
            "a sample has no prompt: its prompt has 0 tokens, so no token predicts the first one of the completion; "
            "let the task's method `prompt` return at least one message with text."
        )
    for n in members:
        num = len(batch.tokens[n])
        if len(prompt) + num > budget:
            raise ConfigError(
                f"a sample of {len(prompt)} prompt + {num} completion tokens exceeds the token budget of {budget} "
                f"tokens per microbatch; start again with at least {len(prompt) + num} (cohort train: "
                "--learner.token_budget; cohort bench learner: --token-budget)."
            )
        if share and units and units[-1].num_tokens + num <= budget:
            last = units[-1]
            units[-1] = replace(last, samples=[*last.samples, n], num_tokens=last.num_tokens + num)
        else:
            units.append(PackUnit(prompt=prompt, samples=[n], num_tokens=len(prompt) + num))
    return units


def fit_into_bins(bundles: Sequence[Sequence[PackUnit]], budget: int) -> list[list[PackUnit]]:
    """Returns all units in bins of at most `budget` tokens; each bin becomes a microbatch.

    A bundle is units that must be in the same bin. Bundles are placed from the largest to the smallest, each into the
    first bin with room, so that bins are few and well filled. One above the budget gets a bin of its own. The result is
    deterministic: bundles of equal size keep their order.
    """
    sized = [(sum(unit.num_tokens for unit in bundle), bundle) for bundle in bundles]
    bins: list[list[PackUnit]] = []
    room: list[int] = []
    for num_tokens, bundle in sorted(sized, key=lambda item: -item[0]):
        for i, free in enumerate(room):
            if num_tokens <= free:
                bins[i] += bundle
                room[i] -= num_tokens
                break
        else:
            bins.append([*bundle])
            room.append(budget - num_tokens)
    return bins


def _make_microbatch(batch: Batch, units: Sequence[PackUnit], group_lengths: Mapping[int, int]) -> Microbatch:
    """Returns one microbatch with all samples of these units, as tensors on the host.

    `group_lengths` maps the index of a group's prompt to the number of targets of the whole group.
    """
    stream = _PackedStream()
    source: list[Ints] = []
    chosen = [n for unit in units for n in unit.samples]
    for unit in units:
        size = len(unit.prompt)
        # The last target and what follows it predict nothing: a sample of one target has no input of its own.
        inputs = {n: batch.tokens[n][: batch.targets[n][-1]] for n in unit.samples}
        shared = len(unit.samples) > 1 and any(map(len, inputs.values()))
        # One sample, or several without inputs of their own, are one plain sequence with the prompt.
        own_inputs = inputs[unit.samples[0]][:0] if shared else max(inputs.values(), key=len)
        start = stream.add(np.concatenate([unit.prompt, own_inputs]), 0)
        for n in unit.samples:
            first = start + size
            if shared and len(inputs[n]):
                first = stream.add(inputs[n], size, (start, size))
            targets = batch.targets[n]
            # A target is predicted by the token before it; the sample's first token by the prompt's last.
            source.append(np.where(targets > 0, first + targets - 1, start + size - 1))
    num_targets = [len(batch.targets[n]) for n in chosen]
    return Microbatch(
        tokens=_concatenate(stream.tokens),
        positions=_concatenate(stream.positions),
        layout=Layout(spans=stream.spans, num_tokens=stream.num),
        source=_concatenate(source),
        targets=_concatenate([batch.tokens[n][batch.targets[n]] for n in chosen]),
        segments=_repeat_per_token(chosen, num_targets),
        lengths=_repeat_per_token(num_targets, num_targets),
        group_lengths=_repeat_per_token([group_lengths[batch.group[n]] for n in chosen], num_targets),
        advantages=_concatenate([batch.advantages[n][batch.targets[n]] for n in chosen]),
        sampler_logprobs=_concatenate([batch.sampler_logprobs[n][batch.targets[n]] for n in chosen]),
        num_samples=len(chosen),
        old_logprobs=_gather_targets(batch, batch.old_logprobs, chosen),
        ref_logprobs=_gather_targets(batch, batch.ref_logprobs, chosen),
    )


class _PackedStream:
    """A packed stream while it is built: tokens of all spans end to end, with their positions."""

    def __init__(self) -> None:
        self.tokens: list[Ints] = []
        self.positions: list[Ints] = []
        self.spans: list[Span] = []
        self.num = 0  # tokens so far

    def add(self, tokens: Ints, position: int, prompt: tuple[int, int] | None = None) -> int:
        """Appends a span with these tokens and returns the index of its first token in the packed stream.

        `position` is the place of the first token in its own sequence. `prompt` is (start, length) of a prompt in the
        packed stream that the span sees too; None = none.
        """
        start, length = self.num, len(tokens)
        self.tokens.append(tokens)
        self.positions.append(np.arange(position, position + length))
        self.spans.append(Span(start, length, *(prompt or (start, 0))))
        self.num += length
        return start


def _concatenate(parts: Sequence[Ints] | Sequence[Floats]) -> Tensor:
    """Returns the arrays joined end to end, as one tensor on the host."""
    return torch.from_numpy(np.concatenate(parts))


def _repeat_per_token(values: list[int], counts: list[int]) -> Tensor:
    """Returns a tensor in which values[i] is repeated counts[i] times: one entry per target token of each sample."""
    return torch.from_numpy(np.repeat(np.array(values), counts))


def _gather_targets(batch: Batch, values: Sequence[Floats | None], chosen: Sequence[int]) -> Tensor | None:
    """Returns the values at the target tokens [N] of the samples numbered `chosen`, end to end.

    `values` has one array [T] per sample of the batch, or None. The result is None where all chosen samples have None.
    Raises AssertionError where only some have.
    """
    present = [(n, v) for n in chosen if (v := values[n]) is not None]
    assert len(present) in (0, len(chosen)), "some samples of a batch are annotated and some are not"
    return _concatenate([v[batch.targets[n]] for n, v in present]) if present else None
