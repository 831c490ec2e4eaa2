"""Evaluation: sample the held-out problems, grade them, and say how sure the number is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from cohort.clock import stage
from cohort.engines.base import Engine
from cohort.engines.rollout import Tasks, roll, stop_if_scoring_is_broken
from cohort.store.records import EvalItem, Evaluation
from cohort.types import Group, Prompt

Z = 1.959963984540054  # 97.5% quantile of the normal distribution


@stage("evaluate")
def evaluate(
    engine: Engine, tasks: Tasks, prompts: Sequence[Prompt], num_samples: int, step: int, split: str
) -> Evaluation:
    """`num_samples` answers to each prompt. A sample that could not be scored is left out, not counted as wrong."""
    groups = roll(engine, tasks, prompts, num_samples)
    stop_if_scoring_is_broken(groups)
    part = tasks.stream.task.accuracy
    scores = [[s.parts[part] for s in g.samples if not s.failure] for g in groups]
    low, high = interval([row for row in scores if row])
    samples = [s for g in groups for s in g.samples]
    return Evaluation(
        task=tasks.stream.task.name,
        split=split,
        step=step,
        accuracy=_mean([_mean(row) for row in scores if row]),
        low=low,
        high=high,
        num_problems=len(groups),
        num_samples=num_samples,
        mean_tokens=_mean([len(s.tokens) for s in samples]),
        finishes=dict(Counter(str(s.finish) for s in samples)),
        num_failed=sum(bool(s.failure) for s in samples),
        items=[_item(g, part) for g in groups],
    )


def interval(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95% interval of the mean over problems of the mean over their samples.

    One 0/1 score a problem: Wilson's interval. Otherwise the normal one over the problems' means, because samples of
    one problem are not independent.

    >>> [round(x, 3) for x in interval([[1.0]] * 8 + [[0.0]] * 2)]
    [0.49, 0.943]
    """
    n = len(scores)
    if not n:
        return 0.0, 1.0
    means = [_mean(row) for row in scores]
    p = _mean(means)
    if all(len(row) == 1 for row in scores) or min(means) == max(means):  # no spread says little about few problems
        centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    else:
        variance = math.fsum((m - p) ** 2 for m in means) / max(1, n - 1)
        centre, half = p, Z * math.sqrt(variance / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(scores: Sequence[Sequence[float]], k: int) -> float:
    """Unbiased probability that one of k samples is right (Chen et al. 2021), mean over problems.

    >>> pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], 2)
    0.25
    """
    rows = [row for row in scores if len(row) >= k]

    def missed(row: Sequence[float]) -> float:
        wrong = sum(score == 0.0 for score in row)
        return math.comb(wrong, k) / math.comb(len(row), k)

    return _mean([1.0 - missed(row) for row in rows])


def _item(group: Group, part: str) -> EvalItem:
    scored = [s for s in group.samples if not s.failure]
    return EvalItem(
        id=group.prompt.id,
        prompt="\n".join(str(m.get("content", "")) for m in group.prompt.messages),
        completions=[s.text for s in scored],
        correct=[s.parts[part] for s in scored],
        reason=[s.reason for s in scored],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
