"""Tests of models outside the native family: loading, writing, refusals, and the protocol of their engine.

tests/equivalence/test_auto.py tests that their numbers are right.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cohort.config import engines as variants
from cohort.engines.auto import AutoEngine
from cohort.engines.base import sample
from cohort.engines.factory import EngineModel, make_engine
from cohort.engines.native.engine import NativeEngine
from cohort.errors import ConfigError, ModelError
from cohort.models.auto import UNLIMITED_POSITIONS
from cohort.models.catalog import resolve_model
from cohort.models.files import load_folder, save_folder
from cohort.text import Tokenizer
from cohort.types import Finish
from tests.helpers.decoders_and_groups import small_decoder
from tests.helpers.engine_conformance import EngineConformance, SameWeights, request, spell
from tests.helpers.foreign_models import FAMILIES, load_foreign, make_foreign_model, write_foreign_folder


@pytest.fixture(scope="module")
def neo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-Neo folder for all tests of the module, which must not change it."""
    return write_foreign_folder(tmp_path_factory.mktemp("models") / "neo")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT-Neo folder that a test may change."""
    return write_foreign_folder(tmp_path / "neo")


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces or adds stored tensors; None removes one."""
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({n: t for n, t in stored.items() if t is not None}, folder / "model.safetensors")


# ---- files


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_has_the_same_tensors_and_config(family: str, tmp_path: Path) -> None:
    source = write_foreign_folder(tmp_path / "a", family)
    loaded = load_folder(source)
    save_folder(loaded.decoder, loaded.hf_config, source, tmp_path / "b")
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    # The names are those that it was published with, and a tied head is stored once.
    assert first.keys() == again.keys()
    assert all(torch.equal(t, again[name]) for name, t in first.items())
    assert sum(name.startswith(("lm_head", "embed_out")) for name in again) == (family == "gpt_neox")
    assert json.loads((tmp_path / "b/config.json").read_text()) == loaded.hf_config | {"dtype": "float32"}
    assert Tokenizer.load(tmp_path / "b").stop_ids == Tokenizer.load(source).stop_ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    own = load_folder(tmp_path / "b").decoder.model.state_dict()
    assert theirs.state_dict().keys() == own.keys()
    assert all(torch.equal(t, own[name]) for name, t in theirs.state_dict().items())


def test_saving_in_shards_in_bf16_with_a_new_config(neo: Path, tmp_path: Path) -> None:
    loaded = load_folder(neo)
    save_folder(loaded.decoder, None, None, tmp_path / "half", dtype=torch.bfloat16, max_shard_bytes=40_000)
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    assert sorted(p.name for p in (tmp_path / "half").glob("*.json")) == ["config.json", "model.safetensors.index.json"]
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    again = load_folder(tmp_path / "half").decoder.state_dict()
    for name, t in loaded.decoder.state_dict().items():
        assert torch.equal(again[name], t.bfloat16().float()), name
    assert loaded.decoder.embed.dtype == torch.float32  # the model itself is left as it was


