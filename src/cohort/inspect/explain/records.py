"""Records of a report: everything that is said about a step, without its layout, which is made by `screen` and `page`.

The texts are not escaped. They contain what models and rows wrote, so the code that shows them must escape them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    ref_logprob: float | None = None  # by the reference policy
    zero_reason: str = ""  # why it has no push although it is in the loss
    tint: float | None = None  # what its colour shows, green above 0 and red below; None = its push

    @property
    def colour(self) -> float:
        """What its colour shows: green above 0, red below, none at 0."""
        return self.push if self.tint is None else self.tint


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """Everything said about a sample."""

    title: str  # such as "sample 0"
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
    value: str  # the number of the group that matters most, such as its rewards
    share: float | None  # of what `ReportPhrases.share` names; None = not known
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
        """The largest |colour| of a token in the group's samples, which is shown in full; 0 if there is none."""
        return max((abs(t.colour) for s in self.samples for t in s.tokens), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPhrases:
    """The words of a report that depend on the kind of the run."""

    group: str = "group"
    value: str = "reward"  # heading of `GroupLine.value`
    share: str = "signal"  # what shares are shares of
    up: str = "pushed up"  # meaning of green
    down: str = "pushed down"  # meaning of red; "" = there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything said about a step, with one of its groups in detail."""

    title: str
    facts: list[Fact]
    notes: list[str]  # what a reader must know to understand the numbers
    groups: list[GroupLine]
    group: GroupReport
    words: ReportPhrases = field(default_factory=ReportPhrases)
