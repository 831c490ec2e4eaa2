"""The settings of the engines that `--engine` can choose, one class per engine. `engines.factory` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from cohort.config.section import Effect, Section, Slots, at_least, at_most

# Settings of engines in other processes, which have no effect while the engine is in this one.
ELSEWHERE = ("replicas", "patience", "restarts")
Replicas = Annotated[int, at_least(1), at_most(1_024)]
Patience = Annotated[float, at_least(1), at_most(86_400)]
Restarts = Annotated[int, at_least(0), at_most(10_000)]


@dataclass(frozen=True, kw_only=True)
class NativeEngine(Section):
    """The built-in engine: continuous batching on the learner's own weights."""

    slots: Slots = 256
    """Samples that are decoded at the same time; further samples wait for a free slot."""
    weights: Literal["shared", "packed", "fp16"] = "shared"
    """shared = the weights in the learner's memory. Only on a CPU: packed = an fp32 copy in the layout that the
    processor prefers, faster and exact; fp16 = a copy of half the size, faster with few slots, not exact (the metric
    sampler_gap shows the difference)."""
    place: Literal["here", "process"] = "here"
    """here = in the process that trains; process = in processes of their own, each with a copy of the weights."""
    replicas: Replicas = 1
    """Engine processes of each rank."""
    devices: tuple[str, ...] = ()
    """The devices of the engine processes of all ranks in turn, such as cuda:1 cuda:2; none = the CPU, if the run is
    on it."""
    patience: Patience = 300.0
    """Seconds that an engine process may need to start, to load weights or to give a sign of life; then it counts as
    lost."""
    restarts: Restarts = 3
    """Times that lost engine processes are started again, together, before the run stops."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            (*ELSEWHERE, "devices"),
            ("place",),
            lambda engine: engine.place == "process",
            "the engine is in the process that trains; set --engine.place process",
        ),
    )

    @property
    def off_settings(self) -> frozenset[str]:
        """The settings of engine processes, if there are none."""
        return frozenset() if self.place == "process" else frozenset(("place", *ELSEWHERE, "devices"))


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
