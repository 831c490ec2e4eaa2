"""Makes a fleet of native engines in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cohort.config.engines import NativeEngine
from cohort.engines.base import Abilities
from cohort.engines.fleet.base import NewsQueue
from cohort.engines.fleet.engine import Fleet, FleetLimits
from cohort.engines.fleet.folder import WeightFolder
from cohort.engines.fleet.process import ProcessReplica
from cohort.engines.fleet.transfer import choose_transfer
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
    device: str  # where the run is: "cpu", or "cuda:N"
    context: int
    vocab_size: int
    threads: int  # of each process; 0 = the cores of this machine divided among all engine processes
    window: int | None  # most decode steps between two reports; None = the engine's usual number
    is_divided: bool = False  # whether ranks divide the learner's model among them


def make_native_fleet(variant: NativeEngine, model: ProcessModel) -> Fleet:
    """Returns a fleet of `variant.replicas` engine processes, which have loaded the model from its folder.

    Raises ConfigError for impossible devices, and EngineError if a process does not start.
    """
    num = variant.replicas
    devices = divide_devices(variant.devices, num, model.device)
    check_gpus(devices, torch.cuda.device_count())
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
                memory=1.0 if is_alone(device, variant.devices, list_learners(model.device)) else variant.memory,
            ),
            news,
            variant.patience,
            show_devices([device]),
        )
        for n, device in enumerate(devices)
    ]
    limits = FleetLimits(context=model.context, vocab_size=model.vocab_size, restarts=variant.restarts)
    transfer = choose_transfer(variant.transfer, WeightFolder(), devices, model.device, model.is_divided)
    return Fleet("native", replicas, news, transfer, limits, ABILITIES)


def list_learners(device: str) -> list[str]:
    """Returns where the learners of this machine are, of all ranks. `device` is where that of this process is."""
    return [f"cuda:{n}" for n in range(count_local_ranks())] if is_rank() and device != "cpu" else [device]


def is_alone(device: str, given: Sequence[str], learners: Sequence[str]) -> bool:
    """Returns whether an engine has its device for itself: no other one of the devices `given`, and no learner."""
    return device == "cpu" or (given.count(device) == 1 and device not in learners)


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
                "engines elsewhere need GPUs: name them, as in --engine.devices cuda:1 cuda:2. The run's own may be "
                "among them; --engine.memory is then the engine's share of its memory."
            )
        return ["cpu"] * num
    for name in given:
        kind, _, index = name.partition(":")
        if name != "cpu" and not (kind == "cuda" and index.isdecimal() and index == str(int(index))):
            raise ConfigError(f'engine.devices has "{name}"; write cpu, or cuda:N with the number of a GPU.')
    if len(given) != num * num_ranks:
        raise ConfigError(
            f"engine.devices names {len(given)} devices, but engines need {num * num_ranks} on this machine: {num} "
            f"(engine.replicas, times engine.tensor if there is one) for each of its ranks, {num_ranks}. Name as many."
        )
    return list(given[rank * num : (rank + 1) * num])


def check_gpus(devices: Sequence[str], num_gpus: int) -> None:
    """Raises ConfigError if a device is a GPU beyond the `num_gpus` that torch sees."""
    for device in devices:
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index) >= num_gpus:
            raise ConfigError(
                f"engine.devices names {device}, but torch sees {num_gpus} GPUs here. Name others, or --engine.devices "
                "cpu."
            )


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
