"""Output of commands: the choice of progress view and sinks, and plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cohort.logs.escape import escape_line
from cohort.logs.sinks.registry import check_sinks

Log = Literal["live", "plain", "json"]
_MAX_CELL = 1000  # characters of one cell of a table


def choose_log(asked: str, terminal: bool) -> str:
    """Returns the kind of progress view: `asked` or, if that is "", "live" on a terminal and "plain" elsewhere."""
    return asked or ("live" if terminal else "plain")


def parse_sink_names(asked: str | None) -> tuple[str, ...]:
    """Returns the names of sinks in a text like "wandb,tensorboard", in order; None = no sinks.

    Spaces around names do not count. Raises ConfigError if one is unknown (also ""), given twice or not installed.

    >>> parse_sink_names(None)
    ()
    """
    names = () if asked is None else tuple(name.strip() for name in asked.split(","))
    check_sinks(names)
    return names


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as lines of text. Columns are aligned at the left and padded with spaces, two of them in between.

    Rows must be as long as the header. Cells are escaped, each to one line.

    >>> print(format_table(["name", "size"], [["tiny", "3 MB"], ["smollm2-135m", "270 MB"]]))
    name          size
    tiny          3 MB
    smollm2-135m  270 MB
    """
    lines = [[escape_line(cell, _MAX_CELL) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
