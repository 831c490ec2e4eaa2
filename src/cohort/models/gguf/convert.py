"""Conversion of a GGUF file to a Hugging Face folder with dequantised weights, config and tokenizer.

Weights that the file holds as plain numbers keep their type. Packed weights become fp32 in models of up to a billion
weights, which represents them exactly. In larger models they become bf16, which takes half the disk and is the type
that such a model is trained in anyway.

This is the only module that imports the `gguf` package, and only for the formats that `dequantize` lacks.
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
from cohort.models.decoder import Decoder, hf_views, to_hf_shape
from cohort.models.gguf.config import make_hf_config, to_hf_name
from cohort.models.gguf.dequantize import FORMATS, BlockFormat
from cohort.models.gguf.reader import GgufHeader, StoredTensor, read_header
from cohort.models.gguf.tokenizer import make_tokenizer_files
from cohort.models.shards import ShardWriter, TensorSpec
from cohort.models.staging import stage_folder
from cohort.system.kernel import count_cores

SHARD_BYTES = 10**9
EXACT_WEIGHTS = 10**9  # packed weights of models with up to this many weights become fp32
PIECE = 1 << 20  # weights that a thread unpacks at a time: few enough to stay in the core's cache
# Keys of config.json whose values are checked against the sizes of the tensors.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorConversion:
    """What is needed to convert one tensor of the file and write it to the folder."""

    name: str  # the Hugging Face name
    stored: StoredTensor
    format: BlockFormat  # how it is packed in the file
    dtype: torch.dtype  # that it is written in
    heads: int = 0  # number of heads whose rows must be reordered; 0 = the order is right

    def split_into_pieces(self) -> Iterator[tuple[TensorConversion, int, int]]:
        """Yields the pieces of the tensor that threads convert independently: (self, first entry, number of entries).

        A piece consists of whole blocks of the packed format, and of whole heads where rows are reordered. It has at
        most PIECE entries, unless one block or head has more.
        """
        total = self.stored.num_weights
        whole = math.lcm(self.format.num_weights, total // self.heads if self.heads else 1)
        step = max(whole, PIECE // whole * whole)
        for first in range(0, total, step):
            yield self, first, min(step, total - first)


def convert_gguf(
    file: str | Path,
    out: str | Path,
    progress: Callable[[float], None] = lambda share: None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes the model in a GGUF file as a Hugging Face folder `out`, which must not exist or be empty. Returns `out`.

    `dtype` is the type that quantised weights become. None means fp32 for models of up to a billion weights, else bf16.
    Unquantised weights keep their type. `progress` is called with the share of the weights that is written, 0 to 1.
    Raises ModelError if the file cannot be converted; then `out` is unchanged.
    """
    file, out = Path(file), Path(out)
    head = read_header(file)
    config, weights = plan_conversion(file, head, dtype)
    side_files = make_tokenizer_files(head.metadata, config["vocab_size"])
    with stage_folder(out) as folder:
        specs = {w.name: TensorSpec(shape=w.stored.shape, dtype=w.dtype) for w in weights}
        _check_space(folder, out, sum(spec.num_bytes for spec in specs.values()))
        _write_json(folder / "config.json", config, indent=2)
        _write_json(folder / "tokenizer.json", side_files["tokenizer.json"])
        _write_json(folder / "tokenizer_config.json", side_files["tokenizer_config.json"], indent=2)
        with ShardWriter(folder, specs, SHARD_BYTES) as shards:
            write_weights(file, weights, shards, progress)
    return out


