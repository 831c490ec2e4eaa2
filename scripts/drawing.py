"""Pictures of a terminal for the documents: a console that remembers what is printed, written as an SVG."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from cohort.logs.console import EscapingConsole


def make_recording_console(width: int, height: int, *, is_interactive: bool = True) -> Console:
    """Returns a console that prints nowhere and remembers everything.

    Without `is_interactive`, rows that are drawn again and again are remembered once, in their last form.
    """
    return EscapingConsole(
        record=True,
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        force_interactive=is_interactive,
        highlight=False,
        markup=False,
        emoji=False,
    )


def write_picture(console: Console, out: Path, title: str) -> None:
    """Writes what a console has printed as an SVG in the frame of a terminal with a title."""
    # The names of classes are those of this picture alone, so that the same text gives the same file.
    svg = console.export_svg(title=title, unique_id=re.sub(r"\W+", "-", out.stem))
    out.write_text(svg, encoding="utf-8")
