"""Tests of model folders: exact round trips, and clear errors for every other folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cohort.errors import ModelError
from cohort.models.config import ModelConfig, make_rope, to_hf
from cohort.models.decoder import Decoder, hf_views, initialise, to_hf_shape
from cohort.models.files import digest_model, load_folder, save_folder
from cohort.models.staging import stage_folder


def make_config(**changes: object) -> ModelConfig:
    """Returns a small config with these changes."""
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 24,
        "hidden": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ff": 20,
        "norm_eps": 1e-5,
        "rope": make_rope({}, 8, 64),
        "max_positions": 64,
        "tied": True,
    }
    return ModelConfig(**values | changes)  # type: ignore[arg-type]


def make_decoder(**changes: object) -> Decoder:
    """Returns a small decoder with random weights, norms and biases included."""
    made = Decoder(make_config(**changes))
    initialise(made, seed=3)
    for p in made.parameters():
        if p.ndim == 1:
            p.data += torch.linspace(-0.5, 0.5, p.numel())
    return made


def read_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Returns copies of all weights by Hugging Face name."""
    return {name: to_hf_shape(name, view).clone() for name, view in hf_views(decoder)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(make_decoder(), None, None, tmp_path / "model")


@pytest.mark.parametrize("shard", [10**9, 2000], ids=["single", "sharded"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False},
        {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
        {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "qkv_bias": True, "out_bias": True},
        {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 1},
    ],
    ids=["tied", "untied", "qwen2", "qwen3", "biases"],
)
def test_round_trip_is_exact(changes: dict, shard: int, tmp_path: Path) -> None:
    first = make_decoder(**changes)
    save_folder(first, None, None, tmp_path / "a", max_shard_bytes=shard)
    assert (tmp_path / "a/model.safetensors.index.json").is_file() == (shard == 2000)
    loaded = load_folder(tmp_path / "a")
    assert loaded.config == first.config
    assert loaded.folder == tmp_path / "a"
    expected, found = read_weights(first), read_weights(loaded.decoder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[n], found[n]) for n in expected)
    save_folder(loaded.decoder, loaded.hf_config, tmp_path / "a", tmp_path / "b", max_shard_bytes=shard)
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes(), file.name


def test_stored_rows_are_the_hugging_face_ones(tmp_path: Path) -> None:
    """The query of head h is rows [h D, (h+1) D) of q_proj, though the decoder stores it elsewhere in qkv."""
    made = make_decoder()
    K, g, D = 2, 2, 8
    fused = made.layers[1].qkv.data.view(K, g + 2, D, 16)
    save_folder(made, None, None, tmp_path / "m")
    stored = load_file(tmp_path / "m/model.safetensors")
    q = stored["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(q[3 * D : 4 * D], fused[1, 1])
    assert torch.equal(stored["model.layers.1.self_attn.k_proj.weight"][D:], fused[1, 2])
    assert torch.equal(stored["model.layers.1.self_attn.v_proj.weight"][:D], fused[0, 3])


def test_half_a_character_in_the_config_is_written_again(tmp_path: Path) -> None:
    made = make_decoder()
    source = {**to_hf(made.config), "note": "é\ud800"}
    save_folder(made, source, None, tmp_path / "m")
    assert load_folder(tmp_path / "m").hf_config["note"] == "é\ud800"


def test_dtypes_in_and_out(tmp_path: Path) -> None:
    made = make_decoder()
    save_folder(made, None, None, tmp_path / "half", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "half/config.json").read_text())["torch_dtype"] == "bfloat16"
    loaded = load_folder(tmp_path / "half", dtype=torch.float64)
    assert loaded.decoder.embed.dtype == torch.float64
    assert torch.equal(loaded.decoder.embed.data, made.embed.data.bfloat16().double())
    assert loaded.decoder.inv_freq.dtype == torch.float32
    save_folder(loaded.decoder, {"dtype": "bfloat16"} | loaded.hf_config, None, tmp_path / "wide")
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float64"


def test_tokenizer_files_are_copied_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "notes.txt",
        "pytorch_model.bin",
    ):
        (folder / name).write_text(name)
    loaded = load_folder(folder)
    out = save_folder(loaded.decoder, loaded.hf_config, folder, tmp_path / "out")
    assert sorted(p.name for p in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (out / "chat_template.jinja").read_text() == "chat_template.jinja"


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces or adds stored tensors; None removes one."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")


