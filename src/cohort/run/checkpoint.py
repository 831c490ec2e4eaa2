"""Checkpoints: everything a run needs to continue as if it had never stopped.

    checkpoints/step-000100/
      model/                  a Hugging Face folder, fp32
      optimizer.safetensors   moments by parameter name, full shape, fp32; the adapters, if only they are trained
      state.json              counters, size and checksum of every other file, and its own checksum

A checkpoint is written under a temporary name, made durable and then renamed. So under its final name it is always
complete. Damage that happens later (a failing disk, a stray `rm`) is found by the checksums when it is loaded.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from cohort.errors import ModelError, RunError
from cohort.system.disk import compute_checksum, explain_disk_errors, sync_directory, sync_file, sync_tree
from cohort.system.json_text import make_record, read_json_file

if TYPE_CHECKING:
    import torch

    from cohort.learner.base import StateStream

FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
_ASIDE_PREFIX = ".tmp-"
_CHECKSUM = "crc32"  # name in state.json of its own checksum


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """The state of a run after `step` completed steps."""

    step: int
    cursor: int  # position in the prompt stream of the task, or in the data
    # Tensors of full shape by name: a stream of the learner that is to be saved, or tensors that are read when they are
    # looked up. On ranks that do not see the files it is {} after a checkpoint was loaded.
    optimizer: Mapping[str, torch.Tensor] | StateStream = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)  # JSON: counters, controllers, thread count, versions
    model: Path | None = None  # the folder of the weights; None = not saved yet, or this rank does not see the files

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the optimizer by name, of a checkpoint that was loaded."""
        assert isinstance(self.optimizer, Mapping), "a stream is for saving alone"
        return self.optimizer


def folder_name(step: int) -> str:
    """Returns the name of the folder that holds the checkpoint of a step. `step` is the number of completed steps.

    >>> folder_name(100)
    'step-000100'
    """
    return f"step-{step:06d}"


def read_step(folder: Path) -> int | None:
    """Returns the step in the name of a checkpoint's folder; None if the folder has another name.

    >>> read_step(Path("checkpoints/step-000100")), read_step(Path("model"))
    (100, None)
    """
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_steps(directory: Path) -> list[int]:
    """Returns the steps whose checkpoints are in `directory`, oldest first; [] if the directory does not exist."""
    if not directory.is_dir():
        return []
    steps = (read_step(entry) for entry in directory.iterdir() if entry.is_dir())
    return sorted(step for step in steps if step is not None)


def find_latest(directory: Path) -> Path | None:
    """Returns the folder of the newest checkpoint in `directory`; None if there is none. Does not check its files."""
    steps = list_steps(directory)
    return directory / folder_name(steps[-1]) if steps else None


def save(directory: Path, checkpoint: Checkpoint, write_model: Callable[[Path], None]) -> Path:
    """Writes a checkpoint to the folder `directory/step-...` and returns that folder, which then survives a power cut.

    `write_model(folder)` is called to write the weights. `checkpoint.model` is set to their folder. Raises RunError if
    the checkpoint exists or the disk fails, and ValueError if an optimizer tensor is neither float32 nor float64. A
    failure removes the temporary files.
    """
    final = directory / folder_name(checkpoint.step)
    if final.exists():
        raise RunError(
            f"{final} exists already, so the checkpoint cannot be written there. Move it away, then continue the run "
            f"with `cohort resume {directory.parent}`."
        )
    aside = directory / f"{_ASIDE_PREFIX}{final.name}"
    with explain_disk_errors(final):
        try:
            # Left by an earlier attempt that was killed.
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
            write_model(aside / "model")
            _write_optimizer(aside / "optimizer.safetensors", checkpoint.optimizer)
            # The order matters: files are durable before state.json vouches for them, and that before the rename.
            sync_tree(aside)
            _write_state(aside, checkpoint)
            os.rename(aside, final)
            sync_directory(directory)
        except (SafetensorError, ModelError) as error:
            # The library reports a full disk as its own error, and so does the writer of the model. The text has the
            # system's reason.
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(
                f"cannot write {final}: {error}. The disk may be full or failing: repair that, then continue the run "
                f"with `cohort resume {directory.parent}`; everything written before is intact."
            ) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    checkpoint.model = final / "model"
    return final


