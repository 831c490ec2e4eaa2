"""`cohort models`: lists the models that can be loaded by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from cohort.cli.arguments import read_arguments
from cohort.cli.output import format_table
from cohort.logs.printing import find_terminal_width, print_result


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


def run(args: list[str]) -> None:
    """Runs `cohort models` with `args`, the words after it: prints a table of the models that can be loaded by name."""
    about = "List the models that can be loaded by name. A folder in Hugging Face format can be named too."
    read_arguments("models", [], about, Options(), args)
    from cohort.models.catalog import list_models

    rows = [
        [m.name, "ready" if m.state == "available" else f"cohort pull {m.name}", m.size, m.source]
        for m in list_models()
    ]
    table = format_table(["model", "state", "size", "source"], rows)
    width = find_terminal_width(sys.stdout)
    if width is not None and max(map(len, table.split("\n"))) > width:
        # A narrow terminal gets a list: rows of the table would be broken in the middle of words.
        table = "\n".join(f"{name}\n  {state}\n  {size}\n  {source}" for name, state, size, source in rows)
    print_result(table)
