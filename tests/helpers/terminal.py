"""A terminal for tests: a pseudo-terminal with a program in it, and a small model of what is on its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

CONTROL = re.compile(r"\x1b\[([?>=]?)([0-9;]*)([A-Za-z])")
PATIENCE = 60.0


def measure_width(character: str) -> int:
    """Returns the cells that a terminal gives a character: 0 for marks, 2 for wide ones, else 1."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


class ScreenModel:
    """The lines of a terminal, those that scrolled away included, and the control codes that it did not expect."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0
        self.unknown: list[str] = []
        self.num_wraps = 0  # lines that did not fit and were broken by the terminal
        self.highest = 0  # rows above the lowest one that were ever written again, at most
        self._rest = ""

    @property
    def text(self) -> str:
        """Everything on the screen and above it, without spaces at the ends of lines and blank lines at the end."""
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip("\n")

    def feed(self, text: str) -> None:
        """Draws what a program has written."""
        text = self._rest + text
        self._rest = ""
        place = 0
        while place < len(text):
            character = text[place]
            if character == "\x1b":
                match = CONTROL.match(text, place)
                if match is None:
                    if re.fullmatch(r"\x1b(\[[?>=]?[0-9;]*)?", text[place:]):
                        self._rest = text[place:]
                        return
                    self.unknown.append(text[place : place + 8])
                    place += 1
                    continue
                self._control(match[1], match[2], match[3])
                place = match.end()
                continue
            self._draw(character)
            place += 1

    def _draw(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            while self.row >= len(self.lines):
                self.lines.append([])
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\x07":
            pass
        elif unicodedata.category(character) == "Cc" or character in "\u202e\u202d\u2028\u2029":
            self.unknown.append(character)
        elif (width := measure_width(character)) == 0:
            if self.lines[self.row]:
                self.lines[self.row][min(self.column, len(self.lines[self.row])) - 1] += character
        else:
            if self.column + width > self.width:
                self.num_wraps += 1
                self.column = 0
                self._draw("\n")
            line = self.lines[self.row]
            line += [" "] * (self.column + width - len(line))
            line[self.column] = character
            if width == 2:
                line[self.column + 1] = ""
            self.column += width

    def _control(self, mark: str, numbers: str, code: str) -> None:
        number = int(numbers) if numbers.isdigit() else 1
        line = self.lines[self.row]
        if mark == "?" and code in "hl":
            return
        if code == "m":
            return
        if code == "A":
            self.row = max(0, self.row - number)
            self.highest = max(self.highest, len(self.lines) - 1 - self.row)
        elif code == "B":
            self.row = min(len(self.lines) - 1, self.row + number)
        elif code == "C":
            self.column = min(self.width - 1, self.column + number)
        elif code == "D":
            self.column = max(0, self.column - number)
        elif code == "G":
            self.column = number - 1
        elif code == "K":
            if numbers == "2":
                line.clear()
            else:
                del line[self.column :]
        elif code == "J" and numbers in ("", "0"):
            del line[self.column :]
            del self.lines[self.row + 1 :]
        else:
            self.unknown.append(f"{mark}{numbers}{code}")


class Terminal:
    """A program in a pseudo-terminal. `screen` is what it shows, `raw` all that it wrote."""

    def __init__(
        self, words: Sequence[str], *, at: Path, env: Mapping[str, str], width: int = 80, height: int = 24
    ) -> None:
        self.screen = ScreenModel(width, height)
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.process = subprocess.Popen(
            words,
            cwd=at,
            env={**env, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.master)

    def type(self, text: str) -> None:
        """Types text, as if on the keyboard. Ctrl-C is \\x03, Ctrl-D \\x04."""
        os.write(self.master, text.encode())

    def read(self, seconds: float) -> bool:
        """Reads what the program writes within some seconds. Returns False at its end."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux tells the end so
            return False
        text = self._decoder.decode(data)
        self.raw += text
        self.screen.feed(text)
        return bool(data)

    def wait_for(self, found: str | Callable[[str], object]) -> str:
        """Reads until a text is on the screen, or `found(text of the screen)` is true. Returns the screen's text."""
        holds = (lambda text: found in text) if isinstance(found, str) else found
        deadline = time.monotonic() + PATIENCE
        while not holds(self.screen.text):
            alive = self.read(0.1)
            assert alive or holds(self.screen.text), f"it ended before {found!r}:\n{self.screen.text}"
            assert time.monotonic() < deadline, f"waited for {found!r}:\n{self.screen.text}"
        return self.screen.text

    def interrupt(self, found: str) -> str:
        """Presses Ctrl-C until a text is on the screen, and returns the screen's text.

        Python's readline notices a signal that comes just before it waits for keys only at the next one.
        """
        deadline = time.monotonic() + PATIENCE
        while found not in self.screen.text:
            assert time.monotonic() < deadline, f"waited for {found!r}:\n{self.screen.text}"
            self.type("\x03")
            pause = time.monotonic() + 1
            while found not in self.screen.text and time.monotonic() < pause:
                self.read(0.1)
        return self.screen.text

    def wait_for_prompt(self, count: int) -> str:
        """Reads until the screen has `count` lines that begin with the prompt, and the last line is only it."""

        def is_ready(text: str) -> bool:
            lines = text.split("\n")
            return sum(line.startswith(">") for line in lines) >= count and lines[-1].strip() == ">"

        return self.wait_for(is_ready)

    def ask(self, line: str) -> str:
        """Types a line and waits for the next prompt. Returns the screen's text."""
        before = sum(shown.startswith(">") for shown in self.screen.text.split("\n"))
        self.type(line + "\n")
        return self.wait_for_prompt(before + 1)

    def wait_for_end(self) -> int:
        """Reads until the program ends, and returns its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.read(0.1):
            assert time.monotonic() < deadline, self.screen.text
        return self.process.wait(PATIENCE)

    def end_by(self, number: signal.Signals) -> int:
        """Sends a signal to a program at its prompt until it ends, for the reason that `interrupt` has.

        Returns its exit code.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            shown = len(self.raw)
            self.process.send_signal(number)
            # A program that ends resets the terminal first, which tells that it has noticed.
            if not self.read(5) or len(self.raw) > shown:
                break
        return self.wait_for_end()
