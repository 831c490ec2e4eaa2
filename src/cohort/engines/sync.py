"""Sends a learner's weights to the engine that samples from them, and proves that they arrived.

An engine that holds the learner's own decoder shares its storage: `load` copies nothing and only drops cached state.
Another engine in this process copies every tensor; `weights.copy_weights` checks names, shapes and types. An engine of
other people, such as vLLM, has a model of its own. What it did with the tensors is proved by a canary: fixed
sequences of tokens, whose log-probabilities engine and learner both compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cohort.engines.base import ENGINE_HERE, ComparableEngine, Engine, RestartingEngine, SleepingEngine, Weights
from cohort.engines.native.random import draw_uniforms
from cohort.errors import EngineError
from cohort.models.shards import TensorSpec

NUM_SEQUENCES = 4
NUM_TOKENS = 32
# Two correct programs differ by rounding: no more than this, per number type, at the start of a run.
LARGEST_START_GAP = {"float32": 0.01, "float64": 0.01, "bfloat16": 0.5, "float16": 0.5}
# Trained weights round otherwise than those of the start: a gap may grow by this factor before it counts as wrong.
GROWTH = 4.0
SMALLEST_TOLERANCE = 1e-5  # in nats; about ten times the usual gap of two fp32 programs
ADVICE = f"Continue from the last checkpoint with another engine: cohort resume RUN {ENGINE_HERE}."


@dataclass(kw_only=True, slots=True)
class Canary:
    """Compares the log-probabilities of engine and learner on fixed sequences of random tokens.

    The gap is the mean difference per token, without sign, of the copy of the weights that differs most. The first
    comparison is of the model as both have read it from its files. It sets the tolerance of all later ones.
    """

    engine: ComparableEngine
    compute: Callable[[list[int]], list[float]]  # the learner's log-probabilities of all tokens but the first
    vocab_size: int
    dtype: str
    tolerance: float = 0.0  # 0 = not measured yet
    expected: list[list[float]] = field(default_factory=list)  # per sequence, what the learner computed last

    def measure_gap(self) -> float:
        """Returns the gap between engine and learner, with the weights that each has now."""
        self.expected = [self.compute(tokens) for tokens in make_sequences(self.vocab_size)]
        return self._compare(self.engine)

    def _compare(self, engine: ComparableEngine) -> float:
        """Returns the gap between `engine`, with its weights of now, and what the learner computed last."""
        found = [engine.compute_logprobs(tokens) for tokens in make_sequences(self.vocab_size)]
        ours = torch.tensor(self.expected, dtype=torch.float64)[:, None]  # [sequences, 1, tokens]
        # [sequences, copies, tokens] -> [copies]
        gaps = (torch.tensor(found, dtype=torch.float64) - ours).abs().mean((0, 2))
        return float(gaps.max())  # NaN if one of them is

    def set_tolerance(self, name: str) -> None:
        """Measures the gap at the start of a run, and sets the tolerance. `name` is that of the engine.

        Raises EngineError if the gap is larger than rounding can explain: then both do not compute the same model.
        """
        gap, most = self.measure_gap(), LARGEST_START_GAP[self.dtype]
        # Written so that NaN fails too.
        if not gap <= most:
            raise EngineError(
                f"the {name} engine and the learner do not compute the same model: log-probabilities of the same "
                f"tokens differ by {gap:.3g} on average, and at most {most} is rounding in {self.dtype}. A server that "
                f"you started must have the same model and compute in {self.dtype} (vLLM: --dtype {self.dtype}). "
                f"Else train with {ENGINE_HERE}."
            )
        self.tolerance = max(GROWTH * gap, SMALLEST_TOLERANCE)

    def check(self, name: str, version: int) -> float:
        """Returns the gap after a load. Raises EngineError, with the numbers, if it is larger than the tolerance."""
        return self._check_gap(self.measure_gap(), name, version)

    def check_again(self, engine: ComparableEngine, name: str, version: int) -> float:
        """Returns the gap between what the learner computed last and `engine`, which has got the same weights later.

        Raises EngineError, with the numbers, if it is larger than the tolerance. The learner computes nothing: it may
        have newer weights by now.
        """
        return self._check_gap(self._compare(engine), name, version)

    def _check_gap(self, gap: float, name: str, version: int) -> float:
        """Returns `gap`. Raises EngineError if it is larger than the tolerance, or not a number."""
        if not gap <= self.tolerance:
            raise EngineError(
                f"version {version} of the weights did not arrive whole in the {name} engine: log-probabilities of the "
                f"same tokens differ from the learner's by {gap:.3g} on average, and the tolerance is "
                f"{self.tolerance:.3g}. {ADVICE}"
            )
        return gap


def make_sequences(vocab_size: int) -> list[list[int]]:
    """Returns the sequences of a canary: the same for every run with this vocabulary."""
    positions = torch.arange(NUM_SEQUENCES * NUM_TOKENS)
    uniforms = draw_uniforms(torch.zeros_like(positions), positions)
    ids: list[list[int]] = (uniforms * vocab_size).long().view(NUM_SEQUENCES, NUM_TOKENS).tolist()
    return ids


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Weights that are checked while they are read, against the names, shapes and types of the first that were sent."""

    weights: Weights
    expected: Mapping[str, TensorSpec]

    @property
    def module(self) -> Any:
        """The learner's decoder, which an engine may share; None if it is in another process."""
        return self.weights.module

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shapes and types that the weights are said to have. They are not checked."""
        return self.weights.specs

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, tensor). Raises EngineError for a tensor that is unknown, missing or of another
        shape or type, or that comes twice.
        """
        missing = set(self.expected)
        for name, tensor in self.weights:
            if name not in missing:
                raise EngineError(f'the new weights have a tensor "{name}" that is unknown or came before. {ADVICE}')
            spec, found = self.expected[name], TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype)
            if found != spec:
                raise EngineError(
                    f'the new weights "{name}" have shape {list(found.shape)} and type {found.dtype}; the engine needs '
                    f"{list(spec.shape)} and {spec.dtype}. {ADVICE}"
                )
            missing.discard(name)
            yield name, tensor
        if missing:
            raise EngineError(
                f"the new weights lack {len(missing)} tensors of the engine's model, {min(missing)} among them. "
                f"{ADVICE}"
            )


