"""Two evaluations of the same problems under the same grader: which is better, and on what."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cohort.errors import RunError
from cohort.evaluation.records import EvalItem, Evaluation
from cohort.evaluation.statistics import Difference, mean, paired
from cohort.run.directory import load_evaluation, load_evaluations

# Knobs that say where rows are: the rows themselves are compared.
WHERE = {"data", "columns", "train_size", "test_size"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A problem on which the two differ: the share of right answers of each."""

    id: str
    question: str
    first: float
    second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `second` has over `first`."""

    first: Evaluation
    second: Evaluation
    difference: Difference
    num_problems: int
    won: list[Pair] = field(default_factory=list)
    lost: list[Pair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else is not the same

    def to_json(self) -> str:
        sides = {
            name: {"setting": asdict(e.setting), "accuracy": e.accuracy, "low": e.low, "high": e.high}
            for name, e in (("first", self.first), ("second", self.second))
        }
        rest = {name: [asdict(pair) for pair in getattr(self, name)] for name in ("won", "lost")}
        facts = {"difference": asdict(self.difference), "num_problems": self.num_problems, "notes": self.notes}
        return json.dumps(sides | facts | rest, indent=1)


def find_evaluation(path: Path) -> Evaluation:
    """A file that `cohort eval` wrote, or an evaluation of a run: RUN (the last) or RUN@STEP."""
    if path.is_file():
        return load_evaluation(path)
    folder, at, step = str(path).rpartition("@")
    run = Path(folder) if at and not path.is_dir() else path
    if not run.is_dir():
        raise RunError(
            f"there is no evaluation or run {path}; name a file that `cohort eval` wrote, or a run directory."
        )
    found = load_evaluations(run)
    if not found:
        raise RunError(f"{run} has no evaluation yet, or is no run.")
    wanted = step if run != path else str(max(found))
    if not wanted.isdecimal() or int(wanted) not in found:
        raise RunError(f"{run} has no evaluation of step {wanted}; it has {', '.join(map(str, found))}.")
    return found[int(wanted)]


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Refuses what cannot be compared; a problem that one side has no score for is left out and noted."""
    pairs = list(zip(first.items, _in_order(first, second), strict=True))
    scored = [(a, b) for a, b in pairs if a.correct and b.correct]
    if not scored:
        raise RunError("there is no problem that both evaluations have a score for.")
    differ = [_pair(a, b) for a, b in scored if mean(a.correct) != mean(b.correct)]
    unscored = [f"{len(pairs) - len(scored)} problems without a score are left out"] * (len(scored) < len(pairs))
    return Comparison(
        first=first,
        second=second,
        difference=paired([a.correct for a, _ in scored], [b.correct for _, b in scored]),
        num_problems=len(scored),
        won=sorted((p for p in differ if p.second > p.first), key=lambda p: p.first - p.second),
        lost=sorted((p for p in differ if p.second < p.first), key=lambda p: p.second - p.first),
        notes=unscored + _notes(first, second),
    )


def _in_order(first: Evaluation, second: Evaluation) -> list[EvalItem]:
    """The second's items in the order of the first's; refuses other problems, prompts or graders."""
    a, b = first.setting, second.setting
    for what, x, y in (("tasks", a.task, b.task), ("graders", a.grader, b.grader), ("splits", a.split, b.split)):
        if x != y:
            advice = "; the grader has changed in between: evaluate both again" if what == "graders" else ""
            raise RunError(f"these evaluations have different {what}, {x} and {y}, and cannot be compared{advice}.")
    for name in sorted({*a.knobs, *b.knobs} - WHERE):
        if a.knobs.get(name) != b.knobs.get(name):
            raise RunError(
                f"these evaluations have different settings of {a.task}, {name} = {a.knobs.get(name)} and "
                f"{b.knobs.get(name)}, by which it may ask or grade otherwise; evaluate both with the same."
            )
    items = {item.id: item for item in second.items}
    if a.rows != b.rows and items.keys() == {item.id for item in first.items}:
        raise RunError(
            "these evaluations have the same ids but other questions, answers or prompts: their data or the task's "
            "settings have changed in between; evaluate both again."
        )
    missing = [item.id for item in first.items if item.id not in items]
    if missing or len(items) != len(first.items):
        raise RunError(
            f"these evaluations have different problems, {len(first.items)} and {len(items)}, of which "
            f"{len(first.items) - len(missing)} are in both; evaluate both with the same --limit and data."
        )
    for item in first.items:
        if item.messages != items[item.id].messages:
            raise RunError(
                f'problem "{item.id}" was asked in other words in the two evaluations; evaluate both with the same '
                "settings of the task."
            )
    return [items[item.id] for item in first.items]


def _notes(first: Evaluation, second: Evaluation) -> list[str]:
    """Allowed, but worth knowing: a baseline under another template is how progress is invented."""
    a, b = asdict(first.setting), asdict(second.setting)
    a |= a.pop("sampling")
    b |= b.pop("sampling")
    names = [n for n in a if n not in ("model", "weights", "step", "rows", "knobs") and a[n] != b.get(n)]
    return [f"{name} is {a[name]} in A and {b.get(name)} in B" for name in names]


def _pair(a: EvalItem, b: EvalItem) -> Pair:
    question = str(next((m["content"] for m in reversed(a.messages) if m["role"] == "user"), ""))
    return Pair(id=a.id, question=question, first=mean(a.correct), second=mean(b.correct))
