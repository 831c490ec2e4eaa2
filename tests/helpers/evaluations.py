"""Evaluations made by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cohort.evaluation.records import EvalAnswer, EvalItem, EvalSetting, Evaluation
from cohort.evaluation.statistics import accuracy_interval, compute_accuracy, compute_all_pass_at_k


def eval_setting(**changes: Any) -> EvalSetting:
    """Returns a setting with arbitrary values, except those given."""
    values = {"task": "arithmetic", "split": "test", "num_problems": 2, "num_samples": 1, "model": "m", "knobs": {}}
    sampling = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": []}
    rest = {"grader": "g-1", "template": "chat", "engine": "native", "sampling": sampling, "seed": 0}
    rest |= {"weights": "w", "rows": "r", "place": "cpu float32"}
    return EvalSetting(**{**values, **rest, **changes})


def eval_item(id: str, scores: Sequence[float | None]) -> EvalItem:
    """Returns an item with one answer per score; None = it could not be scored."""
    messages = [{"role": "user", "content": f"question {id}"}]
    answers = [
        EvalAnswer(
            text=f"answer {i}",
            finish="stop",
            num_tokens=5,
            correct=score,
            parts={} if score is None else {"correct": score},
            failure="died" if score is None else "",
        )
        for i, score in enumerate(scores)
    ]
    return EvalItem(id=id, messages=messages, prompt=f"<user>question {id}", answers=answers)


def evaluation(scores: dict[str, Sequence[float | None]], **changes: Any) -> Evaluation:
    """Returns an evaluation with one item per problem. `scores` has the score of each sample by problem id."""
    items = [eval_item(id, row) for id, row in scores.items()]
    rows = [item.scores for item in items]
    most = max(len(row) for row in scores.values())
    low, high = accuracy_interval(rows)
    return Evaluation(
        setting=eval_setting(**{"num_problems": len(items), "num_samples": most, **changes}),
        accuracy=compute_accuracy(rows),
        low=low,
        high=high,
        passes=compute_all_pass_at_k(rows),
        mean_tokens=5.0,
        finishes={"stop": sum(map(len, scores.values()))},
        num_failed=sum(s is None for row in scores.values() for s in row),
        items=items,
    )