@dataclass(kw_only=True, slots=True)
class WeightSync:
    """The path of weights from a learner to an engine. `get_weights` returns the learner's current weights."""

    get_weights: Callable[[], Weights]
    engine: Engine
    canary: Canary | None = None  # None = the engine samples from the learner's own storage
    specs: dict[str, TensorSpec] = field(default_factory=dict)  # of the model's tensors, by name; {} without a canary
    metrics: dict[str, float] = field(default_factory=dict)  # of the last `send`; {} without a canary

    def start(self, load_first: bool = False) -> None:
        """Compares engine and learner before the first step, and sends the weights for the first time, as version 0.

        Does nothing without a canary. Both must have the model as it is in its files. `load_first` says that they have
        not: the learner has rounded its weights (nf4), or the engine has those of an earlier run. Then both are
        compared after the load only. Raises EngineError if they compute something else.
        """
        if self.canary is None:
            return
        self.specs = dict(self.get_weights().specs)
        if load_first:
            self.engine.load(CheckedWeights(self.get_weights(), self.specs), 0)
        self.canary.set_tolerance(self.engine.name)
        self.send(version=0)

    def free_memory(self) -> None:
        """Lets the engine free memory of its own until the next `send`. It takes no request meanwhile."""
        if isinstance(self.engine, SleepingEngine):
            self.engine.sleep()

    def send(self, version: int) -> None:
        """Loads the learner's current weights into the engine as `version`, and proves that they arrived.

        Raises EngineError if the engine does not report this version afterwards, or computes something else than the
        learner.
        """
        begin = time.perf_counter()
        weights = self.get_weights()
        self.engine.load(weights if self.canary is None else CheckedWeights(weights, self.specs), version)
        # An engine that silently kept its old weights would spoil the training.
        if self.engine.version != version:
            raise EngineError(
                f"the {self.engine.name} engine samples from version {self.engine.version} of the weights although "
                f"version {version} was sent. Continue from the last checkpoint: cohort resume RUN."
            )
        if self.canary is not None:
            loaded = time.perf_counter()
            gap = self.canary.check(self.engine.name, version)
            self._arrange_late_proof(self.canary, version)
            self.metrics = {
                "sync/gap": gap,
                "sync/load_seconds": loaded - begin,
                "sync/proof_seconds": time.perf_counter() - loaded,
            }

    def _arrange_late_proof(self, canary: Canary, version: int) -> None:
        """Makes an engine that starts parts of itself again prove the weights that these get."""
        if isinstance(self.engine, RestartingEngine):
            self.engine.late_proof = lambda part: canary.check_again(part, self.engine.name, version)
