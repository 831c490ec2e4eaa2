"""The proof that weights arrived: names, shapes and types of the tensors, and a canary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.engines.base import ComparableEngine, Weights
from cohort.engines.scripted import ScriptedEngine
from cohort.engines.sync import (
    GROWTH,
    NUM_SEQUENCES,
    NUM_TOKENS,
    SMALLEST_TOLERANCE,
    Canary,
    CheckedWeights,
    WeightSync,
    make_sequences,
)
from cohort.errors import EngineError
from cohort.models.decoder import Decoder, hf_views
from tests.helpers.decoders_and_groups import GivenWeights, naive_logprobs, small_decoder
from tests.helpers.engine_conformance import spell

VOCAB = small_decoder().config.vocab_size


def read_weights(decoder: Decoder) -> GivenWeights:
    """Returns a copy of the decoder's weights."""
    return GivenWeights([(name, tensor.clone()) for name, tensor in hf_views(decoder)])


def compute(decoder: Decoder, tokens: list[int]) -> list[float]:
    """Returns the log-probabilities of all tokens but the first."""
    with torch.no_grad():
        found: list[float] = naive_logprobs(decoder, tokens[:1], tokens[1:]).tolist()
    return found


class CopyingEngine(ScriptedEngine):
    """An engine with decoders of its own, which loads what `fault` makes of the tensors, and computes `offset` more."""

    def __init__(self, decoders: list[Decoder], offset: float = 0.0) -> None:
        super().__init__({}, spell)
        self.decoders = decoders
        self.offset = offset
        self.fault: Callable[[dict[str, Tensor]], None] = lambda tensors: None

    def load(self, weights: Weights, version: int) -> None:
        tensors = {name: tensor.clone() for name, tensor in weights}
        # Only the last copy is loaded wrongly: one wrong copy among several must be noticed.
        for i, decoder in enumerate(self.decoders):
            if i == len(self.decoders) - 1:
                self.fault(tensors)
            with torch.no_grad():
                for name, view in hf_views(decoder):
                    if name in tensors:
                        view.copy_(tensors[name])
        self.version = version

    def compute_logprobs(self, tokens: list[int]) -> list[list[float]]:
        return [[value + self.offset for value in compute(decoder, tokens)] for decoder in self.decoders]


def make_sync(learner: Decoder, engine: CopyingEngine) -> WeightSync:
    """Returns the path of weights from a decoder to an engine, with a canary."""
    canary = Canary(engine=engine, compute=lambda t: compute(learner, t), vocab_size=VOCAB, dtype="float32")
    return WeightSync(get_weights=lambda: read_weights(learner), engine=engine, canary=canary)


