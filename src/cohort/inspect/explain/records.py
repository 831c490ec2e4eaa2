"""Records of a report: everything that is said about a step, without its layout, which is made by `screen` and `page`.

The texts are not escaped. They contain what models and rows wrote, so the code that shows them must escape them.
"""

from __future__ import annotations

from dataclasses import dataclass

Fact = tuple[str, str]
"""A label and the text under it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownToken:
    """A token and what the update does to it."""

    text: str
    id: int
    provenance: int
    push: float = 0.0  # -dL/dlogprob: above 0, the update makes the token more likely
    share: float | None = 0.0  # of the step's signal; None = not known
    logprob: float | None = None
    zero_reason: str = ""  # why it has no push although it is in the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """Everything said about a sample."""

    index: int
    push: float  # sum over its tokens
    share: float | None  # of the step's signal; None = push and share are not known
    fate: str  # why it is out of the loss; "" = it is in
    facts: list[Fact]
    tokens: list[ShownToken]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLine:
    """The line of a group in the overview of a step."""

    index: int
    prompt_id: str
    rewards: str
    share: float | None  # of the step's signal; None = not known
    note: str  # why the group is out of the loss, how old it is; "" = nothing special


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """Everything said about a group."""

    line: GroupLine
    facts: list[Fact]
    prompt: list[ShownToken]
    samples: list[SampleReport]

    @property
    def strongest(self) -> float:
        """The largest |push| of a token in the group's samples, which is shown in full colour; 0 if there is none."""
        return max((abs(t.push) for s in self.samples for t in s.tokens), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything said about a step, with one of its groups in detail."""

    title: str
    facts: list[Fact]
    notes: list[str]  # what a reader must know to understand the numbers
    groups: list[GroupLine]
    group: GroupReport
