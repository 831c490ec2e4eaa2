"""Report of one group of a step: its prompt, its baseline, and what the update did to each sample, token by token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from cohort.algos.algorithm import Algorithm
from cohort.algos.credit import collect_by_turn, find_turns
from cohort.config.algos import PairPolicy
from cohort.config.schema import ThinkAgain
from cohort.fates import Fate
from cohort.inspect.explain.decode import decode_sample, show_prompt
from cohort.inspect.explain.effect import CLIPPED, SampleEffect
from cohort.inspect.explain.records import Fact, GroupLine, GroupReport, SampleReport, ShownToken
from cohort.inspect.explain.step import RecordedStep, describe_fate
from cohort.inspect.explain.words import (
    REASONS,
    explain_reason,
    format_count,
    format_mean_std,
    format_number,
    format_signed,
    mean,
    std,
)
from cohort.types import Group, Provenance, Sample


@runtime_checkable
class _HasReturns(Protocol):
    """An algorithm whose baseline uses returns: rewards after penalties."""

    def compute_returns(self, sample: Sample) -> list[float]:
        """Returns the rewards of a scored sample after the algorithm's penalties: one per turn, or one."""


def make_group_line(step: RecordedStep, index: int) -> GroupLine:
    """Returns the group's line in the overview: index, prompt id, rewards, share of the signal, note.

    The rewards are a text with mean and standard deviation over the scored samples. The note says why the group is left
    out and how old it is. `index` is that of the group in the step. The signal is the sum of |dL/dlogprob| over the
    step.
    """
    group = step.groups[index]
    rewards = [s.reward for s in group.samples if s.reward is not None and not s.failure]
    excluded = f"left out: {group.excluded}" if group.excluded else ""
    return GroupLine(
        index=index,
        prompt_id=group.prompt.id,
        value=format_mean_std(rewards),
        share=step.effect.compute_share(step.effect.group_signals[index]),
        note=", ".join(note for note in (excluded, _describe_age(group)) if note),
    )


def _describe_age(group: Group) -> str:
    """Returns a text like "used again, 2 steps old" for a group of an earlier step; "" for a group of this step."""
    return f"used again, {format_count(group.reused, 'step')} old" if group.reused else ""


def make_group_report(step: RecordedStep, line: GroupLine) -> GroupReport:
    """Returns everything said about the group that `line` is about: facts, prompt, and all samples token by token."""
    group = step.groups[line.index]
    effects = step.effect.groups[line.index]
    return GroupReport(
        line=line,
        facts=_describe_baseline(step, group),
        prompt=show_prompt(step.tokenizer, group),
        samples=[_make_sample_report(step, group, i, effect) for i, effect in enumerate(effects)],
    )


def _describe_baseline(step: RecordedStep, group: Group) -> list[Fact]:
    """Returns the facts about a group as a whole, as (label, text) pairs.

    They say why it is out of the loss, how old it is, its returns (rewards after penalties; one fact per turn if turns
    have their own), those of the batch if baseline or scale use them, failed and masked samples, and how its advantages
    are computed.
    """
    facts: list[Fact] = []
    if group.excluded:
        facts.append(("out of the loss", explain_reason(group.excluded)))
    if group.reused:
        facts.append(("age", _describe_age(group)))
    algo = step.config.algo
    least = 2 if algo.needs_siblings else 1
    facts += _describe_returns("returns", collect_by_turn(_collect_returns(step.algo, group)), least, "scored sample")
    # A baseline or scale over the batch uses the accepted groups that have enough scored samples.
    if "batch" in (algo.baseline, algo.scale):
        accepted = [g for g in step.groups if g.excluded != Fate.NOT_ACCEPTED]
        by_group = [collect_by_turn(_collect_returns(step.algo, g)) for g in accepted]
        rows = [[value for row in turn if len(row) >= least for value in row] for turn in _transpose(by_group)]
        facts += _describe_returns("of the batch", rows, 1)
    failures = Counter(s.failure for s in group.samples if s.failure)
    failed = [f"{format_count(n, 'sample')} failed: {failure}" for failure, n in failures.items()]
    facts.append(("left out", "; ".join(failed) or "no sample"))
    has_pairs = isinstance(algo, PairPolicy)
    if masked := sum(bool(s.masked and not s.failure) for s in group.samples):
        where = "in no pair" if has_pairs else "in the baseline, not in the loss"
        facts.append(("masked", f"{format_count(masked, 'sample')}: {where}"))
    how = step.algo.advantage_description if step.algo else "as recorded, by the code of the algorithm"
    facts.append(("advantages", how if has_pairs else f"{how}, aggregate = {algo.aggregate}"))
    return facts


