"""Engines made from settings, what they state they can do, and weights that get there or do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.config import engines as variants
from cohort.config.load import load
from cohort.config.schema import ENGINES
from cohort.engines.base import Abilities, require_for_training, sample
from cohort.engines.factory import Subject, abilities_of, make_engine
from cohort.engines.native.engine import NativeEngine
from cohort.engines.scripted import ScriptedEngine
from cohort.engines.sync import WeightSync
from cohort.engines.weights import copy_weights
from cohort.errors import ConfigError, EngineError, ModelError
from cohort.jobs import build
from cohort.learner.base import LiveWeights
from cohort.models.decoder import hf_views
from tests.helpers.decoders_and_groups import small_decoder
from tests.helpers.engine_conformance import request, spell
from tests.helpers.fake_server import serving


def test_a_decoder_in_this_process_is_sampled_from_as_it_is():
    decoder = small_decoder()
    engine = make_engine(variants.NativeEngine(slots=3), Subject(decoder=decoder, decode=spell, context=64))
    assert isinstance(engine, NativeEngine) and engine.name == "native"
    assert engine.decoder is decoder and (engine.num_slots, engine.max_context) == (3, 64)
    assert sample(engine, [request()])["0/0"].text.count(".") == 12


def test_a_server_is_asked_for_the_model_by_its_name():
    with serving() as server:
        engine = make_engine(variants.ServerEngine(url=server.url, slots=2), Subject(name="small", context=0))
        assert engine.name == "server" and sample(engine, [request()])["0/0"].text


def test_what_is_stated_of_a_variant_is_what_its_engine_states():
    stated = {name: abilities_of(cls()) for name, cls in ENGINES.items()}
    assert stated["native"] == Abilities()
    assert stated["vllm"] == Abilities(live_weights=False)
    assert stated["server"] == Abilities(token_ids=False, logprobs=False, live_weights=False)


@pytest.mark.parametrize("missing", ["token_ids", "logprobs", "live_weights"])
def test_training_needs_every_ability(missing: str):
    require_for_training(Abilities(), "good")
    words = {"token_ids": "token ids", "logprobs": "log-probabilities", "live_weights": "live weights"}[missing]
    with pytest.raises(ConfigError, match=f"engine odd cannot train: it has no {words}. Train with --engine native"):
        require_for_training(Abilities(**{missing: False}), "odd")


@pytest.mark.parametrize("name", ["vllm", "server"])
def test_a_run_with_an_engine_that_cannot_train_is_refused_before_anything_is_written(name: str, tmp_path: Path):
    """Neither vLLM nor a server is there: what the variant states is enough."""
    with pytest.raises(ConfigError, match=f"engine {name} cannot train") as error:
        build.train(load("quickstart", ["--engine", name]), tmp_path / "run", "plain")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def engine_of(decoder: Any) -> NativeEngine:
    return NativeEngine(decoder, spell, slots=4, max_context=64)


def test_shared_storage_is_not_copied():
    decoder = small_decoder()
    engine = engine_of(decoder)
    before = {name: view.data_ptr() for name, view in hf_views(decoder)}
    WeightSync(weights=lambda: LiveWeights(decoder), engine=engine).send(7)
    assert engine.version == 7 and before == {name: view.data_ptr() for name, view in hf_views(engine.decoder)}


def test_weights_of_another_decoder_are_copied_whole():
    learner, engine = small_decoder(seed=1), engine_of(small_decoder(seed=2))
    assert sample(engine, [request()])["0/0"].tokens != sample(engine_of(learner), [request()])["0/0"].tokens
    WeightSync(weights=lambda: LiveWeights(learner), engine=engine).send(3)
    drawn = sample(engine, [request()])["0/0"]
    assert drawn.versions == [(0, 3)]
    assert drawn.tokens == sample(engine_of(learner), [request()])["0/0"].tokens


def test_an_engine_that_keeps_its_old_version_is_found_out():
    class Deaf(ScriptedEngine):
        def load(self, weights: Any, version: int) -> None:
            pass

    sync = WeightSync(weights=lambda: LiveWeights(small_decoder()), engine=Deaf({}, spell))
    with pytest.raises(EngineError, match="samples from version 0 of the weights although version 2 was sent"):
        sync.send(2)


def test_weights_of_another_type_are_refused_unless_they_may_be_rounded():
    wide, narrow = small_decoder(torch.float32, seed=1), small_decoder(torch.bfloat16, seed=2)
    with pytest.raises(ModelError, match=r'"model.embed_tokens.weight" is of type float32; the model needs bfloat16'):
        copy_weights(LiveWeights(wide), narrow)
    copy_weights(LiveWeights(wide), narrow, rounded=True)
    assert all(torch.equal(a.bfloat16(), b) for (_, a), (_, b) in zip(hf_views(wide), hf_views(narrow), strict=True))
    with pytest.raises(ModelError, match="is of type bfloat16; the model needs float32"):
        copy_weights(LiveWeights(narrow), wide, rounded=True)


def test_weights_with_other_names_or_shapes_are_refused():
    with pytest.raises(ModelError, match="has shape"):
        copy_weights(LiveWeights(small_decoder(ff=48)), small_decoder())
    with pytest.raises(ModelError, match="weights lack"):
        copy_weights(LiveWeights(small_decoder(num_layers=1)), small_decoder())
    with pytest.raises(ModelError, match="that the model has not"):
        copy_weights(LiveWeights(small_decoder(num_layers=3)), small_decoder())
