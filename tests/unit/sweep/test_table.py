"""The table of a sweep, from evaluations made by hand."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from cohort.sweep import collect
from cohort.sweep.directory import RunResult
from cohort.sweep.notes import describe_best
from cohort.sweep.plan import FixedSetting, Plan
from cohort.sweep.records import RunRecord, SweepTable
from cohort.sweep.render import make_combination_cells, make_run_cells, render_json, render_markdown
from cohort.sweep.statistics import compute_t_tails, find_t_quantile
from cohort.sweep.table import make_table
from tests.helpers.evaluations import evaluation
from tests.unit.evaluation.test_mean_reward import reward_evaluation


def make_plan(values: list[str], seeds: list[int]) -> Plan:
    """Returns a plan that sweeps one setting."""
    return Plan(
        recipe="/folder/my.py:recipe",
        folder="/folder",
        settings=[FixedSetting(name="steps", words=["5"])],
        axes=["optim.lr"],
        combinations=[[[value]] for value in values],
        seeds=seeds,
    )


def tabulate(scores: dict[tuple[str, int], str], split: str = "validation", **states: RunResult) -> SweepTable:
    """Returns the table of runs with these right (1) and wrong (0) answers, by value and seed.

    `states` has other ends of runs than "done", by "run_" and number.
    """
    values, seeds = list(dict.fromkeys(v for v, _ in scores)), list(dict.fromkeys(s for _, s in scores))
    plan = make_plan(values, seeds)
    records = []
    for run in plan.list_runs():
        answers = scores[run.values["optim.lr"][0], run.seed]
        result = states.get(f"run_{run.number}", RunResult(state="done", step=5))
        found = evaluation({str(i): [float(a)] for i, a in enumerate(answers)}, split=split) if answers else None
        records.append(
            RunRecord(run=run, result=result if answers or result.state == "failed" else None, evaluation=found)
        )
    return make_table("s", plan, records)


def test_means_are_over_seeds_and_the_best_is_the_highest() -> None:
    table = tabulate({("a", 0): "1100", ("a", 1): "1110", ("b", 0): "1000", ("b", 1): "0000"})
    assert [row.accuracy for row in table.combinations] == [0.625, 0.125]
    assert table.best is table.combinations[0] and table.best.settings == {"optim.lr": "a"}
    assert table.combinations[0].difference is None and table.split == "validation"


def test_a_difference_with_several_seeds_is_by_hand() -> None:
    table = tabulate({("a", 0): "1100", ("a", 1): "1110", ("b", 0): "1000", ("b", 1): "0000"})
    found = table.combinations[1].difference
    assert found is not None
    # b - a by problem: seed 0: 0, -1, 0, 0; seed 1: -1, -1, -1, 0. Both get a 1 and a -1 added. Means of seeds -1/6 and
    # -1/2; of problems -1/2, -1, -1/2, 0, 1, -1; of all -1/3. Problems: 102/36 / 5 / 6 = 17/180. Seeds: 2/36 / 1 / 2 =
    # 1/36. What is left: seed 0: 1/3, -1/6, 1/3, -1/6, -1/6, -1/6 and its negatives; squares 2/3, over 5 and 12: 1/90.
    # So the variance is 17/180 + 1/36 - 1/90 = 1/9.
    freedom = (1 / 9) ** 2 / ((17 / 180) ** 2 / 5 + (1 / 36) ** 2 + (1 / 90) ** 2 / 5)
    assert found.mean == -0.5 and (found.num_seeds, found.num_problems) == (2, 4)
    assert found.low == -1.0 and found.high == pytest.approx(-1 / 3 + find_t_quantile(freedom) / 3)
    assert found.p == found.p_single == pytest.approx(compute_t_tails(1.0, freedom))


def test_intervals_and_p_values_of_several_comparisons_agree() -> None:
    scores = {("a", 0): "11111111", ("b", 0): "00001111", ("c", 0): "00000011"}
    b, c = (row.difference for row in tabulate(scores).combinations[1:])
    assert b is not None and c is not None
    # By hand in test_statistics.py: alone 0.0239, with two comparisons 0.0478 and an interval that ends at -0.006.
    assert (c.p_single, c.p) == pytest.approx((0.0239, 0.0478), abs=2e-4) and c.high == pytest.approx(-0.006, abs=1e-3)
    assert b.p > 0.05 and b.high > 0 and b.p == 2 * b.p_single
    # A third comparison: the same difference is no longer significant, by both.
    third = tabulate({**scores, ("d", 0): "11111110"}).combinations[2].difference
    assert (
        third is not None
        and third.p == pytest.approx(0.0717, abs=2e-4)
        and third.high == pytest.approx(0.049, abs=1e-3)
    )
    assert any("allow for the 2 comparisons" in note for note in tabulate(scores).notes)
    assert any("With one seed" in note for note in tabulate(scores).notes)


def test_the_scatter_of_seeds_is_taken_from_all_combinations() -> None:
    right = {"a": (30, 34), "b": (31, 33), "c": (30, 33), "d": (24, 14)}
    scores = {(v, s): "1" * n + "0" * (40 - n) for v, numbers in right.items() for s, n in enumerate(numbers)}
    two = tabulate({key: text for key, text in scores.items() if key[0] in "ad"}).combinations[-1].difference
    four = tabulate(scores).combinations[-1].difference
    assert two is not None and four is not None and two.mean == four.mean
    # Two combinations have one degree of freedom for the scatter of their seeds, four have three.
    assert four.high - four.low < two.high - two.low and four.p_single < two.p_single
    # One that lacks a seed has to tell by itself.
    scores["d", 1] = ""
    lone = tabulate(scores, run_8=RunResult(state="failed")).combinations[-1].difference
    assert lone is not None and lone.num_seeds == 1


def test_the_winner_says_which_others_may_be_as_good() -> None:
    good, fair, bad = "1" * 20, "1" * 18 + "00", "0" * 20
    assert describe_best(tabulate({("a", 0): good, ("b", 0): fair, ("c", 0): bad})) == [
        "best: optim.lr=a with accuracy 1.000",
        "It may be best by luck: 1 of the 2 others is not distinguishable from it (p of 0.05 or more): optim.lr=b.",
        "To tell them apart, make a new sweep of these with more seeds (--seeds 5) or problems (--eval.problems).",
    ]
    assert describe_best(tabulate({("a", 0): good, ("c", 0): bad, ("d", 0): bad})) == [
        "best: optim.lr=a with accuracy 1.000",
        "It is better than all 2 others (p below 0.05).",
    ]
    many = describe_best(tabulate({(value, 0): fair for value in "abcdef"}))[1]
    assert "all 5 others are" in many and many.endswith("optim.lr=b; optim.lr=c; optim.lr=d; and 2 more.")
    assert describe_best(tabulate({("a", 0): good})) == ["best: optim.lr=a with accuracy 1.000"]
    assert "Best: optim.lr=a with accuracy 1.000. It is better than the other (p below 0.05)." in render_markdown(
        tabulate({("a", 0): good, ("c", 0): bad})
    )


def test_an_interval_of_the_whole_range_is_explained_where_it_happens() -> None:
    apart = {("a", 0): "1" * 40, ("a", 1): "0" * 40}
    wanted = "One such as 0.000 to 1.000 means that 2 seeds are too few to tell"
    assert any(wanted in note for note in tabulate(apart).notes)
    close = {("a", 0): "10" * 20, ("a", 1): "10" * 20}
    assert not any("too few" in note for note in tabulate(close).notes)


def test_the_commands_for_the_winner_are_in_the_page() -> None:
    done = {
        f"run_{number}": RunResult(state="done", step=5, eval_command=["eval", "arithmetic", "--model", "RUN@5"])
        for number in (1, 2, 3, 4)
    }
    scores = {("a", 0): "1000", ("a", 1): "1000", ("b", 0): "1100", ("b", 1): "1110"}
    page = render_markdown(tabulate(scores, **done))
    commands = [line for line in page.splitlines() if line.startswith("cohort ")]
    assert commands == [f"cohort eval arithmetic --model s/{number}@5" for number in ("003", "004")]
    # No problems are left where the test split has chosen.
    assert "cohort eval" not in render_markdown(tabulate(scores, split="test", **done))


def test_a_missing_run_is_named_and_the_best_needs_all_seeds() -> None:
    failed = RunResult(state="failed", why="ValueError: broken")
    table = tabulate({("a", 0): "1111", ("a", 1): "", ("b", 0): "1000", ("b", 1): "0000"}, run_2=failed)
    assert table.best is table.combinations[1]
    a = table.combinations[0]
    assert (a.num_seeds, a.accuracy) == (1, 1.0)
    assert a.difference is not None and a.difference.num_seeds == 1 and a.difference.mean == 0.75
    assert "1 of 4 runs have no result and are left out: 002-optim.lr=a-seed=1." in table.notes
    assert make_combination_cells(table).rows[0][1] == "1 of 2"
    assert "| 002-optim.lr=a-seed=1 | failed | 0 | - | ValueError: broken |" in render_markdown(table)


def test_a_stopped_run_counts_and_is_marked() -> None:
    stopped = RunResult(state="stopped", step=2, why="--stop-below accuracy 0.5 at 2: it is 0.25")
    table = tabulate({("a", 0): "1111", ("b", 0): "1000"}, run_2=stopped)
    assert table.combinations[1].accuracy == 0.25 and table.runs[1].step == 2
    assert make_combination_cells(table).rows[1][2] == "0.250*"
    assert any("marked with *" in note for note in table.notes)


def test_a_rule_that_decided_nothing_is_named() -> None:
    result = RunResult(state="done", step=5, undecided=["--stop-below x 1 at 2"])
    table = tabulate({("a", 0): "1111", ("b", 0): "1000"}, run_2=result)
    wanted = "The rule --stop-below x 1 at 2 decided nothing in 1 of 2 runs, which do not have its metric."
    assert table.notes[-1] == wanted


def test_the_split_that_was_chosen_on_is_named() -> None:
    assert "validation split" in tabulate({("a", 0): "11", ("b", 0): "10"}).notes[0]
    assert "The choice was made on the test split" in tabulate({("a", 0): "11", ("b", 0): "10"}, split="test").notes[0]


def test_runs_without_evaluation_have_a_loss_and_no_winner() -> None:
    plan = make_plan(["a", "b"], [0])
    done = RunResult(state="done", step=5)
    table = make_table("s", plan, [RunRecord(run=run, result=done, loss=0.5) for run in plan.list_runs()])
    assert table.best is None and table.split == "" and table.combinations[0].loss == 0.5
    assert make_combination_cells(table).rows[0] == ["a", "1", "0.500"]
    assert table.notes[0].startswith("No run was evaluated")


def test_runs_with_rewards_and_without_evaluation_have_the_training_reward_in_place_of_the_loss() -> None:
    plan = make_plan(["a", "b"], [0, 1])
    done = RunResult(state="done", step=5)
    rewards = iter([0.25, 0.75, 0.1, None])
    records = [RunRecord(run=r, result=done, loss=1e-9, training_reward=next(rewards)) for r in plan.list_runs()]
    table = make_table("s", plan, records)
    cells = make_combination_cells(table)
    assert cells.header[-1] == "training reward" and [row[-1] for row in cells.rows] == ["0.500", "0.100"]
    assert [row[3] for row in make_run_cells(table).rows] == ["0.250", "0.750", "0.100", "-"]
    assert table.best is None and "The training reward is the mean of the last steps" in table.notes[0]


def test_the_training_reward_is_the_mean_of_the_last_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    series = {"loss": {7: 0.5}, "reward/mean": {step: float(step) for step in range(1, 10)}}
    reader = SimpleNamespace(read_series=lambda name: series.get(name, {}))
    monkeypatch.setattr(collect, "Reader", lambda path, once: nullcontext(reader))
    assert collect._read_training(tmp_path, 7) == (0.5, 5.0)
    series = {"loss": {7: math.nan}}
    assert collect._read_training(tmp_path, 7) == (None, None)


@pytest.mark.parametrize(
    ("changes", "how"), [({"rows": "y"}, "on different problems"), ({"grader": "h-1"}, "by different graders")]
)
def test_nothing_is_best_among_different_problems_or_graders(changes: dict[str, str], how: str) -> None:
    plan = make_plan(["a", "b"], [0])
    done = RunResult(state="done", step=5, eval_command=["eval", "arithmetic", "--model", "RUN@5"])
    scores = {"0": [1.0], "1": [0.0]}
    found = [evaluation(scores, split="validation"), evaluation(scores, split="validation", **changes)]
    records = [RunRecord(run=run, result=done, evaluation=e) for run, e in zip(plan.list_runs(), found, strict=True)]
    table = make_table("s", plan, records)
    assert table.best is None and table.best_runs == [] and describe_best(table) == []
    assert table.notes[0] == f"The combinations were evaluated {how}: none can be called best."
    assert not any("The choice was made" in note for note in table.notes)
    assert make_combination_cells(table).header == ["optim.lr", "seeds", "accuracy", "95% interval"]
    assert "cohort eval" not in render_markdown(table)


def test_a_table_without_results_has_no_column_of_numbers() -> None:
    failed = RunResult(state="failed", why="broken")
    table = tabulate({("a", 0): "", ("b", 0): ""}, run_1=failed, run_2=failed)
    assert make_combination_cells(table).header == ["optim.lr", "seeds"]
    assert "| run | state | step | why |" in render_markdown(table)


def test_the_files_have_no_paths_and_hostile_values_stay_in_their_cells() -> None:
    table = tabulate({("a|b<script>\x1b[2J`", 0): "11", ("b", 0): "10"})
    page, data = render_markdown(table), render_json(table)
    assert "/folder" not in page + data and json.loads(data)["recipe"] == "my.py:recipe"
    row = next(line for line in page.splitlines() if "| best |" in line)
    assert row.replace("\\|", "").count("|") == 8 and "\x1b" not in page and "\\<script>" in page


def tabulate_rewards(rewards: dict[str, list[list[float]]], **coefficients: float) -> SweepTable:
    """Returns the table of runs with these mean rewards: by value, then by seed, then by problem.

    `coefficients` has that of the part "score" by value, where it is not 1.
    """
    plan = make_plan(list(rewards), list(range(len(next(iter(rewards.values()))))))
    records = []
    for run in plan.list_runs():
        value = run.values["optim.lr"][0]
        numbers = {str(i): [reward] for i, reward in enumerate(rewards[value][run.seed])}
        setting = {"split": "validation", "reward": {"score": coefficients.get(value, 1.0)}}
        found = reward_evaluation(numbers, **setting)
        records.append(RunRecord(run=run, result=RunResult(state="done", step=5), evaluation=found))
    return make_table("s", plan, records)


def test_rewards_beyond_0_and_1_are_compared_by_their_own_scatter() -> None:
    table = tabulate_rewards({"a": [[10.0, 20.0, 30.0]], "b": [[13.0, 21.0, 35.0]]})
    best, other = table.combinations[1], table.combinations[0]
    assert (table.measure, best.reward, best.accuracy) == ("reward", 23.0, None) and best.is_best
    # The differences a - b are -3, -1, -5: mean -3, standard error 2 / sqrt(3), two degrees of freedom.
    assert other.difference is not None
    half = find_t_quantile(2) * 2 / 3**0.5
    assert (other.difference.low, other.difference.high) == pytest.approx((-3 - half, -3 + half))
    assert other.difference.p == pytest.approx(compute_t_tails(3 / (2 / 3**0.5), 2))
    text = render_markdown(table)
    assert "| optim.lr | seeds | reward | 95% interval |" in text and "with reward 23.000" in text
    assert json.loads(render_json(table))["combinations"][1]["reward"] == 23.0


def test_rewards_with_other_coefficients_have_no_best() -> None:
    table = tabulate_rewards({"a": [[1.0, 2.0]], "b": [[2.0, 4.0]]}, b=2.0)
    assert table.best is None and "by different coefficients of the reward: none can be called best" in table.notes[0]


def test_one_problem_has_neither_interval_nor_difference_of_rewards() -> None:
    table = tabulate_rewards({"a": [[1.0]], "b": [[2.0]]})
    assert [(row.low, row.difference) for row in table.combinations] == [(None, None)] * 2 and table.best is not None
