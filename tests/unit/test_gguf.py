"""GGUF in: the same weights, the same tokens, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cohort.errors import ModelError
from cohort.models.decoder import hf_views
from cohort.models.files import load_folder
from cohort.models.gguf import convert, hf_config, unpermuted
from cohort.text import Tokenizer
from tests.gguf_file import write_gguf


@pytest.mark.parametrize("kind, tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_conversion_is_exact(kind: str, tied: bool, tmp_path: Path) -> None:
    expected, _ = write_gguf(tmp_path / "m.gguf", kind, tied=tied)
    seen: list[float] = []
    convert(tmp_path / "m.gguf", tmp_path / "out", seen.append)
    loaded = load_folder(tmp_path / "out")
    assert loaded.config == expected.config
    found = dict(hf_views(loaded.decoder))
    for name, view in hf_views(expected):
        assert torch.equal(found[name], view), name
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    expected, _ = write_gguf(tmp_path / "m.gguf", quantise=True)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    found = dict(hf_views(load_folder(tmp_path / "out").decoder))
    for name, view in hf_views(expected):
        # Q8_0: a step is max / 127; off by half a step, and by 127 times the fp16 scale's error of 2^-11 step
        assert (found[name] - view).abs().max() <= view.abs().max() / 127 * (0.5 + 127 / 2048), name
    assert not torch.equal(found["model.embed_tokens.weight"], expected.embed.data)


def test_rotary_pairs_by_hand() -> None:
    rows = np.array([[0], [10], [1], [11], [2], [12], [3], [13]])  # two heads of 4: pairs (0, 10), (1, 11) | ...
    assert unpermuted(rows, 2).ravel().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    _, folder = write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    original, rebuilt = Tokenizer.load(folder), Tokenizer.load(tmp_path / "out")
    messages = [{"role": "user", "content": "The answer is 1234, é 世界 🙂!\n\n  <|im_end|> <tool_call>"}]
    assert rebuilt.render(messages) == original.render(messages)
    assert rebuilt.stop_ids == original.stop_ids
    assert rebuilt.special_ids == original.special_ids
    assert rebuilt.encode("<think>", markup=True) == [original.token_id("<think>")]


@pytest.mark.parametrize("pre, text, pieces", [("llama-bpe", "12345", 2), ("qwen2", "12345", 5), ("gpt-2", "a1", 2)])
def test_other_ways_to_cut_text(pre: str, text: str, pieces: int, tmp_path: Path) -> None:
    import tokenizers

    write_gguf(tmp_path / "m.gguf", pre=pre)
    convert(tmp_path / "m.gguf", tmp_path / "out")
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
    ],
)
def test_what_cannot_be_converted_is_named(extra: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", **extra)
    with pytest.raises(ModelError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unsupported_architecture() -> None:
    with pytest.raises(ModelError, match='GGUF architecture "gemma2" is not supported'):
        hf_config({"general.architecture": "gemma2"}, tied=True, vocab_size=8)


def test_broken_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 40, len(whole) // 3, len(whole) - 200):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            convert(tmp_path / "cut.gguf", tmp_path / "out")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf", "m", "m.gguf"]
    (tmp_path / "cut.gguf").write_bytes(b"PK" + whole[2:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path / "out")
    with pytest.raises(ModelError, match="does not exist"):
        convert(tmp_path / "nothing.gguf", tmp_path / "out")
