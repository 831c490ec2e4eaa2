"""The protocols `Loss` and `Algorithm`. An algorithm gives samples their advantages and tokens their loss.

To add an algorithm, write its settings in `config/algos.py` and its policy loss in `algos/surrogates.py`, decorated
with `@surrogate("its_name")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.policy import PlainAlgorithm, PolicyGradient
from cohort.algos.surrogates import algorithm_names
from cohort.algos.tally import Tally
from cohort.config.algos import ALGOS
from cohort.errors import ConfigError, suggest_name
from cohort.types import Group
from cohort.world import ONE_PROCESS, World


class Loss(Protocol):
    """The part of an algorithm that a learner's update needs. It sees flat vectors: no logits, no model, no ranks."""

    per_token: bool
    """Whether the loss term of a token depends on that token alone. Then `loss` may be called on any pieces."""
    has_ratio: bool
    """Whether the loss compares with the policy at the start of the step. Then later updates need `old_logprobs`."""

    def weigh_tokens(self, lengths: Lengths, totals: Totals) -> Tensor:
        """Returns the token weights [N] of a microbatch. `totals` has the global denominators."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the microbatch's share of the loss (a 0-d tensor, to be summed) and the metrics of its tokens."""


class Algorithm(Loss, Protocol):
    """A loss and the rules that set advantages and exclusions. It sees records and flat vectors, never the model."""

    @property
    def advantage_description(self) -> str:
        """How advantages are computed, as text for a report."""

    def needs(self) -> frozenset[str]:
        """Returns which log-probabilities samples must have before `advantages`: a subset of {"old", "ref"}."""

    def accept(self, group: Group) -> bool:
        """Returns whether a scored group is kept. A rejected group is replaced by one of another prompt."""

    def advantages(self, groups: list[Group], world: World = ONE_PROCESS) -> list[Group]:
        """Sets `advantage` and `masked` of samples and `excluded` of groups, in place. Returns all the groups.

        Baselines over the batch use the groups of all ranks.
        """

    def update_coefficients(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adjusts the KL and entropy coefficients for the next step, if they have targets, by a step's metrics.

        Returns the adjustable coefficients that were used in that step, by metric name.
        """

    def to_record(self) -> PlainAlgorithm:
        """Returns settings and state as a record that can be sent to another process."""

    def state(self) -> dict[str, float]:
        """Returns the coefficients, which a checkpoint stores."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restores what `state` returned."""


def algorithm_name(config: Any) -> str:
    """Returns the name of the algorithm that `config` belongs to. Raises ConfigError for other objects.

    >>> from cohort.config.algos import DrGRPO
    >>> algorithm_name(DrGRPO())
    'dr_grpo'
    """
    for name, variant in ALGOS.items():
        # Exact type: config classes inherit from each other.
        if type(config) is variant:
            return name
    raise ConfigError(f"algo: {type(config).__name__} is not an algorithm config.{suggest_name('', ALGOS)}")


def build_algorithm(config: Any, max_tokens: int) -> Algorithm:
    """Returns the algorithm for a config. `max_tokens` is the longest completion, a constant divisor in some losses."""
    name = algorithm_name(config)
    if name not in algorithm_names():
        raise ConfigError(f'algo "{name}" is configured but not implemented.{suggest_name(name, algorithm_names())}')
    return PolicyGradient(name, config, max_tokens)


def algorithm_from_record(record: PlainAlgorithm) -> Algorithm:
    """Returns the algorithm that another process sent with `Algorithm.to_record`."""
    algo = build_algorithm(record.config, record.max_tokens)
    algo.load_state(record.state)
    return algo
