"""The settings of the engines that `--engine` can choose, one class per engine. `engines.factory` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cohort.config.section import Section, Slots, at_least, at_most


@dataclass(frozen=True, kw_only=True)
class NativeEngine(Section):
    """The built-in engine: continuous batching on the learner's own weights."""

    slots: Slots = 256
    """Samples that are decoded at the same time; further samples wait for a free slot."""
    weights: Literal["shared", "packed", "fp16"] = "shared"
    """shared = the weights in the learner's memory. Only on a CPU: packed = an fp32 copy in the layout that the
    processor prefers, faster and exact; fp16 = a copy of half the size, faster with few slots, not exact (the metric
    sampler_gap shows the difference)."""


@dataclass(frozen=True, kw_only=True)
class VllmEngine(Section):
    """vLLM in this process, with weights of its own: every load of new ones is proved. One process only."""

    slots: Slots = 256
    """Samples that are decoded at the same time."""
    memory: Annotated[float, at_least(0.01), at_most(1)] = 0.8
    """Share of the GPU's memory that vLLM reserves."""


@dataclass(frozen=True, kw_only=True)
class ServerEngine(Section):
    """A server with OpenAI's interface. It returns text without tokens, so it can evaluate but not train."""

    url: str = ""
    """Address of the server, for example http://localhost:8000."""
    slots: Slots = 256
    """Requests that are sent to the server at the same time."""


EngineConfig = NativeEngine | VllmEngine | ServerEngine
ENGINES: dict[str, type] = {"native": NativeEngine, "vllm": VllmEngine, "server": ServerEngine}
