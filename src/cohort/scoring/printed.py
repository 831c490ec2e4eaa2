"""What graders print: the first lines are shown, and the others are counted."""

from __future__ import annotations

import logging

MAX_SHOWN = 10  # lines of a task that are shown
MAX_WIDTH = 300  # characters of a line that are shown

log = logging.getLogger(__name__)


class PrintedLines:
    """The lines that the grader of a task printed. They become INFO messages of this module's logger."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.num_shown = 0
        self.num_more = 0  # lines that were not shown
        self._next_report = 1  # number of lines not shown at which their number is told

    def add(self, text: str, num_lines: int) -> None:
        """Takes what the grader printed for one answer: `text` is its beginning, `num_lines` the number of all lines.

        Empty lines in `text` are neither shown nor counted.
        """
        sent = text.splitlines()
        lines = [line for line in sent if line.strip()]
        shown = lines[: MAX_SHOWN - self.num_shown]
        for line in shown:
            log.info("the grader of %s prints: %s", self.task, line[:MAX_WIDTH])
        self.num_shown += len(shown)
        self.num_more += len(lines) - len(shown) + max(0, num_lines - len(sent))
        # The number is told ever more rarely: after 1 line, 10, 100, ...
        if self.num_more >= self._next_report:
            log.info("the grader of %s printed more lines, which are not shown: %d", self.task, self.num_more)
            while self._next_report <= self.num_more:
                self._next_report *= 10
