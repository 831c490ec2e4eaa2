"""What a step's groups say about it, as numbers and as the one sample worth showing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cohort.logs.view import Showcase
from cohort.types import Group, Provenance, Sample


@dataclass(kw_only=True, slots=True)
class StepStats:
    """The learner's numbers of one step, under the names they have in the metrics table."""

    metrics: dict[str, float] = field(default_factory=dict)


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths, exclusions and the gap between sampler and learner, of all groups together."""
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return {}
    scored = [s for s in samples if s.reward is not None and not s.failure]
    metrics = _rewards(scored) | _lengths(samples) | _gap(samples)
    metrics["groups/num"] = len(groups)
    metrics["groups/dead"] = sum(_is_dead(g) for g in groups) / len(groups)
    metrics["groups/excluded"] = sum(bool(g.excluded) for g in groups) / len(groups)
    metrics["samples/num"] = len(samples)
    metrics["samples/failed"] = sum(bool(s.failure) for s in samples)
    metrics["samples/masked"] = sum(bool(s.masked) for s in samples)
    metrics["tokens/sampled"] = sum(s.num_sampled for s in samples)
    metrics["tokens/prompt"] = sum(len(g.prompt.tokens) for g in groups)
    return metrics


def failures(groups: Iterable[Group]) -> str:
    """The infrastructure failures of a step in one line; empty when there are none."""
    found = [s.failure for g in groups for s in g.samples if s.failure]
    noun = "sample" if len(found) == 1 else "samples"
    return f"{len(found)} {noun} could not be scored and left their groups: {found[0]}" if found else ""


def showcase(step: int, groups: Sequence[Group]) -> Showcase | None:
    """The best answer to the prompt that divided its group the most: there is something to learn from it."""
    best: tuple[float, Group, Sample] | None = None
    for group in groups:
        rewards = [s.reward for s in group.samples if s.reward is not None]
        if not rewards:
            continue
        mean = math.fsum(rewards) / len(rewards)
        spread = math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)
        if best is None or spread > best[0]:
            top = max(group.samples, key=lambda s: -math.inf if s.reward is None else s.reward)
            best = (spread, group, top)
    if best is None:
        return None
    _, group, sample = best
    asked = next((m["content"] for m in reversed(group.prompt.messages) if m["role"] == "user"), "")
    note = " · ".join(n for n in (str(sample.finish), sample.reason) if n)
    completion = group.prompt.forced_text + sample.text
    return Showcase(step=step, prompt=str(asked), completion=completion, reward=sample.reward, note=note)


def _is_dead(group: Group) -> bool:
    """All rewards equal: nothing to prefer, no gradient."""
    rewards = [s.reward for s in group.samples if s.reward is not None]
    return not rewards or max(rewards) == min(rewards)


def _rewards(scored: list[Sample]) -> dict[str, float]:
    rewards = [s.reward for s in scored if s.reward is not None]
    if not rewards:
        return {}
    mean = _mean(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(_mean([(r - mean) ** 2 for r in rewards])),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in scored:
        for name, value in sample.parts.items():
            parts[name].append(value)
    return metrics | {f"reward/{name}": _mean(values) for name, values in sorted(parts.items())}


def _lengths(samples: list[Sample]) -> dict[str, float]:
    lengths: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        lengths[str(sample.finish)].append(len(sample.tokens))
    every = [n for values in lengths.values() for n in values]
    metrics = {"length/mean": _mean(every), "length/max": max(every)}
    for finish, values in sorted(lengths.items()):
        metrics[f"length/{finish}"] = _mean(values)
    for finish in ("stop", "length", "abort"):
        metrics[f"finish/{finish}"] = len(lengths.get(finish, ())) / len(samples)
    return metrics


def _gap(samples: list[Sample]) -> dict[str, float]:
    """|sampler - learner| logprob of the sampled tokens, where the learner has given its own."""
    gaps = [
        abs(ours - theirs)
        for s in samples
        if s.old_logprobs
        for ours, theirs, kind in zip(s.old_logprobs, s.sampler_logprobs, s.provenance, strict=True)
        if kind == Provenance.SAMPLED
    ]
    return {"gap/mean": _mean(gaps), "gap/max": max(gaps)} if gaps else {}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
