"""The engines that can be chosen with `--engine`: each with its own settings. `engines.factory` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cohort.config.section import AtLeast1, Bound, Section


@dataclass(frozen=True, kw_only=True)
class NativeEngine(Section):
    """The built-in engine: continuous batching on the learner's own weights."""

    slots: AtLeast1 = 256
    """Samples decoded at once; more wait and take the slots that finish."""
    weights: Literal["shared", "packed", "fp16"] = "shared"
    """shared = the learner's storage. On CPU also packed = fp32 copy laid out for the processor, faster and exact;
    fp16 = half the bytes, faster at few slots, gap measured."""


@dataclass(frozen=True, kw_only=True)
class VllmEngine(Section):
    """vLLM in this process. It takes no new weights, so it evaluates and does not train."""

    slots: AtLeast1 = 256
    """Samples decoded at once."""
    memory: Annotated[float, Bound("above 0 and at most 1", lambda x: 0 < x <= 1)] = 0.8
    """Share of the GPU's memory that vLLM takes."""


@dataclass(frozen=True, kw_only=True)
class ServerEngine(Section):
    """A server with OpenAI's interface. It gives text alone, so it evaluates and does not train."""

    url: str = ""
    """Where the server is, such as http://localhost:8000."""
    slots: AtLeast1 = 256
    """Requests under way at once."""


EngineConfig = NativeEngine | VllmEngine | ServerEngine
ENGINES: dict[str, type] = {"native": NativeEngine, "vllm": VllmEngine, "server": ServerEngine}