def change(decoder: Decoder, seed: int) -> None:
    """Changes all weights by about as much as a step of training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, view in hf_views(decoder):
            view.add_(1e-3 * torch.randn(view.shape, generator=generator))


def test_sequences_are_the_same_for_every_run():
    once, again = make_sequences(VOCAB), make_sequences(VOCAB)
    assert once == again and len(once) == NUM_SEQUENCES and {len(tokens) for tokens in once} == {NUM_TOKENS}
    assert all(0 <= token < VOCAB for tokens in once for token in tokens) and len(set(map(tuple, once))) == 4


@pytest.mark.parametrize("copies", [1, 2])
def test_whole_loads_are_accepted_and_measured(copies: int):
    learner = small_decoder(seed=1)
    engine = CopyingEngine([small_decoder(seed=1) for _ in range(copies)], offset=1e-4)
    sync = make_sync(learner, engine)
    sync.start()
    assert sync.canary is not None and sync.canary.tolerance == pytest.approx(GROWTH * 1e-4, rel=1e-3)
    for version in (1, 2):
        change(learner, version)
        sync.send(version)
        assert engine.version == version and sync.metrics["sync/gap"] == pytest.approx(1e-4, rel=1e-3)
        assert sync.metrics["sync/load_seconds"] > 0 and sync.metrics["sync/proof_seconds"] > 0


def test_the_tolerance_of_equal_programs_is_not_zero():
    sync = make_sync(small_decoder(), CopyingEngine([small_decoder()]))
    sync.start()
    assert sync.canary is not None and sync.canary.tolerance == SMALLEST_TOLERANCE


MATRIX = "model.layers.0.mlp.gate_proj.weight"


def drop(tensors: dict[str, Tensor]) -> None:
    """Leaves one tensor out: the engine keeps its old one."""
    del tensors[MATRIX]


def transpose(tensors: dict[str, Tensor]) -> None:
    """Transposes a square matrix."""
    assert len(set(tensors[MATRIX].shape)) == 1
    tensors[MATRIX] = tensors[MATRIX].T.contiguous()


def round_off(tensors: dict[str, Tensor]) -> None:
    """Rounds one matrix to bfloat16."""
    tensors[MATRIX] = tensors[MATRIX].bfloat16().float()


def spoil(tensors: dict[str, Tensor]) -> None:
    """Puts one NaN in."""
    tensors[MATRIX][0, 0] = float("nan")


@pytest.mark.parametrize("fault", [drop, transpose, round_off, spoil])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_wrong_load_is_caught_in_every_copy(fault: Callable[[dict[str, Tensor]], None], copies: int):
    learner = small_decoder(seed=1, ff=32)  # its gate is square
    engine = CopyingEngine([small_decoder(seed=1, ff=32) for _ in range(copies)])
    sync = make_sync(learner, engine)
    sync.start()
    change(learner, 1)
    engine.fault = fault
    with pytest.raises(EngineError, match="version 1 of the weights did not arrive whole in the scripted engine"):
        sync.send(1)


def test_an_engine_with_another_model_is_refused_at_the_start():
    sync = make_sync(small_decoder(seed=1), CopyingEngine([small_decoder(seed=2)]))
    with pytest.raises(EngineError, match=r"do not compute the same model: .* Else train with --engine native"):
        sync.start()


def test_a_learner_that_rounded_its_weights_is_compared_after_the_load():
    learner, engine = small_decoder(seed=2), CopyingEngine([small_decoder(seed=1)])
    sync = make_sync(learner, engine)
    sync.start(load_first=True)
    assert sync.canary is not None and sync.canary.tolerance == SMALLEST_TOLERANCE


def test_a_late_copy_is_compared_with_what_the_learner_computed_when_it_sent():
    learner, engine = small_decoder(seed=1), CopyingEngine([small_decoder(seed=1)])
    sync = make_sync(learner, engine)
    sync.start()
    late, stale = CopyingEngine([small_decoder(seed=1)]), CopyingEngine([small_decoder(seed=1)])
    change(learner, 1)
    sync.send(1)
    late.load(read_weights(learner), 1)
    change(learner, 2)  # the learner goes on
    assert sync.canary is not None
    sync.canary.check_again(late, "scripted", 1)
    with pytest.raises(EngineError, match="did not arrive whole"):
        sync.canary.check_again(stale, "scripted", 1)


def rename(tensors: list[tuple[str, Tensor]]) -> None:
    tensors[1] = ("model.odd", tensors[1][1])


def double(tensors: list[tuple[str, Tensor]]) -> None:
    tensors.append(tensors[0])


def shorten(tensors: list[tuple[str, Tensor]]) -> None:
    tensors.pop()


def reshape(tensors: list[tuple[str, Tensor]]) -> None:
    tensors[0] = (tensors[0][0], tensors[0][1].T)


def retype(tensors: list[tuple[str, Tensor]]) -> None:
    tensors[0] = (tensors[0][0], tensors[0][1].bfloat16())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (rename, '"model.odd" that is unknown'),
        (double, "that is unknown or came before"),
        (shorten, "lack 1 tensors of the engine's model"),
        (reshape, "have shape"),
        (retype, "and type torch.bfloat16; the engine needs"),
    ],
)
def test_what_is_sent_has_the_names_shapes_and_types_of_the_first_time(fault: Any, words: str):
    learner = small_decoder()
    sync = make_sync(learner, CopyingEngine([small_decoder()]))
    sync.start()
    weights = read_weights(learner)
    list(CheckedWeights(weights, sync.specs))  # nothing is wrong
    fault(weights.tensors)
    with pytest.raises(EngineError, match=words):
        list(CheckedWeights(weights, sync.specs))


def test_only_engines_with_weights_of_their_own_are_compared():
    assert isinstance(CopyingEngine([]), ComparableEngine) and not isinstance(
        ScriptedEngine({}, spell), ComparableEngine
    )
    sync = WeightSync(get_weights=lambda: read_weights(small_decoder()), engine=CopyingEngine([]))
    sync.start()
    assert sync.specs == {} and sync.metrics == {}
