"""Engines made from settings, their abilities, and the transfer of weights to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.config import engines as variants
from cohort.config.load import load_config
from cohort.config.schema import ENGINES
from cohort.engines.base import Abilities, require_for_training, sample
from cohort.engines.factory import EngineModel, get_abilities, make_engine
from cohort.engines.native.engine import NativeEngine
from cohort.engines.scripted import ScriptedEngine
from cohort.engines.sync import WeightSync
from cohort.engines.weights import copy_weights
from cohort.errors import ConfigError, EngineError, ModelError
from cohort.jobs import build
from cohort.learner.base import LiveWeights
from cohort.models.decoder import hf_views
from cohort.models.shards import TensorSpec
from tests.helpers.decoders_and_groups import GivenWeights, small_decoder
from tests.helpers.engine_conformance import request, spell
from tests.helpers.fake_server import serving


def test_a_loaded_decoder_is_sampled_from_without_a_copy():
    decoder = small_decoder()
    engine = make_engine(variants.NativeEngine(slots=3), EngineModel(decoder=decoder, decode=spell, context=64))
    assert isinstance(engine, NativeEngine) and engine.name == "native"
    assert engine.decoder is decoder and (engine.num_slots, engine.max_context) == (3, 64)
    assert sample(engine, [request()])["0/0"].text.count(".") == 12


def test_a_server_is_asked_for_the_model_by_its_name():
    with serving() as server:
        engine = make_engine(variants.ServerEngine(url=server.url, slots=2), EngineModel(name="small", context=0))
        assert engine.name == "server" and sample(engine, [request()])["0/0"].text


def test_abilities_of_a_variant_are_those_of_its_engine():
    stated = {name: get_abilities(cls()) for name, cls in ENGINES.items()}
    assert stated["native"] == Abilities()
    assert stated["vllm"] == Abilities(truncation=False)
    assert stated["server"] == Abilities(
        token_ids=False, logprobs=False, live_weights=False, truncation=False, streams=False
    )
    assert get_abilities(variants.NativeEngine(place="process")) == Abilities(streams=False)


@pytest.mark.parametrize("missing", ["token_ids", "logprobs", "live_weights"])
def test_training_needs_every_ability(missing: str):
    require_for_training(Abilities(), "good")
    words = {"token_ids": "token ids", "logprobs": "log-probabilities", "live_weights": "the loading of new weights"}[
        missing
    ]
    with pytest.raises(
        ConfigError, match=f"--engine odd is for cohort eval only, because it lacks {words}. Train with --engine native"
    ):
        require_for_training(Abilities(**{missing: False}), "odd")


REFUSED = {
    "--engine server is for cohort eval only": ["--engine", "server"],
    "--engine vllm cannot train with top-p, top-k or min-p": [
        "--engine",
        "vllm",
        "--sampling.top_p",
        "0.9",
        "--sampling.allow_truncation",
        "True",
    ],
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_run_with_an_engine_that_cannot_train_is_refused_before_anything_is_written(words: str, tmp_path: Path):
    """vLLM or a server need not be there: the variant's abilities are enough to refuse it."""
    with pytest.raises(ConfigError, match=words) as error:
        build.train(load_config("quickstart", REFUSED[words]), tmp_path / "run", "plain")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def make_native(decoder: Any) -> NativeEngine:
    """Returns a small native engine for the decoder."""
    return NativeEngine(decoder, spell, slots=4, max_context=64)


def test_shared_storage_is_not_copied():
    decoder = small_decoder()
    engine = make_native(decoder)
    before = {name: view.data_ptr() for name, view in hf_views(decoder)}
    WeightSync(get_weights=lambda: LiveWeights(decoder), engine=engine).send(7)
    assert engine.version == 7 and before == {name: view.data_ptr() for name, view in hf_views(engine.decoder)}


def test_weights_of_another_decoder_are_copied_whole():
    learner, engine = small_decoder(seed=1), make_native(small_decoder(seed=2))
    assert sample(engine, [request()])["0/0"].tokens != sample(make_native(learner), [request()])["0/0"].tokens
    WeightSync(get_weights=lambda: LiveWeights(learner), engine=engine).send(3)
    drawn = sample(engine, [request()])["0/0"]
    assert drawn.versions == [(0, 3)]
    assert drawn.tokens == sample(make_native(learner), [request()])["0/0"].tokens


