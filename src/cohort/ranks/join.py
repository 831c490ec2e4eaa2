"""Makes this process one of several ranks: those that `cohort train --ranks N`, torchrun or accelerate started."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from cohort.errors import ConfigError, RankError
from cohort.ranks.agree import remember_store
from cohort.ranks.environment import RENDEZVOUS, count_sharing_ranks, is_rank, read_place
from cohort.world import ONE_PROCESS, ProcessGroup, World

log = logging.getLogger(__name__)

TIME_LIMIT = "COHORT_RANK_MINUTES"
"""Environment variable: minutes that a rank waits for the others in one collective."""

# Long enough for the slowest rollout, short enough to notice a rank that hangs.
DEFAULT_MINUTES = 30.0
_PARENT_SECONDS = 1.0


def join_ranks(device: str) -> World:
    """Joins the other ranks and returns their world. Returns the world of one process if this process is no rank.

    `device` is the setting of the run. On GPUs each rank of a machine takes another one, and tensors go through nccl;
    on CPUs, and where ranks share a GPU, they go through gloo and host memory. Raises RankError if the ranks do not
    find each other.
    """
    if not is_rank():
        return ONE_PROCESS
    rank, size, local = read_place()
    minutes = _read_minutes()
    uses_gpu = device != "cpu" and torch.cuda.is_available()
    num_gpus = torch.cuda.device_count() if uses_gpu else 0
    if uses_gpu:
        torch.cuda.set_device(local % num_gpus)
    # nccl refuses two ranks on one GPU.
    backend = "gloo" if num_gpus == 0 or count_sharing_ranks(num_gpus) > 1 else "nccl"
    rendezvous = os.environ.get(RENDEZVOUS)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}" if rendezvous else "env://",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=minutes),
        )
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {rank} of {size} did not find the other ranks within {minutes:g} minutes "
            f"({str(error).strip().splitlines()[0]}). Start all ranks with the same number of ranks and address."
        ) from error
    _end_with_parent()
    remember_store()
    if rank == 0 and uses_gpu:
        log.warning("ranks on GPUs were never tried by those who wrote them: see docs/ranks.md, and check results")
    if rank == 0 and uses_gpu and backend == "gloo":
        log.warning("ranks share a GPU: for trying out, not for speed (%d ranks, GPUs: %d)", size, num_gpus)
    if rank > 0:
        # All ranks notice the same things, and the first one says them.
        logging.getLogger("cohort").setLevel(logging.ERROR)
    # torch warns of names of collectives that torch itself uses.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    return ProcessGroup()


def count_gpus() -> int:
    """Returns the number of GPUs of this machine that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def leave_ranks() -> None:
    """Closes the connections to the other ranks, if this process is a rank."""
    # A group in a process that is no rank belongs to another library, such as vLLM, which closes it.
    if is_rank() and dist.is_initialized():
        # A divided model refers to the group, and torch aborts the process if the group goes first.
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def closing_ranks() -> Iterator[None]:
    """Context that closes the connections to the other ranks at its end."""
    try:
        yield
    finally:
        leave_ranks()


def _read_minutes() -> float:
    """Returns the time limit of a collective in minutes. Raises ConfigError if the variable is no such number."""
    text = os.environ.get(TIME_LIMIT, "")
    try:
        minutes = float(text) if text else DEFAULT_MINUTES
    except ValueError:
        minutes = 0.0
    if not 0.01 <= minutes <= 100_000:
        raise ConfigError(f"{TIME_LIMIT} is {text}; it must be a number of minutes from 0.01 to 100000.")
    return minutes


def _end_with_parent() -> None:
    """Ends this process when the launcher has ended: a rank must not outlive it and hold a GPU or a run."""
    parent = os.getppid()

    def watch() -> None:
        """Ends the process at once, wherever it is, when its parent is another than at the start."""
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        # Not `print`: another thread may be in the middle of one.
        with suppress(OSError):
            os.write(2, f"cohort: rank {os.environ.get('RANK')} ends, because what started it has ended\n".encode())
        os._exit(2)

    threading.Thread(target=watch, daemon=True, name="parent").start()
