"""What `cohort sweep` prints fits the terminal, and its dry run says where each time comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cohort.cli.sweep_output import format_combinations, print_dry_run, wrap_lines
from cohort.config.flags import split_args
from cohort.config.schema import RunConfig
from cohort.sweep.plan import Plan
from cohort.sweep.prepare import SweepRequest, prepare_plan
from cohort.sweep.records import CombinationRow, PairedDifference, SweepTable
from cohort.sweep.render import describe_constants


def make_row(settings: dict[str, str], num_seeds: int = 2, is_best: bool = False) -> CombinationRow:
    """Returns a row with the widest numbers that there are."""
    widest = PairedDifference(
        mean=-0.185, low=-0.812, high=-0.107, p=0.0004, p_single=0.0001, num_seeds=2, num_problems=40
    )
    return CombinationRow(
        settings=settings,
        num_seeds=num_seeds,
        num_stopped=1,
        num_problems=40,
        accuracy=0.625,
        low=0.0,
        high=1.0,
        is_best=is_best,
        difference=None if is_best else widest,
    )


def make_table(*rows: CombinationRow) -> SweepTable:
    """Returns a table of rows with two seeds."""
    axes = list(rows[0].settings)
    return SweepTable(
        name="s", recipe="r", axes=axes, seeds=[0, 1], split="validation", combinations=list(rows), runs=[]
    )


def list_widths(text: str) -> set[bool]:
    """Returns whether lines fit 80 columns."""
    return {len(line) <= 80 for line in text.splitlines()}


def test_a_table_of_two_settings_fits_80_columns_with_all_digits() -> None:
    values = [{"optim.lr": lr, "batch.samples": n} for lr in ("1e-4", "3e-4") for n in ("4", "16")]
    text = format_combinations(make_table(*(make_row(v, is_best=v == values[2]) for v in values)), 80)
    assert list_widths(text) == {True} and text.splitlines()[0].split()[:3] == ["lr", "samples", "accuracy"]
    assert "0.000 to 1.000" in text and "-0.812 to -0.107" in text and "<0.001" in text
    wide = format_combinations(make_table(*map(make_row, values)), 120)
    assert wide.startswith("optim.lr  batch.samples  accuracy")


def test_columns_that_are_the_same_in_all_rows_are_said_once() -> None:
    rows = [make_row({"optim.lr": lr, "batch.samples": "8"}) for lr in ("1e-4", "3e-4")]
    table = make_table(*rows)
    assert format_combinations(table, 80).split()[:2] == ["optim.lr", "accuracy"]
    assert describe_constants(table) == "In all rows: batch.samples=8, 2 seeds, 40 problems."
    # A combination that lacks a seed brings the column back.
    table = make_table(*rows, make_row({"optim.lr": "1e-3", "batch.samples": "8"}, num_seeds=1))
    text = format_combinations(table, 80)
    assert text.split()[:3] == ["optim.lr", "seeds", "accuracy"] and "1 of 2" in text and list_widths(text) == {True}
    assert describe_constants(table) == "In all rows: batch.samples=8, 40 problems."


def test_wider_tables_lose_a_digit_and_then_number_their_rows() -> None:
    three = [{"optim.lr": "1e-4", "batch.samples": "16", "algo": "dr_grpo"}]
    three.append({"optim.lr": "3e-4", "batch.samples": "4", "algo": "dapo"})
    text = format_combinations(make_table(*(make_row(v, is_best=v == three[1]) for v in three)), 80)
    assert list_widths(text) == {True} and "-0.81 to -0.11" in text and text.startswith("lr ")
    long = [{"system": "word " * 20 + end, "model": "folder/of/a/model"} for end in "ab"]
    text = format_combinations(make_table(*map(make_row, long)), 80)
    assert list_widths(text) == {True} and text.startswith("no.  accuracy") and "  1  system=word word" in text


def test_text_is_broken_only_at_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = "the runs are evaluated on the validation split: the test split is for the winner alone"
    first, second = wrap_lines(text).splitlines()
    assert f"{first} {second}" == text and len(first) <= 80
    monkeypatch.setenv("COLUMNS", "40")
    assert "--eval.problems" in wrap_lines("To tell them apart, make a new --eval.problems").split()


def test_a_dry_run_marks_which_time_comes_from_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ["the steps of runs/x", "the steps of runs/x"]

    def predict(
        plan: Plan, configs: Sequence[RunConfig], out: Path, tell: Callable[[str], None]
    ) -> list[tuple[float, str]]:
        return [(61.0, sources[0]), (62.0, sources[1])]

    monkeypatch.setattr("cohort.sweep.predict.predict_times", predict)
    given = split_args(["--optim.lr", "1e-4,1e-3", "--steps", "5", "--task.train-size", "300"])[1]
    checked = prepare_plan(SweepRequest(recipe="quickstart", given=given))
    print_dry_run(checked, Path("runs"), 1)
    same = capsys.readouterr().out
    assert "(1)" not in same and "the times are predicted from the steps of runs/x" in same
    sources[1] = "a run of 2 steps, made now"
    print_dry_run(checked, Path("runs"), 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("1:01 (1)") and lines[2].endswith("1:02 (2)")
    assert "times with (1) are predicted from the steps of runs/x" in lines
    assert "times with (2) are predicted from a run of 2 steps, made now" in lines
