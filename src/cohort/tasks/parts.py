"""The parts of a reward: which ones a task class declares, and whether what a grader returned fits them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from numbers import Real
from typing import Any

from cohort.errors import TaskError

ACCURACY = "correct"  # the accuracy of a task that does not name it
SCORE = "score"  # the one part of a task that has no accuracy and names no parts
# The largest number of a part. Squares and sums of many larger ones would not be finite in the update.
MAX_NUMBER = 1e12
NO_PART = "no part of the reward applies to this answer"  # the failure of an answer for which every part is None
_CONTINUOUS = "set accuracy = None in the class for a continuous reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRules:
    """What a task class declares about its reward."""

    parts: tuple[str, ...]  # never empty
    accuracy: str | None  # the part that is 0 or 1; None = the task has none, and its mean reward is measured
    optional: bool  # whether a part may be None, "not applicable to this answer"


def is_computed(cls: type, attribute: str) -> bool:
    """Returns whether a task class has an attribute as a property, whose value depends on the task's settings."""
    return isinstance(inspect.getattr_static(cls, attribute, None), property | cached_property)


def get_declared(cls: type, attribute: str, default: Any) -> Any:
    """Returns an attribute of a task class; `default` if it has none or computes it from the task's settings."""
    return default if is_computed(cls, attribute) else getattr(cls, attribute, default)


def read_part_rules(name: str, cls: type) -> PartRules:
    """Returns what the class of the task `name` declares by `parts`, `accuracy` and `optional_parts`.

    Without `accuracy` it is the part "correct", unless `parts` has none of that name: then there is no accuracy.
    What is a property of the class counts as not declared. Raises TaskError for parts that are no names, are repeated
    or are none at all, and for an accuracy that is not among them.
    """
    declared = get_declared(cls, "parts", None)
    is_list = isinstance(declared, tuple | list)
    if declared is not None and not (is_list and all(isinstance(part, str) and part for part in declared)):
        raise TaskError(f'task "{name}": parts is {declared!r}; write the names in a tuple, as in parts = ("score",)')
    if declared is not None and (not declared or len(set(declared)) < len(declared)):
        raise TaskError(f'task "{name}": parts is {declared!r}; it needs one name or more, none of them twice')
    accuracy = get_declared(cls, "accuracy", ACCURACY if declared is None or ACCURACY in declared else None)
    if accuracy is not None and not isinstance(accuracy, str):
        raise TaskError(f'task "{name}": accuracy is {accuracy!r}; it must be the name of a part, or None')
    parts = (accuracy or SCORE,) if declared is None else tuple(declared)
    if accuracy is not None and accuracy not in parts:
        raise TaskError(
            f'task "{name}": accuracy is "{accuracy}", which is not among its parts {list(parts)}; '
            f"add it to parts, set accuracy to one of them, or {_CONTINUOUS}"
        )
    optional = get_declared(cls, "optional_parts", False)
    if not isinstance(optional, bool):
        raise TaskError(f'task "{name}": optional_parts is {optional!r}; it must be True or False')
    return PartRules(parts=parts, accuracy=accuracy, optional=optional)


def check_parts(
    name: str, row_id: str, declared: tuple[str, ...], accuracy: str | None, scored: Any, optional: bool = False
) -> dict[str, float]:
    """Returns the reward parts that a grader gave as floats, in the order of `declared`, the task's part names.

    `scored` is what the grader returned: a dict, or a number if the task has one part. `accuracy` is the name of the
    part that must be 0 or 1; None = there is none. With `optional` a part that is missing or None does not apply to the
    answer and is left out: {} if none applies. `name` and `row_id` are the task and the row, for messages. Raises
    TaskError if `scored` is neither, for a missing or undeclared part, a value that is no finite number or is beyond
    MAX_NUMBER, and an accuracy other than 0 and 1.

    >>> check_parts("t", "0", ("correct", "format"), "correct", {"format": 0.5, "correct": True})
    {'correct': 1.0, 'format': 0.5}
    >>> check_parts("t", "0", ("score",), None, 0.7)
    {'score': 0.7}
    """
    where = f'task "{name}", row "{row_id}"'
    if len(declared) == 1 and _is_number(scored):
        scored = {declared[0]: scored}
    if not isinstance(scored, Mapping) and len(declared) == 1 and getattr(scored, "shape", None):
        scored = {declared[0]: scored}
    if not isinstance(scored, Mapping):
        bare = ", or a number if the task has one part" if _is_number(scored) else ""
        raise TaskError(
            f"{where}: method `score` gave parts as a {type(scored).__name__}; return a dict, or Verdict(dict){bare}"
        )
    absent = [part for part in declared if scored.get(part) is None]
    if absent and (accuracy in absent or not optional):
        raise TaskError(_describe_absent(where, absent, declared, accuracy, scored, optional))
    if extra := [str(part) for part in scored if part not in declared]:
        raise TaskError(
            f"{where}: the method `score` returned the part {extra[0]!r}, but the task declares parts = {declared!r}; "
            "leave it out, or add it to parts"
        )
    parts = {part: _read_number(where, part, scored[part]) for part in declared if part not in absent}
    if accuracy is not None and parts[accuracy] not in (0.0, 1.0):
        raise TaskError(
            f"{where}: method `score` gave {parts[accuracy]} for {accuracy!r}, the accuracy; return 0 or 1 for it, or "
            f'{_CONTINUOUS}, or add a part for partial credit: parts = ({accuracy!r}, "credit"), and return both'
        )
    return parts


def _describe_absent(
    where: str,
    absent: list[str],
    declared: tuple[str, ...],
    accuracy: str | None,
    scored: Mapping[str, Any],
    optional: bool,
) -> str:
    """Returns the message about parts that are missing or None although they may not be."""
    part = accuracy if optional and accuracy is not None else absent[0]
    given = "None for the part" if part in scored else "no part"
    what = f"{where}: the method `score` returned {given} {part!r}"
    if optional:
        return f"{what}, the accuracy, which applies to every answer; return 0 or 1 for it"
    remedy = "set optional_parts = True in the class if a part need not apply to an answer"
    if part in scored:
        return f"{what}; return a number, or {remedy}"
    return f"{what}, but the task declares parts = {declared!r}; return all of these, change parts, or {remedy}"


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number: also a boolean, a Decimal, and a single number of numpy or torch."""
    # `Real` includes booleans and most numbers of numpy, but not its booleans and its arrays of no dimension.
    return isinstance(value, Real | Decimal) or (getattr(value, "shape", None) == () and isinstance(value.item(), Real))


def _read_number(where: str, part: str, value: Any) -> float:
    """Returns the value of a part as a float. Raises TaskError, beginning with `where`, if it is no finite number."""
    if not _is_number(value):
        shape = getattr(value, "shape", None)
        given = repr(str(value)[:40]) if shape is None else f"an array of shape {tuple(shape)}"
        remedy = "return a number" + ("" if shape is None else ", as its method item() does for a single one")
        raise TaskError(f"{where}: method `score` gave {given} for part {part!r}; {remedy}")
    try:
        number = float(value)
    except (OverflowError, ValueError):
        # An int too large for a float is refused below like infinity, and so is a signalling NaN of a Decimal.
        number = math.inf
    if not math.isfinite(number):
        raise TaskError(f"{where}: method `score` gave {number} (as a float) for {part!r}; return a finite number")
    if abs(number) > MAX_NUMBER:
        raise TaskError(
            f"{where}: method `score` gave {number:g} for {part!r}; return a number between {-MAX_NUMBER:g} and "
            f"{MAX_NUMBER:g}"
        )
    return number
