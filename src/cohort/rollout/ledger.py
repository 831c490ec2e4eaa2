"""The ledger lists every prompt that was taken from the prompt stream and is not finished.

Together with the stream's cursor it is enough to continue after a kill without losing or repeating a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from cohort.fates import Fate
from cohort.types import Group, Prompt

Entry = tuple[str, int]
"""(prompt id, visit)"""


class Status(StrEnum):
    """How far an open prompt is. A finished prompt is no longer open: it is counted by its fate."""

    WAITING = "waiting"  # taken, not sampled yet
    RUNNING = "running"  # being sampled or scored
    SCORED = "scored"  # its group is complete, and not trained on yet


class Ledger:
    """The open prompts in the order in which they were taken (`open`), and the number of finished ones by fate."""

    def __init__(self) -> None:
        # A dict keeps the order in which prompts were added, which a resumed run needs.
        self.open: dict[Entry, Status] = {}
        self.closed: Counter[Fate] = Counter()

    def add(self, prompt: Prompt) -> None:
        """Adds a prompt that was taken from the prompt stream to the open prompts, with the status WAITING."""
        self.open[prompt.id, prompt.visit] = Status.WAITING

    def advance(self, prompt: Prompt, status: Status) -> None:
        """Sets the status of an open prompt. Ignores a prompt that is not open, such as a problem of an evaluation."""
        if (prompt.id, prompt.visit) in self.open:
            self.open[prompt.id, prompt.visit] = status

    def close(self, groups: Iterable[Group]) -> None:
        """Removes the prompts of these groups from the open prompts, and counts them by the fate of their groups.

        Prompts that are not open are ignored.
        """
        for group in groups:
            if self.open.pop((group.prompt.id, group.prompt.visit), None) is not None:
                self.closed[group.excluded] += 1

    def remove(self, prompts: Iterable[Prompt]) -> None:
        """Removes prompts from the open prompts without counting them: other ranks have finished them."""
        for prompt in prompts:
            self.open.pop((prompt.id, prompt.visit), None)
