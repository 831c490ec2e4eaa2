"""Rows of run.db as records, and the description of a run.

Steps are counted from 1 here: step n turns version n - 1 of the weights into version n. Rows, rollout files,
evaluations and checkpoints all count this way, so "after step n" means the same for each of them. 0 is the state before
training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cohort.types import Message, Row

FINISHED = "finished"
"""Text of the event of the kind "run" that ends a run after its last step."""

STOPPED = "stopped by"
"""Beginning of the text of the event of the kind "run" that ends a run early: a signal or an error follows."""


def describe_end(is_complete: bool, rule: str, signal: str) -> str:
    """Returns the text of the event of the kind "run" that ends a run.

    `rule` is why a rule has ended it before its last step, and `signal` which signal has; "" = none has.

    >>> describe_end(True, "", ""), describe_end(False, "", "SIGINT"), describe_end(True, "no progress", "")
    ('finished', 'stopped by SIGINT', 'stopped by a rule: no progress')
    """
    if rule:
        return f"{STOPPED} a rule: {rule}"
    return FINISHED if is_complete else f"{STOPPED} {signal or 'its loop'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The metric that shows at a glance how a run develops."""

    label: str = "reward"
    metric: str = "reward/mean"
    rising: bool = True  # whether larger values are better


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription:
    """What the header and the run card say about a run. Each kind of run makes its own."""

    source: str  # what the run learns from: the name of a task or of data
    source_is: str = "task"  # the word for the source: "task" or "data"
    algo: str
    batch: str  # for example "32 prompts x 8 samples"
    curve: Curve = field(default_factory=Curve)
    columns: tuple[tuple[str, str], ...] = ()  # (title, metric) of the columns of the card's table
    totals: tuple[tuple[str, str], ...] = ()  # (words, metric) of the metrics that the card sums over the run
    left_out: tuple[str, ...] = ()  # what the run does not use of its data, and how many, one line each
    not_evaluated: str = ""  # why the run has no evaluations although it has a task; "" = it has some, or no task
    reads_back: int = 0  # a resume reads the rollouts of so many steps before its checkpoint, to reuse them


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
    """A prompt. It is stored once, in the step that first sampled it."""

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
    """A group: one visit to a prompt. A prompt that is drawn again gets a new row, with the next visit."""

    id: int
    time: float
    step: int
    position: int  # of the group in the step and in its rollout file
    prompt: int  # PromptRow.id
    visit: int
    num_samples: int
    reward_mean: float | None  # over the samples that were scored; None = none was
    reward_min: float | None
    reward_max: float | None
    excluded: str  # the fate of an excluded group; "" = it was trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One sample of a group, without its tokens, which are in the rollout file."""

    id: int
    time: float
    step: int
    group: int  # GroupRow.id
    position: int  # of the sample in the group
    text: str
    finish: str
    num_tokens: int
    version: int  # of the weights that sampled its first token; -1 = unknown
    reward: float | None  # None = it could not be scored
    advantage: float
    parts: dict[str, float]
    reason: str
    failure: str
    masked: str  # the fate of a sample that was left out of the loss; "" = it was trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRow:
    """One turn of a sample that has several, with the environment's reply to it."""

    id: int
    time: float
    step: int
    sample: int  # SampleRow.id
    number: int  # from 1
    num_tokens: int  # that the policy drew in this turn
    num_reply_tokens: int
    finish: str
    calls: dict[str, int] | None  # of tools, by outcome; None = not recorded per turn
    reward: float | None  # of this turn alone; None = the sample has one reward for all turns
    text: str  # the first 2,000 characters, as of `reply`
    reply: str  # "" after the last turn


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    """Something that happened: a skipped step, a failure, a checkpoint, a stop."""

    id: int
    time: float
    step: int
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """What a table of runs shows of a run, from its database."""

    step: int  # newest one with metrics
    metrics: dict[str, float]  # of that step and of the newest evaluation; a value may be NaN
    accuracies: dict[int, float]  # held-out accuracy, or mean reward, by step
    measure: str  # which of the two: "accuracy" or "reward"
    curve: dict[int, float]  # a metric by step, at evenly spaced steps
    command: str  # what the user typed to start the run; "" = not recorded
    started: float  # seconds since 1970, UTC; NaN = not recorded
    updated: float  # when the newest step or event was recorded, likewise
    last_run_event: EventRow | None  # the newest one of the kind "run": a start, a resume, a stop or the end
