"""Run directories with metrics of a test's choice, made without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cohort.run.directory import RunDirectory
from cohort.run.store.db import Store
from tests.helpers.pretend_run import small_run


def recorded_run(
    path: Path,
    steps: Mapping[int, Mapping[str, float]],
    evaluations: Mapping[int, tuple[float, float, float]] | None = None,
    **settings: Any,
) -> Path:
    """Makes the run `path` with the metrics of `steps` and evaluations as (accuracy, low, high), and returns it.

    `settings` are changes of the config of a small run.
    """
    directory = RunDirectory.create(path.parent, small_run(**settings), path.name)
    store = Store(directory.database)
    for step, metrics in steps.items():
        store.write_step(step, metrics)
    for step, (accuracy, low, high) in (evaluations or {}).items():
        numbers = {"eval/accuracy": accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high}
        store.write_evaluation(step, numbers)
    store.close()
    directory.unlock()
    return path
