"""Checkpoints: everything a run needs to go on as if it had never stopped.

    checkpoints/step-000100/
      model/                  a Hugging Face folder, fp32
      optimizer.safetensors   moments by parameter name, full shape, fp32; adapters, if it is these that are trained
      state.json              counters, and size and checksum of every other file

A checkpoint is written aside, made durable and renamed: under its final name it is always whole. What can
still happen to it there (a failing disk, a stray `rm`) is found by the checksums when it is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cohort.errors import RunError
from cohort.system.disk import checksum, disk_errors, sync_directory, sync_tree

FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
_ASIDE = ".tmp-"


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """The state after `step` completed steps; `model` is the weights' folder, once saved or loaded."""

    step: int
    cursor: int  # of the task stream
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)  # JSON: counters, controllers, thread count, versions
    model: Path | None = None


def name(step: int) -> str:
    """The folder of a step.

    >>> name(100)
    'step-000100'
    """
    return f"step-{step:06d}"


def steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def latest(directory: Path) -> Path | None:
    """The newest checkpoint, intact or not; `load` tells."""
    found = steps(directory)
    return directory / name(found[-1]) if found else None


def save(directory: Path, checkpoint: Checkpoint, write_model: Callable[[Path], None]) -> Path:
    """Write `directory/step-...`; when this returns it is durable, before that it does not exist."""
    final = directory / name(checkpoint.step)
    if final.exists():
        raise RunError(f"checkpoint {final} exists already: move it away to write it again.")
    aside = directory / f"{_ASIDE}{final.name}"
    with disk_errors(final):
        try:
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
            write_model(aside / "model")
            _write_optimizer(aside / "optimizer.safetensors", checkpoint.optimizer)
            sync_tree(aside)
            _write_state(aside, checkpoint)
            os.rename(aside, final)
            sync_directory(directory)
        except SafetensorError as error:
            # The library reports a full disk as its own error; its text carries the system's reason.
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(f"cannot write {final}: {error}; everything written before is intact.") from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    checkpoint.model = final / "model"
    return final


def load(path: Path) -> Checkpoint:
    """Read a checkpoint after checking every byte; a damaged one is named, the one before it offered."""
    problem, state = inspect(path)
    if problem:
        raise RunError(f"checkpoint {path} is damaged ({problem}); {_remedy(path)}.")
    try:
        optimizer = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise RunError(f"checkpoint {path} cannot be read ({error}); {_remedy(path)}.") from error
    return Checkpoint(
        step=state["step"],
        cursor=state["cursor"],
        optimizer=optimizer,
        numbers=state["numbers"],
        model=path / "model",
    )


def inspect(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with a checkpoint ("" = nothing), and its state."""
    try:
        state = json.loads((path / "state.json").read_text())
        files = dict(state["files"])
        missing = {"format", "step", "cursor", "numbers"} - state.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"state.json cannot be read: {error}", {}
    if missing:
        return f"state.json has no {', '.join(sorted(missing))}", {}
    if state["format"] > FORMAT:
        return f"format {state['format']} is newer than this version of Cohort, which knows {FORMAT}", state
    for file, expected in files.items():
        target = path / file
        if not target.is_file():
            return f"{file} is missing", state
        size = target.stat().st_size
        if size != expected["size"]:
            return f"{file} has {size} bytes instead of {expected['size']}", state
        if checksum(target) != expected["crc32"]:
            return f"{file} has changed since it was written", state
    return "", state


def prune(directory: Path, *, keep_last: int, keep: set[int]) -> list[int]:
    """Remove all but the newest `keep_last` (at least one) and those of the steps in `keep`."""
    found = steps(directory)
    old = [step for step in found[: -max(keep_last, 1)] if step not in keep]
    for step in old:
        # Renamed first, so that a kill during the removal leaves no checkpoint that lacks files.
        aside = directory / f"{_ASIDE}old-{name(step)}"
        with disk_errors(directory):
            os.rename(directory / name(step), aside)
            shutil.rmtree(aside, ignore_errors=True)
    return old


def clean(directory: Path) -> None:
    """Remove what a killed run left aside. Only for the one who holds the run's lock."""
    for entry in directory.glob(f"{_ASIDE}*"):
        shutil.rmtree(entry, ignore_errors=True)


def _write_optimizer(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """fp32 by contract; float64 (test runs) is kept as it is, because rounding it would not be exact."""
    for parameter, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f'optimizer state "{parameter}" is {tensor.dtype}, must be float32')
    save_file({parameter: _own_storage(tensor.detach().cpu()) for parameter, tensor in tensors.items()}, path)


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Views of a fused tensor are copied: safetensors refuses tensors that share memory."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.contiguous().clone()


def _write_state(folder: Path, checkpoint: Checkpoint) -> None:
    """state.json, last: it vouches for the others."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    state = {
        "format": FORMAT,
        "step": checkpoint.step,
        "cursor": checkpoint.cursor,
        "numbers": checkpoint.numbers,
        "files": {f.relative_to(folder).as_posix(): {"size": f.stat().st_size, "crc32": checksum(f)} for f in files},
    }
    target = folder / "state.json"
    with open(target, "w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(folder)


def _remedy(path: Path) -> str:
    match = _NAME.fullmatch(path.name)
    step = int(match[1]) if match else 0
    for earlier in reversed([s for s in steps(path.parent) if s < step]):
        if not inspect(path.parent / name(earlier))[0]:
            return f"{name(earlier)} before it is intact: move the damaged one away to resume from there"
    return "there is no earlier one: move it away to start this run from its beginning"
