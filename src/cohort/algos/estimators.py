"""Advantage estimators: how the returns of a step's groups become advantages. One registered record per method.

Most algorithms compare a sample with a baseline, as their settings say. An algorithm that does otherwise registers its
own estimator under its name, as `pass_at_k` does. No other code has to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.algos.advantages import compute_advantages, is_constant
from cohort.config.algos import ALGOS, Policy

Returns = Sequence[Sequence[float]]
"""One list per group, with the return of each of its scored samples (the reward after shaping). With credit per turn
they are those of one turn, of the samples that reached it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """Functions of one method to compute advantages. Each takes the algorithm's config as its last argument."""

    # Takes the returns of the groups of all ranks. Returns the advantages in the same shape.
    advantages: Callable[[Returns, Any], list[list[float]]]
    # Takes the returns of one group. Returns whether its advantages give it no gradient.
    is_dead: Callable[[Sequence[float], Any], bool]
    # Returns a description of the method for reports.
    describe: Callable[[Any], str]


def _baseline_advantages(returns: Returns, c: Policy) -> list[list[float]]:
    """Returns the advantages (return - baseline) / scale, in the shape of `returns`, as the config says."""
    return compute_advantages(returns, c.scale, c.baseline)


BASELINE_ESTIMATOR = Estimator(
    advantages=_baseline_advantages,
    is_dead=lambda returns, c: is_constant(returns),
    describe=lambda c: f"baseline = {c.baseline}, scale = {c.scale}",
)
_estimators: dict[str, Estimator] = {}


def register_estimator(name: str, estimator: Estimator) -> None:
    """Makes `estimator` (a way to compute advantages) that of the algorithm `name`, a key of `config.algos.ALGOS`.

    An earlier one of that name is replaced.
    """
    _estimators[name] = estimator


def find_estimator(config: Policy) -> Estimator:
    """Returns how the algorithm that `config` belongs to computes advantages.

    It is the estimator registered under the name of its class or of the nearest class that it inherits, or else
    BASELINE_ESTIMATOR.
    """
    names = (ALGOS.get_name(cls) for cls in type(config).__mro__ if issubclass(cls, Policy))
    return next((_estimators[name] for name in names if name in _estimators), BASELINE_ESTIMATOR)