def test_overwriting_the_file_does_not_change_the_loaded_model(folder: Path) -> None:
    """safetensors maps files into memory, so the loaded weights must be copies."""
    decoder, file = load_folder(folder).decoder, folder / "model.safetensors"
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    with open(file, "r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)
    assert all(torch.equal(p, before[n]) for n, p in decoder.named_parameters())


def test_the_config_of_a_foreign_model(neo: Path, tmp_path: Path) -> None:
    loaded = load_folder(neo)
    assert loaded.config == loaded.decoder.config and loaded.folder == neo
    assert (loaded.config.architecture, loaded.config.vocab_size, loaded.config.context) == (
        "GPTNeoForCausalLM",
        512,
        256,
    )
    assert loaded.decoder.embed is loaded.decoder.head_weight  # tied: one parameter, trained once
    assert (
        load_folder(
            write_foreign_folder(tmp_path / "bloom", "bloom", hidden_size=16, n_layer=1, n_head=2)
        ).config.context
        == UNLIMITED_POSITIONS
    )
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    phi = write_foreign_folder(
        tmp_path / "phi",
        "phi3",
        **small,
        num_key_value_heads=1,
        original_max_position_embeddings=32,
        rope_parameters=rope,
    )
    assert load_folder(phi).config.context == 32


def test_dropout_stays_off(tmp_path: Path) -> None:
    off = {"embed_dropout": 0.5, "attention_dropout": 0.5, "resid_dropout": 0.5}
    decoder = load_folder(write_foreign_folder(tmp_path / "m", **off)).decoder.train()
    tokens = torch.arange(20)
    assert torch.equal(decoder(tokens), decoder(tokens)) and not decoder.training


# ---- refusals


def get_refusal(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Returns the error message, of one line, with which loading the folder fails."""
    with pytest.raises(ModelError) as error:
        load_folder(folder, dtype)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}},
            'no model_type "own", and code that',
        ),
        ({"model_type": "own"}, 'no model_type "own"'),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder (t5)"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "no causal language model for model_type vit"),
        ({"architectures": ["GPTNeoForSequenceClassification"]}, "GPTNeoForSequenceClassification; the causal"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"architectures": {"a": 1}, "model_type": ["gpt_neo"]}, "no model_type \"['gpt_neo']\""),
        ({"num_heads": 5}, "embed_dim must be divisible by num_heads"),
        ({"num_layers": "many"}, "cannot read this config.json: Validation error for field 'num_layers'"),
    ],
)
def test_configs_that_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(folder, **changes)
    assert words in get_refusal(folder)


def test_code_that_comes_with_a_model_is_never_run(folder: Path) -> None:
    """transformers' own class is used if it knows the type, even if the folder comes with code."""
    (folder / "own.py").write_text("raise SystemExit('ran')\n")
    brings = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit_config(folder, auto_map=brings, attn_implementation="someone/kernels", _attn_implementation="someone/kernels")
    decoder = load_folder(folder).decoder
    assert type(decoder.model).__module__.startswith("transformers.")
    assert decoder.model.config._attn_implementation == "eager"


def test_pickles_are_refused_though_transformers_would_read_them(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pickle weights (pytorch_model.bin)" in get_refusal(folder)


def test_wrong_tensors(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    with caplog.at_level(logging.WARNING):
        change_tensors(folder, **{"transformer.other": torch.ones(2), "transformer.another": torch.ones(2)})
        load_folder(folder)
    assert 'tensor "transformer.another" and 1 more not used by GPTNeoForCausalLM' in caplog.text
    original = load_file(folder / "model.safetensors")[name]
    change_tensors(folder, **{name: original.to(torch.int8)})
    assert f'"{name}" is torch.int8: quantised' in get_refusal(folder)
    change_tensors(folder, **{name: original[:4].clone()})
    assert f'tensor "{name}" is [4, 32], config.json says [48, 32]' in get_refusal(folder)
    change_tensors(folder, **{name: torch.full_like(original, float("nan"))})
    assert "not finite, so its weights seem damaged" in get_refusal(folder)
    change_tensors(folder, **{name: None})
    assert f'tensor "{name}" missing: the weights are incomplete' in get_refusal(folder)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    assert "cannot be read as safetensors" in get_refusal(folder)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("gemma2", {**SMALL, "num_key_value_heads": 2, "head_dim": 8}, "not its last hidden state times"),  # capped
        ("cohere", {**SMALL, "num_key_value_heads": 2}, "not its last hidden state times"),  # scaled
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "head with a bias"),
        ("bert", {**SMALL, "is_decoder": True}, "head with a bias"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2}, "takes no past_key_values"),
    ],
)
def test_models_that_are_refused_after_a_trial(
    family: str, values: dict[str, Any], words: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert words in get_refusal(write_foreign_folder(tmp_path / family, family, **values), dtype)


def test_a_soft_cap_is_found_where_logits_are_small(tmp_path: Path) -> None:
    """A cap changes logits below 0.1 by less than a millionth. After training, logits could be larger."""
    model = make_foreign_model("gemma2", **SMALL, num_key_value_heads=2, head_dim=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
        assert model(torch.arange(9)[None]).logits.abs().max() < 0.1
    model.save_pretrained(tmp_path / "m")
    assert "soft-capped" in get_refusal(tmp_path / "m")


def test_a_model_whose_logits_depend_on_padding_is_refused(neo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This model counts positions in columns instead of tokens, so padding on the left changes a prompt."""
    forward = transformers.GPTNeoModel.forward

    def careless(self: Any, input_ids: Any, position_ids: Any = None, **given: Any) -> Any:
        return forward(self, input_ids, **given)

    careless.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(transformers.GPTNeoModel, "forward", careless)
    assert "other logits than one alone" in get_refusal(neo)


def test_without_transformers_one_line_says_what_to_install(neo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert get_refusal(neo) == (
        "GPTNeoForCausalLM is not a model of the native decoder and needs the package transformers: "
        "install it with pip install 'cohort[transformers]'"
    )
    assert load_folder(resolve_model("tiny")).config.architecture == "LlamaForCausalLM"


# ---- the engine


def make_auto_engine(neo: Path, slots: int = 4, window: int = 8) -> AutoEngine:
    """Returns an engine with the model of the folder."""
    return AutoEngine(load_foreign(neo), spell, slots=slots, max_context=200, window=window)


class TestConformance(EngineConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, neo: Path) -> None:
        self.folder = neo

    def make(self, slots: int = 4) -> AutoEngine:
        return make_auto_engine(self.folder, slots)


class TestConformanceWindowOne(TestConformance):
    def make(self, slots: int = 4) -> AutoEngine:
        return make_auto_engine(self.folder, slots, window=1)


def test_a_prompt_is_computed_once_per_group_and_finished_rows_are_removed(neo: Path) -> None:
    engine, seen = make_auto_engine(neo, slots=8), []
    run = engine.decoder.run_padded

    def record_shape(tokens: Any, mask: Any, cache: Any = None, keep_cache: bool = False) -> Any:
        seen.append(tuple(tokens.shape))
        return run(tokens, mask, cache, keep_cache)

    engine.decoder.run_padded = record_shape  # type: ignore[method-assign]
    sample(engine, [request(p, i, max_tokens=2 + i) for p in (0, 2) for i in range(3)])
    assert seen == [(2, 12), (6, 1), (4, 1), (2, 1)]
    assert engine.cache is None and not engine.drafts and not engine.running


def test_rows_side_by_side_never_outgrow_the_context(neo: Path) -> None:
    """If both requests ran side by side from the start, they would need 18 + 240 columns, and the model has 256."""
    engine, widest = AutoEngine(load_foreign(neo), spell, slots=4, max_context=256), 0
    engine.submit(request(0, 0, max_tokens=3, tokens=list(range(1, 19))))
    engine.submit(request(1, 0, max_tokens=240))
    samples = {}
    while events := engine.poll():
        samples.update({e.id: e.sample for e in events if e.sample is not None})
        widest = max(widest, engine.mask.shape[1])
    assert [len(samples[id].tokens) for id in ("0/0", "1/0")] == [3, 240] and widest <= 243


def test_prompts_are_computed_in_bounded_parts(neo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(p, i) for p in range(3) for i in range(3)]
    expected = {k: s.tokens for k, s in sample(make_auto_engine(neo, slots=9), requests).items()}
    monkeypatch.setattr("cohort.engines.auto.PREFILL_TOKENS", 12)
    monkeypatch.setattr("cohort.engines.auto.MAX_LOGITS", 512 * 2)
    assert {k: s.tokens for k, s in sample(make_auto_engine(neo, slots=9), requests).items()} == expected


def test_damaged_weights_raise_an_error_and_the_engine_recovers(neo: Path) -> None:
    engine = make_auto_engine(neo)
    expected = sample(engine, [request(max_tokens=20)])["0/0"].tokens
    engine.submit(request(max_tokens=20))
    engine.poll()
    norm = engine.decoder.model.transformer.ln_f.weight
    kept = norm.detach().clone()
    norm.data.fill_(float("nan"))
    with pytest.raises(ModelError, match=r"version 0.*not finite"):
        engine.poll()
    norm.data.copy_(kept)
    engine.load(SameWeights(engine.decoder), version=1)
    [done] = [e.sample for e in iter_events(engine) if e.sample is not None]
    assert done.tokens == expected and done.finish == Finish.LENGTH and done.versions == [(0, 0), (8, 1)]


def iter_events(engine: AutoEngine) -> Any:
    """Yields the engine's events until it has no more."""
    while events := engine.poll():
        yield from events


def test_out_of_memory_names_the_setting(neo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_auto_engine(neo)
    run = engine.decoder.run_padded

    def full(*args: Any, **values: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.submit(request())
    monkeypatch.setattr(engine.decoder, "run_padded", full)
    with pytest.raises(ConfigError, match=r"1 samples of 4 tokens at once. Start again with fewer slots"):
        engine.poll()
    monkeypatch.setattr(engine.decoder, "run_padded", run)
    assert len([e for e in iter_events(engine) if e.sample is not None]) == 1


def test_which_engine_for_which_decoder(neo: Path) -> None:
    def make_for(decoder: Any, context: int = 64, **values: Any) -> Any:
        return make_engine(variants.NativeEngine(slots=2, **values), EngineModel(decoder=decoder, context=context))

    assert type(make_for(load_foreign(neo))) is AutoEngine
    assert type(make_for(small_decoder(), weights="packed")) is NativeEngine
    with pytest.raises(ConfigError, match=r"engine.weights = packed needs a model .* GPTNeoForCausalLM is not one"):
        make_for(load_foreign(neo), weights="packed")
    with pytest.raises(ConfigError, match=r"257 tokens.*256"):
        make_for(load_foreign(neo), context=257)
    with pytest.raises(ModelError, match=r"but got weights of another one"):
        make_auto_engine(neo).load(SameWeights(load_foreign(neo)), version=1)