def test_an_engine_that_keeps_its_old_version_raises():
    class IgnoresWeights(ScriptedEngine):
        def load(self, weights: Any, version: int) -> None:
            pass

    sync = WeightSync(get_weights=lambda: LiveWeights(small_decoder()), engine=IgnoresWeights({}, spell))
    with pytest.raises(EngineError, match="samples from version 0 of the weights although version 2 was sent"):
        sync.send(2)


def test_weights_of_another_type_are_refused_unless_they_may_be_rounded():
    wide, narrow = small_decoder(torch.float32, seed=1), small_decoder(torch.bfloat16, seed=2)
    with pytest.raises(ModelError, match=r'"model.embed_tokens.weight" are of type float32; the engine needs bfloat16'):
        copy_weights(LiveWeights(wide), narrow)
    copy_weights(LiveWeights(wide), narrow, allow_rounding=True)
    assert all(torch.equal(a.bfloat16(), b) for (_, a), (_, b) in zip(hf_views(wide), hf_views(narrow), strict=True))
    with pytest.raises(ModelError, match="are of type bfloat16; the engine needs float32"):
        copy_weights(LiveWeights(narrow), wide, allow_rounding=True)


def test_weights_with_other_names_or_shapes_are_refused():
    with pytest.raises(ModelError, match="have shape"):
        copy_weights(LiveWeights(small_decoder(ff=48)), small_decoder())
    with pytest.raises(ModelError, match="weights lack"):
        copy_weights(LiveWeights(small_decoder(num_layers=1)), small_decoder())
    with pytest.raises(ModelError, match="that the model of the engine has not"):
        copy_weights(LiveWeights(small_decoder(num_layers=3)), small_decoder())


def test_weights_are_read_once_and_only_if_their_specs_fit():
    """Ranks that divide the weights gather all of them for each reading."""
    target, weights = small_decoder(seed=1), GivenWeights(list(small_decoder(seed=2).named_weights()))
    copy_weights(weights, target)
    assert weights.num_reads == 1
    weights.tensors.pop()
    with pytest.raises(ModelError, match="weights lack 1 tensors"):
        copy_weights(weights, target)
    assert weights.num_reads == 1


def test_weights_that_are_not_as_their_specs_say_are_refused():
    class Lying(GivenWeights):
        specs = small_decoder().weight_specs()  # type: ignore[assignment]

    tensors = list(small_decoder(seed=2).named_weights())
    for wrong in (tensors[:-1], [*tensors[:-1], (tensors[-1][0], torch.zeros(3))], [*tensors, ("odd", torch.ones(1))]):
        with pytest.raises(ModelError):
            copy_weights(Lying(wrong), small_decoder())


@pytest.mark.parametrize("changes", [{}, {"tied": False, "qkv_bias": True, "qk_norm": True, "mlp_bias": True}])
def test_specs_are_those_of_the_tensors(changes):
    decoder = small_decoder(torch.bfloat16, **changes)
    assert decoder.weight_specs() == GivenWeights(list(decoder.named_weights())).specs
    assert {spec.dtype for spec in decoder.weight_specs(torch.float64).values()} == {torch.float64}


@pytest.mark.parametrize("place", ["first", "last", "missing", "unknown"])
def test_refused_weights_leave_the_decoder_as_it_was(place):
    target = small_decoder(seed=1)
    before = {name: tensor.clone() for name, tensor in target.named_weights()}
    tensors = list(small_decoder(seed=2).named_weights())
    if place == "missing":
        tensors.pop()
    elif place == "unknown":
        tensors.append(("model.extra", torch.zeros(1)))
    else:
        index = 0 if place == "first" else -1
        tensors[index] = (tensors[index][0], torch.zeros(3))
    with pytest.raises(ModelError):
        copy_weights(GivenWeights(tensors), target)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.named_weights())


class OtherDecoder(torch.nn.Module):
    """A model that Cohort does not implement itself: names and shapes of its weights are its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"filter": (4, 1, 3), "bias": (4,), "proj": (2, 4)}
        self.weights = {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()
        }

    def named_weights(self):
        return iter(self.weights.items())

    def weight_specs(self):
        return {name: TensorSpec(shape=tuple(p.shape), dtype=p.dtype) for name, p in self.named_weights()}


def test_weights_of_any_model_are_copied_by_their_own_names_and_shapes():
    source, target = OtherDecoder(1), OtherDecoder(2)
    copy_weights(LiveWeights(source), target)
    assert all(torch.equal(target.weights[name], p) for name, p in source.named_weights())
    source.weights["filter"] = torch.nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(ModelError, match=r"\[4, 3\]; the engine needs \[4, 1, 3\]"):
        copy_weights(LiveWeights(source), target)
