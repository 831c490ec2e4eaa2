"""Groups -> microbatches under a token budget, a group's prompt stored once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cohort.clock import stage
from cohort.data.batch import Batch, Microbatch, Minibatch
from cohort.data.layout import Layout, Span
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
        members: list[tuple[list[int], list[tuple[int, Sample]]]] = []  # (prompt, samples) of each group
        num_samples = num_tokens = 0
        for group in chosen:
            members.append((group.prompt.tokens, []))
            for sample in group.samples:
                length = sum(1 for p in sample.provenance if p == loss_on)
                fate = _fate(group, sample, length)
                counts[fate] += 1
                num_samples += fate not in ("failed", "excluded")
                num_tokens += length if fate in ("packed", "no_signal") else 0
                if fate == "packed":
                    members[-1][1].append((segment, sample))
                segment += 1
        repacked = partial(_microbatches, members, share, loss_on)
        packed.append(
            Minibatch(
                microbatches=repacked(token_budget), num_samples=num_samples, num_tokens=num_tokens, repacked=repacked
            )
        )
    return Batch(minibatches=packed, counts=dict(counts))


def _microbatches(
    members: Sequence[tuple[list[int], list[tuple[int, Sample]]]], share: bool, loss_on: Provenance, token_budget: int
) -> list[Microbatch]:
    units = [unit for prompt, samples in members for unit in _units(prompt, samples, token_budget, share)]
    return [_microbatch(bin, loss_on) for bin in fit(units, token_budget)]


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
    """The stream: prompts that several samples read, then what is one plain sequence, then those samples."""
    stream = _Stream()
    chosen: list[tuple[int, Sample, list[int]]] = []
    source: list[int] = []
    rows = [[(s, sample, _targets(sample, loss_on)) for s, sample in unit.samples] for unit in units]
    # the last target and what follows it predict nothing: a sample of one target has no input of its own
    shared = [len(row) > 1 and any(at[-1] for _, _, at in row) for row in rows]
    starts = {n: stream.add(units[n].prompt, 0) for n in range(len(units)) if shared[n]}
    for n in sorted(range(len(units)), key=lambda n: shared[n]):
        prompt = units[n].prompt
        size = len(prompt)
        if shared[n]:
            start = starts[n]
        else:  # samples without inputs of their own, if there are several
            row_tokens = max((sample.tokens[: at[-1]] for _, sample, at in rows[n]), key=len)
            start = stream.add(prompt + row_tokens, 0)
        for segment, sample, at in rows[n]:
            first = start + size
            if shared[n] and at[-1]:
                first = stream.add(sample.tokens[: at[-1]], size, (start, size))
            source += [first + i - 1 if i else start + size - 1 for i in at]
            chosen.append((segment, sample, at))
    num = [len(at) for _, _, at in chosen]
    return Microbatch(
        tokens=torch.tensor(stream.tokens),
        positions=torch.tensor(stream.positions),
        layout=Layout(spans=stream.spans, num_tokens=len(stream.tokens)),
        source=torch.tensor(source),
        targets=_flat(chosen, lambda s: s.tokens, torch.int64),
        segments=_repeat([segment for segment, _, _ in chosen], num),
        lengths=_repeat(num, num),
        advantages=_repeat([s.advantage for _, s, _ in chosen], num),
        sampler_logprobs=_flat(chosen, lambda s: s.sampler_logprobs),
        old_logprobs=_optional(chosen, lambda s: s.old_logprobs),
        ref_logprobs=_optional(chosen, lambda s: s.ref_logprobs),
    )


class _Stream:
    """Tokens end to end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.spans: list[Span] = []

    def add(self, tokens: list[int], position: int, prompt: tuple[int, int] | None = None) -> int:
        """Append a span whose first token stands at `position`; returns where it begins."""
        start, shared = len(self.tokens), prompt or (len(self.tokens), 0)
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))
        self.spans.append(Span(start, len(tokens), *shared))
        return start


def _targets(sample: Sample, loss_on: Provenance) -> list[int]:
    return [i for i, p in enumerate(sample.provenance) if p == loss_on]


def _repeat(values: list[int] | list[float], counts: list[int]) -> Tensor:
    """A sample's value for each of its tokens."""
    return torch.from_numpy(np.repeat(np.array(values), counts))


def _flat(chosen, values, dtype: torch.dtype = torch.float64) -> Tensor:  # type: ignore[no-untyped-def]
    return torch.tensor([values(s)[i] for _, s, at in chosen for i in at], dtype=dtype)


def _optional(chosen, values) -> Tensor | None:  # type: ignore[no-untyped-def]
    present = [values(s) is not None for _, s, _ in chosen]
    assert all(present) or not any(present), "some samples of a batch are annotated and some are not"
    return _flat(chosen, values) if any(present) else None