def plan_conversion(
    file: Path, head: GgufHeader, dtype: torch.dtype | None = None
) -> tuple[dict[str, Any], list[TensorConversion]]:
    """Returns the contents of config.json for a GGUF file, and one conversion per tensor, in the order of the file.

    `head` is the file's header. `dtype` is the type that quantised weights become, or None: see `convert_gguf`. Raises
    ModelError if the model or a tensor's format is not supported, or unless the tensors are exactly those of the model
    that the metadata describe.
    """
    tensors = {t.name: t for t in head.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(
            f'{file} has no tensor "token_embd.weight": it does not hold a whole language model, choose one that does'
        )
    vocab_size = tensors["token_embd.weight"].shape[0]
    config = make_hf_config(head.metadata, tied="output.weight" not in tensors, vocab_size=vocab_size)
    names = {to_hf_name(t.name): t for t in head.tensors}
    formats = {t.format: _find_format(file, t) for t in head.tensors}
    _check_offsets(file, head, formats)
    shape = _read_checked_config(file, config, names)
    total = sum(t.num_weights for t in head.tensors)
    packed = dtype or (torch.float32 if total <= EXACT_WEIGHTS else torch.bfloat16)
    # llama.cpp reorders rows of q and k for Llama and Mistral only: see `unpermute_heads`.
    heads = {}
    if shape.architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
    weights = [
        TensorConversion(
            name=name,
            stored=t,
            format=formats[t.format],
            dtype=formats[t.format].plain or packed,
            heads=heads.get(t.name.split(".")[-2], 0),
        )
        for name, t in names.items()
    ]
    # Norms may be fp32 in any model: matrices decide what config.json says.
    wide = any(w.dtype is not torch.bfloat16 for w in weights if len(w.stored.shape) > 1)
    config["torch_dtype"] = "float32" if wide else "bfloat16"
    return config, weights


def write_weights(
    file: Path, weights: list[TensorConversion], shards: ShardWriter, progress: Callable[[float], None]
) -> None:
    """Reads the tensors `weights` from a GGUF file, unpacks them, and writes them into `shards`, on all cores.

    Only a few pieces are in memory at a time. `progress` is called with the share of weights that is written, 0 to 1.
    """
    pieces = [piece for weight in weights for piece in weight.split_into_pieces()]
    # A file takes bytes from one thread at a time. So the pieces are ordered to go to different files in turn.
    apart = -(-len(pieces) // shards.num_files)
    pieces = [piece for i in range(apart) for piece in pieces[i::apart]]
    total = sum(count for _, _, count in pieces)
    done = 0
    threads = torch.get_num_threads()
    source = os.open(file, os.O_RDONLY)
    # Each thread of the pool gets one core. torch must not start threads of its own within them.
    pool = ThreadPoolExecutor(count_cores(), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for count in pool.map(lambda piece: _write_piece(source, shards, *piece), pieces):
            done += count
            progress(done / total)
    finally:
        pool.shutdown(cancel_futures=True)
        # The setting of the pool's threads would also hold for threads that are started later.
        torch.set_num_threads(threads)
        os.close(source)


def _write_piece(source: int, shards: ShardWriter, weight: TensorConversion, first: int, count: int) -> int:
    """Converts `count` entries of the tensor `weight`, from entry `first` on, and writes them to `shards`.

    `source` is the descriptor of the open GGUF file. Returns `count`.
    """
    form = weight.format
    raw = _read_bytes(source, weight.stored.offset + form.count_bytes(first), form.count_bytes(count))
    blocks = torch.frombuffer(raw, dtype=torch.uint8).view(-1, form.num_bytes)
    values = torch.empty(blocks.shape[0], form.num_weights)
    form.unpack(blocks, values)
    if weight.heads:
        # The number of heads in this piece.
        heads = weight.heads * count // weight.stored.num_weights
        values = unpermute_heads(values.view(-1, *weight.stored.shape[1:]), heads)
    shards.write(weight.name, first, values.to(weight.dtype))
    return count


def _read_bytes(source: int, offset: int, count: int) -> bytearray:
    """Returns exactly `count` bytes from byte `offset` of the GGUF file with the descriptor `source`.

    Any thread may call this. Raises ModelError if the file ends before.
    """
    # The file is not mapped into memory: if it were cut short meanwhile, the process would be killed.
    raw = bytearray(count)
    rest = memoryview(raw)
    while rest:
        data = os.pread(source, len(rest), offset)
        if not data:
            raise ModelError(
                "the GGUF file became shorter while it was read: wait until no program writes it, or download it again"
            )
        rest[: len(data)] = data
        rest, offset = rest[len(data) :], offset + len(data)
    return raw


def unpermute_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Returns the rows of `num_heads` heads of a query or key matrix, moved from GGUF's order to Hugging Face's.

    For Llama, GGUF puts the two rows of a rotary pair (two entries that one angle rotates) next to each other. Hugging
    Face puts the first rows of all pairs of a head before their second rows.
    """
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _find_format(file: Path, tensor: StoredTensor) -> BlockFormat:
    """Returns how the tensor is packed: one of FORMATS, or else a format that the package gguf unpacks.

    Raises ModelError if that package is not installed or does not know the format. `file` is named in the message.
    """
    if tensor.format in FORMATS:
        return FORMATS[tensor.format]
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    except ImportError as e:
        raise ModelError(
            f'{file}: tensor "{tensor.name}" is packed as number {tensor.format}, which needs the gguf package: '
            "pip install 'cohort[gguf]'"
        ) from e
    try:
        kind = GGMLQuantizationType(tensor.format)
        num_weights, num_bytes = GGML_QUANT_SIZES[kind]
        # Tried on one block, because the package names some formats that it cannot unpack.
        dequantize(np.zeros((1, num_bytes), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as e:
        raise ModelError(
            f'{file}: tensor "{tensor.name}" is packed as number {tensor.format}, which the package gguf cannot unpack '
            f"({e}): use another quantisation of the model"
        ) from e

    def unpack(blocks: Tensor, out: Tensor) -> None:
        """Unpacks blocks with the gguf package and writes their weights into `out`."""
        # All blocks as one row, because the package loops over rows in Python.
        row = blocks.numpy().reshape(1, -1)
        out.copy_(torch.from_numpy(dequantize(row, kind)).view(out.shape))

    return BlockFormat(name=kind.name, num_weights=num_weights, num_bytes=num_bytes, unpack=unpack)


def _check_offsets(file: Path, head: GgufHeader, formats: dict[int, BlockFormat]) -> None:
    """Raises ModelError if a tensor's rows are not whole blocks, or if a tensor ends after the end of the file.

    Also raises it if all tensors together have more bytes than the file. Other overlaps of tensors are not noticed.
    `formats` are the block formats by GGUF's number.
    """
    together = 0
    for t in head.tensors:
        form = formats[t.format]
        if t.shape[-1] % form.num_weights:
            raise ModelError(
                f'{file}: tensor "{t.name}" has rows of {t.shape[-1]}, no multiple of {form.name}\'s blocks of '
                f"{form.num_weights}: the file is corrupted, download it again"
            )
        size = form.count_bytes(t.num_weights)
        together += size
        if t.offset + size > head.num_bytes:
            raise ModelError(
                f'{file} is corrupted or truncated (it ends before its tensor "{t.name}" does): download it again'
            )
    if together > head.num_bytes:
        raise ModelError(f"{file} is corrupted (its tensors overlap): download it again")


def _read_checked_config(file: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> ModelConfig:
    """Returns `config`, the contents of a config.json, as a ModelConfig after comparing it with the tensors of `file`.

    `stored` has the Hugging Face names of the tensors as keys. Raises ModelError if the native decoder does not support
    the config, or unless the tensors have exactly the names and shapes of that model.
    """
    # Absurd sizes are refused first: with them the check below would not end or not fit into memory. No size can be
    # larger than the largest side of a tensor, and there cannot be more layers than tensors.
    largest = max(side for t in stored.values() for side in t.shape)
    for key, value in config.items():
        bound = len(stored) if key == "num_hidden_layers" else largest
        if key in _SIZES and (not isinstance(value, int) or not 1 <= value <= bound):
            raise ModelError(
                f"{file}: {key} would be {value!r}, which is not the size of anything in it: "
                "the file is corrupted, download it again"
            )
    try:
        shape = ModelConfig.from_hf(config)
    except ModelError as e:
        raise ModelError(
            f"{file} cannot be converted: {e}. That config.json is made from the file's metadata: choose another GGUF "
            "file, or the safetensors version of the model (cohort pull OWNER/NAME)"
        ) from e
    try:
        # On the meta device the decoder has shapes but no memory.
        with torch.device("meta"):
            expected = {name: tuple(to_hf_shape(name, v).shape) for name, v in hf_views(Decoder(shape))}
    except RuntimeError as e:
        raise ModelError(
            f"{file}: the sizes in its metadata cannot be those of a model ({e}): "
            "the file is corrupted, download it again"
        ) from e
    for name in sorted(expected.keys() | stored.keys()):
        shape_in_file = stored[name].shape if name in stored else "missing"
        if shape_in_file != (described := expected.get(name, "nothing of it")):
            raise ModelError(
                f"{file}: {name} is {shape_in_file}, its metadata say {described}: "
                "the file does not hold one whole model (it may be one part of several), choose one that does"
            )
    return shape


def _check_space(folder: Path, out: Path, needed: int) -> None:
    """Raises ModelError unless `needed` bytes are free on the disk of `folder`. `out` is named in the message."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"{needed / 1e9:.1f} GB are needed for {out} and {free / 1e9:.1f} GB are free: "
            "free some space, or set the environment variable COHORT_CACHE to a folder on a larger disk"
        )


def _write_json(file: Path, value: dict[str, Any], indent: int | None = None) -> None:
    """Writes `value` to a file as JSON with a final newline: on one line, or indented by `indent` spaces."""
    file.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
