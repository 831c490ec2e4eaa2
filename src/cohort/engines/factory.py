"""Makes engines from their settings: the only module that names engine classes. Train, eval and bench use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cohort.config import engines as variants
from cohort.engines.auto import WINDOW as AUTO_WINDOW
from cohort.engines.auto import AutoEngine
from cohort.engines.base import Abilities, Engine
from cohort.engines.fleet.native import ABILITIES as PROCESS_ABILITIES
from cohort.engines.fleet.native import ProcessModel, make_native_fleet
from cohort.engines.fleet.servers import ABILITIES as SERVER_ABILITIES
from cohort.engines.fleet.servers import ServedModel, make_server_fleet
from cohort.engines.native import NativeEngine, make_native_engine
from cohort.engines.server import ServerEngine
from cohort.engines.vllm import VllmEngine
from cohort.errors import ConfigError
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.text import Tokenizer


def decode_nothing(tokens: list[int]) -> str:
    """Returns "" for all tokens. It stands in for a tokenizer's `decode` where the sampled text is not read."""
    return ""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The model that an engine samples from, in every form that some engine needs. Each engine uses some fields."""

    context: int  # most tokens of a prompt and its completion together; 0 = the server decides
    decoder: AnyDecoder | None = None  # the loaded model, for engines in this process
    decode: Callable[[list[int]], str] = decode_nothing
    reserve: int = 0  # bytes of GPU memory that others, such as the learner, need between rollouts
    window: int | None = None  # most decode steps between two reports of an engine here; None = its usual number
    folder: Path | None = None  # the model's files, for engines that load it themselves
    tokenizer: Tokenizer | None = None
    is_divided: bool = False  # whether ranks divide the decoder among them, and must read its weights together
    threads: int = 0  # of engines in other processes; 0 = they share the cores of the machine
    dtype: str = "auto"
    name: str = ""  # the server's name for the model
    template: Literal["chat", "text"] = "chat"
    system: str = ""  # put before the messages, which a server renders itself


def make_engine(variant: variants.EngineConfig, model: EngineModel) -> Engine:
    """Returns a new engine for the settings `variant`, ready to sample from `model`.

    The native settings need `model.decoder`, those of vLLM and SGLang `model.folder`. A server with OpenAI's interface
    is asked at once whether it serves `model.name`; ModelError or ConfigError is raised if it does not answer or does
    not serve it.
    """
    if isinstance(variant, variants.ServerEngine):
        return ServerEngine(
            variant.url, model.name, template=model.template, system=model.system, concurrency=variant.slots
        )
    if isinstance(variant, variants.ServedEngine) and variant.is_served:
        return _make_servers(variant, model)
    if isinstance(variant, variants.VllmEngine):
        assert model.folder is not None, "vLLM loads the model's files itself"
        return VllmEngine(
            model.folder,
            max_context=model.context,
            slots=variant.slots,
            dtype=model.dtype,
            memory=variant.memory,
            tokenizer=model.tokenizer,
            shares_gpu=model.decoder is not None,
        )
    assert isinstance(variant, variants.NativeEngine)
    if variant.place == "process":
        return _make_engine_processes(variant, model)
    return _make_engine_in_process(variant, model)


def _make_engine_in_process(variant: variants.NativeEngine, model: EngineModel) -> Engine:
    """Returns an engine that samples in this process: a native one, or AutoEngine for a model of transformers.

    Raises ConfigError if `variant.weights` is not "shared" for a model of transformers, which can have no packed or
    fp16 copies. `model.decoder` must be set.
    """
    decoder = model.decoder
    assert decoder is not None, "an engine in this process samples from a loaded decoder"
    if not isinstance(decoder, AutoDecoder):
        return make_native_engine(
            decoder,
            model.decode,
            slots=variant.slots,
            max_context=model.context,
            weights=variant.weights,
            window=model.window,
            reserve=model.reserve,
        )
    # Packed copies exist only for the matrices of the native decoder.
    if variant.weights != "shared":
        name = decoder.config.architecture
        raise ConfigError(
            f"engine.weights = {variant.weights} needs a model that Cohort implements itself, and {name} is not one: "
            "set --engine.weights shared."
        )
    return AutoEngine(
        decoder, model.decode, slots=variant.slots, max_context=model.context, window=model.window or AUTO_WINDOW
    )


def _make_engine_processes(variant: variants.NativeEngine, model: EngineModel) -> Engine:
    """Returns native engines in processes of their own. `model.decoder` is not sampled from: they load the folder."""
    assert model.folder is not None and model.decoder is not None
    return make_native_fleet(
        variant,
        ProcessModel(
            folder=model.folder,
            dtype=str(model.decoder.embed.dtype).removeprefix("torch."),
            device=str(model.decoder.embed.device),
            context=model.context,
            vocab_size=model.decoder.config.vocab_size,
            threads=model.threads,
            window=model.window,
            is_divided=model.is_divided,
        ),
    )


def _make_servers(variant: variants.ServedEngine, model: EngineModel) -> Engine:
    """Returns servers as one engine. `model.decoder` is not sampled from: they load the folder."""
    assert model.folder is not None and model.tokenizer is not None
    decoder = model.decoder
    return make_server_fleet(
        "vllm" if isinstance(variant, variants.VllmEngine) else "sglang",
        variant,
        ServedModel(
            folder=model.folder,
            dtype=model.dtype,
            device="cpu" if decoder is None else str(decoder.embed.device),
            context=model.context,
            vocab_size=model.tokenizer.vocab_size if decoder is None else decoder.config.vocab_size,
            threads=model.threads,
            decode=model.tokenizer.decode,
            is_divided=model.is_divided,
        ),
    )


def get_abilities(variant: variants.EngineConfig) -> Abilities:
    """Returns what an engine with these settings can do (token ids, log-probabilities, live weights).

    No engine is made: vLLM need not be installed and no server need run.
    """
    if isinstance(variant, variants.ServerEngine):
        return ServerEngine.abilities
    if isinstance(variant, variants.ServedEngine):
        return SERVER_ABILITIES if variant.is_served else VllmEngine.abilities
    # The GPU engine and AutoEngine can do the same.
    here = isinstance(variant, variants.NativeEngine) and variant.place == "here"
    return NativeEngine.abilities if here else PROCESS_ABILITIES
