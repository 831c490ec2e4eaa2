"""The settings of the algorithms: one class per algorithm, with the defaults of its paper.

A class has only the settings that its algorithm uses. `ALGOS` maps the names of `--algo` to the classes. The losses
and advantages themselves are in `cohort.algos`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeVar, cast, dataclass_transform

from cohort.config.algo_sections import CorrectionConfig, CreditConfig, KLConfig
from cohort.config.preferences import IPO, ORPO, Hinge, Robust, Sigmoid, SimPO
from cohort.config.section import (
    FINITE,
    LARGEST,
    MOST,
    Bound,
    Effect,
    FiniteAbove0,
    FiniteAtLeast0,
    Section,
    Share,
    at_least,
    at_most,
)
from cohort.errors import ConfigError
from cohort.registry import Registry, is_same_definition

P = TypeVar("P")

# The choices of the settings below. The docstrings of the settings explain them.
Baseline = Literal["mean", "leave_one_out", "batch", "none"]
Scale = Literal["std", "batch", "centred", "mean", "none"]
Aggregate = Literal["token", "sequence", "prompt", "constant"]
Dead = Literal["keep", "drop", "refill"]


@dataclass(frozen=True, kw_only=True)
class Policy(Section):
    """The settings that all algorithms have."""

    baseline: Baseline = "mean"
    """Value subtracted from a sample's reward: mean = the group's mean, leave_one_out = the mean of the group's other
    samples, batch = the batch's mean, none = nothing."""
    scale: Scale = "std"
    """Divisor of the reward after the baseline: std = standard deviation of the group's rewards, batch = of the batch's
    rewards, centred = of the batch's rewards after the baseline, mean = the group's mean (MaxRL), none = 1."""
    aggregate: Aggregate = "sequence"
    """How tokens are averaged: token = mean over all tokens; sequence = mean over samples of each sample's token mean;
    prompt = mean over prompts of each prompt's token mean; constant = mean over samples of token sum / max_tokens."""
    truncated: Literal["keep", "mask", "penalize"] = "keep"
    """Treatment of a sample cut at max_tokens: keep = train on it, mask = leave it out of the loss, penalize = train on
    it with a reward of at most 0."""
    dead: Dead = "keep"
    """Treatment of groups whose rewards are all equal, which have no gradient: keep = they count in the mean, drop =
    they do not count, refill = they are replaced by groups of other prompts."""
    entropy: FiniteAtLeast0 = 0.0
    """Coefficient of the entropy bonus; 0 = no bonus."""
    entropy_target: FiniteAtLeast0 = 0.0
    """Entropy in nats per token: after a step at or below it the bonus acts and its coefficient grows, after a step
    above it there is no bonus and the coefficient falls (Skywork-OR1, arXiv:2505.22312); 0 = the coefficient is
    constant."""
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)

    # Why credit per turn has no meaning for the algorithm, and after a semicolon the remedy; "" = it has one.
    no_turn_credit: ClassVar[str] = ""

    # Whether the loss is meant for samples of the current policy, so that older ones need a correction.
    is_on_policy: ClassVar[bool] = True
    # Samples of a group that must be in one microbatch, because the loss compares them with each other.
    num_compared: ClassVar[int] = 1

    @property
    def needs_siblings(self) -> bool:
        """Whether rewards are compared within a group, by the baseline mean or leave_one_out.

        If so, all advantages of a group with equal rewards are 0.
        """
        return self.baseline in ("mean", "leave_one_out")

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if baseline and scale, baseline and dead, or entropy and entropy_target conflict.

        Also if credit per turn has no meaning for the algorithm, or conflicts with baseline and scale. Sections inside,
        such as `kl`, are not checked here. Ignores `user_settings`.
        """
        # For a group of equal rewards these divisors can be 0. That is harmless only where its advantages are 0 too.
        if self.scale in ("std", "mean") and not self.needs_siblings:
            raise ConfigError(
                f"algo.scale {self.scale} divides by a number that can be 0 for a group of equal rewards, and with "
                f"algo.baseline {self.baseline} such a group has an advantage. Set --algo.scale batch, centred or none."
            )
        if self.dead != "keep" and not self.needs_siblings:
            raise ConfigError(
                f"algo.dead is {self.dead}, but with algo.baseline {self.baseline} groups of equal rewards have a "
                "gradient and must be kept. Set --algo.dead keep."
            )
        if self.entropy_target and self.entropy > 1:
            raise ConfigError(
                f"algo.entropy is {self.entropy}; with algo.entropy_target above 0 it must be at most 1. "
                "Lower --algo.entropy, or set --algo.entropy-target 0."
            )
        if self.credit.is_on:
            self._check_turn_credit()

    def _check_turn_credit(self) -> None:
        """Raises a ConfigError if advantages per turn have no meaning for the algorithm, or would have no bound."""
        if self.no_turn_credit:
            cause, _, change = self.no_turn_credit.partition("; ")
            alternative = f" or {change}" if change else ""
            raise ConfigError(f"algo.credit.per is turn, but {cause}. Set --algo.credit.per episode{alternative}.")
        # Few samples reach a late turn. If their returns are equal, the deviation is 0, but without a baseline the
        # returns are not.
        if self.baseline == "none" and self.scale != "none":
            raise ConfigError(
                f"algo.scale {self.scale} divides by the deviation of the returns of a turn, which is 0 if only one "
                "sample reaches it, and with algo.baseline none such a sample has an advantage. Set --algo.scale none, "
                "or --algo.baseline batch."
            )

    def check_group(self, num_samples: int) -> None:
        """Raises a ConfigError if `num_samples`, the samples per group, is below 2 and the algorithm compares samples.

        Whether it does is `needs_siblings`.
        """
        if self.needs_siblings and num_samples < 2:
            raise ConfigError(
                f"batch.samples is {num_samples}, but the algorithm compares the samples of a group with each other, "
                "so nothing would be learned. Raise --batch.samples, for example to 8."
            )


@dataclass(frozen=True, kw_only=True)
class Clipped(Policy):
    """The settings of algorithms that clip the ratio of the new policy's probability to the old one's."""

    clip_low: Share = 0.2
    """With a negative advantage, a token whose ratio (new over old probability) is below 1 - clip_low has no
    gradient."""
    clip_high: FiniteAtLeast0 = 0.2
    """With a positive advantage, a token whose ratio (new over old probability) is above 1 + clip_high has no
    gradient."""


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    dual_clip: Annotated[float, FINITE, Bound("0 or above 1", lambda x: x == 0 or x > 1), at_most(LARGEST)] = 0.0
    """With a negative advantage, a token whose ratio is above dual_clip has no gradient (Ye et al. 2020,
    arXiv:1912.09729): a number above 1; 0 = no limit."""


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO done right (Liu et al. 2025, arXiv:2503.20783): no division by the deviation, and a constant length."""

    scale: Scale = "none"
    aggregate: Aggregate = "constant"


