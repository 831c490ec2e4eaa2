"""Reading and writing of model folders in Hugging Face format.

Weights are read and written as safetensors only. Nothing in a folder is executed or unpickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cohort.errors import ModelError
from cohort.models.auto import (
    AnyDecoder,
    AutoDecoder,
    ForeignConfig,
    load_foreign_decoder,
    read_architecture,
    summarise_tensors,
)
from cohort.models.config import FAMILIES, ModelConfig, to_hf
from cohort.models.decoder import Decoder, hf_views, to_hf_shape
from cohort.models.hub import locate_download
from cohort.models.sizes import check_foreign_size, check_native_size, explain_damage, read_shapes
from cohort.models.staging import stage_folder
from cohort.system.digest import digest_files
from cohort.system.json_text import read_json_file, show_value

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Files of a tokenizer, its chat template and the sampling defaults. A saved folder gets those that its source has.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOAT_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A decoder with its config and the folder that it was read from."""

    decoder: AnyDecoder
    config: ModelConfig | ForeignConfig
    hf_config: dict[str, Any]  # contents of config.json
    folder: Path


def load_folder(path: str | Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Reads a model folder in Hugging Face format. Returns a decoder with weights in `dtype`, and its config.

    The decoder is this package's own (`Decoder`) if that supports the architecture, else a model of transformers
    (`AutoDecoder`). Raises ModelError if files are missing, damaged, or do not fit together, and if the model is not
    supported.
    """
    folder = Path(path)
    hf_config = read_config(folder)
    if not is_native(hf_config):
        # Before transformers is imported, which is slow: a folder without weights is refused at once.
        files = find_weight_files(folder)
        check_foreign_size(folder, hf_config, read_shapes(files))
        foreign = load_foreign_decoder(
            folder, hf_config, ((n, t) for n, t, _ in _read_all_tensors(folder, files)), dtype
        )
        return LoadedModel(decoder=foreign, config=foreign.config, hf_config=hf_config, folder=folder)
    try:
        config = ModelConfig.from_hf(hf_config)
    except ModelError as e:
        raise ModelError(f"{folder}: {e}") from e
    files = find_weight_files(folder)
    # Before memory is taken: the config may describe any size.
    check_native_size(folder, config, read_shapes(files))
    decoder = Decoder(config).to(dtype)
    views = dict(hf_views(decoder))
    stored_names: set[str] = set()
    tied_head: Tensor | None = None
    for name, tensor, file in _read_all_tensors(folder, files):
        stored_names.add(name)
        if config.tied and name == "lm_head.weight":
            # Some exports write a tied head too. It is compared below, when the embedding has surely been read.
            tied_head = tensor
        elif not name.endswith(".rotary_emb.inv_freq"):
            # Old exports contain rotary frequencies. They are skipped: the config determines them.
            _copy_into_view(name, tensor, views, file)
    if missing := sorted(views.keys() - stored_names):
        raise ModelError(
            f"{folder}: {summarise_tensors(missing)} missing: the weights are incomplete, or config.json is of another "
            f"model. Restore them; for a fetched model, delete {locate_download(folder)} and run `cohort pull MODEL`"
        )
    if tied_head is not None and not torch.equal(tied_head.to(dtype), decoder.embed.data):
        raise ModelError(
            f"{folder}: lm_head.weight differs from the embedding, but config.json says they are tied: "
            'set "tie_word_embeddings" to false in config.json'
        )
    return LoadedModel(decoder=decoder, config=config, hf_config=hf_config, folder=folder)


def is_native(hf_config: Mapping[str, Any]) -> bool:
    """Returns whether this package's own decoder supports the architecture in `hf_config`, the contents of config.json.

    Only names are compared: the first of "architectures", or else the model_type. If there is neither, returns True.
    `ModelConfig.from_hf` may still refuse the config, and in that last case raises the better error.

    >>> is_native({"architectures": ["LlamaForCausalLM"]}), is_native({"architectures": ["GPTNeoForCausalLM"]})
    (True, False)
    """
    named, kind = read_architecture(hf_config), hf_config.get("model_type")
    return named in FAMILIES if named else kind in [None, *(family.model_type for family in FAMILIES.values())]


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of the folder's config.json. Raises ModelError if folder or file is missing or damaged."""
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder: give a model name (see `cohort models`) or a folder in Hugging Face format"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json: it is not a model in Hugging Face format. Give a folder that has one, or a "
            "name that `cohort models` lists"
        )
    return read_json(folder / "config.json")


