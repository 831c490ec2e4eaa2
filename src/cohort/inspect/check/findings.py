"""What a check found: a line for people, a record for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cohort.logs.escape import one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`text` says what was found and, unless it is ok, what to do; foreign text in it is escaped already."""

    name: str
    status: Literal["ok", "warn", "FAIL"]
    text: str
    details: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status:<4}  {self.name:<25} {self.text}"


def ok(name: str, text: str, **details: float) -> Finding:
    return Finding(name=name, status="ok", text=text, details=details)


def warn(name: str, text: str, **details: float) -> Finding:
    return Finding(name=name, status="warn", text=text, details=details)


def fail(name: str, text: str, **details: float) -> Finding:
    return Finding(name=name, status="FAIL", text=text, details=details)


def shown(text: str) -> str:
    """Foreign text, quoted and harmless.

    >>> shown("<answer>\\n")
    '"<answer>\\\\n"'
    """
    return f'"{one_line(text, 80)}"'