@dataclass(frozen=True, kw_only=True)
class DAPO(Clipped):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, arXiv:2503.14476)."""

    clip_high: FiniteAtLeast0 = 0.28
    aggregate: Aggregate = "token"
    dead: Dead = "refill"
    overlong: Share = 0.2
    """Length penalty: over this last share of max_tokens it rises from 0 to 1 and is subtracted from the reward; 0 = no
    penalty."""


@dataclass(frozen=True, kw_only=True)
class GSPO(Clipped):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071): one ratio per sample."""

    clip_low: Share = 3e-4
    clip_high: FiniteAtLeast0 = 4e-4

    no_turn_credit: ClassVar[str] = (
        "gspo has one ratio per sample, so every token gets the mean advantage of all turns; choose --algo gspo_token"
    )


@dataclass(frozen=True, kw_only=True)
class GSPOToken(GSPO):
    """The token form of GSPO: the ratio of the sample, but the gradient of each token."""

    no_turn_credit: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class CISPO(Policy):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585): every token keeps a gradient."""

    clip_high: FiniteAtLeast0 = 5.0
    """Largest factor of a token's gradient, which is its ratio of new to old probability; at least 1."""
    aggregate: Aggregate = "token"

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if settings contradict each other (see `Policy.check`), or if `clip_high` is below 1.

        Such a cap would act even where the policy has not changed, because the ratio is 1 there. `user_settings` is
        ignored.
        """
        super().check(user_settings)
        if self.clip_high < 1:
            raise ConfigError(
                f"algo.clip_high is {self.clip_high}. With cispo it is the largest factor of a token's gradient and "
                "must be at least 1; raise --algo.clip-high, or remove it (default: 5)."
            )


@dataclass(frozen=True, kw_only=True)
class SAPO(Policy):
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347): a smooth gate instead of a clip."""

    tau_pos: FiniteAbove0 = 1.0
    """Steepness of the gate for positive advantages: larger = the gradient falls faster as the ratio leaves 1."""
    tau_neg: FiniteAbove0 = 1.05
    """Steepness of the gate for negative advantages: larger = the gradient falls faster as the ratio leaves 1."""


