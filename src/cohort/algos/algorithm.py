"""What an algorithm is: a named object that gives samples their advantages and tokens their loss.

To add one: its settings in `config/algos.py` and its policy loss, decorated with `@surrogate("its_name")`, in
`algos/surrogates.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.policy import PlainAlgorithm, PolicyGradient
from cohort.algos.surrogates import registered
from cohort.algos.tally import Tally
from cohort.config.algos import ALGOS
from cohort.errors import ConfigError, nearest
from cohort.types import Group
from cohort.world import ONE_PROCESS, World


class Loss(Protocol):
    """What a learner's update needs. A loss sees flat vectors only: never logits, model or ranks."""

    per_token: bool
    """Whether each token's term depends on that token alone, so that tokens may be handed over in any pieces."""
    has_ratio: bool
    """Whether it compares with the policy of the step's beginning: then later updates are given `old_logprobs`."""

    def weigh(self, lengths: Lengths, totals: Totals) -> Tensor:
        """[N] weights of a microbatch's tokens, given the global denominators."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """The microbatch's share of the loss, as a plain sum, and its metrics."""


class Algorithm(Loss, Protocol):
    """Pure with respect to the model: it sees records and flat vectors only."""

    @property
    def judging(self) -> str:
        """How samples are judged, in words."""

    def needs(self) -> frozenset[str]:
        """Which of {"old", "ref"} logprobs the samples must have before their advantages are found."""

    def accept(self, group: Group) -> bool:
        """Whether a scored group is kept; a rejected one is replaced by another prompt's."""

    def advantages(self, groups: list[Group], world: World = ONE_PROCESS) -> list[Group]:
        """Set samples' `advantage` and `masked` and groups' `excluded`, in place. Drops nothing.

        Baselines over the batch are over the groups of all ranks.
        """

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Learn from a step's metrics what the next one needs; returns metrics of its own."""

    def plain(self) -> PlainAlgorithm:
        """Settings and state, to be sent elsewhere."""

    def state(self) -> dict[str, float]:
        """What a checkpoint must know."""

    def load_state(self, state: Mapping[str, float]) -> None: ...


def name_of(config: Any) -> str:
    """The registered name of a config variant.

    >>> from cohort.config.algos import DrGRPO
    >>> name_of(DrGRPO())
    'dr_grpo'
    """
    for name, variant in ALGOS.items():
        if type(config) is variant:
            return name
    raise ConfigError(f"algo: {type(config).__name__} is not an algorithm config.{nearest('', ALGOS)}")


def build_algorithm(config: Any, max_tokens: int) -> Algorithm:
    """The algorithm of a config variant; `max_tokens` is the longest completion, the constant divisor."""
    name = name_of(config)
    if name not in registered():
        raise ConfigError(f'algo "{name}" is configured but not implemented.{nearest(name, registered())}')
    return PolicyGradient(name, config, max_tokens)


def from_plain(plain: PlainAlgorithm) -> Algorithm:
    """An algorithm that was sent here: `plain` of another process's."""
    algo = build_algorithm(plain.config, plain.max_tokens)
    algo.load_state(plain.state)
    return algo
