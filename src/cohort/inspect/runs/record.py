"""A run as JSON."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from cohort.inspect.runs.query import format_plain
from cohort.run.summary import RunSummary


def make_record(run: RunSummary) -> dict[str, Any]:
    """Returns everything that is known of a run, for JSON. What is not a finite number is None."""
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "note": run.note,
        "kind": run.kind,
        "recipe": run.recipe,
        "model": run.model,
        "step": run.step,
        "steps": run.num_steps,
        "started": _format_time(run.started),
        "updated": _format_time(run.updated),
        "eta_seconds": _make_finite(run.eta),
        "accuracy": _make_finite(run.accuracy),
        "accuracy_step": None if math.isnan(run.accuracy) else run.accuracy_step,
        "accuracy_split": None if math.isnan(run.accuracy) else run.split or None,
        "best_accuracy": _make_finite(run.best_accuracy),
        "best_step": None if math.isnan(run.best_accuracy) and math.isnan(run.best_eval_reward) else run.best_step,
        **_describe_eval_reward(run),
        "curve": {
            "metric": run.curve.metric,
            "steps": list(run.values),
            "values": [_make_finite(value) for value in run.values.values()],
        },
        "metrics": {name: _make_finite(value) for name, value in run.metrics.items()},
        "differences": _make_finite(dict(run.differences.values)),
        "differences_from": run.differences.source,
        "settings": _make_finite(dict(run.settings)),
        "command": run.command,
    }


def _describe_eval_reward(run: RunSummary) -> dict[str, Any]:
    """Returns the held-out mean reward with its step and split, of a run whose task has no accuracy; else {}."""
    if math.isnan(run.eval_reward):
        return {}
    return {
        "eval_reward": _make_finite(run.eval_reward),
        "eval_reward_step": run.accuracy_step,
        "eval_reward_split": run.split or None,
        "best_eval_reward": _make_finite(run.best_eval_reward),
    }


def _format_time(seconds: float) -> str | None:
    """Returns a moment in seconds since 1970 as text, as in "2026-01-31T18:00:00+00:00"; None if it is not known."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def _make_finite(value: Any) -> Any:
    """Returns a value as JSON can hold it: None for what is not finite, and texts for what it does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _make_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_finite(item) for item in value]
    is_plain = value is None or isinstance(value, str | bool) or (type(value) is int and value.bit_length() <= 1000)
    return value if is_plain else format_plain(value)
