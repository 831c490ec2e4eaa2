"""The flag `--ranks N` of commands that several processes can share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cohort.config.section import at_least, at_most
from cohort.errors import ConfigError
from cohort.logs.printing import print_note
from cohort.ranks.environment import is_rank
from cohort.ranks.launch import launch_ranks, remove_flag

MAX_RANKS = 1_024  # on one machine
Ranks = Annotated[int | None, at_least(0), at_most(MAX_RANKS)]
"""Number of processes; 0 = one per GPU, None = this process alone."""


def start_ranks(args: Sequence[str], num_ranks: int) -> bool:
    """Runs the command `cohort ARGS` as ranks, without its flag --ranks, and returns True when they have ended.

    Returns False, and does nothing, if one rank is asked for: this process does the work itself. Raises SystemExit with
    the exit code of a rank that failed, RankError if one was killed, and ConfigError if this process is a rank itself.
    """
    if is_rank():
        raise ConfigError("--ranks starts processes, and torchrun or another launcher has done that. Remove --ranks.")
    if not 0 <= num_ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks is {num_ranks}; it must be from 0 to {MAX_RANKS:,}. 0 means one rank per GPU.")
    if num_ranks == 0:
        num_ranks = _count_gpus()
    if num_ranks == 1:
        return False
    if code := launch_ranks(remove_flag(args, "ranks"), num_ranks):
        raise SystemExit(code)
    return True


def _count_gpus() -> int:
    """Returns the number of GPUs of this machine. Raises ConfigError if there is none."""
    # Imported here because it imports torch.
    from cohort.ranks.join import count_gpus

    if num := count_gpus():
        return num
    raise ConfigError("--ranks 0 means one rank per GPU, and torch sees no GPU here. Give a number: --ranks 2.")


def notice_idle_gpus(device: str) -> None:
    """Says in one line that this process uses one of several GPUs, if that is so. `device` is the setting."""
    from cohort.ranks.join import count_gpus

    if not is_rank() and device != "cpu" and (num := count_gpus()) > 1:
        print_note(f"this process uses one of {num} GPUs; --ranks 0 uses all of them")
