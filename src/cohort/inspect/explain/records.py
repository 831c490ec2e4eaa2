"""A report: what there is to say about a step, in words and numbers; how it looks is for `screen` and `page`.

Texts in here are as hostile as what they come from: whoever shows them escapes them.
"""

from __future__ import annotations

from dataclasses import dataclass

Fact = tuple[str, str]
"""A label and what is to be said under it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token as it is shown. `push` is -dL/dlogprob: above 0, the update makes it more likely."""

    text: str
    id: int
    provenance: int
    push: float = 0.0
    share: float = 0.0  # of the step's signal
    logprob: float | None = None
    idle: str = ""  # why it has no push although it is in the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """What is said of a sample."""

    index: int
    push: float  # sum over its tokens
    share: float
    fate: str  # why it is out of the loss; "" = it is in
    facts: list[Fact]
    tokens: list[Token]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLine:
    """A group in the overview."""

    index: int
    prompt_id: str
    rewards: str
    share: float
    note: str  # what sets it apart: why it is out, how old it is


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """What is said of a group."""

    line: GroupLine
    facts: list[Fact]
    prompt: list[Token]
    samples: list[SampleReport]

    @property
    def strongest(self) -> float:
        """The largest push of a token: what full colour means."""
        return max((abs(t.push) for s in self.samples for t in s.tokens), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What is said of a step."""

    title: str
    facts: list[Fact]
    notes: list[str]  # what a reader must know before believing the numbers
    groups: list[GroupLine]
    group: GroupReport