def test_tied_head_may_be_stored_if_it_is_equal(folder: Path) -> None:
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(
        folder,
        **{"lm_head.weight": embed.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    )
    assert torch.equal(load_folder(folder).decoder.head_weight.data, embed)
    change_tensors(folder, **{"lm_head.weight": embed + 1})
    with pytest.raises(ModelError, match=r"lm_head.weight differs from the embedding"):
        load_folder(folder)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"model.norm.weight": None}, r'"model.norm.weight" missing'),
        ({"model.norm.weight": None, "model.embed_tokens.weight": None}, "and 1 more missing"),
        (
            {"model.layers.7.mlp.up_proj.weight": torch.ones(2)},
            r'unknown tensor "model.layers.7.mlp.up_proj.weight"',
        ),
        ({"model.norm.weight": torch.ones(15)}, r'"model.norm.weight" is \[15\], config.json says \[16\]'),
        (
            {"model.layers.0.self_attn.q_proj.weight": torch.ones(16, 32)},  # the right number of elements
            r"q_proj.weight\" is \[16, 32\], config.json says \[32, 16\]",
        ),
        ({"model.norm.weight": torch.ones(16, dtype=torch.int8)}, "quantised weights are not supported"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, tensors: dict, message: str) -> None:
    change_tensors(folder, **tensors)
    with pytest.raises(ModelError, match=message):
        load_folder(folder)


def test_truncated_and_corrupted_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-100], whole[:5], b"", b"\xff" * 300, b"garbage" + whole[7:]):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=r"model.safetensors cannot be read as safetensors"):
            load_folder(folder)


def test_folders_that_are_no_models(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        load_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config.json"):
        load_folder(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model.safetensors"):
        load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_folder(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="is not a JSON object"):
        load_folder(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_checkpoints_are_refused_unread(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=rf"only pickle weights \({name}\)"):
        load_folder(folder)


def save_sharded(tmp_path: Path) -> tuple[Path, dict]:
    """Writes a model in several files. Returns its folder and the contents of its index."""
    folder = save_folder(make_decoder(), None, None, tmp_path / "sharded", max_shard_bytes=4000)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize("where", ["absolute", "parent", "link", "pickle"])
def test_shard_paths_cannot_leave_the_folder(where: str, tmp_path: Path) -> None:
    folder, index = save_sharded(tmp_path)
    name, shard = next(iter(index["weight_map"].items()))
    outside = tmp_path / "outside.safetensors"
    shutil.copyfile(folder / shard, outside)
    if where == "link":
        (folder / shard).unlink()
        (folder / shard).symlink_to(outside)
    else:
        target = {"absolute": str(outside), "parent": "../outside.safetensors", "pickle": "weights.bin"}[where]
        index["weight_map"][name] = target
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"only \.safetensors" if where == "pickle" else "leaves the model folder"):
        load_folder(folder)


def test_a_single_file_may_not_be_a_link_out_either(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelError, match="leaves the model folder"):
        load_folder(folder)


def test_the_hub_caches_own_links_are_followed(folder: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--x"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename(repo / "blobs" / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(os.path.join("../../blobs", f"hash-{file.name}"))
    assert torch.equal(load_folder(snapshot).decoder.embed.data, make_decoder().embed.data)


def test_missing_shards_and_wrong_indexes_are_refused(tmp_path: Path) -> None:
    folder, index = save_sharded(tmp_path)
    shards = sorted(set(index["weight_map"].values()))
    first = folder / shards[0]
    kept = first.read_bytes()
    first.unlink()
    with pytest.raises(ModelError, match=rf"{shards[0]} is missing: restore it"):
        load_folder(folder)
    shutil.copyfile(folder / shards[1], first)
    with pytest.raises(ModelError, match="missing, though the index names this file"):
        load_folder(folder)
    first.write_bytes(kept)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        load_folder(folder)


def test_export_refuses_a_folder_in_use_and_leaves_it_alone(folder: Path) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ModelError, match="exists and is not empty"):
        save_folder(make_decoder(), None, None, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), stage_folder(tmp_path / "out") as aside:
        (aside / "config.json").write_text("{}")
        assert not (tmp_path / "out").exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelError, match=r"cannot write .*out.*disk is full"), stage_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_write_are_cleared_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    (tmp_path / ".out.writing-abc").mkdir()
    (tmp_path / ".out.writing-abc" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".other.writing-abc").mkdir()
    with stage_folder(tmp_path / "out") as first, pytest.raises(RuntimeError), stage_folder(tmp_path / "out") as second:
        assert {p.name for p in tmp_path.iterdir()} == {".other.writing-abc", first.name, second.name}
        raise RuntimeError
    assert {p.name for p in tmp_path.iterdir()} == {".other.writing-abc", "out"}


def test_an_error_of_the_tensor_writer_is_told_as_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot write .*out: the disk is full"), stage_folder(tmp_path / "out"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_folder_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with stage_folder(tmp_path / "link") as aside:
        (aside / "config.json").write_text("{}")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target" / "config.json").read_text() == "{}"


def test_a_digest_is_over_every_byte_of_the_model_and_nothing_else(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        save_folder(make_decoder(), None, None, folder, max_shard_bytes=1000)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert digest_model(a) == digest_model(b)
    (b / "results.json").write_text("{}")
    assert digest_model(a) == digest_model(b)
    for file in sorted(a.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert digest_model(a) != digest_model(b), file
        file.write_bytes(content)
    assert digest_model(a) == digest_model(b)


def test_a_digest_of_weights_that_only_vllm_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"1")
    before = digest_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"2")
    assert digest_model(tmp_path) != before