def find_weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Returns a dict from each safetensors file of a model folder to the names of the tensors that it should have.

    The names come from the folder's index. They are None where the folder has one file and no index. Raises ModelError
    if there are no such files, if one is missing or lies outside the folder, and if the index is damaged.
    """
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(
                f"{folder / INDEX} is damaged, because it has no weight_map. Restore the file; for a fetched model, "
                f"delete {locate_download(folder)} and run `cohort pull MODEL`"
            )
        files: dict[Path, list[str] | None] = {}
        for name, file in index.items():
            names = files.setdefault(_resolve_weight_file(folder, file), [])
            assert names is not None
            names.append(name)
        return files
    # A dangling link counts too: _resolve_weight_file then says that the download is incomplete.
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        return {_resolve_weight_file(folder, SINGLE): None}
    if pickled := sorted(p.name for pattern in PICKLE_PATTERNS for p in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has only pickle weights ({pickled[0]}), which can run code when read: "
            "convert them to safetensors (transformers' save_pretrained does)"
        )
    raise ModelError(
        f"{folder} has no weights: no {SINGLE} and no {INDEX}. Restore the files; for a fetched model, delete "
        f"{locate_download(folder)} and run `cohort pull MODEL`"
    )


def digest_model(folder: Path) -> str:
    """Returns 16 hexadecimal digits that identify a model: a hash of every byte of its files.

    These are weights, config, tokenizer, chat template and sampling defaults; other files in the folder do not count.
    Of a folder without safetensors files, which only vLLM can load, all files count. Raises ModelError if a file cannot
    be read.
    """
    try:
        # Their names stand in the index, which counts too. In the hub's cache they are links to files of other names.
        files = {f"weights {n}": file for n, file in enumerate(find_weight_files(folder))}
    except ModelError:
        files = {file.name: file for file in folder.iterdir() if file.is_file()}
    files |= {name: file for name in ("config.json", INDEX, *SIDE_FILES) if (file := folder / name).is_file()}
    try:
        return digest_files(files)
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}; repair its permissions") from error


def save_folder(
    decoder: AnyDecoder,
    hf_config: Mapping[str, Any] | None,
    source: str | Path | None,
    out: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Writes a model folder `out` that transformers and vLLM load, and returns its path.

    config.json is `hf_config` with the new type, or made from the decoder if that is None. Tokenizer, chat template and
    generation_config.json are copied from the folder `source`, as far as it has them (None: not written). Weights are
    written in `dtype`, by default the decoder's, in files of at most `max_shard_bytes`, unless one tensor alone is
    larger. The folder appears complete or not at all. Raises ModelError if `out` is not empty or cannot be written.
    """
    dtype = dtype or decoder.embed.dtype
    with stage_folder(Path(out)) as folder:
        if isinstance(decoder, AutoDecoder):
            decoder.write_model(folder, dtype, max_shard_bytes)
            config = dict(hf_config or read_json(folder / "config.json"))
        else:
            _write_weights(decoder, folder, dtype, max_shard_bytes)
            config = to_hf(decoder.config, hf_config)
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
        _write_json(folder / "config.json", config)
        for name in SIDE_FILES if source is not None else ():
            file = Path(source or "", name)
            if file.is_file():
                shutil.copyfile(file, folder / name)
    return Path(out)


