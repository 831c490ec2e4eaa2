"""How commands talk: the choice of progress view and sinks, and plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cohort.logs.sinks.registry import check_sinks

Log = Literal["live", "plain", "json"]


def choose_log(asked: str, terminal: bool) -> str:
    """The progress view: what was asked for, else live on a terminal and plain elsewhere."""
    return asked or ("live" if terminal else "plain")


def choose_sinks(asked: str | None) -> tuple[str, ...]:
    """The names in `wandb,tensorboard`, each known and installed.

    >>> choose_sinks(None)
    ()
    """
    names = () if asked is None else tuple(name.strip() for name in asked.split(","))
    check_sinks(names)
    return names


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces: readable on a terminal, in a file and in a pipe.

    >>> print(table(["name", "size"], [["tiny", "3 MB"], ["smollm2-135m", "270 MB"]]))
    name          size
    tiny          3 MB
    smollm2-135m  270 MB
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
