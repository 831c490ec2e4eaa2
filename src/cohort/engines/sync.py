"""Gets a learner's weights to the engine that samples from them, and makes sure that they are there.

An engine that holds the learner's own decoder shares its storage: nothing is copied, cached state is dropped. Another
engine in this process copies every tensor (`weights.copy_weights` proves names, shapes and types).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cohort.engines.base import Engine, Weights
from cohort.errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """From `weights`, a function that gives the learner's current ones, to `engine`."""

    weights: Callable[[], Weights]
    engine: Engine

    def send(self, version: int) -> None:
        """Let the engine sample from the current weights, which from now on are called `version`."""
        self.engine.load(self.weights(), version)
        if self.engine.version != version:
            raise EngineError(
                f"the {self.engine.name} engine samples from version {self.engine.version} of the weights although "
                f"version {version} was sent."
            )
