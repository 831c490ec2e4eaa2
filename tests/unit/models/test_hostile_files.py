"""A model folder may come from anywhere: every value in its files gives a model or an error that names the file.

Time and memory stay small too: `config.json` may describe any size.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.config.schema import LoraConfig
from cohort.errors import CohortError, ModelError
from cohort.models.catalog import resolve_model
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder
from cohort.models.lora import Adapters
from cohort.models.peft import load_adapters, save_adapters
from cohort.text import Tokenizer

DEEP = "[" * 100_000 + "]" * 100_000
# Texts of JSON values that take the place of a field, one after another.
VALUES = (
    *("null", "-1", "0", "1", "2", "1000000000", "1" + "0" * 400, "1" + "0" * 5000, "1e400", "-1e400", "NaN", "1.5"),
    *('"x"', '""', '"\\ud800"', "[]", "[null]", "[[1]]", "{}", '{"a": null}', "true", "false", DEEP),
)
ROPES = [
    {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0, "mscale": 1.0}
    | {"mscale_all_dim": 1.0, "truncate": True, "rope_theta": 10000.0}
    for kind in ("linear", "llama3", "yarn")
]


def make_folder(folder: Path) -> Path:
    """Returns a copy of the bundled model, with adapters in a folder of it."""
    shutil.copytree(resolve_model("tiny"), folder)
    # The template where the mutations find it.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    decoder = load_folder(folder).decoder
    assert isinstance(decoder, Decoder)
    config = LoraConfig(rank=2, targets=("q_proj",))
    save_adapters(Adapters(decoder, config).tensors(), config, "tiny", folder / "adapters")
    return folder


def list_mutations() -> Iterator[tuple[str, str, str]]:
    """Yields (file, field, JSON text of the new value). The field "" stands for the whole file."""
    tiny = resolve_model("tiny")
    settings = json.loads((tiny / "config.json").read_text())
    window = ["sliding_window", "use_sliding_window", "layer_types", "max_window_layers", "rope_parameters"]
    fields = {
        "config.json": [*settings, *window, "quantization_config", "partial_rotary_factor", "transformers_version"],
        "generation_config.json": ["eos_token_id", "temperature"],
        "tokenizer_config.json": ["eos_token", "bos_token", "chat_template", "model_max_length"],
        "special_tokens_map.json": ["eos_token"],
        "tokenizer.json": ["model", "added_tokens", "normalizer", "pre_tokenizer", "decoder", "post_processor"],
        "adapters/adapter_config.json": ["r", "lora_alpha", "bias", "peft_type", "target_modules", "rank_pattern"],
        "model.safetensors.index.json": ["weight_map"],
    }
    for file, names in fields.items():
        yield from ((file, name, value) for name in ["", *names] for value in VALUES)
    for rope in ROPES:
        for key in rope:
            yield from (
                ("config.json", "rope_scaling", json.dumps(rope | {key: "PLACE"}).replace('"PLACE"', value))
                for value in VALUES
            )
    for key in ("type", "vocab", "merges", "unk_token"):
        yield from (("tokenizer.json", f"model.{key}", value) for value in VALUES)
    for key in ("id", "content", "special", "single_word"):
        yield from (("tokenizer.json", f"added_tokens.{key}", value) for value in VALUES)


def mutate(folder: Path, file: str, field: str, value: str) -> None:
    """Replaces a field of a JSON file by the text of another value."""
    path = folder / file
    data: Any = json.loads(path.read_text()) if path.exists() else {}
    if field == "":
        data = "PLACE"
    elif "." in field:
        outer, inner = field.split(".")
        (data[outer][0] if isinstance(data[outer], list) else data[outer])[inner] = "PLACE"
    else:
        data[field] = "PLACE"
    path.write_text(json.dumps(data).replace('"PLACE"', value))


def use_model(folder: Path) -> None:
    """Loads everything in a folder and uses it a little. Raises CohortError, which names the folder, or nothing."""
    try:
        model = load_folder(folder)
        with torch.no_grad():
            model.decoder.forward_one_sequence(torch.tensor([1, 2, 3]))
        tokenizer = Tokenizer.load(folder)
        tokenizer.decode(tokenizer.render([{"role": "user", "content": "hi"}]).tokens)
        adapters = load_adapters(folder / "adapters")
        assert isinstance(model.decoder, Decoder)
        Adapters(model.decoder, adapters.config, start=adapters.tensors)
    except CohortError as e:
        message = str(e)
        assert str(folder) in message or "chat template" in message or "adapters" in message, message
        assert len(message) < 1500, message


def run_mutations(folder: Path, mutations: list[tuple[str, str, str]]) -> None:
    """Uses the model with one changed field after another."""
    for file, field, value in mutations:
        path = folder / file
        before = path.read_bytes() if path.exists() else None
        mutate(folder, file, field, value)
        try:
            use_model(folder)
        except BaseException as e:
            raise AssertionError(f"{file}: {field} = {value[:80]} raises {type(e).__name__}: {str(e)[:300]}") from e
        finally:
            path.unlink()
            if before is not None:
                path.write_bytes(before)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hostile") / "m")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "m"))


def test_odd_values_give_a_model_or_a_plain_error(folder: Path) -> None:
    # Where no architecture is named, transformers is imported, which takes seconds.
    sample = [m for m in list_mutations() if m[1] not in ("", "architectures", "model_type")]
    run_mutations(folder, random.Random(0).sample(sample, 150))


@pytest.mark.slow
def test_every_odd_value_gives_a_model_or_a_plain_error(folder: Path) -> None:
    mutations = list(list_mutations())
    assert len(mutations) > 2000
    run_mutations(folder, mutations)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**9, "head_dim": 32},
        {"vocab_size": 10**9},
        {"intermediate_size": 10**12},
        {"num_attention_heads": 10**5, "num_key_value_heads": 10**5},
        {"head_dim": 10**9},
        {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 10**5, "hidden_size": 10**6},
    ],
)
def test_sizes_beyond_the_files_are_refused_before_memory_is_taken(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("a decoder is made")

    monkeypatch.setattr("cohort.models.files.Decoder", fail)
    for key, value in changes.items():
        mutate(folder, "config.json", key, json.dumps(value))
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_folder(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("changes", [{"n_layer": 10**9}, {"vocab_size": 10**9}, {"n_embd": 10**6}, {"n_head": 10**9}])
def test_sizes_of_foreign_models_are_compared_too(folder: Path, changes: dict[str, int]) -> None:
    shape = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 512}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **shape, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{next(iter(changes))} = .*of a smaller model"):
        load_folder(folder)


def test_the_number_of_weights_is_that_of_the_decoder() -> None:
    for changes in ({}, {"tied": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True}):
        config = replace(load_config(), **changes)
        decoder = Decoder(config)
        assert config.num_weights == sum(p.numel() for p in decoder.parameters())


def load_config() -> ModelConfig:
    """Returns the config of the bundled model."""
    return ModelConfig.from_hf(json.loads((resolve_model("tiny") / "config.json").read_text()))


def test_what_is_not_a_file_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load_folder(folder)
    weights.rmdir()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load_folder(folder)
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(ModelError, match=r"model\.safetensors "):
        load_folder(folder)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "adapters/adapter_config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    for read in (load_folder, Tokenizer.load, lambda path: load_adapters(path / "adapters")):
        with pytest.raises(ModelError, match=r"has no "):
            read(folder)


def make_safetensors(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """Returns the bytes of a safetensors file with this header, whose length may be a wrong one."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def make_head(**tensors: tuple[str, list[int], list[int]]) -> bytes:
    """Returns the header for tensors of (type, shape, offsets)."""
    return json.dumps({n: {"dtype": d, "shape": s, "data_offsets": o} for n, (d, s, o) in tensors.items()}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        make_safetensors(b"{}", b"", 1 << 62),
        make_safetensors(b"{}", b"", (1 << 64) - 1),
        make_safetensors(DEEP.encode(), b""),
        make_safetensors(b"[]", b""),
        make_safetensors(make_head(a=("F32", [2], [0, 8]), b=("F32", [2], [4, 12])), b"\0" * 12),
        make_safetensors(make_head(a=("F32", [2], [8, 0])), b"\0" * 8),
        make_safetensors(make_head(a=("F32", [-2], [0, 8])), b"\0" * 8),
        make_safetensors(make_head(a=("F32", [1 << 62, 4], [0, 8])), b"\0" * 8),
        make_safetensors(make_head(a=("F32", [1 << 40], [0, 1 << 42])), b"\0" * 8),
        make_safetensors(make_head(a=("F31", [2], [0, 8])), b"\0" * 8),
        make_safetensors(make_head(a=("F32", [2], [0, 8])), b"\0" * 4),
        make_safetensors(make_head(a=("F32", [2], [0, 8])), b"\0" * 80),
    ],
)
def test_damaged_weight_files_are_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        load_folder(folder)


def test_adapters_of_another_rank_are_refused_before_memory_is_taken(folder: Path) -> None:
    for value in ("1000000000", "3"):
        mutate(folder, "adapters/adapter_config.json", "r", value)
        with pytest.raises(ModelError, match=f"says r = {value}: they are of different adapters"):
            load_adapters(folder / "adapters")