# What state.json holds besides the sizes and checksums of the files.
_STATE_TYPES = {"format": int, "step": int, "cursor": int, "numbers": dict[str, Any]}


@dataclass(frozen=True, kw_only=True)
class _StoredFile:
    """What state.json says of one file of the checkpoint."""

    size: int  # bytes
    crc32: str


def load(path: Path) -> Checkpoint:
    """Returns the checkpoint in the folder `path`. Its weights are not loaded: `model` is their folder.

    The optimizer's tensors are read from the file when they are looked up.

    Every file is first compared with its recorded size and checksum. Raises RunError if a file is missing or damaged,
    or the format is newer than this version knows; the message says from where the run can continue.
    """
    problem, state = check_files(path)
    if state.get("format", FORMAT) > FORMAT:
        raise RunError(
            f"the checkpoint {path} has format {state['format']}, but this version of Cohort reads formats up to "
            f"{FORMAT} only: upgrade Cohort."
        )
    if problem:
        raise RunError(
            f"the checkpoint {path} is damaged or cannot be read ({problem}). Move it away, then continue the run with "
            f"`cohort resume {path.parent.parent}`: {_describe_resume_point(path)}."
        )
    try:
        optimizer = StoredTensors(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the checkpoint {path} cannot be read ({error}). Move it away, then continue the run with "
            f"`cohort resume {path.parent.parent}`: {_describe_resume_point(path)}."
        ) from error
    return Checkpoint(
        step=state["step"],
        cursor=state["cursor"],
        optimizer=optimizer,
        numbers=state["numbers"],
        model=path / "model",
    )


def check_files(path: Path) -> tuple[str, dict[str, Any]]:
    """Compares the files of the checkpoint in the folder `path` with their recorded sizes and checksums.

    Returns a text about the first problem ("" = none) and the content of state.json, as `read_state` does.
    """
    problem, state = read_state(path)
    if problem:
        return problem, state
    files: dict[str, _StoredFile] = make_record(dict[str, _StoredFile], state["files"], "files")
    for file, expected in files.items():
        target = path / file
        if not target.is_file():
            return f"{file} is missing", state
        # The size is compared first, because it needs no reading.
        size = target.stat().st_size
        if size != expected.size:
            return f"{file} has {size} bytes instead of {expected.size}", state
        if compute_checksum(target) != expected.crc32:
            return f"{file} has changed since it was written", state
    return "", state


def read_state(path: Path) -> tuple[str, dict[str, Any]]:
    """Reads state.json of the checkpoint in the folder `path`, and compares it with its own checksum.

    Returns a text about the first problem ("" = none) and the content ({} if it cannot be read). A format that is newer
    than this version knows is a problem as well; then nothing else is checked, and the content has the format.
    Checkpoints of earlier versions have no checksum.
    """
    try:
        state = dict(read_json_file(path / "state.json"))
        number = make_record(int, state.get("format"), "format")
        if number > FORMAT:
            return f"format {number} is newer than this version of Cohort, which knows {FORMAT}", state
        if missing := {*_STATE_TYPES, "files"} - state.keys():
            return f"state.json has no {', '.join(sorted(missing))}", {}
        for name, kind in {**_STATE_TYPES, "files": dict[str, _StoredFile]}.items():
            make_record(kind, state[name], name)
        checksum = _compute_state_checksum(state)
    except (OSError, ValueError, TypeError) as error:
        return f"state.json cannot be read: {error}", {}
    # The name of the folder tells the step too.
    if state.get(_CHECKSUM, checksum) != checksum or state["step"] != (read_step(path) or state["step"]):
        return "state.json has changed since it was written", state
    return "", state


def _compute_state_checksum(state: Mapping[str, Any]) -> str:
    """Returns the CRC-32 of the content of state.json, without the checksum itself, as 8 hexadecimal digits."""
    content = {name: value for name, value in state.items() if name != _CHECKSUM}
    # Keys in any order and any white space give the same text.
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def prune(directory: Path, *, keep_last: int, keep: set[int]) -> list[int]:
    """Removes old checkpoints from `directory` and returns the steps of those that it removed, oldest first.

    It keeps the newest `keep_last` checkpoints (at least one) and those of the steps in `keep`.
    """
    steps = list_steps(directory)
    old = [step for step in steps[: -max(keep_last, 1)] if step not in keep]
    for step in old:
        # Renamed first, so that a kill during the removal does not leave a checkpoint with missing files.
        aside = directory / f"{_ASIDE_PREFIX}old-{folder_name(step)}"
        with explain_disk_errors(directory):
            os.rename(directory / folder_name(step), aside)
            shutil.rmtree(aside, ignore_errors=True)
    return old


