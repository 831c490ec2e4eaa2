"""The settings of every algorithm, typed: one class each, with the paper's defaults.

What an algorithm does not use is not a field of it. `ALGOS` names them; the code is in `cohort.algos`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from cohort.config.section import (
    FINITE,
    ONE_AT_MOST,
    AtLeast0,
    Bound,
    Effect,
    FiniteAbove0,
    FiniteAtLeast0,
    Section,
    Share,
    at_least,
)
from cohort.errors import ConfigError

Baseline = Literal["mean", "leave_one_out", "batch", "none"]
Scale = Literal["std", "batch", "centred", "mean", "none"]
Aggregate = Literal["token", "sequence", "prompt", "constant"]
Dead = Literal["keep", "drop", "refill"]
Estimator = Literal["k1", "k2", "k3", "abs"]


@dataclass(frozen=True, kw_only=True)
class KLConfig(Section):
    """The divergence from another policy, as a penalty."""

    weight: FiniteAtLeast0 = 0.0
    """0 = none, and no reference policy is kept."""
    to: Literal["reference", "sampler"] = "reference"
    """The initial weights, or the policy that drew the tokens."""
    estimator: Estimator = "k3"
    """k1 to k3 are those of Schulman (2020)."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from the reward before the advantage."""
    target: FiniteAtLeast0 = 0.0
    """KL a token that the weight is steered to (Ziegler et al. 2019, arXiv:1909.08593); 0 = the weight is constant."""
    refresh: AtLeast0 = 0
    """Steps after which the reference becomes the current policy; 0 = never."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("estimator", "place", "to", "target", "refresh"),
            ("weight",),
            lambda kl: kl.on,
            "algo.kl.weight is 0; set --algo.kl.weight above 0",
        ),
        Effect(
            ("refresh",),
            ("to",),
            lambda kl: kl.to == "reference",
            "the divergence is from the sampler; set --algo.kl.to reference",
        ),
    )

    @property
    def on(self) -> bool:
        return self.weight > 0

    def check(self, given: Collection[str]) -> None:
        if self.on and self.estimator == "k1" and self.place == "loss":
            raise ConfigError(
                "algo.kl.estimator = k1 in the loss has a gradient of zero on average; use k2 or k3, or "
                "--algo.kl.place reward."
            )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig(Section):
    """For tokens that another policy drew: an older one, or the engine's slightly different one."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """Multiply by the importance weight, held within bounds (TIS), or 0 where it is outside (MIS, IcePop)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """The weight of each token, of the whole sample (the product), or the sample's geometric mean."""
    bounds: tuple[float, float] = (0.0, 2.0)

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("level", "bounds"),
            ("kind",),
            lambda correction: correction.on,
            "nothing is corrected; set --algo.correction.kind truncate or mask",
        ),
    )

    @property
    def on(self) -> bool:
        return self.kind != "none"

    def check(self, given: Collection[str]) -> None:
        low, high = self.bounds
        if not 0 <= low <= 1 <= high < math.inf or low == high:
            raise ConfigError(f"algo.correction.bounds is {low} {high}; it must be two numbers with 1 between them.")


@dataclass(frozen=True, kw_only=True)
class Policy(Section):
    """What all algorithms have."""

    baseline: Baseline = "mean"
    """Subtracted from a sample's reward: its group's mean, its siblings' mean, the batch's mean, nothing."""
    scale: Scale = "std"
    """What divides it then: the standard deviation of the group's rewards, of the batch's, of the batch's after the
    baseline, the group's mean (MaxRL), nothing."""
    aggregate: Aggregate = "sequence"
    """Mean over all tokens; over samples of the token mean; over prompts of the token mean; over samples of the token
    sum over max_tokens."""
    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """What a sample cut at max_tokens does: train as any other, leave the loss, or score at most 0."""
    dead: Dead = "keep"
    """A group of equal rewards has no gradient. It counts in the mean, or not, or other prompts take its place."""
    entropy: FiniteAtLeast0 = 0.0
    """Weight of the entropy bonus."""
    entropy_target: FiniteAtLeast0 = 0.0
    """Nats: below it the bonus grows, above it there is none (Skywork-OR1, arXiv:2505.22312); 0 = constant weight."""
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    @property
    def needs_siblings(self) -> bool:
        """Whether a sample is judged against others of its group: one of equal rewards has no gradient then."""
        return self.baseline in ("mean", "leave_one_out")

    def check(self, given: Collection[str]) -> None:
        if self.scale in ("std", "mean") and not self.needs_siblings:
            raise ConfigError(
                f"algo.scale = {self.scale} divides by what a group of equal rewards has none of, and algo.baseline = "
                f"{self.baseline} gives such groups an advantage; set --algo.scale batch, centred or none."
            )
        if self.dead != "keep" and not self.needs_siblings:
            raise ConfigError(
                f"algo.dead = {self.dead}, but with baseline = {self.baseline} groups of equal rewards have a "
                "gradient: set --algo.dead keep."
            )
        if self.entropy_target and self.entropy > 1:
            raise ConfigError(f"algo.entropy is {self.entropy}; with algo.entropy_target it must be at most 1.")

    def check_group(self, num_samples: int) -> None:
        """Refuse groups of this size where the algorithm could do nothing with them."""
        if self.needs_siblings and num_samples < 2:
            raise ConfigError(
                "batch.samples is 1, but the baseline is the mean of the group: every advantage would be 0; "
                "set --batch.samples to 2 or more."
            )