def _transpose(by_group: Sequence[Sequence[list[float]]]) -> list[list[list[float]]]:
    """Returns, for each turn, the lists of the groups that reached it. `by_group` has one list per turn and group."""
    num_turns = max(map(len, by_group), default=0)
    return [[turns[turn] for turns in by_group if turn < len(turns)] for turn in range(num_turns)]


def _describe_returns(label: str, turns: Sequence[Sequence[float]], least: int, noun: str = "") -> list[Fact]:
    """Returns facts called `label` with mean and standard deviation of the returns, one fact per turn.

    `turns` has the returns of each turn. With fewer than `least` of them a turn has no baseline. If `noun` is given,
    the number of returns is added.
    """
    facts: list[Fact] = []
    for turn, values in enumerate(turns, start=1):
        text = f"{_describe_moments(values)}" if values else "none"
        if values and noun:
            text += f" of {format_count(len(values), noun)}"
        if turn > 1 and len(values) < least:
            text += ": too few for a baseline, so no advantage"
        facts.append((label, f"turn {turn}: {text}" if len(turns) > 1 else text))
    return facts or [(label, "none")]


def _describe_moments(values: Sequence[float]) -> str:
    """Returns mean and standard deviation as text, such as "mean 0.500, std 0.707". Needs at least one value."""
    return f"mean {format_number(mean(values))}, std {format_number(std(values))}"


def _collect_returns(algo: Algorithm | None, group: Group) -> list[list[float]]:
    """Returns the returns (rewards after penalties) of each sample of a group that could be scored."""
    return [_get_returns(algo, s) for s in group.samples if not s.failure and s.reward is not None]


def _get_returns(algo: Algorithm | None, sample: Sample) -> list[float]:
    """Returns what baselines use for a scored sample: its reward after the algorithm's penalties, or one per turn.

    Penalties are left out if the algorithm has no penalties or is not known (None), or if it needs old
    log-probabilities that the sample lacks. The sample must have a reward.
    """
    assert sample.reward is not None
    if algo is None:
        return [sample.reward]
    # A group that was not accepted and was replaced has no log-probabilities, so a KL in its reward is not known.
    is_known = sample.old_logprobs is not None or "old" not in algo.needs()
    if isinstance(algo, _HasReturns) and is_known:
        return algo.compute_returns(sample)
    return algo.credit.compute_returns(sample)


def _make_sample_report(step: RecordedStep, group: Group, index: int, effect: SampleEffect) -> SampleReport:
    """Returns everything said about the sample at `index` of its group. `effect` is what the update did to it."""
    sample = group.samples[index]
    fate = describe_fate(group, sample)
    share = step.effect.compute_share
    known = sample.old_logprobs if step.effect.has_exact_ratios and sample.old_logprobs else sample.sampler_logprobs
    texts = decode_sample(step.tokenizer, group, sample)
    rows = zip(texts, sample.tokens, sample.provenance, effect.gradient, effect.zero_reasons, strict=True)
    tokens = [
        ShownToken(
            text=text,
            id=id,
            provenance=p,
            push=-gradient if gradient else 0.0,
            share=share(abs(gradient)),
            logprob=known[i] if p == Provenance.SAMPLED and i < len(known) else None,
            zero_reason=reason,
        )
        for i, (text, id, p, gradient, reason) in enumerate(rows)
    ]
    return SampleReport(
        title=f"sample {index}",
        push=math.fsum(t.push for t in tokens),
        share=share(effect.signal),
        fate=fate,
        facts=_describe_sample(step, sample, fate, effect) + describe_pushes(tokens),
        tokens=tokens,
    )


