"""Rollout files: the groups of one step, without loss, in the format of `cohort.serialize`.

A token takes about 14 bytes: 4 for its id, 1 for its provenance, 8 for two float32 log-probabilities. Texts are
compressed. Files of format 1, which earlier versions wrote, can be read as well.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from cohort.errors import RunError
from cohort.fates import Fate
from cohort.run.store.rollouts_format_1 import is_format_1, read_format_1
from cohort.serialize import SerialError, dumps, loads
from cohort.system.disk import explain_disk_errors, write_atomically
from cohort.types import Finish, Group, Prompt, Provenance, Sample

_NAME = re.compile(r"step-(\d{6,})\.safetensors")
_DAMAGED_ADVICE = "Restore it from a copy; `cohort explain` and `cohort replay` can also take another --step."


def make_rollout_path(folder: Path, step: int) -> Path:
    """Returns the path of the rollout file of a step, counted from 1: step-000001.safetensors in `folder`."""
    return folder / f"step-{step:06d}.safetensors"


def save_rollouts(path: Path, groups: Sequence[Group]) -> int:
    """Writes groups to the rollout file `path`, completely or not at all, and returns the size of the file in bytes.

    Raises RunError if a value cannot be stored or the disk fails.
    """
    try:
        data = dumps(list(groups))
    except SerialError as error:
        raise RunError(
            f"cannot write {path}, because the task made a value that cannot be stored: {error}. The task's methods "
            "`rows` and `prompt`, and its environment if it has one, must return JSON values only: change them."
        ) from error
    with explain_disk_errors(path):
        # The folder may have been removed while the run goes on.
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, data)
    return len(data)


def load_rollouts(path: Path, advice: str = _DAMAGED_ADVICE) -> list[Group]:
    """Returns the groups in the rollout file `path`, equal to the saved ones to the last bit.

    Reads the current format and format 1. Raises RunError if the file is missing, cannot be read, or is damaged; the
    message ends with `advice`. A damaged file may contain anything, hence the many handlers. Files of earlier versions
    have no checksum, so not all of their damage is found.
    """
    try:
        data = path.read_bytes()
        arrays = load_arrays(data)
        # Both formats are safetensors files; their arrays have different names.
        groups = read_format_1(arrays) if is_format_1(arrays) else loads(data)
        if not isinstance(groups, list):
            raise ValueError("it does not contain a list of groups")
        for group in groups:
            _check_group(group)
    except FileNotFoundError:
        raise RunError(
            f"there is no file {path}: the run has not done this step, or its rollouts were removed. {advice}"
        ) from None
    except MemoryError:
        raise RunError(
            f"{path} is damaged, or its content does not fit into memory. Use a machine with more memory. {advice}"
        ) from None
    except RecursionError:
        raise RunError(f"{path} is damaged or not a rollout file: its content is nested too deeply. {advice}") from None
    except (LookupError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise RunError(
            f"{path} is damaged or not a rollout file: its content is inconsistent ({kind}: {error}). {advice}"
        ) from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}. Repair its permissions, or restore it from a copy.") from error
    except (SafetensorError, zlib.error, ValueError) as error:
        raise RunError(
            f"{path} is damaged, not a rollout file or from a newer version of Cohort: {error}. {advice}"
        ) from error
    return groups


def _check_group(group: Any) -> None:
    """Raises ValueError for a group that no run can have saved: wrong types in fields, or lists of different lengths.

    The serialisation knows records by their field names alone, so fields of a damaged file may hold any type.
    """
    if type(group) is not Group:
        raise ValueError("it contains something else than groups")
    _check_fields(group, _GROUP_CHECKS)
    prompt = group.prompt
    _check_fields(prompt, _PROMPT_CHECKS)
    if len(prompt.provenance) != len(prompt.tokens):
        raise ValueError("the tokens and the provenance of a prompt differ in length")
    for sample in group.samples:
        _check_fields(sample, _SAMPLE_CHECKS)
        num = len(sample.tokens)
        for name in ("provenance", "sampler_logprobs"):
            if len(getattr(sample, name)) != num:
                raise ValueError(f"the tokens and the {name} of a sample differ in length")
        # These may be empty or None: they are not known for every sample.
        for name in ("kept_mass", "old_logprobs", "ref_logprobs", "token_advantages"):
            if (values := getattr(sample, name)) and len(values) != num:
                raise ValueError(f"the tokens and the {name} of a sample differ in length")


ValueCheck = Callable[[Any], bool]
"""Returns whether a value is valid for a field."""


def _check_fields(record: Any, checks: dict[str, ValueCheck]) -> None:
    """Raises ValueError if a field of the record does not pass its check. `checks` has one check per field name."""
    for name, is_valid in checks.items():
        if not is_valid(getattr(record, name)):
            raise ValueError(f"the field {name} of a {type(record).__name__.lower()} has a wrong type or value")


def _has_type(*kinds: type) -> ValueCheck:
    """Returns a function that tells whether a value has exactly one of these types.

    Values of a subclass fail, so True is not an int.
    """
    return lambda value: type(value) in kinds


def _is_list_of(*kinds: type) -> ValueCheck:
    """Returns a function that tells whether a value is a list in which every item has one of these types.

    The types may be mixed, subclasses fail, and the empty list passes.
    """

    def is_valid(value: Any) -> bool:
        if type(value) is not list:
            return False
        types = list(map(type, value))
        # Most lists have only the first type, and counting is faster than a set.
        return types.count(kinds[0]) == len(types) or set(types) <= set(kinds)

    return is_valid


def _is_provenance(value: Any) -> bool:
    """Returns whether the value is a list of provenances (who wrote each token: prompt, policy, ...) as numbers."""
    return _is_int_list(value) and set(value) <= _PROVENANCE_VALUES


def _is_versions(value: Any) -> bool:
    """Returns whether the value is a list of tuples of two int. The numbers themselves are not checked.

    Each stands for (index of the first token of a span, version of the weights that sampled it).
    """
    return _is_list_of(tuple)(value) and all(list(map(type, pair)) == [int, int] for pair in value)


def _is_parts(value: Any) -> bool:
    """Returns whether the value is a dict whose values are numbers, like the reward parts of a sample by name.

    Keys are not checked. True is not a number here.
    """
    return type(value) is dict and all(type(part) in (float, int) for part in value.values())


def _is_calls(value: Any) -> bool:
    """Returns whether the value is a dict whose values are int, like the calls of a sample by outcome."""
    return type(value) is dict and all(type(count) is int for count in value.values())


def _is_none_or(is_valid: ValueCheck) -> ValueCheck:
    """Returns a function that accepts None and every value that `is_valid` accepts."""
    return lambda value: value is None or is_valid(value)


_PROVENANCE_VALUES = set(map(int, Provenance))
_is_text = _has_type(str)
_is_number = _has_type(float, int)
_is_int_list = _is_list_of(int)
_is_number_list = _is_list_of(float, int)
# The checks of all fields, by record.
_GROUP_CHECKS = {
    "prompt": _has_type(Prompt),
    "samples": _is_list_of(Sample),
    "excluded": _has_type(Fate),
    "reused": _has_type(int),
}
_PROMPT_CHECKS = {
    **{
        "task": _is_text,
        "id": _is_text,
        "visit": _has_type(int),
        "row": _has_type(dict),
        "messages": _is_list_of(dict),
    },
    **{"tokens": _is_int_list, "provenance": _is_provenance, "forced_text": _is_text},
}
_SAMPLE_CHECKS = {
    **{
        "tokens": _is_int_list,
        "provenance": _is_provenance,
        "sampler_logprobs": _is_number_list,
        "kept_mass": _is_number_list,
    },
    **{"versions": _is_versions, "finish": _has_type(Finish), "masked": _has_type(Fate)},
    **{"text": _is_text, "reason": _is_text, "failure": _is_text, "parts": _is_parts},
    **{"reward": _is_none_or(_is_number), "turn_rewards": _is_number_list},
    **{"calls": _is_calls, "turn_calls": _is_list_of(dict), "messages": _is_list_of(dict)},
    **{"advantage": _is_number, "token_advantages": _is_none_or(_is_number_list)},
    **{"old_logprobs": _is_none_or(_is_number_list), "ref_logprobs": _is_none_or(_is_number_list)},
}


def list_rollout_steps(folder: Path) -> list[int]:
    """Returns the steps, counted from 1, that have a rollout file in `folder`, oldest first; [] without the folder."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def remove_rollouts(folder: Path, keep: Callable[[int], bool]) -> None:
    """Removes the rollout files of all steps for which `keep(step)` is false."""
    for step in list_rollout_steps(folder):
        if not keep(step):
            make_rollout_path(folder, step).unlink()
