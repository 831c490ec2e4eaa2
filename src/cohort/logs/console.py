"""Consoles of rich: the only place that writes control codes to a terminal, those of rich itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from cohort.logs.escape import escape_all


class EscapingConsole(Console):
    """A console that escapes all text that it is given, whatever draws it, and follows no links in it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of a renderable: rich's own control codes as they are, all text escaped."""
        for text, style, control in super().render(renderable, options):
            if control:
                yield Segment(text, style, control)
            else:
                yield Segment(escape_all(text), style.update_link(None) if style and style.link else style)


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Returns a console that prints to `file`; None = standard output or, with `stderr`, standard error.

    Text is not searched for markup, emoji names and numbers to colour.
    """
    return EscapingConsole(file=file, stderr=stderr, highlight=False, markup=False, emoji=False)
