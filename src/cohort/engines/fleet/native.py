"""Makes a fleet of native engines in processes of their own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cohort.config.engines import NativeEngine
from cohort.engines.base import Abilities
from cohort.engines.fleet.base import NewsQueue
from cohort.engines.fleet.engine import Fleet, FleetLimits
from cohort.engines.fleet.folder import WeightFolder
from cohort.engines.fleet.process import ProcessReplica
from cohort.engines.fleet.wire import EngineHello
from cohort.errors import ConfigError
from cohort.ranks.environment import count_local_ranks, is_rank, read_place
from cohort.system.kernel import count_cores

ABILITIES = Abilities(streams=False)
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessModel:
    """The model that engine processes load, and how."""

    folder: Path
    dtype: str
    device: str  # "cpu" or "cuda": where the run is
    context: int
    vocab_size: int
    threads: int  # of each process; 0 = the cores of this machine divided among all engine processes
    window: int | None  # most decode steps between two reports; None = the engine's usual number


def make_native_fleet(variant: NativeEngine, model: ProcessModel) -> Fleet:
    """Returns a fleet of `variant.replicas` engine processes, which have loaded the model from its folder.

    Raises ConfigError for impossible devices, and EngineError if a process does not start.
    """
    num = variant.replicas
    devices = divide_devices(variant.devices, num, model.device)
    news = NewsQueue()
    replicas = [
        ProcessReplica(
            n,
            f"engine process {n + 1} of {num} ({device})",
            EngineHello(
                folder=str(model.folder),
                dtype=model.dtype,
                device=device.partition(":")[0],
                threads=count_threads(model.threads, num),
                slots=variant.slots,
                context=model.context,
                weights=variant.weights,
                window=model.window,
            ),
            news,
            variant.patience,
            show_devices([device]),
        )
        for n, device in enumerate(devices)
    ]
    limits = FleetLimits(context=model.context, vocab_size=model.vocab_size, restarts=variant.restarts)
    return Fleet("native", replicas, news, WeightFolder(), limits, ABILITIES)


def count_threads(given: int, num: int) -> int:
    """Returns the threads of each of a rank's `num` engines on a CPU: as given, or an equal share of the cores."""
    return given or max(1, count_cores() // (count_local_ranks() * num))


def divide_devices(given: tuple[str, ...], num: int, device: str) -> list[str]:
    """Returns the `num` devices of this rank's engines: "cpu", or "cuda:N" each. `device` is where the run is.

    `given` are those that the user named. Raises ConfigError as `choose_devices` does.
    """
    return choose_devices(given, num, device, read_place()[2] if is_rank() else 0, count_local_ranks())


def choose_devices(given: tuple[str, ...], num: int, device: str, rank: int, num_ranks: int) -> list[str]:
    """Returns the devices of the engines of rank number `rank` of this machine, `num` in all: "cpu", or "cuda:N" each.

    `given` are the devices that the user named, for all `num_ranks` ranks of the machine in turn; `device` is where the
    run is. Raises ConfigError for other names, for GPUs beside the CPU or another number of devices, and if none are
    named on a GPU.
    """
    if not given:
        if device != "cpu":
            raise ConfigError(
                "engines elsewhere need GPUs of their own, because that of the run has no room to spare: name them, as "
                "in --engine.devices cuda:1 cuda:2."
            )
        return ["cpu"] * num
    for name in given:
        kind, _, index = name.partition(":")
        if name != "cpu" and not (kind == "cuda" and index.isdecimal()):
            raise ConfigError(f'engine.devices has "{name}"; write cpu, or cuda:N with the number of a GPU.')
    if len(given) != num * num_ranks:
        raise ConfigError(
            f"engine.devices names {len(given)} devices, but engines need {num * num_ranks} on this machine: {num} "
            f"(engine.replicas, times engine.tensor if there is one) for each of its ranks, {num_ranks}. Name as many."
        )
    return list(given[rank * num : (rank + 1) * num])


def show_devices(devices: list[str]) -> dict[str, str]:
    """Returns the environment variable because of which a process sees only these GPUs; {} for the CPU.

    A number counts among the GPUs that this process sees. Raises ConfigError for one that it does not see.
    """
    indices = [int(device.partition(":")[2]) for device in devices if device != "cpu"]
    if not indices:
        return {}
    visible = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    if visible and max(indices) >= len(visible):
        raise ConfigError(
            f"engine.devices names cuda:{max(indices)}, but {VISIBLE} shows {len(visible)} GPUs: use cuda:0 to cuda:"
            f"{len(visible) - 1}."
        )
    return {VISIBLE: ",".join(visible[index] if visible else str(index) for index in indices)}
