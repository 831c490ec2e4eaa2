"""Where every prompt is that was taken from the stream and is not done with.

With the stream's cursor this is enough to go on after a kill without losing or repeating a prompt.
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
    """How far an open prompt is. What is done with is no longer open: it is counted by its fate."""

    WAITING = "waiting"
    RUNNING = "running"
    SCORED = "scored"


class Ledger:
    """`open` has the prompts under way in the order in which they were taken; `closed` counts the others by fate."""

    def __init__(self) -> None:
        self.open: dict[Entry, Status] = {}
        self.closed: Counter[Fate] = Counter()

    def add(self, prompt: Prompt) -> None:
        """A prompt was taken from the stream."""
        self.open[prompt.id, prompt.visit] = Status.WAITING

    def advance(self, prompt: Prompt, status: Status) -> None:
        """A prompt has come to this status. Prompts that are not from the stream (an evaluation's) are not kept."""
        if (prompt.id, prompt.visit) in self.open:
            self.open[prompt.id, prompt.visit] = status

    def close(self, groups: Iterable[Group]) -> None:
        """These groups were trained or excluded: they need not be sampled again. Others than open ones are ignored."""
        for group in groups:
            if self.open.pop((group.prompt.id, group.prompt.visit), None) is not None:
                self.closed[group.excluded] += 1
