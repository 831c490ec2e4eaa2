"""GGUF in, a Hugging Face folder out: weights dequantised, config and tokenizer from the metadata.

What the file holds as plain numbers is written as it is. Packed weights become fp32, exactly what they stand for, in
models of up to a billion weights, and bf16 in larger ones: half the disk, and what such a model is trained in anyway.

The only module that imports the `gguf` package, and only for the packings that `dequantize` lacks.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import ModelError
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder, hf_shaped, hf_views
from cohort.models.gguf.config import hf_config, hf_name
from cohort.models.gguf.dequantize import FORMATS, Format
from cohort.models.gguf.reader import Head, StoredTensor, read_head
from cohort.models.gguf.tokenizer import tokenizer_files
from cohort.models.shards import Shards, Spec
from cohort.models.staging import staged

SHARD_BYTES = 10**9
EXACT_WEIGHTS = 10**9  # packed weights of models up to this size become fp32
PIECE = 1 << 20  # weights that a thread unpacks at a time: they stay in its cache
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A tensor on its way from the file to the folder."""

    name: str  # in Hugging Face's naming
    stored: StoredTensor
    format: Format
    dtype: torch.dtype  # it is written in
    heads: int = 0  # whose rows are to be brought into order

    def pieces(self) -> Iterator[tuple[Weight, int, int]]:
        """(self, first number, how many): whole blocks, and whole heads where their rows change places."""
        total = self.stored.num_weights
        whole = math.lcm(self.format.num_weights, total // self.heads if self.heads else 1)
        step = max(whole, PIECE // whole * whole)
        for first in range(0, total, step):
            yield self, first, min(step, total - first)


def convert(
    file: str | Path,
    out: str | Path,
    progress: Callable[[float], None] = lambda share: None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the model in a GGUF file as a Hugging Face folder `out` (which must not exist, or be empty).

    `dtype` is what packed weights become: fp32 or bf16, by the model's size unless given.
    """
    file, out = Path(file), Path(out)
    head = read_head(file)
    config, weights = read_model(file, head, dtype)
    side_files = tokenizer_files(head.metadata, config["vocab_size"])
    with staged(out) as folder:
        specs = {w.name: Spec(shape=w.stored.shape, dtype=w.dtype) for w in weights}
        _check_space(folder, out, sum(spec.num_bytes for spec in specs.values()))
        _write_json(folder / "config.json", config, indent=2)
        _write_json(folder / "tokenizer.json", side_files["tokenizer.json"])
        _write_json(folder / "tokenizer_config.json", side_files["tokenizer_config.json"], indent=2)
        with Shards(folder, specs, SHARD_BYTES) as shards:
            write_weights(file, weights, shards, progress)
    return out


def read_model(file: Path, head: Head, dtype: torch.dtype | None = None) -> tuple[dict[str, Any], list[Weight]]:
    """The config.json of a GGUF file and its tensors, in the file's order; every one is there, and none else."""
    tensors = {t.name: t for t in head.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f'{file} has no tensor "token_embd.weight": it holds no whole language model')
    vocab_size = tensors["token_embd.weight"].shape[0]
    config = hf_config(head.metadata, tied="output.weight" not in tensors, vocab_size=vocab_size)
    names = {hf_name(t.name): t for t in head.tensors}
    formats = {t.format: _format_of(file, t) for t in head.tensors}
    _check_places(file, head, formats)
    shape = _checked_shape(file, config, names)
    total = sum(t.num_weights for t in head.tensors)
    packed = dtype or (torch.float32 if total <= EXACT_WEIGHTS else torch.bfloat16)
    heads = {}
    if shape.architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    weights = [
        Weight(
            name=name,
            stored=t,
            format=formats[t.format],
            dtype=formats[t.format].plain or packed,
            heads=heads.get(t.name.split(".")[-2], 0),
        )
        for name, t in names.items()
    ]
    wide = any(w.dtype is not torch.bfloat16 for w in weights if len(w.stored.shape) > 1)
    config["torch_dtype"] = "float32" if wide else "bfloat16"
    return config, weights


def write_weights(file: Path, weights: list[Weight], shards: Shards, progress: Callable[[float], None]) -> None:
    """Read, unpack and write every weight, on all cores, holding a few pieces in memory at a time."""
    pieces = [piece for weight in weights for piece in weight.pieces()]
    # a file takes bytes from one thread at a time: pieces that follow each other go to different files
    apart = -(-len(pieces) // shards.num_files)
    pieces = [piece for i in range(apart) for piece in pieces[i::apart]]
    total, done = sum(count for _, _, count in pieces), 0
    threads = torch.get_num_threads()
    source = os.open(file, os.O_RDONLY)
    # one core to each of these threads, none to torch's own
    pool = ThreadPoolExecutor(_num_cores(), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for count in pool.map(lambda piece: _write_piece(source, shards, *piece), pieces):
            done += count
            progress(done / total)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' setting is also that of threads to come
        os.close(source)


def _write_piece(source: int, shards: Shards, weight: Weight, first: int, count: int) -> int:
    form = weight.format
    raw = _read(source, weight.stored.offset + form.size(first), form.size(count))
    blocks = torch.frombuffer(raw, dtype=torch.uint8).view(-1, form.num_bytes)
    values = torch.empty(blocks.shape[0], form.num_weights)
    form.unpack(blocks, values)
    if weight.heads:
        heads = weight.heads * count // weight.stored.num_weights
        values = unpermuted(values.view(-1, *weight.stored.shape[1:]), heads)
    shards.write(weight.name, first, values.to(weight.dtype))
    return count


def _read(source: int, at: int, count: int) -> bytearray:
    """Bytes of a file. Not by mapping it into memory: a file that is cut meanwhile would end the process."""
    raw = bytearray(count)
    left = memoryview(raw)
    while left:
        got = os.preadv(source, [left], at)
        if got == 0:
            raise ModelError("the GGUF file became shorter while it was read: fetch it again")
        left, at = left[got:], at + got
    return raw


def unpermuted(rows: Tensor, num_heads: int) -> Tensor:
    """Query or key rows as Hugging Face has them: GGUF interleaves Llama's rotary pairs instead of halves."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _format_of(file: Path, tensor: StoredTensor) -> Format:
    """How a tensor is packed: known here, or to the gguf package."""
    if tensor.format in FORMATS:
        return FORMATS[tensor.format]
    what = f'{file}: tensor "{tensor.name}" is packed as number {tensor.format}'
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    except ImportError as e:
        raise ModelError(f"{what}, which needs the gguf package: pip install 'cohort[gguf]'") from e
    try:
        kind = GGMLQuantizationType(tensor.format)
        num_weights, num_bytes = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, num_bytes), dtype=np.uint8), kind)  # some have a name and nothing else
    except (ValueError, KeyError, NotImplementedError) as e:
        raise ModelError(f"{what}, which cannot be read ({e}): use another quantisation of the model") from e

    def unpack(blocks: Tensor, out: Tensor) -> None:
        row = blocks.numpy().reshape(1, -1)  # it loops over rows in Python
        out.copy_(torch.from_numpy(dequantize(row, kind)).view(out.shape))

    return Format(name=kind.name, num_weights=num_weights, num_bytes=num_bytes, unpack=unpack)


def _check_places(file: Path, head: Head, formats: dict[int, Format]) -> None:
    """Every tensor is whole blocks inside the file, and together they are no more than it has bytes."""
    together = 0
    for t in head.tensors:
        form = formats[t.format]
        if t.shape[-1] % form.num_weights:
            raise ModelError(
                f'{file}: tensor "{t.name}" has rows of {t.shape[-1]}, no multiple of {form.name}\'s blocks'
            )
        size = form.size(t.num_weights)
        together += size
        if t.offset + size > head.num_bytes:
            raise ModelError(f'{file} is corrupted or truncated (tensor "{t.name}" ends after it): fetch it again')
    if together > head.num_bytes:
        raise ModelError(f"{file} is corrupted (its tensors overlap): fetch it again")


def _checked_shape(file: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> ModelConfig:
    """The shape that the metadata describe, if it is that of the tensors."""
    # no size may be larger than what is there: the check below would not end, or not fit into memory
    largest = max(side for t in stored.values() for side in t.shape)
    for key, value in config.items():
        bound = len(stored) if key == "num_hidden_layers" else largest
        if key in _SIZES and (not isinstance(value, int) or not 1 <= value <= bound):
            raise ModelError(f"{file}: {key} would be {value!r}, which is not the size of anything in it")
    shape = ModelConfig.from_hf(config)
    try:
        with torch.device("meta"):
            expected = {name: tuple(hf_shaped(name, v).shape) for name, v in hf_views(Decoder(shape))}
    except RuntimeError as e:
        raise ModelError(f"{file}: the sizes in its metadata cannot be those of a model ({e})") from e
    for name in sorted(expected.keys() | stored.keys()):
        found = stored[name].shape if name in stored else "missing"
        if found != (said := expected.get(name, "nothing of it")):
            raise ModelError(f"{file}: {name} is {found}, its metadata say {said}: it is no whole model")
    return shape


def _check_space(folder: Path, out: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(f"{needed / 1e9:.1f} GB are needed for {out} and {free / 1e9:.1f} GB are free")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_json(file: Path, value: dict[str, Any], indent: int | None = None) -> None:
    file.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
