"""What an algorithm is: a named object that gives samples their advantages and tokens their loss.

An algorithm is built from its config variant. To add one: a config class in `config/schema.py`, a class with
these methods decorated with `@algorithm("its_name")`, and its module imported in `algos/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.config.schema import ALGOS
from cohort.errors import ConfigError, nearest
from cohort.types import Group


class Loss(Protocol):
    """What a learner's update needs. A loss sees flat vectors only: never logits, model or ranks."""

    per_token: ClassVar[bool]
    """Whether each token's term depends on that token alone, so that tokens may be handed over in any pieces."""

    def weigh(self, lengths: Tensor, num_tokens: float, num_samples: float) -> Tensor:
        """[N] lengths (of each token's sample) -> [N] weights, given the global denominators."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """The microbatch's share of the loss, as a plain sum, and its metrics."""


class Algorithm(Loss, Protocol):
    """Pure with respect to the model: it sees records and flat vectors only."""

    def needs(self, num_updates: int) -> frozenset[str]:
        """Which of {"old", "ref"} logprobs to annotate when a batch gets `num_updates` optimizer steps."""

    def accept(self, group: Group) -> bool:
        """Whether a scored group is kept; a rejected one is replaced by another prompt's."""

    def advantages(self, groups: list[Group]) -> list[Group]:
        """Set samples' `advantage` and `masked` and groups' `excluded`, in place. Drops nothing."""


Builder = Callable[[Any, int], Algorithm]
"""(config variant, max_tokens of a completion) -> algorithm."""

_builders: dict[str, Builder] = {}


def algorithm(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder (usually a class) under its config variants' names in `config.schema.ALGOS`."""

    def register(builder: Builder) -> Builder:
        _builders.update(dict.fromkeys(names, builder))
        return builder

    return register


def name_of(config: Any) -> str:
    """The registered name of a config variant.

    >>> from cohort.config.schema import DrGRPO
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
    if name not in _builders:
        raise ConfigError(f'algo "{name}" is configured but not implemented.{nearest(name, _builders)}')
    return _builders[name](config, max_tokens)


def registered() -> Sequence[str]:
    """Names that can be built."""
    return sorted(_builders)
