"""Pass@k: a sample's advantage is what it adds to the best of k. Its policy loss is `clipped_surrogate`."""

from __future__ import annotations

from cohort.algos.advantages import best_of_k_gains
from cohort.algos.estimators import Estimator, Returns, register_estimator
from cohort.config.algos import PassAtK


def _pass_at_k_advantages(returns: Returns, c: PassAtK) -> list[list[float]]:
    """Returns, per group, how much each sample raises the best return of `c.k` samples (see `best_of_k_gains`)."""
    return [best_of_k_gains(group, c.k) for group in returns]


register_estimator(
    "pass_at_k",
    Estimator(
        advantages=_pass_at_k_advantages,
        is_dead=lambda returns, c: not any(best_of_k_gains(returns, c.k)),
        describe=lambda c: f"what each adds to the best of {c.k}",
    ),
)
