"""A picture of a chat as the terminal shows it: an SVG, with real answers of two models.

python -m scripts.record_chat docs/chat.svg tiny runs/demo@best
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.text import Text

from cohort.chat.models import ChatModels
from cohort.chat.options import ChatOptions
from cohort.chat.problems import TaskProblems
from cohort.chat.screen import Screen
from cohort.chat.session import ChatSession
from cohort.tasks.arithmetic import Arithmetic
from scripts.drawing import make_recording_console, write_picture

# What the user types. An empty line asks the next problem of the task.
LINES = ("What is 17 + 25?", "", "", "/save talk.md")
WIDTH, HEIGHT = 80, 24


class PreparedScreen(Screen):
    """A terminal whose lines are prepared, and which remembers what it shows."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(is_interactive=False)
        self.is_interactive = True
        self._lines = list(lines)
        self._is_plain = False
        self._console = make_recording_console(WIDTH, HEIGHT, is_interactive=False)

    def read_line(self) -> str | None:
        """Returns the next prepared line, as if it had just been typed; None after the last one."""
        self._console.print(Text("> " + (self._lines[0] if self._lines else ""), style="bold"))
        return self._lines.pop(0) if self._lines else None

    def show_gap(self) -> None:
        """Leaves a blank line."""
        self._console.print("")

    def draw(self, out: Path, title: str) -> None:
        """Writes the picture."""
        write_picture(self._console, out, title)


def record_chat(out: Path, names: Sequence[str]) -> None:
    """Writes an SVG of a chat with the models of these names. The file that the chat saves is removed."""
    options = ChatOptions(threads=1, seed=3)
    problems = TaskProblems(Arithmetic(), "test")
    screen = PreparedScreen(LINES)
    models = ChatModels(options, lambda name: None)
    models.swap(names)
    with closing(models), closing(problems):
        ChatSession(models, options, screen, problems).run()
    Path("talk.md").unlink()
    labels = " ".join(name.rpartition("/")[2] for name in names)
    screen.draw(out, f"cohort chat {labels} --task arithmetic --seed 3")


if __name__ == "__main__":
    record_chat(Path(sys.argv[1]), sys.argv[2:])
