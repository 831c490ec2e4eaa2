"""Records of an evaluation: its settings, its result, and every problem with its answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cohort.evaluation.statistics import PassAtK
from cohort.types import Message


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
