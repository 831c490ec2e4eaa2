"""Output of commands: every text that they print to a terminal, a pipe or a file is escaped here.

Names of rows, words of graders, values in model files and replies of servers reach the user through many messages. No
caller has to remember which of them are foreign: all of the text is escaped. Only `logs.console` writes control codes.

On a terminal, lines that do not fit are broken between words. In a pipe or a file a line stays one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

from cohort.logs.escape import escape_all, escape_line
from cohort.logs.wrapping import wrap_text

_MAX_LOG_CHARACTERS = 2000  # of one log record
_USUAL_WIDTH = 80  # columns of a terminal that does not tell


def print_result(text: str, end: str = "\n") -> None:
    """Prints text, escaped, and `end` to standard output, which is for results, and flushes it.

    On a terminal, prose is wrapped. A text without a line break at its end is a piece of a line, and is not.
    """
    is_piece = not (text + end).endswith("\n")
    print(escape_all(text) if is_piece else _wrap_for(sys.stdout, escape_all(text)), end=end, flush=True)


def print_note(text: str) -> None:
    """Prints a line, escaped, to standard error, which is for errors and progress, and flushes it.

    On a terminal, prose is wrapped.
    """
    print(_wrap_for(sys.stderr, escape_all(text)), file=sys.stderr, flush=True)


def find_terminal_width(stream: TextIO) -> int | None:
    """Returns the columns of the terminal that a stream writes to; None if it is a pipe or a file."""
    if not stream.isatty():
        return None
    if (asked := os.environ.get("COLUMNS", "")).isdecimal() and int(asked) > 0:
        return int(asked)
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    # Some terminals do not know their size.
    return columns or _USUAL_WIDTH


def _wrap_for(stream: TextIO, text: str) -> str:
    """Returns the text, wrapped if the stream is a terminal."""
    width = find_terminal_width(stream)
    return text if width is None else wrap_text(text, width)


class EscapingFormatter(logging.Formatter):
    """A formatter that makes one escaped line of a log record."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the formatted record in one line, cut after 2000 characters."""
        return escape_line(super().format(record), _MAX_LOG_CHARACTERS)


class _NoteHandler(logging.Handler):
    """A log handler that prints each record as a note."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints the message of a record to standard error as one escaped line."""
        print_note(escape_line(record.getMessage(), _MAX_LOG_CHARACTERS))


def show_grader_output() -> contextlib.AbstractContextManager[None]:
    """Context that prints what graders print to standard error. A run shows it among its notices."""
    return show_records("cohort.scoring.printed")


@contextlib.contextmanager
def show_records(logger: str) -> Iterator[None]:
    """While this context is open, prints what a logger gets, from level INFO, to standard error."""
    log = logging.getLogger(logger)
    handler = _NoteHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Otherwise the handlers of the program would print it a second time.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = True


def prepare_output() -> None:
    """Makes the standard streams of this process safe to print to. A command calls it before anything else.

    Standard streams that are closed become /dev/null. Characters that the encoding lacks are written as escape
    sequences. Log records that no handler takes, and the traceback of an unexpected exception, are escaped.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Streams that tests and notebooks put in place may lack `reconfigure`.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(EscapingFormatter())
    sys.excepthook = _print_traceback


def flush_output() -> None:
    """Flushes the standard streams. One that cannot be written, because its reader has left, becomes /dev/null.

    Python flushes both once more when it ends, and must not fail then.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # A stream that a test has put in place may have no descriptor.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed_streams() -> None:
    """Opens /dev/null in place of each standard stream that the process was started without.

    Otherwise the next file that is opened, such as run.db, would get the number of standard output, and everything
    that a library prints would go into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an exception that nothing has caught as Python does, but escaped."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    text = "".join(traceback.format_exception(kind, error, trace)).rstrip("\n")
    print(escape_all(text), file=sys.stderr, flush=True)
