"""One group of a step: its prompt, its baseline, and what was done to each of its samples, token by token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from cohort.algos.algorithm import Algorithm
from cohort.fates import Fate
from cohort.inspect.explain.effect import CLIPPED, SampleEffect
from cohort.inspect.explain.records import Fact, GroupLine, GroupReport, SampleReport, Token
from cohort.inspect.explain.step import Step, fate_of
from cohort.inspect.explain.words import WHY, because, mean, mean_std, number, plural, signed, std
from cohort.text import TextStream
from cohort.types import Group, Provenance, Sample

_BEFORE = 8  # tokens: what stands before a completion decides on its first token's space


@runtime_checkable
class _Shapes(Protocol):
    """An algorithm whose baseline sees something else than the reward."""

    def returned(self, sample: Sample) -> float: ...


def group_line(step: Step, index: int) -> GroupLine:
    """A group in the overview."""
    group = step.groups[index]
    rewards = [s.reward for s in group.samples if s.reward is not None and not s.failure]
    return GroupLine(
        index=index,
        prompt_id=group.prompt.id,
        rewards=mean_std(rewards),
        share=step.effect.share(step.effect.sizes[index]),
        note=", ".join(n for n in (f"left out: {group.excluded}" if group.excluded else "", _age(group)) if n),
    )


def _age(group: Group) -> str:
    return f"used again, {plural(group.reused, 'step')} old" if group.reused else ""


def group_report(step: Step, line: GroupLine) -> GroupReport:
    """The group of a line of the overview."""
    group = step.groups[line.index]
    stream = TextStream(step.tokenizer, skip_special=False) if step.tokenizer else None
    prompt = group.prompt
    texts = _texts(stream, prompt.tokens)
    effects = step.effect.groups[line.index]
    return GroupReport(
        line=line,
        facts=_baseline(step, group),
        prompt=[
            Token(text=text, id=id, provenance=p)
            for text, id, p in zip(texts, prompt.tokens, prompt.provenance, strict=True)
        ],
        samples=[_sample(step, group, i, effect) for i, effect in enumerate(effects)],
    )


def _baseline(step: Step, group: Group) -> list[Fact]:
    facts: list[Fact] = []
    if group.excluded:
        facts.append(("out of the loss", because(group.excluded)))
    if group.reused:
        facts.append(("age", _age(group)))
    returns = _returns(step.algo, group)
    facts.append(("returns", f"{_moments(returns)} of {plural(len(returns), 'scored sample')}" if returns else "none"))
    algo = step.config.algo
    if "batch" in (algo.baseline, algo.scale):
        rows = [_returns(step.algo, g) for g in step.groups if g.excluded != Fate.NOT_ACCEPTED]
        facts.append(("of the batch", _moments([value for row in rows if len(row) > 1 for value in row])))
    left = [f"{plural(n, 'sample')} failed: {f}" for f, n in Counter(s.failure for s in group.samples).items() if f]
    facts.append(("left out", "; ".join(left) or "nothing"))
    if masked := sum(bool(s.masked and not s.failure) for s in group.samples):
        facts.append(("masked", f"{plural(masked, 'sample')}: in the baseline, not in the loss"))
    facts.append(("advantages", f"{step.algo.judging}, aggregate = {algo.aggregate}"))
    return facts


def _moments(values: Sequence[float]) -> str:
    return f"mean {number(mean(values))}, std {number(std(values))}"


def _returns(algo: Algorithm, group: Group) -> list[float]:
    return [_returned(algo, s) for s in group.samples if not s.failure and s.reward is not None]


def _returned(algo: Algorithm, sample: Sample) -> float:
    """What the baseline saw of a sample: its reward after penalties, where the algorithm tells."""
    assert sample.reward is not None
    # a group that others took the place of was never annotated, so a KL in its reward is not known
    known = sample.old_logprobs is not None or "old" not in algo.needs()
    return algo.returned(sample) if isinstance(algo, _Shapes) and known else sample.reward


def _sample(step: Step, group: Group, index: int, effect: SampleEffect) -> SampleReport:
    sample = group.samples[index]
    fate = fate_of(group, sample)
    share = step.effect.share
    stream = TextStream(step.tokenizer, skip_special=False) if step.tokenizer else None
    _texts(stream, group.prompt.tokens[-_BEFORE:])
    known = sample.old_logprobs if step.effect.exact and sample.old_logprobs else sample.sampler_logprobs
    rows = zip(
        _texts(stream, sample.tokens), sample.tokens, sample.provenance, effect.gradient, effect.idle, strict=True
    )
    tokens = [
        Token(
            text=text,
            id=id,
            provenance=p,
            push=-gradient if gradient else 0.0,
            share=share(abs(gradient)),
            logprob=known[i] if p == Provenance.SAMPLED and i < len(known) else None,
            idle=idle,
        )
        for i, (text, id, p, gradient, idle) in enumerate(rows)
    ]
    return SampleReport(
        index=index,
        push=math.fsum(t.push for t in tokens),
        share=share(effect.size),
        fate=fate,
        facts=_facts(step, sample, fate, effect) + _pushes(tokens),
        tokens=tokens,
    )


def _facts(step: Step, sample: Sample, fate: str, effect: SampleEffect) -> list[Fact]:
    facts: list[Fact] = []
    if fate in WHY:
        facts.append(("out of the loss", because(fate) + (f" ({sample.failure})" if sample.failure else "")))
    facts.append(("reward", _reward(step, sample)))
    if sample.reason:
        facts.append(("reason", sample.reason))
    facts.append(("advantage", signed(sample.advantage)))
    facts.append(("finish", f"{sample.finish}, {plural(len(sample.tokens), 'token')}, {sample.num_sampled} sampled"))
    m = effect.metrics
    if effect.in_loss and step.effect.exact and "ratio/mean" in m:
        facts.append(("ratio", _ratio(m["ratio/min"], m["ratio/mean"], m["ratio/max"])))
    elif effect.in_loss:
        facts.append(("ratio", "not known, taken as 1"))
    if sample.old_logprobs and sample.num_sampled:
        pairs = zip(sample.old_logprobs, sample.sampler_logprobs, sample.provenance, strict=True)
        ratios = [math.exp(min(old - drawn, 700.0)) for old, drawn, p in pairs if p == Provenance.SAMPLED]
        facts.append(("to the sampler", _ratio(min(ratios), mean(ratios), max(ratios))))
    return facts + _held(step, sample, effect)


def _pushes(tokens: Sequence[Token]) -> list[Fact]:
    """How far tokens are pushed, for where colours are not seen."""
    pushed = sorted((t for t in tokens if t.push), key=lambda t: -abs(t.push))
    if not pushed:
        return []
    if math.isclose(pushed[0].push, pushed[-1].push, rel_tol=1e-6):
        return [("push", f"{signed(pushed[0].push)} on each of {plural(len(pushed), 'token')}")]
    strongest = ", ".join(f'"{t.text}" {signed(t.push)}' for t in pushed[:3])
    return [("push", f"on {plural(len(pushed), 'token')}, most on {strongest}")]


def _held(step: Step, sample: Sample, effect: SampleEffect) -> list[Fact]:
    """Tokens in the loss that are not pushed as their advantage would."""
    facts: list[Fact] = []
    m = effect.metrics
    for side, words in (("low", "ratio below the clip range"), ("high", "ratio above the clip range")):
        if share := m.get(f"clip/{side}", 0.0):
            sign = "negative" if sample.advantage < 0 else "positive"
            setting = f"algo.clip_{side} = {getattr(step.config.algo, f'clip_{side}')}"
            num = plural(round(share * m["tokens"]), "token")
            facts.append(("clipped", f"{num}: {words} ({setting}), with a {sign} advantage"))
    if share := m.get("importance/bounded", 0.0):
        c = step.config.algo.correction
        raw = f"importance weight {m['importance/min']:.4f} to {m['importance/max']:.4f}"
        num = plural(round(share * m["tokens"]), "token")
        facts.append(("correction", f"{num} outside {c.bounds[0]} to {c.bounds[1]}: {c.kind} ({raw})"))
    for reason, n in Counter(filter(None, effect.idle)).items():
        if reason != CLIPPED or not any(label == "clipped" for label, _ in facts):
            facts.append(("no gradient", f"{plural(n, 'token')}: {because(reason)}"))
    return facts


def _ratio(low: float, middle: float, high: float) -> str:
    return f"min {low:.4f}, mean {middle:.4f}, max {high:.4f}"


def _reward(step: Step, sample: Sample) -> str:
    if sample.reward is None:
        return "none: it could not be scored"
    weights = step.config.reward
    parts = []
    for name, value in sample.parts.items():
        weight = weights.get(name, 1.0)
        parts.append(
            f"{name} {number(value)}" + ("" if weight == 1 else f" x {number(weight)}" if weight else " (only logged)")
        )
    again = sample.num_turns - 1
    if again > 0:
        cost = again * getattr(step.config.turns, "cost", 0.0)
        parts.append(f"{plural(again, 'further attempt')}" + (f" at {number(-cost)}" if cost else ""))
    text = f"{number(sample.reward)} from {', '.join(parts)}" if parts else number(sample.reward)
    returned = _returned(step.algo, sample)
    return text if returned == sample.reward else f"{text}; the baseline sees {number(returned)}"


def _texts(stream: TextStream | None, tokens: list[int]) -> list[str]:
    """Each token's text. A token that completes no character, or has no known text, is its id."""
    return [(stream.push([id]) if stream else "") or f"⟨{id}⟩" for id in tokens]
