"""Rollout files: the groups of one step, exactly, in the one serialisation (`cohort.serialize`).

About 14 bytes per token: an id in 4, a provenance in 1, two float32 log-probabilities; texts are deflated. Files of
format 1, which earlier versions wrote, are read as well.
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
from cohort.system.disk import write_atomic
from cohort.types import Finish, Group, Prompt, Provenance, Sample

_NAME = re.compile(r"step-(\d{6,})\.safetensors")


def rollout_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def save_rollouts(path: Path, groups: Sequence[Group]) -> int:
    """Write the groups, whole or not at all, and return the number of bytes."""
    try:
        data = dumps(list(groups))
    except SerialError as error:
        raise RunError(f"{path} cannot be written, because of what the rollouts hold: {error}.") from error
    write_atomic(path, data)
    return len(data)


def load_rollouts(path: Path) -> list[Group]:
    """The groups as they were saved: equal records, token for token and bit for bit."""
    try:
        data = path.read_bytes()
        arrays = load_arrays(data)
        groups = read_format_1(arrays) if is_format_1(arrays) else loads(data)
        if not isinstance(groups, list):
            raise ValueError("it holds no groups")
        for group in groups:
            _check_group(group)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: rollouts of that step were not kept (see save.rollouts).") from None
    except MemoryError:
        raise RunError(f"{path} is damaged or too large: what it claims to hold does not fit into memory.") from None
    except RecursionError:
        raise RunError(f"{path} is damaged or not a rollout file: it is nested too deep.") from None
    except (LookupError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise RunError(f"{path} is damaged or not a rollout file: it makes no sense ({kind}: {error}).") from error
    except (OSError, SafetensorError, zlib.error, ValueError) as error:
        raise RunError(f"{path} is damaged or not a rollout file: {error}.") from error
    return groups


def _check_group(group: Any) -> None:
    """Raises ValueError for a group that no run can have saved: the wrong thing in a field, or lists that do not fit.

    The serialisation knows records by their field names alone, so a damaged file may hold anything in them.
    """
    if type(group) is not Group:
        raise ValueError("it holds something that is no group")
    _check_fields(group, _GROUP)
    prompt = group.prompt
    _check_fields(prompt, _PROMPT)
    if len(prompt.provenance) != len(prompt.tokens):
        raise ValueError("the tokens and the provenance of a prompt differ in length")
    for sample in group.samples:
        _check_fields(sample, _SAMPLE)
        num = len(sample.tokens)
        for name in ("provenance", "sampler_logprobs"):
            if len(getattr(sample, name)) != num:
                raise ValueError(f"the tokens and the {name} of a sample differ in length")
        for name in ("kept_mass", "old_logprobs", "ref_logprobs", "token_advantages"):  # where they are known
            if (values := getattr(sample, name)) and len(values) != num:
                raise ValueError(f"the tokens and the {name} of a sample differ in length")


Holds = Callable[[Any], bool]


def _check_fields(record: Any, fields: dict[str, Holds]) -> None:
    for name, holds in fields.items():
        if not holds(getattr(record, name)):
            raise ValueError(f"the {name} of a {type(record).__name__.lower()} is not what it should be")


def _is(*kinds: type) -> Holds:
    """These very types: True is no number here."""
    return lambda value: type(value) in kinds


def _list_of(*kinds: type) -> Holds:
    """A list of these very types, most often of the first."""

    def holds(value: Any) -> bool:
        if type(value) is not list:
            return False
        found = list(map(type, value))
        return found.count(kinds[0]) == len(found) or set(found) <= set(kinds)

    return holds


def _are_marks(value: Any) -> bool:
    """One provenance per token."""
    return _whole_numbers(value) and set(value) <= _MARKS


def _are_versions(value: Any) -> bool:
    return _list_of(tuple)(value) and all(list(map(type, pair)) == [int, int] for pair in value)


def _are_parts(value: Any) -> bool:
    return type(value) is dict and all(type(part) in (float, int) for part in value.values())


def _or_none(holds: Holds) -> Holds:
    return lambda value: value is None or holds(value)


_MARKS = set(map(int, Provenance))
_text, _number = _is(str), _is(float, int)
_whole_numbers, _numbers = _list_of(int), _list_of(float, int)
_GROUP = {"prompt": _is(Prompt), "samples": _list_of(Sample), "excluded": _is(Fate), "reused": _is(int)}
_PROMPT = {
    **{"task": _text, "id": _text, "visit": _is(int), "row": _is(dict), "messages": _list_of(dict)},
    **{"tokens": _whole_numbers, "provenance": _are_marks, "forced_text": _text},
}
_SAMPLE = {
    **{"tokens": _whole_numbers, "provenance": _are_marks, "sampler_logprobs": _numbers, "kept_mass": _numbers},
    **{"versions": _are_versions, "finish": _is(Finish), "masked": _is(Fate)},
    **{"text": _text, "reason": _text, "failure": _text, "parts": _are_parts},
    **{"reward": _or_none(_number), "advantage": _number, "token_advantages": _or_none(_numbers)},
    **{"old_logprobs": _or_none(_numbers), "ref_logprobs": _or_none(_numbers)},
}


def rollout_steps(folder: Path) -> list[int]:
    """The steps whose rollouts are there, oldest first."""
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def remove_rollouts(folder: Path, wanted: Callable[[int], bool]) -> None:
    """Remove the files of every step that is not wanted: retention, and the clean slate before a resume."""
    for step in rollout_steps(folder):
        if not wanted(step):
            rollout_path(folder, step).unlink()
