"""Comparison of the sizes in a config.json with the stored tensors, before memory is taken for what it describes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cohort.errors import ModelError
from cohort.models.config import ModelConfig
from cohort.models.hub import locate_download
from cohort.models.shards import DTYPES, TensorSpec
from cohort.system.json_text import show_value

Shapes = Mapping[str, list[int]]
"""Shapes of stored tensors by name."""

# A model may be described larger than its files by this factor and number of weights: the comparison of single tensors
# then says which of them differ, and the memory until then is small.
_FACTOR = 2
_EXTRA = 1 << 24
# Keys of a config.json whose value is at most the longest side of a stored tensor.
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_SIDES = (
    *_WIDTHS,
    *("vocab_size", "intermediate_size", "ffn_dim", "n_inner", "head_dim", "word_embed_proj_dim"),
    *("num_attention_heads", "num_heads", "n_head", "num_key_value_heads"),
)
# Keys of a config.json whose value is at most the number of stored tensors.
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


@contextmanager
def explain_damage(file: Path) -> Iterator[None]:
    """Turns the errors of reading a safetensors file inside the block into a ModelError that names the file."""
    try:
        yield
    except (SafetensorError, OSError) as e:
        raise ModelError(
            f"{file} cannot be read as safetensors ({e}). Restore the file; for a fetched model, delete "
            f"{locate_download(file.parent)} and run `cohort pull MODEL`"
        ) from e


def read_shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    """Returns the shapes of all tensors in safetensors files by name. Only the heads of the files are read.

    Raises ModelError if a file cannot be read.
    """
    shapes: dict[str, list[int]] = {}
    for file in files:
        # For torch the whole file would be mapped as memory of its own, and there may not be so much.
        with explain_damage(file), safe_open(file, framework="numpy") as stored:
            shapes |= {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 no dict
    return shapes


def read_specs(files: Iterable[Path]) -> dict[str, TensorSpec]:
    """Returns shape and type of all tensors in safetensors files by name. Only the heads of the files are read.

    Raises ModelError if a file cannot be read, or has tensors of a type that weights do not have.
    """
    types = {code: dtype for dtype, code in DTYPES.items()}
    specs: dict[str, TensorSpec] = {}
    for file in files:
        with explain_damage(file), safe_open(file, framework="numpy") as stored:
            for name in stored.keys():  # noqa: SIM118 no dict
                head = stored.get_slice(name)
                if head.get_dtype() not in types:
                    raise ModelError(f'{file}: the tensor "{name}" is of type {head.get_dtype()}, as no weights are')
                specs[name] = TensorSpec(shape=tuple(head.get_shape()), dtype=types[head.get_dtype()])
    return specs


def check_native_size(folder: Path, config: ModelConfig, shapes: Shapes) -> None:
    """Raises ModelError if the config of a native decoder describes many more weights than are stored."""
    stored = sum(map(math.prod, shapes.values()))
    if config.num_weights > _FACTOR * stored + _EXTRA:
        raise ModelError(
            f"{folder}: config.json describes a model of {config.num_weights} weights "
            f"({config.num_layers} layers, hidden size {config.hidden}, vocabulary {config.vocab_size}), but the "
            f"weight files have {stored}. Use a folder whose config.json and weights belong together"
        )


def check_foreign_size(folder: Path, hf_config: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises ModelError if `hf_config`, a config.json of any architecture, has sizes that the stored tensors rule out.

    Only sizes under the usual names are compared: those of embedding, layers and heads.
    """
    longest = max((side for shape in shapes.values() for side in shape), default=0)
    stored = sum(map(math.prod, shapes.values()))

    def find(keys: Iterable[str]) -> dict[str, int]:
        """Returns the whole numbers under these keys."""
        return {key: hf_config[key] for key in keys if type(hf_config.get(key)) is int}

    limits = {**dict.fromkeys(_SIDES, longest), **dict.fromkeys(_DEPTHS, len(shapes))}
    wrong = [key for key, value in find(limits).items() if value > limits[key]]
    width = max(find(_WIDTHS).values(), default=1)
    # A layer has at least two square matrices for attention, and the embedding has a row per token.
    for key, value in find((*_DEPTHS, "vocab_size")).items():
        if value * width * (1 if key == "vocab_size" else width) > _FACTOR * stored + _EXTRA:
            wrong.append(key)
    if wrong:
        raise ModelError(
            f"{folder}: config.json has {wrong[0]} = {show_value(hf_config[wrong[0]])}, but the stored tensors are of "
            "a smaller model. Use a folder whose config.json and weights belong together"
        )
