"""The parts that jobs of every kind are built of: the model on its device, its adapters, and digests of the inputs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.jobs.inputs import InputDigests
from cohort.jobs.models import find_model
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.decoder import Decoder
from cohort.models.device import DTYPES, limit_memory
from cohort.models.files import LoadedModel, digest_model, load_folder
from cohort.models.lora import Adapters
from cohort.models.peft import digest_adapters, load_adapters
from cohort.models.spinning import throttle_thread_spinning
from cohort.ranks.environment import count_local_ranks
from cohort.system.kernel import count_cores
from cohort.text.framing import digest_template

C = TypeVar("C", bound=RunConfig)


def configure_torch(threads: int, device: torch.device) -> None:
    """Sets torch's number of threads (0 = all cores that this process may use, divided among the ranks on them).

    On a CPU, makes torch raise for nondeterministic operations. On a GPU deterministic algorithms would cost time, so
    equal runs may differ in the last bits there.
    """
    torch.set_num_threads(threads or max(1, count_cores() // count_local_ranks()))
    throttle_thread_spinning()
    # Equivalent to use_deterministic_algorithms(True), which would also import the compiler: a second at every start.
    torch.set_deterministic_debug_mode("error" if device.type == "cpu" else "default")
    if device.type == "cuda":
        # An earlier run of this process may have left a part of the memory to engines.
        limit_memory(device, 1.0)


def load_model(config: C, device: torch.device) -> tuple[Path, LoadedModel, C]:
    """Finds or fetches the model that the config names, and loads it.

    Returns its folder, the model on the device, and the config adapted to the model's architecture.
    """
    folder = find_model(config.model).folder
    model = load_folder(folder, DTYPES[config.learner.dtype])
    model.decoder.to(device)
    return folder, model, _adapt_to_architecture(config, model.decoder)


def make_frozen_copy(model: LoadedModel) -> AnyDecoder:
    """Returns a copy of the model whose weights are never trained, for use as the reference policy."""
    frozen = copy.deepcopy(model.decoder)
    frozen.requires_grad_(False)
    return frozen


def _adapt_to_architecture(config: C, decoder: AnyDecoder) -> C:
    """Returns the config, with `learner.prefix_sharing` off if Cohort does not implement the model itself.

    Such a model (`AutoDecoder`, from transformers) computes a prompt once per sample, not once per group. Raises
    ConfigError if the config asks for adapters, which such a model cannot have.
    """
    if not isinstance(decoder, AutoDecoder):
        return config
    if config.learner.lora.is_on:
        raise ConfigError(
            f"learner.lora needs a model that Cohort implements itself, and {decoder.config.architecture} is not one: "
            "train without adapters (--learner.lora.rank 0, no --learner.lora.load), or use another --model."
        )
    return replace(config, learner=replace(config.learner, prefix_sharing=False))


def make_adapters(config: RunConfig, decoder: AnyDecoder) -> Adapters | None:
    """Returns the LoRA adapters of `decoder` that the config asks for, new or read from learner.lora.load.

    Freezes the decoder's own weights then. None, and nothing is changed, if the config asks for no adapters, or the
    model is not one that Cohort implements itself.
    """
    lora = config.learner.lora
    if not isinstance(decoder, Decoder):
        return None
    if lora.load:
        loaded = load_adapters(lora.load)
        return Adapters(decoder, replace(loaded.config, base=lora.base), config.seed, loaded.tensors)
    return Adapters(decoder, lora, config.seed) if lora.rank else None


def digest_files(config: RunConfig, folder: Path) -> InputDigests:
    """Returns digests of the model in `folder`, of the adapters that the config loads, and of its template file."""
    adapters = config.learner.lora.load
    return InputDigests(
        model=digest_model(folder),
        adapters=digest_adapters(adapters) if adapters else "",
        template=digest_template(config.template),
    )
