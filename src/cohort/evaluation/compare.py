"""Comparison of two evaluations of the same problems with the same grader: which is better, and on which problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cohort.errors import RunError
from cohort.evaluation.coefficients import format_coefficients
from cohort.evaluation.records import EvalItem, Evaluation, select_comparable
from cohort.evaluation.statistics import Difference, compare_paired, mean
from cohort.run.directory import load_evaluation, load_evaluations
from cohort.run.finding import find_run, find_similar_run, is_sweep, require_run
from cohort.run.naming import find_best_step, split_name

# Settings of tasks that say where rows come from. They may differ, because the rows themselves are compared.
DATA_SETTINGS = {"data", "columns", "train_size", "test_size"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferingProblem:
    """A problem on which two evaluations differ."""

    id: str
    question: str
    first: float  # the share of right answers, or the mean reward, in the first evaluation
    second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How much better `second` is than `first`. Its JSON is the output of `cohort compare --json`."""

    first: Evaluation
    second: Evaluation
    names: tuple[str, str]  # what the notes call the two
    difference: Difference
    num_problems: int  # that both have a score for
    won: list[DifferingProblem] = field(default_factory=list)  # `second` is better; the largest difference first
    lost: list[DifferingProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # other differences between the two settings

    def to_json(self) -> str:
        """Returns settings, accuracies with intervals, difference, notes and differing problems as JSON text.

        Answers are left out.
        """
        sides = {
            name: {"setting": asdict(e.setting), e.measure: e.value, "low": e.low, "high": e.high}
            for name, e in (("first", self.first), ("second", self.second))
        }
        rest = {name: [asdict(pair) for pair in getattr(self, name)] for name in ("won", "lost")}
        facts = {"difference": asdict(self.difference), "num_problems": self.num_problems, "notes": self.notes}
        return json.dumps(sides | facts | rest, indent=1)


def find_evaluation(path: Path) -> Evaluation:
    """Returns the evaluation that `path` names.

    It is a file that `cohort eval` wrote, RUN (its newest evaluation), RUN@STEP or RUN@best (the most accurate), where
    RUN may be a part of a run's name. Raises RunError if there is none or it is damaged.
    """
    if path.is_file():
        return load_evaluation(path)
    run, which = split_name(str(path))
    run = find_run(run)
    if not run.is_dir():
        similar = find_similar_run(run)
        hint = f". Did you mean {similar}? `cohort runs` lists all runs" if similar else ""
        name = "; name a file that `cohort eval` wrote, a run directory, or RUN@STEP"
        raise RunError(f"there is no evaluation or run {path}{hint or name}.")
    if is_sweep(run):
        require_run(run)
    evaluations = load_evaluations(run)
    if not evaluations:
        raise RunError(
            f"{run} has no evaluations in its folder eval, so there is nothing to compare. Evaluate its model with "
            f"`cohort eval TASK --model {run}` and name the file that this writes, or name another run directory."
        )
    words = {
        "": max(evaluations),
        "last": max(evaluations),
        "best": find_best_step({s: e.value for s, e in select_comparable(evaluations).items()}) or -1,
    }
    step = words.get(which, int(which) if which.isdecimal() else -1)
    if step not in evaluations:
        steps = ", ".join(map(str, evaluations))
        raise RunError(
            f"{run} has no evaluation of step {which}; it has evaluations of the steps {steps}. Name one of these "
            "after the @, or best."
        )
    return evaluations[step]


def compare(first: Evaluation, second: Evaluation, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compares two evaluations of the same problems. Returns the difference, and the problems that were won and lost.

    A problem without a score in one of them is left out, with a note. Raises RunError if tasks, splits, graders,
    settings of the task (other than DATA_SETTINGS) or problems differ, or if no problem has a score in both. Other
    differences, such as the template, are notes, which call the evaluations by `names`.
    """
    pairs = list(zip(first.items, _match_items(first, second), strict=True))
    scored = [(a, b) for a, b in pairs if a.scores and b.scores]
    if not scored:
        raise RunError(
            "no problem has a score in both evaluations. Their files say why, under `failure`: repair that, usually in "
            "the task's method `score`, then evaluate both models again with `cohort eval`."
        )
    # Only problems on which the two differ are listed as won or lost.
    differ = [_make_differing_problem(a, b) for a, b in scored if mean(a.scores) != mean(b.scores)]
    num_unscored = len(pairs) - len(scored)
    unscored = [f"{num_unscored} problems without a score are left out"] if num_unscored else []
    return Comparison(
        first=first,
        second=second,
        names=names,
        difference=compare_paired(
            [a.scores for a, _ in scored], [b.scores for _, b in scored], are_shares=first.accuracy is not None
        ),
        num_problems=len(scored),
        won=sorted((p for p in differ if p.second > p.first), key=lambda p: p.first - p.second),
        lost=sorted((p for p in differ if p.second < p.first), key=lambda p: p.second - p.first),
        notes=unscored + _describe_other_prompts(pairs) + _describe_other_differences(first, second, names),
    )


def _match_items(first: Evaluation, second: Evaluation) -> list[EvalItem]:
    """Returns the items (problems with answers) of `second`, in the order of the items of `first`.

    Raises RunError if task, split, grader, settings of the task (other than DATA_SETTINGS), problems or messages
    differ.
    """
    a, b = first.setting, second.setting
    for what, x, y in (("tasks", a.task, b.task), ("graders", a.grader, b.grader), ("splits", a.split, b.split)):
        if x != y:
            cause = "; the grader has changed in between" if what == "graders" else ""
            raise RunError(
                f"these evaluations have different {what}, {x} and {y}, and cannot be compared{cause}. "
                "Evaluate both models again with `cohort eval`: same task, same --split, same version of its code."
            )
    for name in sorted({*a.knobs, *b.knobs} - DATA_SETTINGS):
        if a.knobs.get(name) != b.knobs.get(name):
            raise RunError(
                f"these evaluations have different settings of the task {a.task}: {name} = {a.knobs.get(name)} and "
                f"{b.knobs.get(name)}. Evaluate both models with `cohort eval` and the same --task.{name}."
            )
    if a.reward != b.reward:
        raise RunError(
            f"these evaluations have rewards with different coefficients, {format_coefficients(a.reward)} and "
            f"{format_coefficients(b.reward)}, and cannot be compared. Evaluate both models with `cohort eval` and the "
            "same --reward."
        )
    items = {item.id: item for item in second.items}
    # Equal ids with other rows or messages mean that the data has changed. Other ids are reported below, with counts.
    if a.rows != b.rows and items.keys() == {item.id for item in first.items}:
        raise RunError(
            "these evaluations have problems with the same ids, but their rows, prompts or order differ: the data or "
            "the task has changed in between. Evaluate both models again with `cohort eval`, on the same data."
        )
    missing = [item.id for item in first.items if item.id not in items]
    if missing or len(items) != len(first.items):
        raise RunError(
            f"these evaluations have different problems, {len(first.items)} and {len(items)}, of which "
            f"{len(first.items) - len(missing)} are in both. Evaluate both models with `cohort eval`, with the same "
            "data and --limit, and without --too-long skip."
        )
    for item in first.items:
        if item.messages != items[item.id].messages:
            raise RunError(
                f'problem "{item.id}" has different messages in the two evaluations: a file has changed since it was '
                "written. Evaluate both models again with `cohort eval`."
            )
    return [items[item.id] for item in first.items]


def _describe_other_differences(first: Evaluation, second: Evaluation, called: tuple[str, str]) -> list[str]:
    """Returns one line per differing setting that does not forbid a comparison: template, sampling, engine and others.

    They are shown because they can explain a difference, for example if only the baseline used another template. Model,
    weights, step and settings of the task are left out. `called` are the names of the evaluations.
    """
    a, b = asdict(first.setting), asdict(second.setting)
    # Sampling options are compared one by one, like the other settings.
    a |= a.pop("sampling")
    b |= b.pop("sampling")
    names = [n for n in a if n not in ("model", "weights", "run", "step", "rows", "knobs") and a[n] != b.get(n)]
    return [f"{name} is {a[name]} in {called[0]} and {b.get(name)} in {called[1]}" for name in names]


def _describe_other_prompts(pairs: Sequence[tuple[EvalItem, EvalItem]]) -> list[str]:
    """Returns a line about problems whose prompts differ although their messages are equal; [] if there are none.

    Each pair is a problem in both evaluations. A prompt that a server made is not known, and not compared.
    """
    differing = [a.id for a, b in pairs if a.prompt and b.prompt and a.prompt != b.prompt]
    if not differing:
        return []
    return [
        f"the models were asked the same questions in different prompts ({len(differing)} of {len(pairs)} problems, "
        f"first {differing[0]}): their templates, or the dates in them, differ"
    ]


def _make_differing_problem(a: EvalItem, b: EvalItem) -> DifferingProblem:
    """Returns id, question and both accuracies, or mean rewards, of a problem.

    `a` and `b` are its items in the two evaluations. The question is the last user message; "" if there is none.
    """
    question = str(next((m.get("content") for m in reversed(a.messages) if m.get("role") == "user"), ""))
    return DifferingProblem(id=a.id, question=question, first=mean(a.scores), second=mean(b.scores))
