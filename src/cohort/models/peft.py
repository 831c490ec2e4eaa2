"""Folders of adapters as the PEFT library writes and reads them: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from cohort.config.schema import TARGETS, LoraConfig
from cohort.errors import ModelError
from cohort.models.files import FLOATS, read_json, stored_tensors
from cohort.models.staging import staged

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# What does not change what the stored adapters are: where they came from, how they were trained.
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "r", "lora_alpha", "target_modules"),
}
# Settings that need a value, and those under which the adapters are plain ones.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # the others change the base too
}


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """The contents of a folder; `config` has rank, alpha and targets."""

    config: LoraConfig
    tensors: dict[str, Tensor]


def save_adapters(tensors: Mapping[str, Tensor], config: LoraConfig, base_model: str, out: str | Path) -> Path:
    """Write a folder that PEFT and vLLM load on top of the base model. `tensors` as `Adapters.tensors` names them."""
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
    with staged(Path(out)) as folder:
        (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
        kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    return Path(out)


def load_adapters(path: str | Path) -> SavedAdapters:
    """Read such a folder; refuses by name whatever makes the adapters others than alpha / r * B A."""
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}: it is not a folder of adapters in PEFT format")
    settings = read_json(folder / CONFIG)
    _require_plain(settings, folder / CONFIG)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise ModelError(f"{folder / CONFIG}: r = {rank!r}, a positive whole number is needed")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ModelError(f"{folder / CONFIG}: lora_alpha = {alpha!r}, a positive number is needed")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}: save the adapters as safetensors")
    tensors = dict(stored_tensors(folder / WEIGHTS, None))
    modules = set()
    for name, tensor in tensors.items():
        parts = name.split(".")
        if tensor.dtype not in FLOATS or len(parts) < 3 or parts[-2] not in ("lora_A", "lora_B"):
            raise ModelError(f'{folder / WEIGHTS}: "{name}" ({tensor.dtype}) is no adapter of a matrix')
        modules.add(parts[-3])
    if unknown := sorted(modules - set(TARGETS)):
        raise ModelError(
            f"{folder / WEIGHTS}: adapters of {unknown[0]} are not supported, only of {', '.join(TARGETS)}"
        )
    if not modules:
        raise ModelError(f"{folder / WEIGHTS} holds no adapters")
    # the tensors say which matrices: target_modules may be a pattern
    targets = tuple(target for target in TARGETS if target in modules)
    return SavedAdapters(config=LoraConfig(rank=rank, alpha=float(alpha), targets=targets), tensors=tensors)


def _require_plain(settings: Mapping[str, Any], file: Path) -> None:
    """Fields of PEFT's many variants are off when false, null or empty, also those that do not exist yet."""
    for name, value in settings.items():
        if not (value in PLAIN[name] if name in PLAIN else name in HARMLESS or not value):
            raise ModelError(f"{file}: {name} = {value!r} is not supported, only plain LoRA is")
    if "peft_type" not in settings:
        raise ModelError(f"{file} has no peft_type: it is not a config of PEFT")