@dataclass(frozen=True, kw_only=True)
class Clipped(Policy):
    """Those that hold the ratio of new to old policy within bounds."""

    clip_low: Annotated[float, FINITE, at_least(0), ONE_AT_MOST] = 0.2
    """The ratio is clipped at 1 - clip_low for negative advantages."""
    clip_high: FiniteAtLeast0 = 0.2
    """The ratio is clipped at 1 + clip_high for positive advantages."""


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    dual_clip: Annotated[float, FINITE, Bound("0 or above 1", lambda x: x == 0 or x > 1)] = 0.0
    """Negative advantages count at most this many times (Ye et al. 2020, arXiv:1912.09729); 0 = off, else above 1."""


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO done right (Liu et al. 2025, arXiv:2503.20783): no std, constant length divisor."""

    scale: Scale = "none"
    aggregate: Aggregate = "constant"


@dataclass(frozen=True, kw_only=True)
class DAPO(Clipped):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, arXiv:2503.14476)."""

    clip_high: FiniteAtLeast0 = 0.28
    aggregate: Aggregate = "token"
    dead: Dead = "refill"
    overlong: Share = 0.2
    """Share of max_tokens over which the reward of a long completion falls by up to 1; 0 = no such penalty."""


@dataclass(frozen=True, kw_only=True)
class GSPO(Clipped):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071): one ratio a sample."""

    clip_low: Annotated[float, FINITE, at_least(0), ONE_AT_MOST] = 3e-4
    clip_high: FiniteAtLeast0 = 4e-4


@dataclass(frozen=True, kw_only=True)
class GSPOToken(GSPO):
    """GSPO's token form: the sample's ratio, each token's own gradient."""


@dataclass(frozen=True, kw_only=True)
class CISPO(Policy):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585): every token keeps a gradient."""

    clip_high: FiniteAtLeast0 = 5.0
    """Largest weight of a token."""
    aggregate: Aggregate = "token"

    def check(self, given: Collection[str]) -> None:
        super().check(given)
        if self.clip_high < 1:
            raise ConfigError(f"algo.clip_high is {self.clip_high}: cispo's largest weight must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class SAPO(Policy):
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347): a smooth gate instead of a clip."""

    tau_pos: FiniteAbove0 = 1.0
    """How fast the gate closes for positive advantages."""
    tau_neg: FiniteAbove0 = 1.05
    """And for negative ones."""


@dataclass(frozen=True, kw_only=True)
class GMPO(Clipped):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673). Clips log-ratios, not ratios."""

    clip_low: FiniteAtLeast0 = 0.4
    clip_high: FiniteAtLeast0 = 0.4


@dataclass(frozen=True, kw_only=True)
class PassAtK(Clipped):
    """The gradient of the best of k samples' reward (Walder & Karkhanis 2025, arXiv:2505.15201)."""

    aggregate: Aggregate = "constant"
    k: Annotated[int, at_least(2)] = 4
    """Samples of which the best counts; at most batch.samples."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(("baseline", "scale"), (), lambda algo: False, "pass_at_k has its own; choose another --algo"),
    )

    @property
    def needs_siblings(self) -> bool:
        return True

    def check_group(self, num_samples: int) -> None:
        super().check_group(num_samples)
        if self.k > num_samples:
            raise ConfigError(f"algo.k is {self.k}, more than batch.samples = {num_samples}; lower --algo.k.")


@dataclass(frozen=True, kw_only=True)
class Reinforce(Policy):
    """REINFORCE (Williams 1992), with the batch's mean reward as its baseline."""

    baseline: Baseline = "batch"
    scale: Scale = "none"
    aggregate: Aggregate = "constant"


@dataclass(frozen=True, kw_only=True)
class RLOO(Reinforce):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

    baseline: Baseline = "leave_one_out"


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(GRPO):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): advantages normalised over the batch."""

    baseline: Baseline = "batch"
    scale: Scale = "centred"
    aggregate: Aggregate = "token"
    kl: KLConfig = field(default_factory=lambda: KLConfig(estimator="k1", place="reward"))


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ with the group's mean subtracted before."""

    baseline: Baseline = "mean"
    kl: KLConfig = field(default_factory=lambda: KLConfig(estimator="k2"))


ALGOS: dict[str, type[Policy]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "gspo_token": GSPOToken,
    "cispo": CISPO,
    "sapo": SAPO,
    "gmpo": GMPO,
    "pass_at_k": PassAtK,
    "reinforce": Reinforce,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
}
