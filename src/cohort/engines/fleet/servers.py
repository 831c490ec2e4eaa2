"""Makes a fleet of vLLM's or SGLang's servers, which Cohort starts or the user names."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.config.engines import ServedEngine, VllmEngine
from cohort.engines.base import Abilities
from cohort.engines.fleet.base import NewsQueue
from cohort.engines.fleet.calls import Address, read_address
from cohort.engines.fleet.dialect import Dialect, ServerSettings, warn_hardware
from cohort.engines.fleet.engine import Fleet, FleetLimits
from cohort.engines.fleet.folder import WeightFolder
from cohort.engines.fleet.native import count_threads, divide_devices, show_devices
from cohort.engines.fleet.server import ServerReplica, SessionSettings, Starter
from cohort.engines.fleet.sglang_server import SglangDialect
from cohort.engines.fleet.transfer import choose_transfer
from cohort.engines.fleet.vllm_server import VllmDialect
from cohort.engines.site import read_api_key
from cohort.errors import ConfigError
from cohort.ranks.environment import is_rank, read_place

log = logging.getLogger(__name__)

ABILITIES = Abilities(truncation=False, streams=False)
FIND_SECONDS = 60.0  # for a look whether an environment has a package
# Beside the weights, because some versions read them again: what a model is made of.
SIDE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model that servers load, and how."""

    folder: Path
    dtype: str
    device: str  # where the run is: "cpu", or "cuda:N"
    context: int
    vocab_size: int
    threads: int  # of each server on a CPU; 0 = the cores of this machine divided among all servers
    decode: Callable[[list[int]], str]
    is_divided: bool = False  # whether ranks divide the learner's model among them


def make_server_fleet(name: str, variant: ServedEngine, model: ServedModel) -> Fleet:
    """Returns a fleet of servers of the kind `name` ("vllm" or "sglang"), which have loaded the model.

    Raises ConfigError for impossible settings and for servers that cannot be trained with, EngineError for one that
    does not start.
    """
    addresses = divide_addresses(variant.urls)
    devices = [] if addresses else divide_devices(variant.devices, variant.replicas * variant.tensor, model.device)
    side_files = {file: model.folder / file for file in SIDE_FILES}
    folder = WeightFolder(side_files=side_files, parent=find_parent(variant.folder))
    wish = variant.transfer if isinstance(variant, VllmEngine) and variant.passes_memory else "files"
    transfer = choose_transfer(wish, folder, devices, model.device, model.is_divided)
    has_extension = "cpu" in devices or transfer is not folder
    dialect: Dialect = VllmDialect(has_extension) if name == "vllm" else SglangDialect()
    settings = SessionSettings(
        context=model.context,
        slots=variant.slots,
        patience=variant.patience,
        decode=model.decode,
        key=read_api_key("http://localhost", "") if addresses else "",
    )
    sources: Sequence[Starter | Address] = addresses or make_starters(dialect, variant, model, devices)
    news = NewsQueue()
    replicas = [ServerReplica(n, dialect, source, settings, news) for n, source in enumerate(sources)]
    limits = FleetLimits(context=model.context, vocab_size=model.vocab_size, restarts=variant.restarts)
    return Fleet(name, replicas, news, transfer, limits, ABILITIES)


def find_parent(folder: str) -> Path | None:
    """Returns the folder that the user has named for new weights; None = none. Raises ConfigError if there is none."""
    if not folder:
        return None
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"engine.folder is {folder}, which is no folder: make it, where the servers see it too.")
    return path


def make_starters(dialect: Dialect, variant: ServedEngine, model: ServedModel, devices: list[str]) -> list[Starter]:
    """Returns what starts the servers of this rank, on `devices`. Raises ConfigError for impossible ones."""
    num = variant.replicas
    on_cpu = devices[0] == "cpu"
    if on_cpu and variant.tensor > 1:
        raise ConfigError(
            f"engine.tensor is {variant.tensor}, which needs GPUs, and the servers are on the CPU: remove it, or "
            "name GPUs (--engine.devices)."
        )
    if not on_cpu:
        warn_hardware(dialect.title)
    settings = ServerSettings(
        python=find_python(variant.python, dialect.package),
        folder=model.folder,
        dtype=model.dtype,
        context=model.context,
        slots=variant.slots,
        memory=variant.memory,
        tensor=variant.tensor,
        on_cpu=on_cpu,
        threads=count_threads(model.threads, num),
    )
    parts = [devices[n * variant.tensor : (n + 1) * variant.tensor] for n in range(num)]
    return [Starter(dialect=dialect, settings=settings, environment=show_devices(part)) for part in parts]


def find_python(given: str, package: str) -> str:
    """Returns the path of the Python that has a package: the given one, or that of this process if none is given.

    Raises ConfigError if there is no such program, or it lacks the package.
    """
    # Links are not followed: an environment's python is one, and knows its packages by where it lies.
    path = shutil.which(Path(given).expanduser()) if given else sys.executable
    if path is None:
        raise ConfigError(
            f"engine.python is {given}, which is no program. Name the python of an environment, such as "
            "~/vllm/bin/python."
        )
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    # Its folder has no files that could be imported by mistake.
    done = subprocess.run([path, "-c", script], cwd="/", capture_output=True, timeout=FIND_SECONDS, check=False)
    if done.returncode:
        which = f"the Python {given}" if given else "the Python of this environment"
        raise ConfigError(
            f"{which} has no {package}, which a server needs. Install it there, or name the Python of an environment "
            "that has it: --engine.python PATH."
        )
    return str(Path(path).absolute())


def divide_addresses(urls: tuple[str, ...]) -> list[Address]:
    """Returns the addresses of this rank's servers among those that the user has named for all ranks.

    Raises ConfigError for a text that is no address, one that comes twice, and a number that ranks cannot divide. Warns
    of addresses that other machines can reach.
    """
    addresses = [read_address(url) for url in urls]
    if len(set(addresses)) < len(addresses):
        raise ConfigError("engine.urls names a server twice: each has weights of its own, so name each once.")
    rank, num_ranks, _ = read_place() if is_rank() else (0, 1, 0)
    if len(addresses) % num_ranks:
        raise ConfigError(
            f"engine.urls names {len(addresses)} servers, which {num_ranks} ranks cannot divide among them: name a "
            f"multiple of {num_ranks}."
        )
    num = len(addresses) // num_ranks
    own = addresses[rank * num : (rank + 1) * num]
    for address in own:
        if not address.is_local:
            log.warning(
                "the server %s is beyond this machine: every program that can reach it can change its weights and run "
                "code in it, and an API key does not guard that. Keep it on a private network (docs/engines.md)",
                address,
            )
    return own
