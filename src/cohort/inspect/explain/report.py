"""The report of a step: what it was made of, where its signal came from, and what a reader must know besides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cohort.config.document import variant_name
from cohort.errors import RunError, nearest
from cohort.inspect.explain.effect import NOT_FINITE, StepEffect
from cohort.inspect.explain.group import group_line, group_report
from cohort.inspect.explain.records import Fact, Report
from cohort.inspect.explain.step import Step, fate_of, load
from cohort.inspect.explain.words import because, counted, mean, number, plural, signed, spread
from cohort.logs.escape import one_line
from cohort.types import Group

_RECORDED = (
    *("loss", "grad_norm", "lr", "updates/done", "updates/no_signal", "updates/bad", "updates/clipped"),
    *("ratio/min", "ratio/max", "clip/low", "clip/high", "kl/ref", "entropy", "sampler_gap/max"),
)


def explain(path: Path, number: int | None, group: str = "") -> Report:
    """The report of a step (None = the newest that is kept) and of one of its groups: an index, a prompt id, or
    "" for the one with the largest share of the signal."""
    return report(load(path, number), group)


def report(step: Step, group: str = "") -> Report:
    """The same of a step that is loaded already."""
    lines = [group_line(step, i) for i in range(len(step.groups))]
    config = step.config
    variants = [variant_name("task", config.task), variant_name("algo", config.algo)]
    named = [f"step {step.number} of {config.steps}", config.recipe, config.model, *variants]
    return Report(
        title=" · ".join(n for n in named if n),
        facts=_overview(step),
        notes=_notes(step),
        groups=lines,
        group=group_report(step, lines[find_group(step.groups, group, step.effect)]),
    )


def find_group(groups: Sequence[Group], wanted: str, effect: StepEffect) -> int:
    """The index of a group by its index or, where that is none, by its prompt's id."""
    if not wanted:
        return max(range(len(groups)), key=lambda i: effect.sizes[i])
    if wanted.isdecimal() and int(wanted) < len(groups):
        return int(wanted)
    for i, group in enumerate(groups):
        if group.prompt.id == wanted:
            return i
    ids = one_line(nearest(wanted, [g.prompt.id for g in groups]))
    raise RunError(f'there is no group "{wanted}"; give an index from 0 to {len(groups) - 1} or a prompt id.{ids}')


def _overview(step: Step) -> list[Fact]:
    groups, effect = step.groups, step.effect
    samples = [s for g in groups for s in g.samples]
    sampled = [e for g in effect.groups for e in g]
    out = Counter(f"left out: {g.excluded}" for g in groups if g.excluded)
    fates = Counter(fate for g in groups for s in g.samples if (fate := fate_of(g, s)))
    facts = [
        ("groups", counted(len(groups), Counter({"in the loss": sum(not g.excluded for g in groups)}) + out)),
        ("samples", counted(len(samples), Counter({"in the loss": sum(e.in_loss for e in sampled)}) + fates)),
    ]
    samples = [s for g in groups if not g.reused for s in g.samples]  # rewards of today's policy
    rewards = [s.reward for s in samples if s.reward is not None and not s.failure]
    if rewards:
        parts = sorted({name for s in samples for name in s.parts})
        means = [f"{name} {number(mean([s.parts[name] for s in samples if name in s.parts]))}" for name in parts]
        facts.append(("reward", f"{spread(rewards)}; parts on average: {', '.join(means) or 'none'}"))
    pushes = [-g for e in sampled for g in e.gradient]
    up, down = (math.fsum(p for p in pushes if p * sign > 0) for sign in (1, -1))
    facts.append(("signal", f"{number(effect.total)} = sum of |dL/dlogprob|: {signed(up)} up, {signed(down)} down"))
    metrics = {name: step.metrics[name] for name in _RECORDED if name in step.metrics}
    counts = ("updates/", "clip/")  # of which there is nothing to say while they are 0
    recorded = [f"{name} {number(value)}" for name, value in metrics.items() if value or not name.startswith(counts)]
    if recorded:
        facts.append(("recorded", ", ".join(recorded)))
    return facts


def _notes(step: Step) -> list[str]:
    config, notes = step.config, []
    if not step.effect.total:
        bonus = bool(config.algo.entropy or config.algo.entropy_target)
        notes.append(no_signal(step.groups, step.effect, "no log-probability is pushed" if bonus else "loss is 0"))
    elif abs(step.metrics.get("loss", math.inf)) < 1e-3 * step.effect.total:
        notes.append("the loss is near 0 because ratios are 1 and advantages cancel out; its gradient is what teaches.")
    if broken := sum(e.idle.count(NOT_FINITE) for g in step.effect.groups for e in g):
        notes.append(f"{plural(broken, 'token')} without a finite gradient: an update with these is skipped.")
    if not step.effect.exact:
        notes.append("ratios are not known: this file has no log-probabilities by the learner; taken as exactly 1.")
    if step.num_changed:
        notes.append(
            f"{plural(step.num_changed, 'sample')} would get another advantage or fate today: the settings or Cohort "
            "changed since. Shown is what was stored."
        )
    updates = config.learner.epochs * config.learner.minibatches
    if updates > 1:
        notes.append(
            f"the step had {updates} updates; shown is each sample's first, by the policy the step began with."
        )
    signal = step.metrics.get("signal", step.effect.total)
    if updates == 1 and not math.isclose(signal, step.effect.total, rel_tol=1e-3, abs_tol=1e-12):
        notes.append(
            f"the learner itself recorded a signal of {number(signal)}: what is shown is not quite what it did."
        )
    if config.algo.entropy or config.algo.entropy_target:
        notes.append(
            "the entropy bonus acts besides: it moves whole distributions, not the log-probability of a token."
        )
    if config.algo.kl.weight and config.algo.kl.place == "loss":
        notes.append("the KL penalty is part of the loss: every push contains its pull to the other policy.")
    if step.tokenizer is None:
        notes.append("the run's tokenizer was not found: tokens are shown as ids.")
    return notes


def no_signal(groups: Sequence[Group], effect: StepEffect, fact: str = "loss is 0") -> str:
    """Why a step that pushes no token does not."""
    pairs = [(g, s) for g in groups for s in g.samples]
    causes = [
        f"{plural(n, 'group')} left out ({because(r)})" for r, n in Counter(g.excluded for g in groups).items() if r
    ]
    inside = [(g, s) for g, s in pairs if not g.excluded]
    fates = Counter(fate for g, s in inside if (fate := fate_of(g, s)))
    causes += [f"{plural(n, 'sample')} {because(fate)}" for fate, n in fates.items()]
    idle = Counter(reason for g in effect.groups for e in g for reason in e.idle if reason)
    causes += [f"{plural(n, 'token')} without a gradient ({because(reason)})" for reason, n in idle.items()]
    return f"{fact} because {', '.join(causes) or 'there is no sample'}."
