"""Checks of a reward without an accuracy: no answer is right or wrong, so only rewards are compared with each other.

A reward may be above 0 for an empty answer, below 0 for a good one, and have any scale. So what fails elsewhere is a
warning here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from cohort.inspect.check.findings import Finding, ok, quote, warn
from cohort.types import Answer


class ScoredCase(Protocol):
    """What these checks read of an answer that was scored."""

    @property
    def answer(self) -> Answer:
        """The answer."""

    @property
    def reward(self) -> float:
        """Its reward, with coefficients."""


Kinds = Mapping[str, Sequence[ScoredCase]]
"""Scored answers by the way in which they were made: empty, echo, gold and so on."""

_WORTHLESS = ("empty", "whitespace", "skeleton")


def check_continuous(kinds: Kinds) -> Iterator[Finding]:
    """Runs the checks of a reward without an accuracy, and yields their findings. `kinds` has only scored answers."""
    yield check_range(kinds)
    yield check_gold_reward(kinds)
    yield check_empty_reward(kinds)
    best = max((case.reward for case in kinds.get("gold", ())), default=None)
    if best is None:
        return
    yield check_worthless("reward/cheapest", "without content", [c for k in _WORTHLESS for c in kinds.get(k, ())], best)
    yield check_worthless("reward/echo", "that repeats the prompt", kinds.get("echo", ()), best)


def check_range(kinds: Kinds) -> Finding:
    """Returns warn if all answers got the same reward, else ok with the range."""
    rewards = {case.reward for cases in kinds.values() for case in cases}
    if len(rewards) > 1:
        return ok("reward/varies", f"{len(rewards)} different rewards, {min(rewards):g} to {max(rewards):g}")
    text = f"all answers that were tried got the reward {next(iter(rewards), 0.0):g}"
    return warn("reward/varies", f"{text}: a constant reward teaches nothing. Does score read the right field?")


def check_gold_reward(kinds: Kinds) -> Finding:
    """Returns warn if the task's own answers earn no more on average than empty ones, or there are none; else ok."""
    name = "reward/gold"
    gold, empty = kinds.get("gold", ()), kinds.get("empty", ())
    if not gold:
        return warn(name, "not checked: the task gives no good answers. Add gold(row) -> str to the task.")
    mean, base = _mean(gold), _mean(empty) if empty else None
    text = f"the task's own answers earn {mean:g} on average in {len(gold)} rows"
    if base is not None and mean <= base:
        return warn(name, f"{text}, and empty answers {base:g}. Correct score or gold of the task.", reward=mean)
    return ok(name, text, reward=mean)


def check_empty_reward(kinds: Kinds) -> Finding:
    """Returns warn if an empty answer earns the most of all answers that were tried, else ok with what it earns."""
    name = "reward/empty"
    empty = kinds.get("empty", ())
    others = [case.reward for kind, cases in kinds.items() if kind not in _WORTHLESS for case in cases]
    if not empty:
        return warn(name, "not checked: no empty answer got a score.")
    most = max(case.reward for case in empty)
    if others and most >= max(others):
        text = f"an empty answer earns {most:g}, as much as any answer that was tried"
        return warn(name, f"{text}: the policy may learn to say nothing. Score an empty answer lower.", reward=most)
    return ok(name, f"an empty answer earns at most {most:g}", reward=most)


def check_worthless(name: str, words: str, cases: Sequence[ScoredCase], best: float) -> Finding:
    """Returns warn if an answer of a worthless kind, which `words` describe, earns as much as the task's best one."""
    if not cases:
        return warn(name, f"not checked: no answer {words} got a score.")
    most = max(cases, key=lambda case: case.reward)
    text = f"an answer {words} earns at most {most.reward:g}, the task's own answers up to {best:g}"
    if most.reward >= best:
        return warn(name, f"{text}: {quote(most.answer.text)}. The policy may find this.", reward=most.reward)
    return ok(name, text, reward=most.reward)


def _mean(cases: Sequence[ScoredCase]) -> float:
    """Returns the mean reward of answers, of which there is at least one."""
    return sum(case.reward for case in cases) / len(cases)
