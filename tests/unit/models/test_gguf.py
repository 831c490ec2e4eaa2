"""Tests of GGUF conversion: weights and tokens stay the same, and other files are refused with clear errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf as peer
import pytest
import torch

from cohort.errors import ModelError
from cohort.models.decoder import hf_views
from cohort.models.files import load_folder, read_tensors
from cohort.models.gguf import convert as gguf
from cohort.models.gguf.config import make_hf_config, to_hf_name
from cohort.models.gguf.convert import convert_gguf, unpermute_heads
from cohort.models.shards import ShardWriter, TensorSpec
from cohort.text import Tokenizer
from tests.helpers.gguf_file import write_gguf


@pytest.mark.parametrize("kind, tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
@pytest.mark.parametrize("piece", [64, 600, gguf.PIECE])
def test_conversion_is_exact(
    kind: str, tied: bool, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of less than a head, of two heads and a bit, and of everything.
    monkeypatch.setattr(gguf, "PIECE", piece)
    expected, _ = write_gguf(tmp_path / "m.gguf", kind, tied=tied)
    seen: list[float] = []
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", seen.append)
    loaded = load_folder(tmp_path / "out")
    assert loaded.config == expected.config
    found = dict(hf_views(loaded.decoder))
    for name, view in hf_views(expected):
        assert torch.equal(found[name], view), name
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    expected, _ = write_gguf(tmp_path / "m.gguf", packed="Q8_0")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found = dict(hf_views(load_folder(tmp_path / "out").decoder))
    for name, view in hf_views(expected):
        # A step of Q8_0 is max / 127. Rounding errs by half a step. The fp16 scale errs by 2^-11 of a step, up to 127
        # times that much in a weight.
        assert (found[name] - view).abs().max() <= view.abs().max() / 127 * (0.5 + 127 / 2048), name
    assert not torch.equal(found["model.embed_tokens.weight"], expected.embed.data)


@pytest.mark.parametrize("packed", ["Q4_1", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "TQ1_0"])
def test_every_format_end_to_end(packed: str, tmp_path: Path) -> None:
    """The weights equal those that the gguf package reads from the same file. It also unpacks the last two for us."""
    write_gguf(tmp_path / "m.gguf", "qwen2", packed=packed, hidden=256)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found = dict(read_tensors(tmp_path / "out/model.safetensors", None))
    for t in peer.GGUFReader(tmp_path / "m.gguf").tensors:
        expected = torch.from_numpy(peer.dequantize(t.data, t.tensor_type).copy())
        assert torch.equal(found.pop(to_hf_name(t.name)), expected), t.name
    assert not found


@pytest.mark.parametrize(
    "packed, limit, dtype, config",
    [
        ("Q8_0", 10**9, torch.float32, "float32"),
        ("Q8_0", 1000, torch.bfloat16, "bfloat16"),  # large and packed: rounded
        ("F32", 1000, torch.float32, "float32"),  # plain numbers are kept as they are
        ("F16", 1000, torch.float16, "float32"),
        ("BF16", 10**9, torch.bfloat16, "bfloat16"),
    ],
)
def test_types_of_the_written_weights(
    packed: str, limit: int, dtype: torch.dtype, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "EXACT_WEIGHTS", limit)
    write_gguf(tmp_path / "m.gguf", "qwen2", packed=packed)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    found = dict(read_tensors(tmp_path / "out/model.safetensors", None))
    for t in peer.GGUFReader(tmp_path / "m.gguf").tensors:
        exact = torch.from_numpy(peer.dequantize(t.data, t.tensor_type).copy())
        one = found[to_hf_name(t.name)]
        assert one.dtype == (dtype if exact.ndim == 2 else torch.float32), t.name
        assert torch.equal(one, exact.to(one.dtype)), t.name
        if packed != "Q8_0" or dtype == torch.float32:
            assert torch.equal(one.float(), exact), t.name
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == config
    assert load_folder(tmp_path / "out").decoder.embed.dtype == torch.float32


def test_the_type_can_be_chosen(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", packed="Q8_0")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype=torch.bfloat16)
    found = dict(read_tensors(tmp_path / "out/model.safetensors", None))
    assert found["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert found["model.norm.weight"].dtype == torch.float32


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SHARD_BYTES", 30_000)
    expected, _ = write_gguf(tmp_path / "m.gguf", "qwen3", tied=False)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    found = dict(hf_views(load_folder(tmp_path / "out").decoder))
    for name, view in hf_views(expected):
        assert torch.equal(found[name], view), name


def test_torch_keeps_its_threads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
        with ThreadPoolExecutor(1) as pool:
            assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_rotary_pairs_by_hand() -> None:
    rows = torch.tensor([[0], [10], [1], [11], [2], [12], [3], [13]])  # two heads of 4: pairs (0, 10), (1, 11) | ...
    assert unpermute_heads(rows, 2).flatten().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    _, folder = write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    original, rebuilt = Tokenizer.load(folder), Tokenizer.load(tmp_path / "out")
    messages = [{"role": "user", "content": "The answer is 1234, é 世界 🙂!\n\n  <|im_end|> <tool_call>"}]
    assert rebuilt.render(messages) == original.render(messages)
    assert rebuilt.stop_ids == original.stop_ids
    assert rebuilt.special_ids == original.special_ids
    assert rebuilt.encode("<think>", markup=True) == [original.get_token_id("<think>")]


@pytest.mark.parametrize("pre, text, pieces", [("llama-bpe", "12345", 2), ("qwen2", "12345", 5), ("gpt-2", "a1", 2)])
def test_other_ways_to_cut_text(pre: str, text: str, pieces: int, tmp_path: Path) -> None:
    import tokenizers

    write_gguf(tmp_path / "m.gguf", pre=pre)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    rebuilt = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert len(rebuilt.pre_tokenizer.pre_tokenize_str(text)) == pieces
    plain = "Then we're done:\n\n the answer, naïve  ok"
    assert rebuilt.decode(rebuilt.encode(plain).ids) == plain


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"pre": "deepseek-llm"}, 'pre-tokenizer "deepseek-llm"'),
        ({"model": "llama"}, 'GGUF tokenizer "llama" is not supported'),
        ({"tensors": ["rope_freqs.weight"]}, "its own rope frequencies"),
        ({"tensors": ["blk.0.ffn_gate_exps.weight"]}, 'tensor "blk.0.ffn_gate_exps.weight" is unknown'),
        ({"tensors": ["blk.2.attn_norm.weight"]}, r"layers\.2\.input_layernorm.weight is \(4,\), .* say nothing of it"),
        ({"tensors": ["blk.0.attn_q.bias"]}, r"q_proj.bias is \(4,\), its metadata say nothing of it"),
    ],
)
def test_files_that_cannot_be_converted_are_refused_with_the_reason(extra: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", **extra)
    with pytest.raises(ModelError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_transformers_takes_the_tokenizer_without_a_warning(tmp_path: Path) -> None:
    """Without a version in config.json, transformers would wrongly advise to change how text is cut."""
    write_gguf(tmp_path / "m.gguf", "qwen2", pre="qwen2")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    code = (
        "import sys, transformers\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(tokenizer.backend_tokenizer.encode('12345').tokens)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.stdout.strip() == "['1', '2', '3', '4', '5']", done.stderr
    assert "regex" not in done.stderr


def test_unsupported_architecture() -> None:
    with pytest.raises(ModelError, match='GGUF architecture "gemma2" is not supported'):
        make_hf_config({"general.architecture": "gemma2"}, tied=True, vocab_size=8)


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ModelError, match=r"0\.0 GB are needed for .*out and 0\.0 GB are free"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rare_formats_need_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "rare.gguf", packed="IQ4_NL")
    write_gguf(tmp_path / "common.gguf", packed="Q4_1")
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it fails
    with pytest.raises(
        ModelError, match=r"packed as number 20, which needs the gguf package: pip install 'cohort\[gguf"
    ):
        convert_gguf(tmp_path / "rare.gguf", tmp_path / "out")
    assert convert_gguf(tmp_path / "common.gguf", tmp_path / "out").is_dir()


def test_broken_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 23, 24, 40, len(whole) // 3, len(whole) - 200):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf", "m", "m.gguf"]
    (tmp_path / "cut.gguf").write_bytes(b"PK" + whole[2:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    with pytest.raises(ModelError, match="does not exist"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path / "out")
    with pytest.raises(ModelError, match="Is a directory"):
        convert_gguf(tmp_path, tmp_path / "out")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    file, before = tmp_path / "m.gguf", (tmp_path / "m.gguf").stat().st_size
    _, weights = gguf.plan_conversion(file, gguf.read_header(file))
    os.truncate(file, before // 2)
    specs = {w.name: TensorSpec(shape=w.stored.shape, dtype=w.dtype) for w in weights}
    with ShardWriter(tmp_path, specs, 10**9) as shards, pytest.raises(ModelError, match="became shorter"):
        gguf.write_weights(file, weights, shards, lambda share: None)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_raise_model_error_or_are_converted(seed: int, tmp_path: Path) -> None:
    """Random bytes in the header cause no crash and no endless loop: the file is refused or converted."""
    write_gguf(tmp_path / "m.gguf", "llama" if seed % 2 else "qwen2", packed="Q8_0")
    whole = (tmp_path / "m.gguf").read_bytes()
    end = len(whole) - gguf.read_header(tmp_path / "m.gguf").tensors[0].offset
    rng = random.Random(seed)
    refused = 0
    for i in range(60):
        damaged = bytearray(whole)
        # Half of the damage hits the few bytes of counts and numbers, half any byte of the header.
        reach = rng.choice([700, len(whole) - end])
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(reach)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            convert_gguf(tmp_path / "bad.gguf", tmp_path / f"out{i}")
        except ModelError as e:
            refused += 1
            assert "\n" not in str(e)
    assert 10 < refused < 60
