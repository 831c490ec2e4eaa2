"""A rank whose connection reads only copies, as gloo with a GPU: `python -m tests.helpers.unreadable_memory`.

A tensor counts as one in GPU memory unless it is a copy that the world has made. The collectives refuse all others, as
the call of a library refuses memory that it cannot read. Which collectives had copies is written to `copied-RANK` in
the folder of the runs. The words of the command line are those of `rank_runs`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cohort import world
from cohort.world import ProcessGroup
from tests.helpers import rank_runs

# The collectives of tensors, where they are looked up, with the number of tensors that each gets.
COLLECTIVES = ((world.dist, "all_reduce", 1), (world.dist, "broadcast", 1), (world, "_JOIN", 2))
COLLECTIVES += ((world, "_SUM_SCATTERED", 2),)


class Copy(torch.Tensor):
    """A tensor in memory that the connection reads."""


def refuse_others(name: str, call: Callable[..., Any], num: int, used: set[str]) -> Callable[..., Any]:
    """Returns a collective that refuses tensors which are no copies. It notes its name in `used`."""

    def checked(*args: Any, **options: Any) -> Any:
        """Calls the collective with plain tensors."""
        for tensor in args[:num]:
            if not isinstance(tensor, Copy):
                raise RuntimeError(f"{name}: this memory cannot be read")
        used.add(name)
        return call(*(tensor.as_subclass(torch.Tensor) for tensor in args[:num]), *args[num:], **options)

    return checked


def main() -> None:
    """Does the cases of the command line as a rank with such a connection."""
    used: set[str] = set()
    for place, name, num in COLLECTIVES:
        setattr(place, name, refuse_others(name, getattr(place, name), num, used))
    ProcessGroup._reads = lambda self, x: isinstance(x, Copy)  # type: ignore[method-assign]
    ProcessGroup._carry = lambda self, x: x.detach().clone().contiguous().as_subclass(Copy)  # type: ignore[method-assign]
    rank_runs.main()
    (Path(sys.argv[1]) / f"copied-{os.environ['RANK']}").write_text(" ".join(sorted(used)))


if __name__ == "__main__":
    main()
