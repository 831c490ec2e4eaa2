"""What a step's groups say about it, as numbers and as the one sample worth showing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cohort.algos.account import account
from cohort.logs.view import Showcase
from cohort.types import Group, Sample
from cohort.world import ONE_PROCESS, World


@dataclass(kw_only=True, slots=True)
class StepStats:
    """The learner's numbers of one step, under the names they have in the metrics table."""

    metrics: dict[str, float] = field(default_factory=dict)


def step_stats(groups: Sequence[Group], update: Mapping[str, float], world: World = ONE_PROCESS) -> StepStats:
    """Rewards and lengths of the rollouts of all ranks, fates of groups and samples, and the learner's metrics."""
    if world.size > 1:
        groups = [group for part in world.gather([_light(g) for g in groups]) for group in part]
    fresh, ages = [g for g in groups if not g.reused], [g.reused for g in groups if g.reused]
    reused = {"replay/groups": float(len(ages)), "replay/age": _mean(ages), "replay/age_max": max(ages)} if ages else {}
    metrics = {**rollout_metrics(fresh), **account(fresh), **reused, **update}
    if "importance/square" in update:  # how many samples of equal weight these are worth
        metrics["importance/ess"] = update["importance/mean"] ** 2 / max(update["importance/square"], 1e-300)
    return StepStats(metrics=metrics)


def _light(group: Group) -> Group:
    """Without what no metric reads: what ranks tell each other."""
    prompt = replace(group.prompt, row={}, messages=[], provenance=[], forced_text="")
    dropped: dict[str, Any] = {"tokens": [], "sampler_logprobs": [], "old_logprobs": None, "ref_logprobs": None}
    samples = [replace(s, **dropped, token_advantages=None, text="", reason="") for s in group.samples]
    return replace(group, prompt=prompt, samples=samples)


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and failures of all groups together."""
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return {}
    scored = [s for s in samples if s.reward is not None and not s.failure]
    metrics = _rewards(scored) | _lengths(samples)
    metrics["groups/dead"] = sum(_is_dead(g) for g in groups) / len(groups)
    metrics["samples/failed"] = sum(bool(s.failure) for s in samples)
    metrics["samples/masked"] = sum(bool(s.masked) for s in samples)
    metrics["tokens/sampled"] = sum(s.num_sampled for s in samples)
    metrics["tokens/prompt"] = sum(len(g.prompt.tokens) for g in groups)
    if max(turns := [s.num_turns for s in samples]) > 1:
        metrics["turns/mean"] = _mean(turns)
    if kept := [mass for s in samples for mass in s.kept_mass]:  # truncated sampling: how much of the policy acted
        metrics["sampling/kept_mass"] = _mean(kept)
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
        lengths[str(sample.finish)].append(sample.num_sampled)
    every = [n for values in lengths.values() for n in values]
    metrics = {"length/mean": _mean(every), "length/max": max(every)}
    for finish, values in sorted(lengths.items()):
        metrics[f"length/{finish}"] = _mean(values)
    for finish in ("stop", "length", "abort"):
        metrics[f"finish/{finish}"] = len(lengths.get(finish, ())) / len(samples)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