def remove_leftovers(directory: Path) -> None:
    """Removes temporary folders (.tmp-*) that killed processes left in `directory`.

    The caller must hold the run's lock.
    """
    for entry in directory.glob(f"{_ASIDE_PREFIX}*"):
        shutil.rmtree(entry, ignore_errors=True)


class StoredTensors(Mapping[str, "torch.Tensor"]):
    """The tensors in a safetensors file by name. A tensor is read when it is looked up, and not kept."""

    def __init__(self, path: Path) -> None:
        # Imported here because it imports torch: a wrong name of a checkpoint must not wait for that.
        from safetensors import safe_open

        self._file = safe_open(path, framework="pt")
        self._names: dict[str, None] = dict.fromkeys(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def assist_save(checkpoint: Checkpoint) -> None:
    """Does the part of the other ranks while the first one saves the same checkpoint with `save`."""
    if not isinstance(checkpoint.optimizer, Mapping):
        for _ in checkpoint.optimizer.tensors():
            pass


_DTYPE_NAMES = {"torch.float32": "F32", "torch.float64": "F64"}  # names of types in a safetensors file


def _write_optimizer(path: Path, optimizer: Mapping[str, torch.Tensor] | StateStream) -> None:
    """Writes the optimizer's tensors, by parameter name, to the file `path`, without rounding and one by one.

    The file has the bytes that the library safetensors would write. Raises ValueError for a tensor that is not float32
    (or float64, which occurs in tests).
    """
    import torch

    from cohort.learner.base import StateStream

    stream = StateStream.wrap(optimizer, {}) if isinstance(optimizer, Mapping) else optimizer
    for parameter, entry in stream.entries.items():
        if str(entry.dtype) not in _DTYPE_NAMES:
            raise ValueError(f'the optimizer state "{parameter}" is {entry.dtype}, but must be float32 (or float64)')
    header: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    end = 0
    # The order of the library: wide types first, then by name.
    for name, entry in sorted(stream.entries.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        offsets[name], end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        place = {"data_offsets": [offsets[name], end]}
        header[name] = {"dtype": _DTYPE_NAMES[str(entry.dtype)], "shape": list(entry.shape), **place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded, such that the tensors begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in stream.tensors():
            assert tensor is not None, "only the first rank writes"
            file.seek(8 + len(text) + offsets[name])
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            # Freed here: otherwise two tensors would be in memory while the next one is put together.
            del tensor


def _write_state(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes state.json, durably: the counters of the checkpoint, and size and checksum of every file below `folder`.

    So it must be the last file that is written.
    """
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    state: dict[str, Any] = {
        "format": FORMAT,
        "step": checkpoint.step,
        "cursor": checkpoint.cursor,
        "numbers": checkpoint.numbers,
        "files": {
            f.relative_to(folder).as_posix(): {"size": f.stat().st_size, "crc32": compute_checksum(f)} for f in files
        },
    }
    # Read back first: JSON turns tuples into lists and keys into texts.
    state[_CHECKSUM] = _compute_state_checksum(json.loads(json.dumps(state)))
    target = folder / "state.json"
    with open(target, "w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        sync_file(file.fileno())
    sync_directory(folder)


def _describe_resume_point(path: Path) -> str:
    """Returns the end of a message: where a resume begins once the damaged checkpoint `path` is moved away.

    A resume takes the newest checkpoint that is left. The message names those that are damaged too and must go first.
    """
    others = [step for step in list_steps(path.parent) if folder_name(step) != path.name]
    damaged: list[str] = []
    for step in reversed(others):
        if not check_files(path.parent / folder_name(step))[0]:
            also = f"{', '.join(damaged)} must be moved away too; then " if damaged else ""
            return f"{also}{folder_name(step)} is intact, and the run continues from there"
        damaged.append(folder_name(step))
    also = f" once {', '.join(damaged)} is moved away too" if damaged else ""
    return f"no other checkpoint is intact, so the run starts again from its beginning{also}"
