"""What the store keeps and gives back.

A step has a number from 1 on: step n turns policy version n - 1 into version n. Rows, rollout files,
evaluations and checkpoints all count this way, so "after step n" means the same for each of them, and 0 is
the state before training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cohort.types import Message, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The metric that tells at a glance how a run is doing."""

    label: str = "reward"
    metric: str = "reward/mean"
    rising: bool = True  # whether more is better


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a run says of itself in its header and card, in the words of its kind."""

    source: str  # what it learns from: the name of a task or of data
    source_is: str = "task"  # the word for that
    algo: str
    batch: str  # "32 prompts x 8 samples"
    curve: Curve = field(default_factory=Curve)
    columns: tuple[tuple[str, str], ...] = ()  # (title, metric) of the card's table
    totals: tuple[tuple[str, str], ...] = ()  # (words, metric) that the card sums over the run
    reads_back: int = 0  # steps before a checkpoint whose rollouts a resume from it reads


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """One number of one step."""

    id: int
    time: float  # seconds since 1970, UTC
    step: int
    name: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """A prompt, stored when it is first drawn."""

    id: int
    time: float
    step: int
    task: str
    prompt_id: str
    messages: list[Message]
    row: Row
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """One visit to a prompt."""

    id: int
    time: float
    step: int
    position: int  # in the step; the same as in the rollout file
    prompt: int  # PromptRow.id
    visit: int
    num_samples: int
    reward_mean: float | None  # over the samples that were scored
    reward_min: float | None
    reward_max: float | None
    excluded: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """What one member of a group said and got."""

    id: int
    time: float
    step: int
    group: int  # GroupRow.id
    position: int  # in the group
    text: str
    finish: str
    num_tokens: int
    version: int  # policy version of its first token
    reward: float | None
    advantage: float
    parts: dict[str, float]
    reason: str
    failure: str
    masked: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    """Something that happened: a skipped step, a failure, a checkpoint, a stop."""

    id: int
    time: float
    step: int
    kind: str
    text: str
