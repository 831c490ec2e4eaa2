"""Makes engines from their settings: the only module that names engine classes. Train, eval and bench use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cohort.config import engines as variants
from cohort.engines.auto import AutoEngine
from cohort.engines.base import Abilities, Engine
from cohort.engines.native import NativeEngine, native_engine
from cohort.engines.server import ServerEngine
from cohort.engines.vllm import VllmEngine
from cohort.errors import ConfigError
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.text import Tokenizer


def no_text(tokens: list[int]) -> str:
    """In the place of a tokenizer, where nobody reads what is sampled."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that an engine samples from, in every form that some engine needs."""

    context: int  # most tokens of a prompt and its completion together; 0 = the server knows
    decoder: AnyDecoder | None = None  # loaded, for engines that share it
    decode: Callable[[list[int]], str] = no_text
    reserve: int = 0  # bytes of GPU memory that others (the learner) need between rollouts
    folder: Path | None = None  # its files, for engines that load it themselves
    tokenizer: Tokenizer | None = None
    dtype: str = "auto"
    name: str = ""  # what a server calls it
    template: Literal["chat", "text"] = "chat"


def make_engine(variant: variants.EngineConfig, subject: Subject) -> Engine:
    """The engine that `variant` describes, ready to sample from `subject`."""
    if isinstance(variant, variants.ServerEngine):
        return ServerEngine(variant.url, subject.name, template=subject.template, concurrency=variant.slots)
    if isinstance(variant, variants.VllmEngine):
        assert subject.folder is not None, "vLLM loads the model's files itself"
        return VllmEngine(
            subject.folder,
            max_context=subject.context,
            slots=variant.slots,
            dtype=subject.dtype,
            memory=variant.memory,
            tokenizer=subject.tokenizer,
        )
    return _in_process(variant, subject)


def _in_process(variant: variants.NativeEngine, subject: Subject) -> Engine:
    """The engine of a decoder in this process: the native one, or that of models outside the native family."""
    decoder = subject.decoder
    assert decoder is not None, "an engine in this process samples from a loaded decoder"
    if not isinstance(decoder, AutoDecoder):
        return native_engine(
            decoder,
            subject.decode,
            slots=variant.slots,
            max_context=subject.context,
            weights=variant.weights,
            reserve=subject.reserve,
        )
    if variant.weights != "shared":
        name = decoder.config.architecture
        raise ConfigError(f"engine.weights = {variant.weights} is for native models: {name} is none.")
    return AutoEngine(decoder, subject.decode, slots=variant.slots, max_context=subject.context)


def abilities_of(variant: variants.EngineConfig) -> Abilities:
    """What the engine states it can do, before one is made: vLLM need not be installed, no server has to answer."""
    if isinstance(variant, variants.ServerEngine):
        return ServerEngine.abilities
    if isinstance(variant, variants.VllmEngine):
        return VllmEngine.abilities
    return NativeEngine.abilities
