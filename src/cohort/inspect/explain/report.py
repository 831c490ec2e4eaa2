"""Report of a step: its groups and samples, where its signal comes from, and notes for understanding the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cohort.config.document import get_variant_name
from cohort.config.imitation import DPO, SFT
from cohort.inspect.explain.effect import NOT_FINITE, StepEffect
from cohort.inspect.explain.examples import explain_examples
from cohort.inspect.explain.group import make_group_line, make_group_report
from cohort.inspect.explain.pairs import explain_pairs
from cohort.inspect.explain.records import Fact, Report
from cohort.inspect.explain.step import RecordedStep, add_effect, describe_fate, find_named_group, read_step_files
from cohort.inspect.explain.words import (
    explain_reason,
    format_count,
    format_number,
    format_signed,
    format_spread,
    format_total,
    mean,
)
from cohort.logs.legend import list_task_rewards
from cohort.types import Group

# Recorded metrics that the overview repeats.
_SHOWN_METRICS = (
    *("loss", "grad_norm", "lr", "updates/done", "updates/no_signal", "updates/bad", "updates/clipped"),
    *("ratio/min", "ratio/max", "clip/low", "clip/high", "implicit/margin", "implicit/accuracy", "kl/ref", "entropy"),
    "sampler_gap/max",
)


def explain_step(path: Path, number: int | None, group: str = "") -> Report:
    """Loads a step of the run in `path` and returns its report, with one of its groups in detail.

    `number` None = the newest step whose rollouts are kept. `group` is an index or a prompt id; "" = the group with the
    largest share of the signal (sum of |dL/dlogprob|), of the loss in supervised fine-tuning. Raises RunError if there
    is no such run, step or group.
    """
    files = read_step_files(path, number)
    if isinstance(files.config, SFT):
        return explain_examples(files, group)
    if isinstance(files.config, DPO):
        return explain_pairs(files, group)
    return make_report(add_effect(files), group)


def make_report(step: RecordedStep, group: str = "") -> Report:
    """Returns the report of a step that is loaded already, with one group in detail.

    `group` is an index or a prompt id; "" = the group with the largest share of the signal. Raises RunError if there is
    no such group.
    """
    lines = [make_group_line(step, i) for i in range(len(step.groups))]
    config = step.config
    variants = [get_variant_name("task", config.task), get_variant_name("algo", config.algo)]
    named = [f"step {step.number} of {config.steps}", config.recipe, config.model, *variants]
    return Report(
        title=" · ".join(n for n in named if n),
        facts=_describe_step(step),
        notes=_collect_notes(step),
        groups=lines,
        group=make_group_report(step, lines[find_group(step.groups, group, step.effect)]),
    )


def find_group(groups: Sequence[Group], wanted: str, effect: StepEffect) -> int:
    """Returns the index of the group that `wanted` names.

    `wanted` is an index or, if there is no such index, a prompt id; "" = the group with the largest signal or, if that
    is not known, with the largest advantages. Raises RunError if no group fits.
    """
    if not wanted and not effect.is_known:
        return max(range(len(groups)), key=lambda i: sum(abs(s.advantage) for s in groups[i].samples))
    return find_named_group(groups, wanted, effect.group_signals)


def _describe_step(step: RecordedStep) -> list[Fact]:
    """Returns the facts about a step as (label, text) pairs: groups, samples, rewards, signal, recorded metrics.

    The rewards are those of groups sampled in this step; reused groups are left out there.
    """
    groups, effect = step.groups, step.effect
    samples = [s for g in groups for s in g.samples]
    sampled = [e for g in effect.groups for e in g]
    out = Counter(f"left out: {g.excluded}" for g in groups if g.excluded)
    fates = Counter(fate for g in groups for s in g.samples if (fate := describe_fate(g, s)))
    facts = [
        ("groups", format_total(len(groups), Counter({"in the loss": sum(not g.excluded for g in groups)}) + out)),
        ("samples", format_total(len(samples), Counter({"in the loss": sum(e.is_in_loss for e in sampled)}) + fates)),
    ]
    # Reused groups are left out here, because an earlier policy earned their rewards.
    samples = [s for g in groups if not g.reused for s in g.samples]
    rewards = [s.reward for s in samples if s.reward is not None and not s.failure]
    if rewards:
        parts = sorted({name for s in samples for name in s.parts})
        means = [f"{name} {format_number(mean([s.parts[name] for s in samples if name in s.parts]))}" for name in parts]
        facts.append(("reward", f"{format_spread(rewards)}; parts on average: {', '.join(means) or 'none'}"))
        if tasks := list_task_rewards(step.metrics):
            own = [f"{label} {format_number(reward)}" for label, reward in tasks]
            facts.append(("tasks", f"mean reward: {', '.join(own)}"))
    if effect.is_known:
        # A token is pushed against its gradient.
        pushes = [-g for e in sampled for g in e.gradient]
        up, down = (math.fsum(p for p in pushes if p * sign > 0) for sign in (1, -1))
        signal = f"{format_number(effect.signal)} = sum of |dL/dlogprob|"
        facts.append(("signal", f"{signal}: {format_signed(up)} up, {format_signed(down)} down"))
    metrics = {name: step.metrics[name] for name in _SHOWN_METRICS if name in step.metrics}
    counts = ("updates/", "clip/")  # shown only if they are not 0
    shown = {name: value for name, value in metrics.items() if value or not name.startswith(counts)}
    recorded = [f"{name} {format_number(value)}" for name, value in shown.items()]
    if recorded:
        facts.append(("recorded", ", ".join(recorded)))
    return facts


def _collect_notes(step: RecordedStep) -> list[str]:
    """Returns the notes that a reader needs to understand the numbers of the report; empty if none is needed."""
    config = step.config
    notes = [step.problem] if step.problem else []
    if not step.effect.is_known:
        name = get_variant_name("algo", config.algo)
        note = (
            f"the loss is code of {name}, which explain never runs: pushes, ratios and shares of the signal are not "
            f"known. cohort replay RUN --step {step.number} --trust runs it."
        )
        return [*notes, note, *step.note_missing_tokenizer()]
    if not step.effect.signal:
        has_bonus = bool(config.algo.entropy or config.algo.entropy_target)
        # With an entropy bonus the loss is not 0 although no single log-probability is pushed.
        fact = "no log-probability is pushed" if has_bonus else "loss is 0"
        notes.append(explain_no_signal(step.groups, step.effect, fact))
    elif abs(step.metrics.get("loss", math.inf)) < 1e-3 * step.effect.signal:
        notes.append(
            "the loss is near 0 because ratios are 1 and advantages cancel out; "
            "training follows its gradient, which is not 0."
        )
    if broken := sum(e.zero_reasons.count(NOT_FINITE) for g in step.effect.groups for e in g):
        num_broken = format_count(broken, "token")
        notes.append(f"{num_broken} without a finite gradient: an update with such tokens is skipped.")
    if not step.effect.has_exact_ratios:
        notes.append(
            "ratios are not known, because the rollout file has no log-probabilities by the learner; "
            "they are taken as 1."
        )
    if step.num_changed:
        notes.append(
            f"{format_count(step.num_changed, 'sample')} would get another advantage or fate today, because the "
            "settings or Cohort changed since. The report shows what was stored."
        )
    # Later updates of a step see a policy that has moved, and its log-probabilities are not stored.
    updates = config.learner.epochs * config.learner.minibatches
    if updates > 1:
        notes.append(
            f"the step had {updates} updates; the report shows the first update of each sample, computed with the "
            "policy that the step began with."
        )
    signal = step.metrics.get("signal", step.effect.signal)
    if updates == 1 and not math.isclose(signal, step.effect.signal, rel_tol=1e-3, abs_tol=1e-12):
        notes.append(
            f"the learner recorded a signal of {format_number(signal)}: its update was not quite the one shown here."
        )
    if config.algo.entropy or config.algo.entropy_target:
        notes.append(
            "the entropy bonus is not shown: it moves whole distributions, not the log-probability of a token."
        )
    if config.algo.kl.weight and config.algo.kl.place == "loss":
        policy = config.algo.kl.to
        notes.append(f"the KL penalty is part of the loss: every push includes its pull towards the {policy} policy.")
    return notes + step.note_missing_tokenizer()


def explain_no_signal(groups: Sequence[Group], effect: StepEffect, fact: str = "loss is 0") -> str:
    """Returns a sentence that says why a step pushes no token: "`fact` because" and all causes with their counts."""
    pairs = [(g, s) for g in groups for s in g.samples]
    excluded = Counter(g.excluded for g in groups if g.excluded)
    causes = [f"{format_count(n, 'group')} left out ({explain_reason(reason)})" for reason, n in excluded.items()]
    inside = [(g, s) for g, s in pairs if not g.excluded]
    fates = Counter(fate for g, s in inside if (fate := describe_fate(g, s)))
    causes += [f"{format_count(n, 'sample')} {explain_reason(fate)}" for fate, n in fates.items()]
    idle = Counter(reason for g in effect.groups for e in g for reason in e.zero_reasons if reason)
    causes += [
        f"{format_count(n, 'token')} without a gradient ({explain_reason(reason)})" for reason, n in idle.items()
    ]
    return f"{fact} because {', '.join(causes) or 'there is no sample'}."
