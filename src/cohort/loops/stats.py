"""Metrics of a training step, computed from its groups, and the choice of the one sample to show the user."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cohort.algos.account import count_fates
from cohort.algos.credit import WHOLE_EPISODE, CreditRule
from cohort.logs.view import Showcase
from cohort.types import Group, Sample
from cohort.world import ONE_PROCESS, World


@dataclass(kw_only=True, slots=True)
class StepStats:
    """The metrics of one step, by their names in the metrics table of run.db."""

    metrics: dict[str, float] = field(default_factory=dict)


def compute_step_stats(
    groups: Sequence[Group],
    update: Mapping[str, float],
    world: World = ONE_PROCESS,
    credit: CreditRule = WHOLE_EPISODE,
) -> StepStats:
    """Returns a step's metrics: rewards, lengths and fates of the groups of all ranks, and the learner's own.

    `groups` are those of this rank (process), `update` the learner's metrics, which are taken over. Of the other
    metrics, groups that were reused from earlier steps count only in those named `replay/`. Adds `importance/ess`, the
    effective sample size as a share, if `update` has importance ratios. `credit` is that of the algorithm.
    """
    if world.size > 1:
        groups = [group for part in world.gather([_strip_for_gather(g) for g in groups]) for group in part]
    fresh = [g for g in groups if not g.reused]
    ages = [g.reused for g in groups if g.reused]
    reused = {"replay/groups": float(len(ages)), "replay/age": _mean(ages), "replay/age_max": max(ages)} if ages else {}
    metrics = {**compute_rollout_metrics(fresh, credit), **count_fates(fresh), **reused, **update}
    # Effective sample size as a share: how many samples of equal importance these are worth, per sample.
    if "importance/square" in update:
        metrics["importance/ess"] = update["importance/mean"] ** 2 / max(update["importance/square"], 1e-300)
    return StepStats(metrics=metrics)


def _strip_for_gather(group: Group) -> Group:
    """Returns a copy of the group without the fields that no metric reads, so that less is sent to other ranks.

    Emptied are the samples' tokens, log-probabilities, token advantages, texts and reasons, and the prompt's row,
    messages and provenance. The prompt's tokens and the samples' provenance stay, because metrics count them. So do the
    rewards of turns, which decide whether a group is dead.
    """
    prompt = replace(group.prompt, row={}, messages=[], provenance=[], forced_text="")
    dropped: dict[str, Any] = {"tokens": [], "sampler_logprobs": [], "old_logprobs": None, "ref_logprobs": None}
    samples = [replace(s, **dropped, token_advantages=None, text="", reason="", messages=[]) for s in group.samples]
    return replace(group, prompt=prompt, samples=samples)


def compute_rollout_metrics(groups: Sequence[Group], credit: CreditRule = WHOLE_EPISODE) -> dict[str, float]:
    """Returns metrics over all samples of the groups, by name: rewards, lengths, failures and token counts.

    Rewards are over scored samples only. `groups/dead` is a share, `samples/` and `tokens/` are numbers; a prompt's
    tokens count once per group. `credit` says which rewards of a group are compared: those of samples or of turns. {}
    if there are no samples.
    """
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return {}
    scored = [s for s in samples if s.reward is not None and not s.failure]
    metrics = _compute_reward_metrics(scored) | _compute_length_metrics(samples)
    metrics["groups/dead"] = sum(map(credit.is_dead, groups)) / len(groups)
    metrics["samples/failed"] = sum(bool(s.failure) for s in samples)
    metrics["samples/masked"] = sum(bool(s.masked) for s in samples)
    metrics["tokens/sampled"] = sum(s.num_sampled for s in samples)
    metrics["tokens/prompt"] = sum(len(g.prompt.tokens) for g in groups)
    if max(turns := [s.num_turns for s in samples]) > 1:
        metrics["turns/mean"] = _mean(turns)
    metrics |= _count_calls(samples) | _compute_task_metrics(groups, credit)
    # Only truncated sampling (top-p, top-k, min-p) records it: the probability of the tokens that could be drawn.
    if kept := [mass for s in samples for mass in s.kept_mass]:
        metrics["sampling/kept_mass"] = _mean(kept)
    return metrics


def summarise_failures(groups: Iterable[Group]) -> str:
    """Returns one line with the number of samples that could not be scored and the first reason; "" if none failed."""
    reasons = [s.failure for g in groups for s in g.samples if s.failure]
    noun = "sample" if len(reasons) == 1 else "samples"
    return f"{len(reasons)} {noun} could not be scored and left their groups: {reasons[0]}" if reasons else ""


def describe_dead_steps(num_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns what to try after `num_steps` steps in a row without a signal. `metrics` are those of the last one."""
    mean = f" (mean reward {metrics['reward/mean']:.2g})" if "reward/mean" in metrics else ""
    return (
        f"{num_steps} steps in a row taught nothing: all rewards of every group are equal{mean}. Try easier rows "
        "(harder ones, if rewards are high), more --batch.samples, a higher --sampling.temperature, or reward parts "
        "for partial success; cohort check RECIPE tries the reward"
    )


