"""Model folders in Hugging Face format: safetensors in and out, nothing executed or unpickled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cohort.errors import ModelError
from cohort.models.auto import AnyDecoder, AutoDecoder, ForeignConfig, architecture_of, foreign_decoder, some
from cohort.models.config import FAMILIES, ModelConfig, to_hf
from cohort.models.decoder import Decoder, hf_shaped, hf_views
from cohort.models.staging import staged

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SIDE_FILES = (  # what a tokenizer, its template and the sampling defaults may consist of
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
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A decoder and where it came from."""

    decoder: AnyDecoder
    config: ModelConfig | ForeignConfig
    hf_config: dict[str, Any]
    folder: Path


def load_folder(path: str | Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Read config.json and the safetensors files of a folder into a decoder: the native one, or transformers' own."""
    folder = Path(path)
    hf_config = read_config(folder)
    if not is_native(hf_config):
        files = weight_files(folder)  # before anything heavy is imported
        foreign = foreign_decoder(folder, hf_config, ((n, t) for n, t, _ in _all_tensors(folder, files)), dtype)
        return LoadedModel(decoder=foreign, config=foreign.config, hf_config=hf_config, folder=folder)
    config = ModelConfig.from_hf(hf_config)
    files = weight_files(folder)
    decoder = Decoder(config).to(dtype)
    views = dict(hf_views(decoder))
    found: set[str] = set()
    tied_head: Tensor | None = None
    for name, tensor, file in _all_tensors(folder, files):
        found.add(name)
        if config.tied and name == "lm_head.weight":
            tied_head = tensor
        elif not name.endswith(".rotary_emb.inv_freq"):  # old exports wrote it; it follows from the config
            _place(name, tensor, views, file)
    if missing := sorted(views.keys() - found):
        raise ModelError(f"{folder}: {some(missing)} missing: the checkpoint is incomplete, or config.json another's")
    if tied_head is not None and not torch.equal(tied_head.to(dtype), decoder.embed.data):
        raise ModelError(f"{folder}: lm_head.weight differs from the embedding, but config.json says they are tied")
    return LoadedModel(decoder=decoder, config=config, hf_config=hf_config, folder=folder)


def is_native(hf_config: Mapping[str, Any]) -> bool:
    """Is this of the native family? A config that names nothing is: the error is better there.

    >>> is_native({"architectures": ["LlamaForCausalLM"]}), is_native({"architectures": ["GPTNeoForCausalLM"]})
    (True, False)
    """
    named, kind = architecture_of(hf_config), hf_config.get("model_type")
    return named in FAMILIES if named else kind in [None, *(family.model_type for family in FAMILIES.values())]


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give a model name (see `cohort models`) or a Hugging Face folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model in Hugging Face format")
    return read_json(folder / "config.json")


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder, each with the tensors the index expects in it (None: no index)."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(f"{folder / INDEX} has no weight_map")
        files: dict[Path, list[str] | None] = {}
        for name, file in index.items():
            names = files.setdefault(_inside(folder, file), [])
            assert names is not None
            names.append(name)
        return files
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        return {_inside(folder, SINGLE): None}
    if pickled := sorted(p.name for pattern in PICKLES for p in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has only pickle weights ({pickled[0]}), which can run code when read: "
            "convert them to safetensors (transformers' save_pretrained does)"
        )
    raise ModelError(f"{folder} has no {SINGLE} and no {INDEX}")


def save_folder(
    decoder: AnyDecoder,
    hf_config: Mapping[str, Any] | None,
    source: str | Path | None,
    out: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a folder that transformers and vLLM load: config, weights, `source`'s tokenizer and template."""
    dtype = dtype or decoder.embed.dtype
    with staged(Path(out)) as folder:
        if isinstance(decoder, AutoDecoder):
            decoder.write(folder, dtype, max_shard_bytes)
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
    shards: list[list[str]] = [[]]
    views, size, total = dict(hf_views(decoder)), 0, 0
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
        # cloned one shard at a time: views of one storage cannot be written as they are
        tensors = {n: hf_shaped(n, views[n].detach()).to("cpu", dtype, copy=True).contiguous() for n in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _place(name: str, tensor: Tensor, views: Mapping[str, Tensor], file: Path) -> None:
    """Copy one stored tensor to where the decoder has it."""
    if name not in views:
        raise ModelError(f'{file}: unknown tensor "{name}": the weights are not of the model config.json describes')
    if tensor.dtype not in FLOATS:
        raise ModelError(f'{file}: tensor "{name}" is {tensor.dtype}: quantised weights are not supported')
    shape = list(hf_shaped(name, views[name].to("meta")).shape)
    if list(tensor.shape) != shape:
        raise ModelError(f'{file}: tensor "{name}" is {list(tensor.shape)}, config.json says {shape}')
    views[name].copy_(tensor.view(views[name].shape))


def _all_tensors(folder: Path, files: Mapping[Path, list[str] | None]) -> Iterator[tuple[str, Tensor, Path]]:
    """Every tensor of a folder, one at a time, and its file."""
    found: set[str] = set()
    for file, names in files.items():
        for name, tensor in stored_tensors(file, names):
            if name in found:
                raise ModelError(f'tensor "{name}" is in more than one file of {folder}')
            found.add(name)
            yield name, tensor, file


def stored_tensors(file: Path, expected: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one safetensors file, one at a time."""
    try:
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            if expected is not None and (missing := sorted(set(expected) - names)):
                raise ModelError(f"{file}: {some(missing)} missing, though the index says it is there")
            for name in sorted(names):
                yield name, stored.get_tensor(name)
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{file} is corrupted or truncated ({e}): fetch it again") from e


def _inside(folder: Path, file: Any) -> Path:
    """A weight file's path, if it stays in the folder. (The hub's cache links to its own blobs folder.)"""
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        raise ModelError(f"{folder / INDEX} names {file!r}: only .safetensors files are read")
    root, path = folder.resolve(), (folder / file).resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if Path(file).is_absolute() or ".." in Path(file).parts or not any(path.is_relative_to(r) for r in roots):
        raise ModelError(f'weight file "{file}" leaves the model folder {folder}: refused')
    if not path.is_file():
        raise ModelError(f"{folder / file} is missing: the download is incomplete, fetch it again")
    return path


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{file} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
