"""Records of a sweep's table: rows of runs and combinations, and what they are made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from cohort.evaluation.records import Evaluation
from cohort.sweep.directory import RunResult
from cohort.sweep.plan import PlannedRun

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run of a sweep in its table."""

    name: str
    settings: dict[str, str]  # the swept values
    seed: int
    state: str  # "done", "stopped", "failed" or "missing"
    step: int  # completed steps
    accuracy: float | None  # of its last evaluation; None = it has none
    reward: float | None = None  # the mean reward of its last evaluation, where the task has no accuracy
    loss: float | None = None  # of the last step, for runs that are not evaluated
    training_reward: float | None = None  # the same, of the last few steps, where samples have rewards
    why: str = ""  # the rule that stopped it, the last line of its error, or what is missing
    eval_command: list[str] = field(default_factory=list)  # words that evaluate it; RUN stands for its name

    @property
    def value(self) -> float | None:
        """Its accuracy or, without one, its mean reward; None = it was not evaluated."""
        return self.reward if self.accuracy is None else self.accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """How much better a combination is than the best one, on the same problems and with the same seeds."""

    mean: float
    low: float  # of the 95% interval, which allows for the number of comparisons
    high: float
    p: float  # allows for it too: it is below 0.05 exactly where the interval leaves out 0
    p_single: float  # if this were the only comparison
    num_seeds: int
    num_problems: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinationRow:
    """One combination of settings: means over the seeds that have an evaluation."""

    settings: dict[str, str]
    num_seeds: int  # with an evaluation
    num_stopped: int  # of these, stopped by a rule
    num_problems: int
    accuracy: float | None
    reward: float | None = None  # the mean reward, where the task has no accuracy
    low: float | None  # of the 95% interval
    high: float | None
    loss: float | None = None
    training_reward: float | None = None
    is_best: bool = False
    difference: PairedDifference | None = None  # to the best; None = it is the best, or they cannot be compared

    @property
    def value(self) -> float | None:
        """Its accuracy or, without one, its mean reward; None = it was not evaluated."""
        return self.reward if self.accuracy is None else self.accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTable:
    """The whole result of a sweep. Its JSON is the content of sweep.json."""

    format: int = FORMAT
    name: str
    recipe: str
    axes: list[str]
    seeds: list[int]
    split: str  # the problems that the choice was made on: "validation", "test", or "" = there was no evaluation
    combinations: list[CombinationRow]
    runs: list[RunRow]
    notes: list[str] = field(default_factory=list)

    @property
    def measure(self) -> str:
        """What evaluations measured: "accuracy" or "reward"; "" = no run was evaluated."""
        if any(row.accuracy is not None for row in self.combinations):
            return "accuracy"
        return "reward" if any(row.reward is not None for row in self.combinations) else ""

    @property
    def best_runs(self) -> list[RunRow]:
        """The runs of the best combination that can be evaluated on the test split, in the order of their seeds.

        There are none if the choice was made on that split.
        """
        if self.best is None or self.split != "validation":
            return []
        return [run for run in self.runs if run.settings == self.best.settings and run.eval_command]

    @property
    def best(self) -> CombinationRow | None:
        """The combination with the best mean result; None if there is none, or they have different problems."""
        return next((row for row in self.combinations if row.is_best), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What is known of a run when the table is made."""

    run: PlannedRun
    result: RunResult | None = None  # None = it has not ended
    evaluation: Evaluation | None = None  # its last one
    loss: float | None = None  # of its last step, if it is not evaluated
    training_reward: float | None = None  # of its last few steps, if it is not evaluated and samples have rewards

    @property
    def has_result(self) -> bool:
        """Whether the run has ended, has not failed, and what it left is there."""
        return self.result is not None and self.result.state in ("done", "stopped")
