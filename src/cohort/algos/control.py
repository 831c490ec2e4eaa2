"""Coefficients of the KL penalty and of the entropy bonus, adjusted after every step and stored in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cohort.config.algos import Policy

# A step changes the KL coefficient by a factor of at most 1 +- KL_GAIN * KL_MAX_ERROR.
KL_GAIN, KL_MAX_ERROR = 0.1, 0.2
# A step changes the entropy coefficient by ENTROPY_STEP, within 0 and ENTROPY_MAX.
ENTROPY_STEP, ENTROPY_MAX = 0.005, 1.0


@dataclass(kw_only=True, slots=True)
class Coefficients:
    """KL and entropy coefficients for the next step. They are constant unless the config names a target."""

    kl: float
    entropy: float
    low_entropy: bool = True  # whether the last measured entropy was at or below the target; only then the bonus acts

    @staticmethod
    def from_config(config: Policy) -> Coefficients:
        """Returns the coefficients with which a run starts: those of the config."""
        return Coefficients(kl=config.kl.weight, entropy=config.entropy)

    def update(self, config: Policy, metrics: Mapping[str, float]) -> None:
        """Adjusts the coefficients that have a target, in place, by the metrics of a step, and sets `low_entropy`.

        A KL above its target raises the KL coefficient, one below lowers it (Ziegler et al. 2019), by at most 2%. An
        entropy at or below its target raises the entropy coefficient by ENTROPY_STEP, one above lowers it, within 0 and
        ENTROPY_MAX. A metric that is missing changes nothing.

        >>> from cohort.config.algo_sections import KLConfig
        >>> from cohort.config.algos import GRPO
        >>> config = GRPO(kl=KLConfig(weight=0.1, target=0.01), entropy=0.01, entropy_target=0.5)
        >>> coefficients = Coefficients.from_config(config)
        >>> coefficients.update(config, {"kl/ref": 0.02, "entropy": 0.4})
        >>> round(coefficients.kl, 4), coefficients.entropy
        (0.102, 0.015)
        """
        measured_kl = metrics.get("kl/ref" if config.kl.to == "reference" else "kl/sampler")
        if config.kl.target and measured_kl is not None:
            error = max(-KL_MAX_ERROR, min(KL_MAX_ERROR, measured_kl / config.kl.target - 1.0))
            self.kl *= 1.0 + KL_GAIN * error
        if config.entropy_target and "entropy" in metrics:
            self.low_entropy = metrics["entropy"] <= config.entropy_target
            step = ENTROPY_STEP if self.low_entropy else -ENTROPY_STEP
            self.entropy = max(0.0, min(ENTROPY_MAX, self.entropy + step))

    @property
    def active_entropy(self) -> float:
        """The entropy coefficient that the loss uses: 0 if the last measured entropy was above its target.

        Without a target, and before the first measurement, it is `entropy`.
        """
        return self.entropy if self.low_entropy else 0.0
