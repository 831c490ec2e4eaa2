"""Lines that a user types: with line editing and a history where Python has readline, and without echo elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from types import ModuleType

from cohort.errors import ConfigError
from cohort.system.cache import cache_root

HISTORY_FILE = "chat_history"  # in the cache folder
HISTORY_LINES = 1000


class LineInput:
    """The user's lines. Those of earlier chats can be called up with the arrow keys."""

    def __init__(self) -> None:
        self._readline = _import_readline()
        self._history = cache_root() / HISTORY_FILE
        if self._readline is not None:
            # There is no history yet, or it cannot be read.
            with contextlib.suppress(OSError):
                self._readline.read_history_file(self._history)
            self._readline.set_history_length(HISTORY_LINES)

    def read_line(self, prompt: str) -> str | None:
        """Returns the next line; None after Ctrl-D. A line that ends in a backslash is continued by the next one.

        Raises KeyboardInterrupt after Ctrl-C, and ConfigError if the line is not text in the terminal's encoding.
        """
        lines: list[str] = []
        while True:
            try:
                lines.append(input(prompt if not lines else ". "))
            except EOFError:
                return None
            except UnicodeDecodeError:
                raise ConfigError("this line is not text in the terminal's encoding; write it again.") from None
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]

    def save_history(self) -> None:
        """Writes the history to a file that only this user can read. Does nothing if it cannot be written."""
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
        former = os.umask(0o077)
        try:
            self._readline.write_history_file(self._history)
            # An older file may have had other permissions.
            self._history.chmod(0o600)
        except OSError:
            pass
        finally:
            os.umask(former)


def read_piped_line() -> str | None:
    """Returns the next line of standard input, which is no terminal; None at its end.

    A line that ends in a backslash is continued by the next one. Raises ConfigError if it is not text.
    """
    lines: list[str] = []
    while True:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not text in UTF-8: {error}. Convert it to UTF-8.") from None
        if not line:
            return "\n".join(lines) if lines else None
        lines.append(line.rstrip("\r\n"))
        if not lines[-1].endswith("\\"):
            return "\n".join(lines)
        lines[-1] = lines[-1][:-1]


def _import_readline() -> ModuleType | None:
    """Returns Python's readline, which changes how `input` reads a line; None where Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline


@contextlib.contextmanager
def hide_typing() -> Iterator[None]:
    """Context in which the terminal does not show what is typed. It stays there for the next line that is read.

    Otherwise a typed character, or the "^C" of Ctrl-C, would stand in the middle of an answer. Keys such as Ctrl-D keep
    their meaning for that line. Does nothing where standard input is no terminal.
    """
    try:
        former = termios.tcgetattr(sys.stdin.fileno())
    # Standard input is no terminal, or was replaced by an object without a descriptor.
    except (termios.error, OSError, ValueError):
        yield
        return
    quiet = [*former[:6], [*former[6]]]
    quiet[3] &= ~termios.ECHO
    # A terminal that edits lines itself would turn Ctrl-D into a zero byte, which means nothing to readline.
    if _import_readline() is not None:
        quiet[3] &= ~termios.ICANON
        quiet[6][termios.VMIN], quiet[6][termios.VTIME] = 1, 0
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, former)
