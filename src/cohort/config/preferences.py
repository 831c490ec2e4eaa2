"""The settings of the losses on pairs of answers: one class per loss, with the defaults of its paper.

The losses themselves are in `cohort.algos.preferences`. A pair is a prompt with a better and a worse answer. Its
*score* of an answer is what a loss compares: the log-probability of the answer, mostly minus that of the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cohort.config.section import FiniteAbove0, FiniteAtLeast0, Section, Share, at_most
from cohort.registry import Registry


@dataclass(frozen=True, kw_only=True)
class PairLoss(Section):
    """What every loss on pairs has."""

    beta: FiniteAbove0 = 0.1
    """Factor of the difference of the two scores: the larger, the less the policy leaves its reference."""
    nll: FiniteAtLeast0 = 0.0
    """Coefficient of a further term: the mean negative log-probability of the tokens of the better answers; 0 = off."""

    # Whether scores are relative to a reference policy.
    has_reference: ClassVar[bool] = True
    # Whether a score is a mean over the tokens of an answer, if there is no setting for it.
    always_mean: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Sigmoid(PairLoss):
    """DPO (arXiv:2305.18290): the log-sigmoid of beta times the difference of the scores."""

    label_smoothing: Annotated[Share, at_most(0.5)] = 0.0
    """The assumed share of pairs in which the two answers are the wrong way round (conservative DPO)."""
    length_normalize: bool = False
    """Whether a score is divided by the number of tokens of its answer."""


@dataclass(frozen=True, kw_only=True)
class Hinge(PairLoss):
    """The hinge of SLiC (arXiv:2305.10425) and RSO: 1 minus beta times the difference, at least 0."""

    length_normalize: bool = False
    """Whether a score is divided by the number of tokens of its answer."""


@dataclass(frozen=True, kw_only=True)
class IPO(PairLoss):
    """IPO (arXiv:2310.12036): the squared distance of the difference from 1 / (2 beta), so it does not grow forever."""

    length_normalize: bool = True
    """Whether a score is divided by the number of tokens of its answer, as the authors of the paper did."""


@dataclass(frozen=True, kw_only=True)
class Robust(PairLoss):
    """Robust DPO (arXiv:2403.00409): an unbiased loss where a known share of pairs is the wrong way round."""

    label_smoothing: Annotated[Share, at_most(0.49)] = 0.1
    """The assumed share of pairs in which the two answers are the wrong way round."""
    length_normalize: bool = False
    """Whether a score is divided by the number of tokens of its answer."""


@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """SimPO (arXiv:2405.14734): mean log-probabilities of the policy alone, which must differ by a margin."""

    has_reference: ClassVar[bool] = False
    always_mean: ClassVar[bool] = True

    beta: FiniteAbove0 = 2.0
    """Factor of the difference of the two mean log-probabilities."""
    gamma: FiniteAtLeast0 = 1.0
    """The margin: how much larger beta times the better mean should be."""
    label_smoothing: Annotated[Share, at_most(0.5)] = 0.0
    """The assumed share of pairs in which the two answers are the wrong way round."""


@dataclass(frozen=True, kw_only=True)
class ORPO(PairLoss):
    """ORPO (arXiv:2403.07691): imitation of the better answers, and the log odds ratio of the two answers."""

    has_reference: ClassVar[bool] = False
    always_mean: ClassVar[bool] = True

    beta: FiniteAbove0 = 0.1
    """Coefficient of the odds ratio (lambda in the paper)."""
    nll: FiniteAtLeast0 = 1.0
    """Coefficient of the imitation: the mean negative log-probability of the tokens of the better answers."""


PAIR_LOSSES: Registry[type[PairLoss]] = Registry(
    "loss",
    {"sigmoid": Sigmoid, "ipo": IPO, "hinge": Hinge, "robust": Robust, "simpo": SimPO, "orpo": ORPO},
    is_open=False,
)
"""The classes by the name that `--loss` takes in a run on pairs."""
