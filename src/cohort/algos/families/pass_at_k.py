"""Pass@k: a sample's advantage is what it adds to the best of k. Its loss is that of `clipped`."""

from __future__ import annotations

from cohort.algos.advantages import best_of_k
from cohort.algos.estimators import Estimator, Returns, register_estimator
from cohort.config.algos import PassAtK


def _best_of_k(returns: Returns, c: PassAtK) -> list[list[float]]:
    return [best_of_k(group, c.k) for group in returns]


register_estimator(
    "pass_at_k",
    Estimator(
        advantages=_best_of_k,
        is_dead=lambda returns, c: not any(best_of_k(returns, c.k)),
        words=lambda c: f"what each adds to the best of {c.k}",
    ),
)
