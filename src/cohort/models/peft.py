"""Adapter folders in the format of the PEFT library: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from cohort.config.schema import TARGETS, LoraConfig
from cohort.errors import ModelError
from cohort.models.files import FLOAT_DTYPES, read_json, read_tensors
from cohort.models.staging import stage_folder
from cohort.system.digest import digest_files
from cohort.system.json_text import show_value

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Settings that are read elsewhere, or that do not change what the stored adapters mean: their origin and training.
IGNORED_SETTINGS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "r", "lora_alpha", "target_modules"),
}
MAX_ALPHA = 1e6
# Settings that are never empty, with the values under which the adapters are plain LoRA.
PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Other ways to initialise change the base weights too.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """The contents of an adapter folder."""

    config: LoraConfig  # with rank, alpha and targets of the adapters; all else is default
    tensors: dict[str, Tensor]  # A and B, by PEFT's names


def save_adapters(tensors: Mapping[str, Tensor], config: LoraConfig, base_model: str, out: str | Path) -> Path:
    """Writes an adapter folder `out` that PEFT and vLLM load on top of the base model, and returns its path.

    `tensors` are A and B of all matrices, with the names of `Adapters.tensors`. `config` tells rank, alpha and targets.
    `base_model` is the name or path that is recorded in the folder. Raises ModelError if `out` is not empty or cannot
    be written.
    """
    # PEFT's own lora_alpha is an integer, so a whole number is written as one.
    alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    settings: dict[str, Any] = {
        "auto_mapping": None,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "revision": None,
        "target_modules": list(config.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    with stage_folder(Path(out)) as folder:
        (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
        kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    return Path(out)


def load_adapters(path: str | Path) -> SavedAdapters:
    """Returns config and tensors of the adapter folder `path`, in the format of PEFT.

    The targets are the kinds of matrices that the stored tensors belong to. Raises ModelError
    if files are missing or damaged, if the adapters are of other matrices than TARGETS, or if they are not plain LoRA,
    which adds alpha / r * B A to a matrix.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} has no {CONFIG}: it is not a folder of adapters in PEFT format; "
            "set learner.lora.load to a folder that is"
        )
    settings = read_json(folder / CONFIG)
    _require_plain(settings, folder / CONFIG)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    # bool is a subclass of int.
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{folder / CONFIG}: r = {show_value(rank)} must be a positive whole number: correct the file")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        raise ModelError(
            f"{folder / CONFIG}: lora_alpha = {show_value(alpha)} must be a positive number of at most {MAX_ALPHA:g}: "
            "correct the file"
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"{folder} has no {WEIGHTS}: save the adapters again as safetensors, with PEFT's save_pretrained"
        )
    tensors = dict(read_tensors(folder / WEIGHTS, None))
    modules = set()
    for name, tensor in tensors.items():
        parts = name.split(".")
        if tensor.dtype not in FLOAT_DTYPES or len(parts) < 3 or parts[-2] not in ("lora_A", "lora_B"):
            raise ModelError(
                f'{folder / WEIGHTS}: tensor "{name}" ({tensor.dtype}) is not lora_A or lora_B of a matrix in floating '
                "point: use plain LoRA adapters"
            )
        # A has the rank as its rows, B as its columns.
        side = 0 if parts[-2] == "lora_A" else 1
        if tensor.ndim != 2 or tensor.shape[side] != rank:
            raise ModelError(
                f'{folder / WEIGHTS}: tensor "{name}" is {list(tensor.shape)}, but {CONFIG} says r = '
                f"{show_value(rank)}: they are of different adapters. Save them again with PEFT's save_pretrained"
            )
        modules.add(parts[-3])
    if unknown := sorted(modules - set(TARGETS)):
        raise ModelError(
            f"{folder / WEIGHTS}: adapters of {unknown[0]} are not supported: use adapters only of {', '.join(TARGETS)}"
        )
    if not modules:
        raise ModelError(f"{folder / WEIGHTS} holds no adapters: save them again with PEFT's save_pretrained")
    # The tensors tell which matrices have adapters. The setting target_modules may be a pattern.
    targets = tuple(target for target in TARGETS if target in modules)
    return SavedAdapters(config=LoraConfig(rank=rank, alpha=float(alpha), targets=targets), tensors=tensors)


def digest_adapters(path: str | Path) -> str:
    """Returns 16 hexadecimal digits of a hash of every byte of an adapter folder's config and tensors.

    Raises ModelError if one of the files cannot be read.
    """
    try:
        return digest_files({name: Path(path) / name for name in (CONFIG, WEIGHTS)})
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}; repair its permissions") from error


def _require_plain(settings: Mapping[str, Any], file: Path) -> None:
    """Raises ModelError if any of `settings`, the contents of adapter_config.json, turns on a variant of LoRA.

    Settings that are unknown here must be false, null, 0 or empty, and peft_type must be there. `file` is named in the
    message.
    """
    # Each variant of PEFT has a field that is false, null or empty when it is off. So a field that is unknown here,
    # of a newer PEFT, is refused only if it is on.
    for name, value in settings.items():
        if not (value in PLAIN_VALUES[name] if name in PLAIN_VALUES else name in IGNORED_SETTINGS or not value):
            raise ModelError(
                f"{file}: {name} = {show_value(value)} is not supported: use plain LoRA adapters of a causal language "
                "model, trained without this setting"
            )
    if "peft_type" not in settings:
        raise ModelError(f"{file} has no peft_type: it is not a config of PEFT; save the adapters again with PEFT")
