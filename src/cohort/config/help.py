"""Help of a command: tyro prints all settings of a dataclass, grouped by section."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import textwrap
from typing import Any, TextIO

import tyro

from cohort.config.flags import collect_settings

# Booleans of a run are written `--flag true`, not `--no-flag`, so that every setting is written in the same way.
_TYRO = (tyro.conf.FlagConversionOff,)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def print_settings_help(default: Any, prog: str, description: str, *, has_switches: bool = False) -> None:
    """Prints tyro's help for all settings of the dataclass instance `default`, grouped by section, and returns.

    `prog` is the command in the usage line, `description` the text below it. With `has_switches`, a boolean needs no
    value on the command line: its name alone switches it on.
    """
    # A switch that is on by default would be shown as --no-NAME, which there is not.
    is_on = any(setting.type is bool and setting.value for setting in collect_settings(default).values())
    marks = (tyro.conf.FlagCreatePairsOff,) if has_switches and not is_on else _TYRO
    stream = _HelpStream(sys.stdout) if sys.stdout.isatty() else sys.stdout
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(stream):
        tyro.cli(type(default), default=default, args=["--help"], prog=prog, description=description, config=marks)


class _HelpStream(io.TextIOBase):
    """A terminal to which tyro prints help. Lines outside of tyro's boxes that do not fit are broken between words."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute there
        """The encoding of the terminal, by which tyro chooses the characters of its boxes."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Returns True: tyro uses colours."""
        return True

    def write(self, text: str) -> int:
        """Writes text, of which the usage line and the description are wrapped."""
        width = shutil.get_terminal_size().columns
        self._stream.write("\n".join(_wrap_outside_of_boxes(line, width) for line in text.split("\n")))
        return len(text)

    def flush(self) -> None:
        """Flushes the terminal."""
        self._stream.flush()


def _wrap_outside_of_boxes(line: str, width: int) -> str:
    """Returns a line of tyro's help with line breaks between words, if it is too long and not in a box."""
    plain = _COLOUR.sub("", line)
    if len(plain) <= width or plain.startswith(("╭", "│", "╰")):
        return line
    indent = " " * len("usage: ") if plain.startswith("usage: ") else ""
    return textwrap.fill(plain, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
