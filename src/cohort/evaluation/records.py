"""Records of an evaluation: its setting, its result, and every problem with its answers.

They are stored as JSON, so names of fields are a file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cohort.evaluation.statistics import MIN_PROBLEMS, PassAtK
from cohort.system.json_text import make_record
from cohort.types import Message

ACCURACY = "eval/accuracy"
REWARD = "eval/reward"
HELD_OUT_METRICS = (ACCURACY, REWARD)
"""Names of the metric that an evaluation of a task has: its accuracy or, if the task has none, its mean reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalAnswer:
    """One answer, in full, with its score."""

    text: str
    finish: str
    num_tokens: int
    correct: float | None  # 0 or 1; None = it could not be scored, or the task has no accuracy
    reward: float | None = None  # where the task has no accuracy: the parts with their coefficients; None = not scored
    parts: dict[str, float] = field(default_factory=dict)  # all parts of the score, by name
    reason: str = ""  # the grader's explanation
    failure: str = ""  # why it could not be scored
    messages: list[Message] = field(default_factory=list)  # of a conversation of several turns, after the prompt
    calls: dict[str, int] = field(default_factory=dict)  # calls of tools, by outcome

    @property
    def value(self) -> float | None:
        """What the evaluation takes the mean of: `correct` or, without an accuracy, `reward`; None = not scored."""
        return self.reward if self.correct is None else self.correct


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalItem:
    """One problem of an evaluation, with its prompt and its answers."""

    id: str
    messages: list[Message]
    prompt: str  # as the model saw it, special tokens included; "" if a server rendered it
    answers: list[EvalAnswer]
    tools: list[Any] = field(default_factory=list)  # descriptions of the tools that the model could call

    @property
    def scores(self) -> list[float]:
        """The value of each answer that could be scored, in their order: 0 or 1, or its reward; [] if none could."""
        return [a.value for a in self.answers if a.value is not None]

    @property
    def has_failures(self) -> bool:
        """Whether at least one answer could not be scored."""
        return any(a.failure for a in self.answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetting:
    """Everything that decides the result of an evaluation."""

    task: str
    split: str
    num_problems: int
    num_samples: int  # per problem
    model: str
    weights: str  # a digest of the model's files; "" = weights of a run, or not known because a server has them
    knobs: dict[str, Any]  # the settings of the task
    rows: str  # a digest of the rows and messages of the problems
    grader: str  # a digest of the grader's code; evaluations with different graders cannot be compared
    template: str  # "chat", "text", or name and digest of a file with a template
    engine: str
    place: str  # device and dtype, or the server's address
    sampling: dict[str, Any]
    seed: int
    step: int = 0  # completed steps of the run; 0 outside a run
    run: str = ""  # name of the run directory that a checkpoint was evaluated from; "" = it was not named by its run
    # "TASK/SPLIT" of the evaluations that chose this checkpoint as the best of its run; "" = they did not choose it.
    # An accuracy on the same problems flatters it.
    chosen_on: str = ""
    num_left_out: int = 0  # problems that are too long for the model's context
    date: str = ""  # the day that the chat template puts into prompts as today, YYYY-MM-DD; "" = it puts none
    system: str = ""  # the text that was put before the messages of every problem
    # "first" = the first answer counts; "all" = further attempts too; for conversations their limits.
    turns: str = "first"
    reward: dict[str, float] = field(default_factory=dict)  # coefficients of the parts; {} = the task has an accuracy


# Fields that were added later, with the values that earlier evaluations stand for.
ADDED_FIELDS: dict[str, Any] = {"turns": "first", "run": "", "chosen_on": "", "date": "", "system": "", "reward": {}}


def select_comparable(evaluations: Mapping[int, Evaluation]) -> dict[int, Evaluation]:
    """Returns the evaluations of a run, by step, that have the same grader as the newest one.

    The grader of a run may change when it is resumed; accuracies of different graders cannot be compared.
    """
    if not evaluations:
        return {}
    grader = evaluations[max(evaluations)].setting.grader
    return {step: e for step, e in evaluations.items() if e.setting.grader == grader}


def list_differences(a: EvalSetting, b: EvalSetting) -> list[str]:
    """Returns the names of the fields in which two settings differ."""
    return [f.name for f in fields(EvalSetting) if getattr(a, f.name) != getattr(b, f.name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Accuracy or mean reward of one policy version on one split, with its 95% interval and every item."""

    setting: EvalSetting
    accuracy: float | None  # avg@n; None = the task has none
    reward: float | None = None  # the mean reward of a task without an accuracy
    low: float | None  # of the 95% interval of the accuracy or mean reward; None = it has too few problems for one
    high: float | None
    passes: list[PassAtK] = field(default_factory=list)  # for k = 2, 4, 8, ...
    parts: dict[str, float] = field(default_factory=dict)  # mean of each part of the score except the accuracy
    summary: dict[str, float] = field(default_factory=dict)  # further numbers that the task computes
    mean_tokens: float = 0.0
    finishes: dict[str, int] = field(default_factory=dict)  # samples by finish reason
    num_failed: int = 0  # samples that could not be scored; they are left out, not counted as wrong
    items: list[EvalItem] = field(default_factory=list)

    @property
    def measure(self) -> str:
        """What is measured: "accuracy", or "reward" where the task has no accuracy."""
        return "reward" if self.accuracy is None else "accuracy"

    @property
    def value(self) -> float:
        """The number that evaluations are compared by: the accuracy or, without one, the mean reward."""
        value = self.reward if self.accuracy is None else self.accuracy
        assert value is not None, "an evaluation has an accuracy or a mean reward"
        return value

    @property
    def title(self) -> str:
        """What is measured, in words."""
        return f"held-out {self.measure}"

    @property
    def accuracies(self) -> dict[str, float]:
        """The accuracy of each task of a mixture that has one, by label; {} for an evaluation of a single task."""
        summary = self.summary if self.setting.task == "mix" else {}
        found = {name.partition("/"): value for name, value in summary.items()}
        return {label: value for (measure, _, label), value in found.items() if measure == "accuracy"}

    def list_own_values(self) -> list[tuple[str, str, float]]:
        """Returns (label, measure, value) of each task of a mixture: its accuracy or, without one, its mean reward.

        Empty for an evaluation of a single task.
        """
        accuracies = self.accuracies
        found = []
        for name, value in self.summary.items() if self.setting.task == "mix" else ():
            measure, _, label = name.partition("/")
            if measure == "accuracy" or (measure == "reward" and label not in accuracies):
                found.append((label, measure, value))
        return found

    def format_interval(self) -> str:
        """Returns the 95% interval as text; why there is none if there is none."""
        if self.low is None or self.high is None:
            return f"no interval: fewer than {MIN_PROBLEMS} problems"
        return f"{self.low:.3f} to {self.high:.3f}"

    @property
    def step(self) -> int:
        """The number of completed steps of the run; 0 outside a run."""
        return self.setting.step

    @property
    def metrics(self) -> dict[str, float]:
        """The main numbers of the evaluation as metrics, by names like "eval/accuracy".

        They are accuracy (or "eval/reward", the mean reward, of a task without one), its interval, mean tokens and the
        share of each finish reason; pass@k, parts and the summary of a task are left out. Where answers are given, not
        sampled, the summary has the measured losses, and is in; so is that of a mixture.
        """
        total = max(1, sum(self.finishes.values()))
        shares = {f"eval/finish/{name}": count / total for name, count in sorted(self.finishes.items())}
        # The summary of a mixture has the accuracy of each task.
        summary = self.summary if self.setting.engine == "none" or self.setting.task == "mix" else {}
        measured = {f"eval/{name}": value for name, value in summary.items()}
        name = f"eval/{self.measure}"
        ends = {} if self.low is None or self.high is None else {f"{name}_low": self.low, f"{name}_high": self.high}
        return {
            name: self.value,
            **ends,
            "eval/mean_tokens": self.mean_tokens,
            **shares,
            **measured,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the evaluation as nested dicts and lists that can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Evaluation:
        """Returns the evaluation from the dict that `to_json` returned. Raises ValueError for anything else."""
        evaluation: Evaluation = make_record(cls, data)
        return evaluation
