"""The settings of the engines that `--engine` can choose, one class per engine. `engines.factory` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from cohort.config.section import Effect, Section, Slots, at_least, at_most

# Settings of engines in other processes, which have no effect while the engine is in this one.
ELSEWHERE = ("replicas", "patience", "restarts")
# Settings of servers, and those of servers that Cohort starts.
SERVED = ("urls", "folder", "patience", "restarts")
STARTED = ("replicas", "tensor", "devices", "python", "memory")
# Settings of engine processes on GPUs.
ON_GPU = ("memory", "transfer")
Replicas = Annotated[int, at_least(1), at_most(1_024)]
Patience = Annotated[float, at_least(1), at_most(86_400)]
Restarts = Annotated[int, at_least(0), at_most(10_000)]
Memory = Annotated[float, at_least(0.01), at_most(1)]
Transfer = Literal["auto", "files"]


def names_gpu(devices: tuple[str, ...]) -> bool:
    """Returns whether any of the devices that a user has named is a GPU."""
    return any(name != "cpu" for name in devices)


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
    memory: Memory = 0.4
    """Share of the memory of its GPU that an engine process may use where it is not alone: beside the learner, or
    beside another one."""
    transfer: Transfer = "auto"
    """How new weights get there: auto = through memory of the GPU where it is the learner's own, else as files; files =
    always as files."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            (*ELSEWHERE, "devices", *ON_GPU),
            ("place",),
            lambda engine: engine.place == "process",
            "the engine is in the process that trains; set --engine.place process",
        ),
        Effect(
            ON_GPU,
            ("devices",),
            lambda engine: names_gpu(engine.devices),
            "no engine process is on a GPU; name one, as in --engine.devices cuda:0",
        ),
    )

    @property
    def off_settings(self) -> frozenset[str]:
        """The settings of engine processes, if there are none, and those of GPUs, if none of them is on one."""
        if self.place == "here":
            return frozenset(("place", *ELSEWHERE, "devices", *ON_GPU))
        return frozenset() if names_gpu(self.devices) else frozenset(ON_GPU)


@dataclass(frozen=True, kw_only=True)
class ServedEngine(Section):
    """What engines have in common that may be servers: started by Cohort, or by the user."""

    slots: Slots = 256
    """Samples that are decoded at the same time, by each server."""
    memory: Memory = 0.8
    """Share of the GPU's memory that the engine reserves."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that you have started, for all ranks in turn, such as http://localhost:8000 or
    unix:/run/vllm.sock; none = Cohort starts them."""
    replicas: Replicas = 1
    """Servers that Cohort starts for each rank."""
    tensor: Annotated[int, at_least(1), at_most(64)] = 1
    """GPUs that hold the model of one server together."""
    devices: tuple[str, ...] = ()
    """The GPUs of the servers that Cohort starts, of all ranks in turn, such as cuda:1 cuda:2; none = the CPU, if the
    run is on it."""
    python: str = ""
    """Python of the environment that has the server's package, such as ~/vllm/bin/python; none = this one."""
    folder: str = ""
    """Folder in which new weights are put for the servers; other machines must see it under the same name. None = one
    in shared memory."""
    patience: Patience = 300.0
    """Seconds that a server may need to start, to load weights or to give a sign of life; then it counts as lost."""
    restarts: Restarts = 3
    """Times that lost servers are started again or waited for, together, before the run stops."""

    @property
    def is_served(self) -> bool:
        """Whether the engine is a server, and not in the process that trains."""
        return True

    @property
    def off_settings(self) -> frozenset[str]:
        """The settings of servers if there are none, and of their start if the user has started them."""
        if not self.is_served:
            return frozenset((*STARTED, *SERVED, "place")) - {"memory"}
        return frozenset(STARTED if self.urls else ())


_ARE_STARTED = Effect(
    STARTED,
    ("urls",),
    lambda engine: not engine.urls,
    "you have started the servers of engine.urls, and they keep their settings",
)


@dataclass(frozen=True, kw_only=True)
class VllmEngine(ServedEngine):
    """vLLM, in the process that trains or as servers. Every load of new weights is proved."""

    place: Literal["here", "server"] = "here"
    """here = in the process that trains, which must be one; server = as servers, which Cohort starts, or those of
    engine.urls."""
    transfer: Transfer = "auto"
    """How new weights get to a server that Cohort starts: auto = through memory of the GPU where it is the learner's
    own, else as files; files = always as files."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            tuple(name for name in (*STARTED, *SERVED) if name not in ("memory", "urls")),
            ("place", "urls"),
            lambda engine: engine.is_served,
            "vLLM is in the process that trains; set --engine.place server",
        ),
        _ARE_STARTED,
        Effect(
            ("transfer",),
            ("place", "urls", "devices", "tensor"),
            lambda engine: engine.passes_memory,
            "no server that Cohort starts is on one GPU alone; name it, as in --engine.devices cuda:0",
        ),
    )

    @property
    def is_served(self) -> bool:
        """Whether vLLM is a server. Addresses say so too."""
        return self.place == "server" or bool(self.urls)

    @property
    def passes_memory(self) -> bool:
        """Whether weights might get to a server through memory of its GPU."""
        return self.is_served and not self.urls and names_gpu(self.devices) and self.tensor == 1

    @property
    def off_settings(self) -> frozenset[str]:
        """As of any server, and how weights get there if there is only one way."""
        return super().off_settings | frozenset(() if self.passes_memory else ("transfer",))


@dataclass(frozen=True, kw_only=True)
class SglangEngine(ServedEngine):
    """SGLang's servers. They were never tried: only a stand-in that follows their interface."""

    effects: ClassVar[tuple[Effect, ...]] = (_ARE_STARTED,)


@dataclass(frozen=True, kw_only=True)
class ServerEngine(Section):
    """A server with OpenAI's interface. It returns text without tokens, so it can evaluate but not train."""

    url: str = ""
    """Address of the server, for example http://localhost:8000."""
    slots: Slots = 256
    """Requests that are sent to the server at the same time."""


EngineConfig = NativeEngine | VllmEngine | SglangEngine | ServerEngine
ENGINES: dict[str, type] = {
    "native": NativeEngine,
    "vllm": VllmEngine,
    "sglang": SglangEngine,
    "server": ServerEngine,
}