@dataclass(frozen=True, kw_only=True)
class GMPO(Clipped):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673). It clips log-ratios, not ratios."""

    clip_low: FiniteAtLeast0 = 0.4
    """With a negative advantage, a token whose log-ratio (log of new over old probability) is below -clip_low has no
    gradient."""
    clip_high: FiniteAtLeast0 = 0.4
    """With a positive advantage, a token whose log-ratio (log of new over old probability) is above clip_high has no
    gradient."""

    no_turn_credit: ClassVar[str] = (
        "gmpo has one mean ratio per sample, so every token gets the mean advantage of all turns; choose --algo grpo"
    )


@dataclass(frozen=True, kw_only=True)
class PassAtK(Clipped):
    """The gradient of the best reward among k samples (Walder & Karkhanis 2025, arXiv:2505.15201)."""

    aggregate: Aggregate = "constant"
    k: Annotated[int, at_least(2), at_most(MOST)] = 4
    """Number of samples of which only the best counts: 2 to batch.samples."""

    # The advantages of pass_at_k come from all subsets of k samples. No setting makes baseline and scale act.
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("baseline", "scale"),
            (),
            lambda algo: False,
            "pass_at_k computes advantages without it; choose another --algo",
        ),
    )
    no_turn_credit: ClassVar[str] = "pass_at_k compares the best of k whole samples; choose --algo grpo"

    @property
    def needs_siblings(self) -> bool:
        """True: advantages compare subsets of the group, whatever `baseline` says."""
        return True

    def check_group(self, num_samples: int) -> None:
        """Raises a ConfigError if `num_samples`, the samples per group, is below 2 or below k."""
        super().check_group(num_samples)
        if self.k > num_samples:
            raise ConfigError(
                f"algo.k is {self.k}, but a group has only {num_samples} samples (batch.samples). "
                "Lower --algo.k or raise --batch.samples."
            )


@dataclass(frozen=True, kw_only=True)
class Reinforce(Policy):
    """REINFORCE (Williams 1992), with the mean reward of the batch as baseline."""

    baseline: Baseline = "batch"
    scale: Scale = "none"
    aggregate: Aggregate = "constant"


@dataclass(frozen=True, kw_only=True)
class RLOO(Reinforce):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

    baseline: Baseline = "leave_one_out"


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(GRPO):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): advantages are normalised over the batch."""

    baseline: Baseline = "batch"
    scale: Scale = "centred"
    aggregate: Aggregate = "token"
    kl: KLConfig = field(default_factory=lambda: KLConfig(estimator="k1", place="reward"))


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ where the mean of the group is subtracted before advantages are normalised over the batch."""

    baseline: Baseline = "mean"
    kl: KLConfig = field(default_factory=lambda: KLConfig(estimator="k2"))


@dataclass(frozen=True, kw_only=True)
class PairPolicy(Policy):
    """The settings of algorithms that train on pairs of samples. Each inherits those of its loss on pairs too."""

    pairs: Literal["best_worst", "random"] = "best_worst"
    """Which two samples of a group are compared: best_worst = the first of those with the highest reward and the first
    of those with the lowest; random = any two whose rewards differ, chosen by a hash of the prompt's name and visit."""
    dead: Literal["drop", "refill"] = "drop"
    """Treatment of groups whose rewards are all equal, which have no pair: drop = they do not count, refill = they are
    replaced by groups of other prompts."""

    is_on_policy: ClassVar[bool] = False
    num_compared: ClassVar[int] = 2
    # A loss on pairs has no advantages to scale, and keeps near its reference by itself. These are no settings here.
    baseline: ClassVar[Baseline] = "mean"  # type: ignore[misc]  # a field of the class above
    scale: ClassVar[Scale] = "none"  # type: ignore[misc]
    aggregate: ClassVar[Aggregate] = "prompt"  # type: ignore[misc]
    entropy: ClassVar[float] = 0.0  # type: ignore[misc]
    entropy_target: ClassVar[float] = 0.0  # type: ignore[misc]
    kl: ClassVar[KLConfig] = KLConfig()  # type: ignore[misc]
    correction: ClassVar[CorrectionConfig] = CorrectionConfig()  # type: ignore[misc]
    credit: ClassVar[CreditConfig] = CreditConfig()  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class OnlineDPO(PairPolicy, Sigmoid):
    """DPO on pairs from a reward: samples of the policy itself (Guo et al. 2024, arXiv:2402.04792)."""


