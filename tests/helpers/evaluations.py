"""Evaluations made by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cohort.evaluation.records import EvalAnswer, EvalItem, EvalSetting, Evaluation
from cohort.evaluation.statistics import accuracy, all_passes, interval


def eval_setting(**changes: Any) -> EvalSetting:
    values = {"task": "arithmetic", "split": "test", "num_problems": 2, "num_samples": 1, "model": "m", "knobs": {}}
    sampling = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": []}
    rest = {"grader": "g-1", "template": "chat", "engine": "native", "sampling": sampling, "seed": 0}
    rest |= {"weights": "w", "rows": "r", "place": "cpu float32"}
    return EvalSetting(**{**values, **rest, **changes})


def eval_item(id: str, scores: Sequence[float | None]) -> EvalItem:
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
    """One item a problem, with the numbers they give."""
    items = [eval_item(id, row) for id, row in scores.items()]
    rows = [item.correct for item in items]
    most = max(len(row) for row in scores.values())
    low, high = interval(rows)
    return Evaluation(
        setting=eval_setting(**{"num_problems": len(items), "num_samples": most, **changes}),
        accuracy=accuracy(rows),
        low=low,
        high=high,
        passes=all_passes(rows),
        mean_tokens=5.0,
        finishes={"stop": sum(map(len, scores.values()))},
        num_failed=sum(s is None for row in scores.values() for s in row),
        items=items,
    )