def _write_weights(decoder: Decoder, folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Writes the decoder's weights in `dtype` into safetensors files in `folder`, under their Hugging Face names.

    It is one file, or several of at most `max_shard_bytes` each (or one larger tensor) and an index.
    """
    # First decide which tensors go into which file, in the decoder's order.
    shards: list[list[str]] = [[]]
    views = dict(hf_views(decoder))
    size = 0
    total = 0
    for name, view in views.items():
        num_bytes = view.numel() * dtype.itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + num_bytes, total + num_bytes
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        # safetensors refuses views that share storage, so they are copied. One shard at a time, to save memory.
        tensors = {n: to_hf_shape(n, views[n].detach()).to("cpu", dtype, copy=True).contiguous() for n in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _copy_into_view(name: str, tensor: Tensor, views: Mapping[str, Tensor], file: Path) -> None:
    """Copies a tensor that was read from `file` into the view of that name, which is part of the decoder's storage.

    The numbers are converted to the view's type. Raises ModelError if there is no such view, if the shape does not fit,
    or if the tensor has integers or 8-bit floats, as quantised weights do.
    """
    if name not in views:
        raise ModelError(
            f'{file}: unknown tensor "{name}": the weights are quantised or of another model than config.json. '
            "Use a folder whose config.json and weights belong together"
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise ModelError(
            f'{file}: tensor "{name}" is {tensor.dtype}: quantised weights are not supported, '
            "use the original, unquantised model"
        )
    # On the meta device the shape is computed without a copy.
    shape = list(to_hf_shape(name, views[name].to("meta")).shape)
    if list(tensor.shape) != shape:
        raise ModelError(
            f'{file}: tensor "{name}" is {list(tensor.shape)}, config.json says {shape}: '
            "they are of different models. Use a folder whose config.json and weights belong together"
        )
    views[name].copy_(tensor.view(views[name].shape))


def _read_all_tensors(folder: Path, files: Mapping[Path, list[str] | None]) -> Iterator[tuple[str, Tensor, Path]]:
    """Yields (name, tensor, file) for every tensor of a model folder, one at a time, also those that the index lacks.

    `files` is the result of `find_weight_files`. Raises ModelError if a tensor that the index names is missing, if one
    is in two files, or if a file is damaged.
    """
    yielded: set[str] = set()
    for file, names in files.items():
        for name, tensor in read_tensors(file, names):
            if name in yielded:
                raise ModelError(
                    f'{folder}: tensor "{name}" is in more than one weight file. Restore the files; for a fetched '
                    f"model, delete {locate_download(folder)} and run `cohort pull MODEL`"
                )
            yielded.add(name)
            yield name, tensor, file


def read_tensors(file: Path, expected: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for every tensor of one safetensors file, in alphabetical order.

    `expected` are names that the file must have; None means any. Other tensors are yielded too. Raises ModelError if
    one is missing or the file cannot be read.
    """
    with explain_damage(file), safe_open(file, framework="pt") as stored:
        names = set(stored.keys())
        if expected is not None and (missing := sorted(set(expected) - names)):
            raise ModelError(
                f"{file}: {summarise_tensors(missing)} missing, though the index names this file. Restore both; "
                f"for a fetched model, delete {locate_download(file.parent)} and run `cohort pull MODEL`"
            )
        for name in sorted(names):
            yield name, stored.get_tensor(name)


def _resolve_weight_file(folder: Path, file: Any) -> Path:
    """Returns the real path of a weight file, given its name relative to the model folder, as in the index.

    Raises ModelError unless it is an existing safetensors file inside the folder, or in the hub's cache beside it: an
    index of unknown origin must not cause other files to be read.
    """
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        raise ModelError(
            f"{folder / INDEX} names {show_value(file)}, but only .safetensors files are read: convert the weights to "
            "safetensors (transformers' save_pretrained does), or use another model"
        )
    root = folder.resolve()
    try:
        path = (folder / file).resolve()
    # A link to itself, a null character, a name that is too long.
    except (OSError, ValueError, RuntimeError) as e:
        raise ModelError(
            f"the weight file {folder / file} cannot be found: {e}. Restore it, or use another model"
        ) from e
    # In the hub's cache, a snapshot folder has links to the files of a `blobs` folder beside it.
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if Path(file).is_absolute() or ".." in Path(file).parts or not any(path.is_relative_to(r) for r in roots):
        raise ModelError(
            f'weight file "{file}" leaves the model folder {folder}, by its path or as a link, and is not read: '
            "put the file itself into the folder (its bare name into the index), or use another model"
        )
    if not path.is_file():
        raise ModelError(
            f"the weight file {folder / file} is missing: restore it; for a fetched model, delete "
            f"{locate_download(folder)} and run `cohort pull MODEL`"
        )
    return path


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file as a dict. Raises ModelError if the file cannot be read or has no object."""
    try:
        value = read_json_file(file)
    except (OSError, ValueError) as e:
        raise ModelError(
            f"{file} cannot be read as JSON: {e}. Restore the file; for a fetched model, delete "
            f"{locate_download(file.parent)} and run `cohort pull MODEL`"
        ) from e
    if not isinstance(value, dict):
        raise ModelError(
            f"{file} is not a JSON object, so it is damaged. Restore the file; for a fetched model, delete "
            f"{locate_download(file.parent)} and run `cohort pull MODEL`"
        )
    return value


def _write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes `value` to a file as indented JSON with a final newline."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        content = text.encode()
    # Half a character has no bytes, but JSON has an escape for it.
    except UnicodeEncodeError:
        content = json.dumps(value, indent=2).encode()
    file.write_bytes(content + b"\n")