def _describe_sample(step: RecordedStep, sample: Sample, fate: str, effect: SampleEffect) -> list[Fact]:
    """Returns the facts about a sample as (label, text) pairs, each where it applies.

    They are: why it is out of the loss, reward, the grader's reason, advantage (of each turn, if turns have their own),
    finish, ratios, ratios to the sampler, limited tokens. `fate` says why the sample is out of the loss; "" = it is in.
    """
    facts: list[Fact] = []
    if fate in REASONS:
        facts.append(("out of the loss", explain_reason(fate) + (f" ({sample.failure})" if sample.failure else "")))
    facts.append(("reward", _describe_reward(step, sample)))
    if sample.reason:
        facts.append(("reason", sample.reason))
    facts += _describe_turns(step, sample) or [("advantage", format_signed(sample.advantage))]
    length = format_count(len(sample.tokens), "token")
    turns = f", {format_count(sample.num_turns, 'turn')}" if sample.num_turns > 1 else ""
    facts.append(("finish", f"{sample.finish}, {length}, {sample.num_sampled} sampled{turns}"))
    if sample.calls:
        facts.append(("calls", ", ".join(f"{outcome} {num}" for outcome, num in sample.calls.items())))
    m = effect.metrics
    if effect.is_in_loss and step.effect.has_exact_ratios and "ratio/mean" in m:
        facts.append(("ratio", _format_ratios(m["ratio/min"], m["ratio/mean"], m["ratio/max"])))
    elif effect.is_in_loss and step.effect.is_known and not isinstance(step.config.algo, PairPolicy):
        facts.append(("ratio", "not known, taken as 1"))
    # The ratio of the learner's probability to the sampler's. The bound keeps exp from an overflow.
    if sample.old_logprobs and sample.num_sampled:
        pairs = zip(sample.old_logprobs, sample.sampler_logprobs, sample.provenance, strict=True)
        ratios = [math.exp(min(old - drawn, 700.0)) for old, drawn, p in pairs if p == Provenance.SAMPLED]
        facts.append(("sampler ratio", _format_ratios(min(ratios), mean(ratios), max(ratios))))
    return facts + _describe_limited_tokens(step, sample, effect)


def _describe_turns(step: RecordedStep, sample: Sample) -> list[Fact]:
    """Returns one fact (label, text) per turn of a sample: its reward, return and advantage, as far as they are known.

    Empty if the sample has only one advantage because credit is per episode or because it has only one turn.
    """
    turns, algo = find_turns(sample.provenance), step.algo
    by_turn = algo.credit.by_turn if algo else sample.token_advantages is not None
    if len(turns) < 2 or not by_turn or sample.reward is None:
        return []
    texts = ["" for _ in turns]
    if algo:
        pairs = zip(algo.credit.split_reward(sample), _get_returns(algo, sample), strict=True)
        texts = [f"reward {format_number(r)}, return {format_number(value)}, " for r, value in pairs]
    by_token = sample.token_advantages or [sample.advantage] * len(sample.tokens)
    return [
        (f"turn {number}", f"{text}advantage {format_signed(by_token[turn[0]])}")
        for number, (text, turn) in enumerate(zip(texts, turns, strict=True), start=1)
    ]


