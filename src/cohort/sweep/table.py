"""The table of a sweep: what each combination reached, computed from the evaluations of its runs.

Nothing here depends on clocks, paths or the order in which runs ended: equal runs give equal tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cohort.evaluation.records import EvalItem, Evaluation
from cohort.evaluation.statistics import mean
from cohort.sweep.notes import make_notes, note_undecided
from cohort.sweep.plan import Plan
from cohort.sweep.records import CombinationRow, PairedDifference, RunRecord, RunRow, SweepTable
from cohort.sweep.statistics import (
    SeedStats,
    VariancePart,
    adjust_p_value,
    compute_p_value,
    estimate_difference,
    estimate_mean,
    estimate_scatter,
    find_accuracy_interval,
    find_interval,
    find_mean_interval,
)
from cohort.sweep.values import format_value


def make_table(name: str, plan: Plan, records: Sequence[RunRecord]) -> SweepTable:
    """Returns the table of a sweep from its runs, in the order of the plan. `name` is that of the sweep."""
    rows = [_make_run_row(record) for record in records]
    groups = [[r for r in records if r.run.combination == index] for index in range(len(plan.combinations))]
    evaluated = [{r.run.seed: r for r in group if r.evaluation is not None} for group in groups]
    obstacle = _find_obstacle(evaluated)
    best = None if obstacle else _find_best(evaluated)
    scatter = _estimate_scatter(evaluated, best)
    differences = _compare_with_best(evaluated, best, scatter)
    combinations = [
        _make_combination_row(
            group,
            evaluated[index],
            index == best,
            differences.get(index),
            _list_parts(scatter, evaluated[index]),
        )
        for index, group in enumerate(groups)
    ]
    splits = {r.evaluation.setting.split for r in records if r.evaluation is not None}
    split = "test" if "test" in splits else next(iter(splits), "")
    return SweepTable(
        name=name,
        recipe=plan.recipe.rpartition("/")[2],
        axes=list(plan.axes),
        seeds=list(plan.seeds),
        split=split,
        combinations=combinations,
        runs=rows,
        notes=make_notes(plan, rows, combinations, split, obstacle) + note_undecided(records),
    )


def _make_run_row(record: RunRecord) -> RunRow:
    """Returns the row of a run."""
    result = record.result
    return RunRow(
        name=record.run.name,
        settings={name: format_value(value) for name, value in record.run.values.items()},
        seed=record.run.seed,
        state="missing" if result is None else result.state,
        step=0 if result is None else result.step,
        accuracy=None if record.evaluation is None else record.evaluation.accuracy,
        reward=None if record.evaluation is None else record.evaluation.reward,
        loss=record.loss,
        training_reward=record.training_reward,
        why="" if result is None else result.why,
        eval_command=[] if result is None else result.eval_command,
    )


def _find_obstacle(evaluated: Sequence[Mapping[int, RunRecord]]) -> str:
    """Returns why no combination can be called the best: how their evaluations differ; "" if they do not.

    Accuracies on other problems, or by another grader, do not say which combination is better.
    """
    present = [found for found in evaluated if found]
    for other in present[1:]:
        first = present[0]
        # The problems may depend on the seed, so the same seeds are compared where there are some.
        seeds = [(seed, seed) for seed in first if seed in other] or [(next(iter(first)), next(iter(other)))]
        for a, b in seeds:
            one, two = first[a].evaluation, other[b].evaluation
            if not _is_comparable(one, two):
                is_same = one and two and (one.setting.rows, one.setting.task) == (two.setting.rows, two.setting.task)
                if is_same and one and two and one.setting.grader == two.setting.grader:
                    return "by different coefficients of the reward"
                return "by different graders" if is_same else "on different problems"
    return ""


def _find_best(evaluated: Sequence[Mapping[int, RunRecord]]) -> int | None:
    """Returns the index of the combination with the best mean result, the first of equal ones; None = there is none.

    Only those with the most seeds count: one of few seeds may be good by luck.
    """
    most = max(map(len, evaluated), default=0)
    if not most:
        return None
    candidates = [index for index, found in enumerate(evaluated) if len(found) == most]
    return max(candidates, key=lambda index: (_mean_value(evaluated[index]), -index))


def _mean_value(found: Mapping[int, RunRecord]) -> float:
    """Returns the mean accuracy, or mean reward, over seeds."""
    return mean([r.evaluation.value for r in found.values() if r.evaluation is not None])


def _list_items(record: RunRecord) -> dict[str, EvalItem]:
    """Returns the problems of a run's evaluation that have a score, by id."""
    items = [] if record.evaluation is None else record.evaluation.items
    return {item.id: item for item in items if item.scores}


