"""Rollout files: the groups of one step, exactly, in the one serialisation (`cohort.serialize`).

About 14 bytes per token: an id in 4, a provenance in 1, two float32 log-probabilities; texts are deflated. Files of
format 1, which earlier versions wrote, are read as well.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from cohort.disk import write_atomic
from cohort.errors import RunError
from cohort.serialize import dumps, loads
from cohort.store.rollouts_format_1 import is_format_1, read_format_1
from cohort.types import Group

_NAME = re.compile(r"step-(\d{6,})\.safetensors")


def rollout_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def save_rollouts(path: Path, groups: Sequence[Group]) -> int:
    """Write the groups, whole or not at all, and return the number of bytes."""
    data = dumps(list(groups))
    write_atomic(path, data)
    return len(data)


def load_rollouts(path: Path) -> list[Group]:
    """The groups as they were saved: equal records, token for token and bit for bit."""
    try:
        data = path.read_bytes()
        arrays = load_arrays(data)
        groups = read_format_1(arrays) if is_format_1(arrays) else loads(data)
        if not isinstance(groups, list) or not all(isinstance(group, Group) for group in groups):
            raise ValueError("it holds no groups")
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: rollouts of that step were not kept (see save.rollouts).") from None
    except (OSError, SafetensorError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged or not a rollout file: {error}.") from error
    return groups


def rollout_steps(folder: Path) -> list[int]:
    """The steps whose rollouts are there, oldest first."""
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def remove_rollouts(folder: Path, wanted: Callable[[int], bool]) -> None:
    """Remove the files of every step that is not wanted: retention, and the clean slate before a resume."""
    for step in rollout_steps(folder):
        if not wanted(step):
            rollout_path(folder, step).unlink()