@dataclass(frozen=True, kw_only=True)
class OnlineIPO(PairPolicy, IPO):
    """IPO on pairs from a reward (Calandriello et al. 2024, arXiv:2403.08635)."""


@dataclass(frozen=True, kw_only=True)
class OnlineHinge(PairPolicy, Hinge):
    """The hinge of SLiC on pairs from a reward (arXiv:2305.10425)."""


@dataclass(frozen=True, kw_only=True)
class OnlineRobust(PairPolicy, Robust):
    """Robust DPO on pairs from a reward that is sometimes wrong (arXiv:2403.00409)."""


@dataclass(frozen=True, kw_only=True)
class OnlineSimPO(PairPolicy, SimPO):
    """SimPO on pairs from a reward, without a reference (arXiv:2405.14734)."""


@dataclass(frozen=True, kw_only=True)
class OnlineORPO(PairPolicy, ORPO):
    """ORPO on pairs from a reward: it also imitates the better samples, without a reference (arXiv:2403.07691)."""


# The keys are the names of --algo and stand in config.yaml files: they must not change.
ALGOS: Registry[type[Policy]] = Registry(
    "algo",
    {
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
        "online_dpo": OnlineDPO,
        "online_ipo": OnlineIPO,
        "online_hinge": OnlineHinge,
        "online_robust": OnlineRobust,
        "online_simpo": OnlineSimPO,
        "online_orpo": OnlineORPO,
    },
)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def algorithm(name: str) -> Callable[[type[P]], type[P]]:
    """Returns a decorator that registers a class of settings as the algorithm `name`: `@cohort.algorithm("fading")`.

    The class inherits `cohort.Policy`, or the settings of a built-in algorithm, and becomes a frozen dataclass. Its
    method `policy_loss(self, tokens)` returns one loss term per token, as a tensor [T] or a `Surrogate`; `tokens` is a
    `Tokens` of `cohort.algos.surrogates`. Without that method it has the loss of the class that it inherits.
    `per_token = False` on the class says that a term depends on other tokens of the same sample. Raises ConfigError for
    a name that is not allowed or that another class has, and for a class that cannot be an algorithm. The same
    definition may be registered again.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise ConfigError(
            f'algorithm name "{name}" is not allowed; use lower-case letters, digits, "_" and "-", beginning with a '
            "letter."
        )

    def register(cls: type[P]) -> type[P]:
        """Checks the class, makes it a frozen dataclass, enters it in ALGOS and returns it."""
        if not issubclass(cls, Policy):
            raise ConfigError(
                f'algorithm "{name}": the class {cls.__name__} has none of the settings that all algorithms have; '
                f"write class {cls.__name__}(cohort.Policy)."
            )
        has_loss = callable(getattr(cls, "policy_loss", None))
        if not has_loss and not any(base in ALGOS.values() for base in cls.__mro__):
            raise ConfigError(
                f'algorithm "{name}": class {cls.__name__} has no method policy_loss; write def policy_loss(self, '
                "tokens), which returns one loss term per token, or inherit a built-in algorithm."
            )
        # A class that inherits a dataclass counts as one, but its own fields do not until it is made one itself.
        if "__dataclass_params__" not in vars(cls):
            cls = dataclass(frozen=True, kw_only=True)(cls)
        known = ALGOS.get(name)
        if known is not None and not is_same_definition(known, cls):
            raise ConfigError(f'another class is already registered as algorithm "{name}"; use another name.')
        ALGOS[name] = cast(type[Policy], cls)
        return cls

    return register