def describe_pushes(tokens: Sequence[ShownToken]) -> list[Fact]:
    """Returns one fact (label, text): how many tokens the update pushes up or down; empty if it pushes none.

    It has the push on each token if the pushes are equal, else the three strongest. It is for readers who see no
    colours.
    """
    pushed = sorted((t for t in tokens if t.push), key=lambda t: -abs(t.push))
    if not pushed:
        return []
    # All are compared: the strongest and the weakest can be equal while one between them has the other sign.
    if all(math.isclose(t.push, pushed[0].push, rel_tol=1e-6) for t in pushed):
        return [("push", f"{format_signed(pushed[0].push)} on each of {format_count(len(pushed), 'token')}")]
    strongest = ", ".join(f'"{t.text}" {format_signed(t.push)}' for t in pushed[:3])
    return [("push", f"on {format_count(len(pushed), 'token')}, most on {strongest}")]


def _describe_limited_tokens(step: RecordedStep, sample: Sample, effect: SampleEffect) -> list[Fact]:
    """Returns facts about tokens in the loss with a limited push: clipped, corrected, or without a gradient.

    Each fact is a pair (label, text) with the number of tokens and the reason. Empty if there are no such tokens.
    """
    facts: list[Fact] = []
    m = effect.metrics
    for side, words in (("low", "ratio below the clip range"), ("high", "ratio above the clip range")):
        if share := m.get(f"clip/{side}", 0.0):
            sign = "negative" if sample.advantage < 0 else "positive"
            # Turns of a sample may have advantages of different signs.
            where = f", with a {sign} advantage" if sample.token_advantages is None else ""
            setting = f"algo.clip_{side} = {getattr(step.config.algo, f'clip_{side}')}"
            num = format_count(round(share * m["tokens"]), "token")
            facts.append(("clipped", f"{num}: {words} ({setting}){where}"))
    if share := m.get("importance/bounded", 0.0):
        c = step.config.algo.correction
        raw = f"importance weight {m['importance/min']:.4f} to {m['importance/max']:.4f}"
        num = format_count(round(share * m["tokens"]), "token")
        facts.append(("correction", f"{num} outside {c.bounds[0]} to {c.bounds[1]}: {c.kind} ({raw})"))
    # Clipped tokens were listed above already, if the loss reports how many it clipped.
    for reason, n in Counter(filter(None, effect.zero_reasons)).items():
        if reason != CLIPPED or not any(label == "clipped" for label, _ in facts):
            facts.append(("no gradient", f"{format_count(n, 'token')}: {explain_reason(reason)}"))
    return facts


def _format_ratios(low: float, middle: float, high: float) -> str:
    """Returns the smallest, the mean and the largest ratio as text, such as "min 0.9000, mean 1.0000, max 1.1000"."""
    return f"min {low:.4f}, mean {middle:.4f}, max {high:.4f}"


def _describe_reward(step: RecordedStep, sample: Sample) -> str:
    """Returns a text with the reward of a sample and how it is composed: parts, coefficients, cost of further turns.

    Says so if the sample has no reward, and which value the baseline uses if that is another one.
    """
    if sample.reward is None:
        return "none: it could not be scored"
    coefficients = step.config.reward
    parts = []
    for name, value in sample.parts.items():
        coefficient = coefficients.get(name, 1.0)
        # A part with the coefficient 0 is recorded but not rewarded.
        factor = f" x {format_number(coefficient)}" if coefficient else " (only logged)"
        parts.append(f"{name} {format_number(value)}" + ("" if coefficient == 1 else factor))
    num_attempts = sample.num_turns - 1
    if isinstance(step.config.turns, ThinkAgain) and num_attempts > 0:
        cost = num_attempts * step.config.turns.cost
        attempts = format_count(num_attempts, "further attempt")
        parts.append(attempts + (f" at {format_number(-cost)}" if cost else ""))
    if sample.turn_rewards:
        parts.append(f"per turn {', '.join(map(format_number, sample.turn_rewards))}")
    text = f"{format_number(sample.reward)} from {', '.join(parts)}" if parts else format_number(sample.reward)
    returns = _get_returns(step.algo, sample)
    # With several returns, there is a fact for each turn.
    is_plain = len(returns) > 1 or returns == [sample.reward]
    return text if is_plain else f"{text}; the baseline uses {format_number(returns[0])}"
