"""What the store keeps and gives back.

A step has a number from 1 on: step n turns policy version n - 1 into version n. Rows, rollout files,
evaluations and checkpoints all count this way, so "after step n" means the same for each of them, and 0 is
the state before training.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cohort.scores import PassAtK
from cohort.types import Message, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalAnswer:
    """One answer, whole, with what the grader made of it."""

    text: str
    finish: str
    num_tokens: int
    correct: float | None  # 0 or 1; None where it could not be scored
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # the grader's
    failure: str = ""  # why it could not be scored


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalItem:
    """One problem of an evaluation: what was asked, to the letter, and what was answered."""

    id: str
    messages: list[Message]
    prompt: str  # as the model saw it, special tokens spelled; "" where a server rendered it
    answers: list[EvalAnswer]

    @property
    def correct(self) -> list[float]:
        """Of the answers that could be scored."""
        return [a.correct for a in self.answers if a.correct is not None]

    @property
    def failed(self) -> bool:
        """Whether an answer could not be scored."""
        return any(a.failure for a in self.answers)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EvalItem:
        return cls(**{**data, "answers": [EvalAnswer(**a) for a in data["answers"]]})


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetting:
    """Everything that decides an evaluation's result."""

    task: str
    split: str
    num_problems: int
    num_samples: int  # per problem
    model: str
    weights: str  # a digest of its files; "" = of the run, or the server's affair
    knobs: dict[str, Any]  # the task's
    rows: str  # a digest of the problems, their answers and how they are asked
    grader: str  # a digest of the grader's code: evaluations under another one cannot be compared
    template: str  # "chat" or "text"
    engine: str
    place: str  # device and type of numbers, or the server's address
    sampling: dict[str, Any]
    seed: int
    step: int = 0  # of a run
    num_left_out: int = 0  # problems too long for the model's context
    turns: str = "first"  # "first" = the first answer counts; "all" = the environment of the run decides


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Accuracy of one policy version on one split, with its 95% interval and every item."""

    setting: EvalSetting
    accuracy: float  # avg@n
    low: float
    high: float
    passes: list[PassAtK] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)  # mean of each part of the score besides the accuracy
    summary: dict[str, float] = field(default_factory=dict)  # what the task counts besides
    mean_tokens: float = 0.0
    finishes: dict[str, int] = field(default_factory=dict)  # samples by finish reason
    num_failed: int = 0  # samples that could not be scored: left out, not wrong
    items: list[EvalItem] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.setting.step

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of it, under the names they have in the metrics table."""
        total = max(1, sum(self.finishes.values()))
        shares = {f"eval/finish/{name}": count / total for name, count in sorted(self.finishes.items())}
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": self.low,
            "eval/accuracy_high": self.high,
            "eval/mean_tokens": self.mean_tokens,
            **shares,
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Evaluation:
        items = [EvalItem.from_json(item) for item in data["items"]]
        passes = [PassAtK(**p) for p in data["passes"]]
        return cls(**{**data, "setting": EvalSetting(**data["setting"]), "passes": passes, "items": items})


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