def _make_combination_row(
    group: Sequence[RunRecord],
    found: Mapping[int, RunRecord],
    is_best: bool,
    difference: PairedDifference | None,
    seed_parts: Sequence[VariancePart],
) -> CombinationRow:
    """Returns the row of a combination. `group` are its runs, `found` those with an evaluation, by seed."""
    by_seed = [_list_items(record) for record in found.values()]
    # A problem that could not be scored for one seed is left out for all.
    ids = [id for id in (by_seed[0] if by_seed else ()) if all(id in items for items in by_seed)]
    ends: tuple[float, float] | None = None
    is_share = all(r.evaluation is None or r.evaluation.accuracy is not None for r in found.values())
    if ids:
        table = [[mean(items[id].scores) for id in ids] for items in by_seed]
        scores = [[score for items in by_seed for score in items[id].scores] for id in ids]
        ends = (find_accuracy_interval if is_share else find_mean_interval)(table, scores, seed_parts)
    low, high = ends or (None, None)
    value = _mean_value(found) if found else None
    losses = [r.loss for r in group if r.loss is not None]
    rewards = [r.training_reward for r in group if r.training_reward is not None]
    return CombinationRow(
        settings={name: format_value(value) for name, value in group[0].run.values.items()},
        num_seeds=len(found) or max(len(losses), len(rewards)),
        num_stopped=sum(r.result is not None and r.result.state == "stopped" for r in found.values()),
        num_problems=len(ids),
        accuracy=value if is_share else None,
        reward=None if is_share else value,
        low=low,
        high=high,
        loss=mean(losses) if losses else None,
        training_reward=mean(rewards) if rewards else None,
        is_best=is_best,
        difference=difference,
    )


def _estimate_scatter(evaluated: Sequence[Mapping[int, RunRecord]], best: int | None) -> SeedStats | None:
    """Returns how much seeds scatter, from the combinations with all seeds of the best one; None if that is unknown."""
    complete = [found for found in evaluated if best is not None and found.keys() == evaluated[best].keys()]
    seeds = list(complete[0]) if complete else []
    return estimate_scatter([[_mean_value({seed: found[seed]}) for found in complete] for seed in seeds])


def _list_parts(scatter: SeedStats | None, found: Mapping[int, RunRecord]) -> tuple[VariancePart, ...]:
    """Returns what seeds add to the variance of a combination's mean; () if it lacks seeds and tells by itself."""
    return scatter.mean_parts if scatter is not None and scatter.num_seeds == len(found) else ()


def _compare_with_best(
    evaluated: Sequence[Mapping[int, RunRecord]], best: int | None, scatter: SeedStats | None
) -> dict[int, PairedDifference]:
    """Returns the paired difference of each other combination to the best one, by index.

    Combinations that share no seed or no problem with the best, or have other graders, are left out.
    """
    if best is None:
        return {}
    is_share = all(r.evaluation is None or r.evaluation.accuracy is not None for r in evaluated[best].values())
    # Of one problem nothing tells how much rewards scatter; that of an accuracy is between 0 and 1.
    tables = {
        index: table
        for index, other in enumerate(evaluated)
        if index != best and (table := _subtract(evaluated[best], other)) and (is_share or len(table[0]) > 1)
    }
    parts = scatter.difference_parts if scatter is not None else ()
    return {
        index: _make_difference(table, len(tables), parts if len(table) == len(evaluated[best]) else (), is_share)
        for index, table in tables.items()
    }


def _subtract(best: Mapping[int, RunRecord], other: Mapping[int, RunRecord]) -> list[list[float]]:
    """Returns the results of `other` less those of `best`, by seed and problem, where both have them; [] = nowhere."""
    seeds = [seed for seed in best if seed in other]
    pairs = [(_list_items(best[seed]), _list_items(other[seed])) for seed in seeds]
    same = all(_is_comparable(best[seed].evaluation, other[seed].evaluation) for seed in seeds)
    ids = [id for id in (pairs[0][0] if pairs else ()) if all(id in a and id in b for a, b in pairs)]
    if not same or not ids:
        return []
    return [[mean(b[id].scores) - mean(a[id].scores) for id in ids] for a, b in pairs]


def _make_difference(
    table: Sequence[Sequence[float]], num_comparisons: int, seed_parts: Sequence[VariancePart], is_share: bool
) -> PairedDifference:
    """Returns the mean of a table of differences with its interval and p-value, which allow for all comparisons.

    `is_share` = they are differences of accuracies, which lie between -1 and 1.
    """
    estimate = (estimate_difference if is_share else estimate_mean)(table, seed_parts)
    limit = 1.0 if is_share else math.inf
    low, high = find_interval(estimate, num_comparisons)
    p = compute_p_value(estimate)
    return PairedDifference(
        mean=mean([mean(row) for row in table]),
        low=max(-limit, low),
        high=min(limit, high),
        p=adjust_p_value(p, num_comparisons),
        p_single=p,
        num_seeds=len(table),
        num_problems=len(table[0]),
    )


def _is_comparable(a: Evaluation | None, b: Evaluation | None) -> bool:
    """Returns whether two evaluations have the same problems, grader and coefficients of the reward."""
    if a is None or b is None:
        return False
    one, two = a.setting, b.setting
    return (one.grader, one.rows, one.task, one.reward) == (two.grader, two.rows, two.task, two.reward)