def describe_bad_updates(num_bad: int) -> str:
    """Returns what to tell the user at the first step whose updates were skipped. `num_bad` of them were."""
    what = "1 update was" if num_bad == 1 else f"{num_bad} updates were"
    return (
        f"{what} skipped: the gradient was not finite (NaN or infinite), so the weights did not change. The usual "
        "causes are a policy_loss of your own that divides by zero or takes the logarithm of zero, and a "
        "learning rate that is too high (--optim.lr). The metric updates/bad counts such updates"
    )


def choose_showcase(step: int, groups: Sequence[Group]) -> Showcase | None:
    """Returns a sample to show the user: the one with the highest reward in the group whose rewards vary the most.

    Such a group shows what the step could learn. Of equal groups and samples the first counts. None if no sample has a
    reward. `step` counts from 1.
    """
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
    question = next((m["content"] for m in reversed(group.prompt.messages) if m["role"] == "user"), "")
    note = " · ".join(n for n in (str(sample.finish), sample.reason) if n)
    completion = group.prompt.forced_text + sample.text
    return Showcase(step=step, prompt=str(question), completion=completion, reward=sample.reward, note=note)


def _compute_reward_metrics(scored: list[Sample]) -> dict[str, float]:
    """Returns mean, standard deviation, minimum and maximum of the rewards, and the mean of each reward part.

    All names begin with "reward/". A part's mean is over the samples that have it. {} if no sample has a reward.
    """
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


def _compute_task_metrics(groups: Sequence[Group], credit: CreditRule) -> dict[str, float]:
    """Returns metrics of each task of a mixture, by names that end in the task's label; {} if the groups are of none.

    They are the mean reward and accuracy, the share of dead groups, the mean length and the number of samples. The
    accuracy of a mixture is the part "correct".
    """
    metrics: dict[str, float] = {}
    # The ids of a mixture's rows begin with the label.
    mixed = [group for group in groups if group.prompt.id.startswith(f"{group.prompt.task}/")]
    for label in sorted({group.prompt.task for group in mixed}):
        own = [group for group in mixed if group.prompt.task == label]
        samples = [sample for group in own for sample in group.samples]
        scored = [sample for sample in samples if sample.reward is not None and not sample.failure]
        if scored:
            metrics[f"reward/mean/{label}"] = _mean([sample.reward for sample in scored if sample.reward is not None])
        if scored and all("correct" in sample.parts for sample in scored):
            metrics[f"reward/correct/{label}"] = _mean([sample.parts["correct"] for sample in scored])
        metrics[f"groups/dead/{label}"] = sum(map(credit.is_dead, own)) / len(own)
        if samples:
            metrics[f"length/mean/{label}"] = _mean([sample.num_sampled for sample in samples])
        metrics[f"samples/of/{label}"] = float(len(samples))
    return metrics


def _compute_length_metrics(samples: list[Sample]) -> dict[str, float]:
    """Returns metrics of the number of sampled tokens per sample: mean, maximum, and mean per finish reason.

    Adds the share of samples per finish reason; that of stop, length and abort also if it is 0. There must be a sample.
    """
    lengths: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        lengths[str(sample.finish)].append(sample.num_sampled)
    all_lengths = [n for values in lengths.values() for n in values]
    metrics = {"length/mean": _mean(all_lengths), "length/max": max(all_lengths)}
    for finish, values in sorted(lengths.items()):
        metrics[f"length/{finish}"] = _mean(values)
    # These three are always reported, also when their share is 0. Only conversations end in other ways.
    for finish in sorted({"stop", "length", "abort", *lengths}):
        metrics[f"finish/{finish}"] = len(lengths.get(finish, ())) / len(samples)
    return metrics


def _count_calls(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the number of calls of tools per sample, and the number of calls with each outcome; {} without calls."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts.update(sample.calls)
    if not counts:
        return {}
    metrics = {f"calls/{outcome}": float(num) for outcome, num in sorted(counts.items())}
    return {"calls/mean": sum(counts.values()) / len(samples), **metrics}


def compute_times(metrics: Mapping[str, float], seconds: float, stages: Mapping[str, float]) -> dict[str, float]:
    """Returns the time metrics of a step: seconds of each stage and of the whole step, and tokens per second.

    `metrics` has the token counts; a rate without its count or its stage is left out. `seconds` are those of the step,
    `stages` those of each stage by name, and events within them, such as "scoring/retries". Names begin with "time/",
    so that a comparison of two runs can leave them out.
    """
    # Names with a slash are of what happens within a stage.
    times = {f"time/{name}" if "/" in name else f"time/stage/{name}": value for name, value in stages.items()}
    times["time/step"] = seconds
    # (name of the rate, metric that it counts, seconds to divide by)
    rates = (
        # A step that samples nothing trains given tokens.
        ("tokens_per_s", "tokens/sampled" if "tokens/sampled" in metrics else "tokens", seconds),
        ("sampled_per_s", "tokens/sampled", stages.get("rollout")),
        ("trained_per_s", "tokens", stages.get("update")),
    )
    for name, counted, spent in rates:
        if counted in metrics and spent is not None:
            times[f"time/{name}"] = metrics[counted] / max(spent, 1e-9)
    return times


def _mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value, summed without rounding errors."""
    return math.fsum(values) / len(values)
