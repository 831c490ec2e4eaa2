"""Weights that are steered from step to step: of the KL penalty and of the entropy bonus. Part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cohort.config.algos import Policy

KL_GAIN, KL_REACH = 0.1, 0.2  # a step changes the weight by at most KL_GAIN * KL_REACH
ENTROPY_STEP, ENTROPY_MOST = 0.005, 1.0


@dataclass(kw_only=True, slots=True)
class Weights:
    """Those in force in the next step. Constant unless the config names a target."""

    kl: float
    entropy: float
    low_entropy: bool = True  # at or below the target: only then there is a bonus

    @staticmethod
    def of(config: Policy) -> Weights:
        return Weights(kl=config.kl.weight, entropy=config.entropy)

    def observe(self, config: Policy, metrics: Mapping[str, float]) -> None:
        """KL above its target raises its weight (Ziegler et al. 2019), entropy below its the bonus.

        >>> from cohort.config.algos import GRPO, KLConfig
        >>> config = GRPO(kl=KLConfig(weight=0.1, target=0.01), entropy=0.01, entropy_target=0.5)
        >>> weights = Weights.of(config)
        >>> weights.observe(config, {"kl/ref": 0.02, "entropy": 0.4})
        >>> round(weights.kl, 4), weights.entropy
        (0.102, 0.015)
        """
        seen = metrics.get("kl/ref" if config.kl.to == "reference" else "kl/sampler")
        if config.kl.target and seen is not None:
            error = max(-KL_REACH, min(KL_REACH, seen / config.kl.target - 1.0))
            self.kl *= 1.0 + KL_GAIN * error
        if config.entropy_target and "entropy" in metrics:
            self.low_entropy = metrics["entropy"] <= config.entropy_target
            step = ENTROPY_STEP if self.low_entropy else -ENTROPY_STEP
            self.entropy = max(0.0, min(ENTROPY_MOST, self.entropy + step))

    @property
    def bonus(self) -> float:
        return self.entropy if self.low_entropy else 0.0
