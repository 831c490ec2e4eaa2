"""The sections of an algorithm's settings that several algorithms have: KL penalty, correction, and credit of turns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from cohort.config.section import (
    LARGEST,
    SMALLEST,
    AtLeast0,
    Bound,
    Effect,
    FiniteAtLeast0,
    Section,
    at_least,
)
from cohort.errors import ConfigError

Estimator = Literal["k1", "k2", "k3", "abs"]
"""Formulas of the KL per token; the setting `estimator` explains them."""


@dataclass(frozen=True, kw_only=True)
class KLConfig(Section):
    """A penalty for the KL divergence between the policy and another policy."""

    weight: FiniteAtLeast0 = 0.0
    """Coefficient of the penalty; 0 = no penalty, and no reference policy is kept in memory."""
    to: Literal["reference", "sampler"] = "reference"
    """The other policy: reference = the initial weights, sampler = the policy that sampled the tokens."""
    estimator: Estimator = "k3"
    """Formula per token, with d = its log-probability under the policy minus that under the other: k1 = d, k2 =
    d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020), abs = the size of d."""
    place: Literal["loss", "reward"] = "loss"
    """loss = a term of the loss; reward = subtracted from the reward before advantages are computed."""
    target: FiniteAtLeast0 = 0.0
    """KL per token, in nats, that the coefficient is adjusted to reach (Ziegler et al. 2019, arXiv:1909.08593); 0 =
    the coefficient is constant."""
    refresh: AtLeast0 = 0
    """Number of steps after which the current policy becomes the reference; 0 = the reference never changes."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("estimator", "place", "to", "target", "refresh"),
            ("weight",),
            lambda kl: kl.is_on,
            "algo.kl.weight is 0; set --algo.kl.weight above 0",
        ),
        Effect(
            ("refresh",),
            ("to",),
            lambda kl: kl.to == "reference",
            "algo.kl.to is sampler, which needs no reference; set --algo.kl.to reference",
        ),
    )

    @property
    def is_on(self) -> bool:
        """Whether the penalty is applied at all, that is, `weight` is above 0."""
        return self.weight > 0

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError for the estimator k1 in the loss, where its gradient is zero on average.

        Checks nothing if the penalty is off. Ignores `user_settings`.
        """
        if self.is_on and self.estimator == "k1" and self.place == "loss":
            raise ConfigError(
                "algo.kl.estimator is k1 and algo.kl.place is loss, but in the loss k1 has a gradient of zero on "
                "average. Set --algo.kl.estimator k2 or k3, or --algo.kl.place reward."
            )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig(Section):
    """A correction for tokens that were sampled by a policy other than the current one.

    That is an older policy, or the engine's, whose log-probabilities differ slightly from the learner's.
    """

    kind: Literal["none", "truncate", "mask"] = "none"
    """none = no correction; truncate = multiply the loss by the importance weight, clipped to the bounds (TIS); mask =
    the same, but 0 where it is outside the bounds (MIS, IcePop)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """token = each token has its own importance weight; sequence = the product over the sample; geometric = the
    geometric mean over the sample."""
    bounds: tuple[float, float] = (0.0, 2.0)
    """Smallest and largest importance weight; 1 must lie between them."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("level", "bounds"),
            ("kind",),
            lambda correction: correction.is_on,
            "algo.correction.kind is none; set --algo.correction.kind truncate or mask",
        ),
    )

    @property
    def is_on(self) -> bool:
        """Whether any correction is applied."""
        return self.kind != "none"

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError unless the bounds are different, enclose 1, and are neither negative nor too large.

        One of them may be 1. They are checked even if there is no correction. Ignores `user_settings`.
        """
        low, high = self.bounds
        if not 0 <= low <= 1 <= high <= LARGEST or low == high:
            raise ConfigError(
                f"algo.correction.bounds is {low} {high}; it must be two different numbers, the first from 0 to 1 and "
                f"the second at least 1 and at most {LARGEST:,}. Correct --algo.correction.bounds, or remove it "
                "(default: 0 2)."
            )


@dataclass(frozen=True, kw_only=True)
class CreditConfig(Section):
    """Which rewards of a conversation the tokens of a turn answer for."""

    per: Literal["episode", "turn"] = "episode"
    """episode = every token answers for the reward of its whole sample; turn = for the rewards from its own turn on,
    compared with those of the group's other samples in the same turn."""
    discount: Annotated[float, Bound("above 0 and at most 1", lambda x: 0 < x <= 1), at_least(SMALLEST)] = 1.0
    """Factor of a reward for each turn that it comes later; 1 = later rewards count in full."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("discount",),
            ("per",),
            lambda credit: credit.is_on,
            "algo.credit.per is episode, so a sample has only one reward; set --algo.credit.per turn",
        ),
    )

    @property
    def is_on(self) -> bool:
        """Whether turns have rewards and advantages of their own."""
        return self.per == "turn"
