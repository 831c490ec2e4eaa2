"""Sends a learner's weights to the engine that samples from them, and checks that they arrived.

An engine that holds the learner's own decoder shares its storage: `load` copies nothing and only drops cached state.
Another engine in this process copies every tensor; `weights.copy_weights` checks names, shapes and types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cohort.engines.base import Engine, Weights
from cohort.errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """The path of weights from a learner to an engine. `get_weights` returns the learner's current weights."""

    get_weights: Callable[[], Weights]
    engine: Engine

    def send(self, version: int) -> None:
        """Loads the learner's current weights into the engine as `version`.

        Raises EngineError if the engine does not report this version afterwards.
        """
        self.engine.load(self.get_weights(), version)
        # An engine that silently kept its old weights would spoil the training.
        if self.engine.version != version:
            raise EngineError(
                f"the {self.engine.name} engine samples from version {self.engine.version} of the weights although "
                f"version {version} was sent. Continue from the last checkpoint: cohort resume RUN."
            )
