"""Result of a single check: a line for people, a record for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cohort.logs.escape import escape_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check. `text` says what was found and, unless the status is "ok", what to do.

    Text that comes from tasks or models is already escaped in `text`. `details` are numbers for `--json`.
    """

    name: str
    status: Literal["ok", "warn", "FAIL"]
    text: str
    details: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status:<4}  {self.name:<25} {self.text}"


def ok(name: str, text: str, **details: float) -> Finding:
    """Returns a finding with the status "ok". `name` is that of the check, such as "reward/speed".

    `text` says what was found; `details` are numbers for `--json`.
    """
    return Finding(name=name, status="ok", text=text, details=details)


def warn(name: str, text: str, **details: float) -> Finding:
    """Returns a finding with the status "warn": the run can start, but the user should read `text`.

    `name` is that of the check; `details` are numbers for `--json`. Prints nothing.
    """
    return Finding(name=name, status="warn", text=text, details=details)


def fail(name: str, text: str, **details: float) -> Finding:
    """Returns a finding with the status "FAIL", for which `cohort check` exits with code 1. Raises nothing.

    `name` is that of the check; `details` are numbers for `--json`.
    """
    return Finding(name=name, status="FAIL", text=text, details=details)


def quote(text: str) -> str:
    """Returns the first 80 characters of a text in double quotes, escaped so that it cannot act on a terminal.

    A longer text ends with the number of characters left out. Quotes and backslashes in the text are not escaped.

    >>> quote("<answer>\\n")
    '"<answer>\\\\n"'
    """
    return f'"{escape_line(text, 80)}"'
