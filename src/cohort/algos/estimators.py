"""How an algorithm judges samples: the returns of a step's groups become advantages. One registered record per way.

Most algorithms judge a sample relative to a baseline, as their settings say. One that does it another way registers its
own estimator under its name, as `pass_at_k` does here; nothing else has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.algos.advantages import advantages, is_constant
from cohort.config.algos import Policy

Returns = Sequence[Sequence[float]]
"""Per group, what each of its scored samples returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """`advantages` gets the groups of all ranks. Its result has the same shape."""

    advantages: Callable[[Returns, Any], list[list[float]]]
    is_dead: Callable[[Sequence[float], Any], bool]  # whether a group with these returns has no gradient
    words: Callable[[Any], str]  # for people


def _relative(returns: Returns, c: Policy) -> list[list[float]]:
    return advantages(returns, c.scale, c.baseline)


RELATIVE = Estimator(
    advantages=_relative,
    is_dead=lambda returns, c: is_constant(returns),
    words=lambda c: f"baseline = {c.baseline}, scale = {c.scale}",
)
_estimators: dict[str, Estimator] = {}


def register_estimator(name: str, estimator: Estimator) -> None:
    """Use `estimator` for the algorithm `name` of `config.algos.ALGOS`."""
    _estimators[name] = estimator


def find_estimator(name: str) -> Estimator:
    """The estimator of an algorithm: its own, or that of a baseline."""
    return _estimators.get(name, RELATIVE)
