"""The protocols `Loss` and `Algorithm`. An algorithm gives samples their advantages and tokens their loss.

To add an algorithm to the package, write its settings in `config/algos.py` and its policy loss in a module of
`algos/families`, decorated with `@surrogate("its_name")`. One of a user's own is a class under `@cohort.algorithm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.credit import CreditRule
from cohort.algos.inputs import LossInputs
from cohort.algos.pairing import PairedAlgorithm
from cohort.algos.policy import PlainAlgorithm, PolicyGradient
from cohort.algos.surrogates import algorithm_names, find_surrogate
from cohort.algos.tally import Tally
from cohort.config.algos import ALGOS, PairPolicy
from cohort.errors import ConfigError, suggest_name
from cohort.types import Group
from cohort.world import ONE_PROCESS, World


class Loss(Protocol):
    """The part of an algorithm that a learner's update needs. It sees flat vectors: no logits, no model, no ranks."""

    per_token: bool
    """Whether the loss term of a token depends on that token alone. Then `loss` may be called on any pieces."""
    has_ratio: bool
    """Whether the loss compares with the policy at the start of the step. Then later updates need `old_logprobs`."""
    whole_groups: bool
    """Whether the loss compares the samples of a group with each other. Then they stay in one microbatch."""

    def weigh_tokens(self, lengths: Lengths, totals: Totals) -> Tensor:
        """Returns the token weights [N] of a microbatch: the factor of each token's loss term, divisions included.

        `lengths` has the lengths of each token's sample and group, `totals` the denominators over all ranks.
        """

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the sum over tokens of loss term times token weight, as a 0-d tensor, and the metrics of the tokens.

        The loss of an optimizer step is the sum of the results of all its microbatches.
        """


class Algorithm(Loss, Protocol):
    """A loss and the rules that set advantages and exclusions. It sees records and flat vectors, never the model."""

    credit: CreditRule
    """How rewards become returns: one per sample, or one per turn."""

    @property
    def advantage_description(self) -> str:
        """How advantages are computed, as text for a report. An example is "baseline = mean, scale = std"."""

    def needs(self) -> frozenset[str]:
        """Returns which log-probabilities the learner must add to samples before `advantages`.

        The result is a subset of {"old", "ref"}: by the current policy, and by the reference policy.
        """

    def loss_needs(self) -> frozenset[str]:
        """Returns which of these the learner must add after `advantages`, to the samples that train, for the loss."""

    def accept(self, group: Group) -> bool:
        """Returns whether a scored group is kept. A group that is not kept is replaced by one of another prompt."""

    def advantages(self, groups: list[Group], world: World = ONE_PROCESS) -> list[Group]:
        """Sets `advantage`, `token_advantages` and `masked` of samples and `excluded` of groups, in place.

        Returns `groups`, all of them. A group that other code excluded keeps its fate. `world` has the ranks that train
        together, which must all call this: baselines over the batch use the groups of all ranks.
        """

    def update_coefficients(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adjusts the KL and entropy coefficients for the next step, if they have targets, by the metrics of a step.

        Returns the values that were used in that step, by metric name; coefficients without a target are left out.
        """

    def to_record(self) -> PlainAlgorithm:
        """Returns settings, `max_tokens` and state as a record that can be sent to another process."""

    def state(self) -> dict[str, float]:
        """Returns the current coefficients by name, and whether the entropy bonus acts. A checkpoint stores them."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Replaces the coefficients by those that `state` returned."""


def algorithm_name(config: Any) -> str:
    """Returns the name of the algorithm that `config` belongs to, a key of `config.algos.ALGOS`.

    The class must match exactly. Raises ConfigError for other objects.

    >>> from cohort.config.algos import DrGRPO
    >>> algorithm_name(DrGRPO())
    'dr_grpo'
    """
    name = ALGOS.get_name(type(config))
    if name is None:
        raise ConfigError(
            f"algo: {type(config).__name__} is not an algorithm config of cohort.config.algos.ALGOS. Use a class that "
            f'is there, such as GRPO, or write @cohort.algorithm("NAME") above yours.{suggest_name("", ALGOS)}'
        )
    return name


def build_algorithm(config: Any, max_tokens: int) -> Algorithm:
    """Returns the algorithm for a config of `config.algos.ALGOS`.

    `max_tokens` is the length of the longest completion, which some losses and penalties use. Raises ConfigError for
    other objects, for an algorithm without registered policy loss, and for one on pairs with a policy loss of its own.
    """
    name = algorithm_name(config)
    if isinstance(config, PairPolicy):
        if hasattr(config, "policy_loss"):
            raise ConfigError(
                f'algo "{name}" compares pairs of samples, so the method policy_loss of {type(config).__name__} would '
                "never be called: remove the method, or inherit cohort.Policy."
            )
        return PairedAlgorithm(config, max_tokens)
    surrogate = find_surrogate(config)
    if surrogate is None:
        raise ConfigError(
            f'algo "{name}" has settings but no policy loss: give its class a method policy_loss(self, tokens), or '
            f'decorate a function with @surrogate("{name}"), or choose another algorithm.'
            f"{suggest_name(name, algorithm_names())}"
        )
    return PolicyGradient(config, max_tokens, surrogate)


def algorithm_from_record(record: PlainAlgorithm) -> Algorithm:
    """Returns the algorithm that a record from `Algorithm.to_record` describes, with the coefficients that it had.

    Raises ConfigError as `build_algorithm` does.
    """
    algo = build_algorithm(record.config, record.max_tokens)
    algo.load_state(record.state)
    return algo
