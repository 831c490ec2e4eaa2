"""Filters, orders and the table of runs, on summaries that are made by hand."""

from __future__ import annotations

import json
import math
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from cohort.config.differences import SettingsDifference
from cohort.errors import ConfigError
from cohort.inspect.runs.query import describe_splits, parse_filter, select_runs, sort_runs
from cohort.inspect.runs.record import make_record
from cohort.inspect.runs.table import TableFormat, fit_columns, format_runs, make_columns
from cohort.logs.curve import ASCII_BLOCKS
from cohort.logs.widths import measure_width
from cohort.run.store.records import Curve
from cohort.run.summary import RunSummary
from cohort.run.swept import SweptSettings


def make_summary(name: str, **values: Any) -> RunSummary:
    """Returns the summary of a finished run; `values` replace fields of it."""
    fields: dict[str, Any] = {
        "state": "done",
        "kind": "rl",
        "recipe": "quickstart",
        "model": "tiny",
        "step": 100,
        "num_steps": 100,
        "started": 1e9,
        "updated": time.time() - 7300,
        "accuracy": 0.5,
        "accuracy_step": 100,
        "values": {step: step / 100 for step in range(1, 101)},
        "metrics": {"reward/mean": 0.75, "entropy": 0.25, "eval/accuracy": 0.5},
        "settings": {"steps": 100, "seed": 0, "optim.lr": 1e-4, "sampling.stop": ["a", "b"], "save.keep_best": True},
        "differences": SettingsDifference(values={"optim.lr": 1e-4, "seed": 0}, source="recipe"),
    }
    return RunSummary(name=name, path=Path("runs") / name, **{**fields, **values})


def list_lines(runs: list[RunSummary], metrics: list[str], format: TableFormat) -> list[str]:
    """Returns the lines of the table as texts."""
    return [line.text for line in format_runs(runs, metrics, format).lines]


RUNS = [
    make_summary("a", accuracy=0.3, started=3e9, metrics={"reward/mean": 0.1, "entropy": 0.5}),
    make_summary("b", accuracy=0.9, step=50, state="running", recipe="tiny_lora"),
    make_summary("c", accuracy=math.nan, metrics={}, settings={}, state="broken", note="run.db: it is missing", step=0),
    make_summary("word-D", settings={"optim.lr": 3e-4, "seed": 12}, started=2e9),
]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("state=running", "b"),
        ("state=finished", "a word-D"),
        ("state!=done", "b c"),
        ("recipe=quickstart", "a c word-D"),
        ("accuracy>0.5", "b"),
        ("accuracy>=0.5", "b word-D"),
        ("accuracy<0.5", "a"),
        ("accuracy <= 0.3", "a"),
        ("optim.lr=1e-4", "a b"),
        ("optim.lr=0.0001", "a b"),
        ("--optim.lr==0.0003", "word-D"),
        ("optim.lr!=1e-4", "c word-D"),
        ("seed>5", "word-D"),
        ("name~WORD", "word-D"),
        ("name!~word", "a b c"),
        ("note~missing", "c"),
        ("reward>0.5", "b word-D"),
        ("entropy=0.5", "a"),
        ("eval/accuracy=0.5", "b word-D"),
        ("save.keep-best=true", "a b"),
        ("sampling.stop=a,b", "a b"),
        ("step<100", "b c"),
        (f"date>{date.fromtimestamp(15e8)}", "a word-D"),
    ],
)
def test_a_filter_selects(text: str, names: str) -> None:
    assert [run.name for run in select_runs(RUNS, [parse_filter(text)])] == names.split()


def test_several_filters_must_all_hold() -> None:
    chosen = [parse_filter(text) for text in ("accuracy>0.2", "state=done")]
    assert [run.name for run in select_runs(RUNS, chosen)] == ["a", "word-D"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "runs/other",
            r'--filter "runs/other" is no condition. Write NAME, one of = != < <= > >= ~, .* before the flags',
        ),
        ("", "is no condition"),
        ("=3", "is no condition"),
        ("state=runing", 'unknown state "runing" in --filter "state=runing". Did you mean "running"?'),
        ("name>a", "asks for an order, but name is a text. Use =, != or ~"),
        ("accuracy>high", '"high" is not a number. Correct it'),
        ("accuracy>nan", '"nan" is not a number'),
        ("date>yesterday", '"yesterday" is not a date like 2026-01-31'),
        ("acuracy>0.5", 'no run has "acuracy". Did you mean "accuracy"?'),
        ("lr=3", 'no run has "lr". Did you mean optim.lr?'),
        ("zzzz=3", "Valid: name, state, .*, a setting such as optim.lr, a metric such as entropy"),
    ],
)
def test_a_wrong_filter_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_runs(RUNS, [parse_filter(text)])


@pytest.mark.parametrize(
    ("name", "reverse", "names"),
    [
        # The newest and the best come first; a run without the value comes last in either order.
        ("date", False, "a word-D b c"),
        ("accuracy", False, "b word-D a c"),
        ("accuracy", True, "a word-D b c"),
        ("reward", False, "b word-D a c"),
        ("step", False, "a word-D b c"),
        ("name", False, "a b c word-D"),
        ("name", True, "word-D c b a"),
        ("optim.lr", False, "word-D a b c"),
        ("entropy", True, "b word-D a c"),
    ],
)
def test_an_order(name: str, reverse: bool, names: str) -> None:
    assert [run.name for run in sort_runs(RUNS, name, reverse)] == names.split()


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'--sort: no run has "entropi". Did you mean "entropy"\?'):
        sort_runs(RUNS, "entropi", False)
    assert sort_runs([], "entropi", False) == []


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_line_fits_on_the_terminal(width: int) -> None:
    other = SettingsDifference(values={"seed": 7}, source="recipe")
    runs = [
        *RUNS,
        make_summary("n" * 100, recipe="r" * 50, model="m" * 90, note="n" * 300, step=123456, differences=other),
    ]
    lines = list_lines(runs, [], TableFormat(width=width))
    table = lines[: len(runs) + 1]
    assert max(map(measure_width, table)) <= width
    needed = ("name", "state", "accuracy") if width < 80 else ("name", "state", "step", "accuracy", "reward")
    assert all(title in table[0] for title in needed)
    assert ("differences" in table[0]) == (width > 80) and ("model" in table[0]) == (width >= 120)


def test_a_pipe_gets_everything() -> None:
    long = make_summary("n" * 300, differences=SettingsDifference(values={"a": ["x"] * 500}, source="recipe"))
    lines = list_lines([long], ["entropy"], TableFormat(width=None))
    assert len(lines) == 2 and "n" * 300 in lines[1] and ",".join(["x"] * 500) in lines[1]
    first = ["name", "state", "step", "accuracy", "reward"]
    assert lines[0].split() == [*first, "entropy", "differences", "recipe", "model", "age", "note"]
    assert "0.250" in lines[1] and "…" not in lines[1]


def test_a_name_keeps_its_end() -> None:
    lines = list_lines([make_summary("2026-11-16-a-very-long-name-of-a-run-k3f9")], [], TableFormat(width=80))
    assert lines[1].startswith("2026-11-16-") and "…" in lines[1] and "-k3f9 " in lines[1]


def test_cells() -> None:
    line = list_lines([make_summary("a")], [], TableFormat(width=None))[1]
    cells = [cell for cell in line.split("  ") if cell.strip()]
    assert [cell.strip() for cell in cells[:6]] == [
        *("a", "done", "100/100", "0.500 @100"),
        *("0.750 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██", "optim.lr=1e-4 seed=0"),
    ]
    assert [cell.strip() for cell in cells[6:]] == ["quickstart", "tiny", "2h"]
    plain = list_lines([make_summary("a")], [], TableFormat(width=None, blocks=ASCII_BLOCKS, mark="~"))[1]
    assert plain.isascii() and "__..--==++**##@@" in plain


def test_runs_of_both_kinds_share_a_column() -> None:
    curve = Curve(label="loss", metric="loss", rising=False)
    other = make_summary("b", kind="sft", curve=curve, metrics={"loss": 1.5}, accuracy=math.nan)
    both = list_lines([make_summary("a"), other], [], TableFormat(width=None))
    assert "reward" in both[0] and "0.750 ▁" in both[1] and "loss 1.5" in both[2]
    assert "loss" in list_lines([other], [], TableFormat(width=None))[0]


def test_notes_that_have_no_room_stand_below() -> None:
    broken = [make_summary(f"b{i}", state="broken", note="run.db: it is missing") for i in range(13)]
    lines = list_lines([make_summary("a"), *broken], [], TableFormat(width=70))
    assert lines[15] == "" and lines[16] == "b0: run.db: it is missing"
    assert lines[-1] == "and 3 more: --filter state=broken or state=crashed" and len(lines) == 27
    wide = list_lines([make_summary("a"), *broken], [], TableFormat(width=200))
    assert len(wide) == 15 and wide[2].endswith("run.db: it is missing")


def test_hostile_text_is_escaped() -> None:
    evil = "\x1b[2J\r\n\u202e"
    run = make_summary(evil, recipe=evil, model=evil, note=evil, state="broken")
    for width in (None, 80, 200):
        text = "".join(list_lines([run], [], TableFormat(width=width)))
        assert text.isprintable() and "\\x1b[2J" in text


def test_every_line_knows_where_its_state_is() -> None:
    for width in (None, 80):
        lines = format_runs([*RUNS, make_summary("表" * 30)], [], TableFormat(width=width)).lines
        found = [line.text[line.start : line.start + len(line.state)] for line in lines[1:6]]
        assert found == ["done", "running", "broken", "done", "done"] and lines[0].state == ""


def test_what_tells_runs_apart_comes_first() -> None:
    settings = [{"steps": 9, "eval.every": 3, "seed": seed, "optim.lr": 1e-4} for seed in (1, 2)]
    runs = [
        make_summary(f"r{i}", differences=SettingsDifference(values=v, source="recipe")) for i, v in enumerate(settings)
    ]
    # A run without differences, such as a broken one, does not count.
    runs.append(make_summary("x", differences=SettingsDifference(values={}, source="")))
    lines = list_lines(runs, [], TableFormat(width=None))
    assert "seed=1 optim.lr=1e-4 steps=9 eval.every=3" in lines[1] and "seed=2 optim.lr" in lines[2]


def test_columns_without_content_take_no_room() -> None:
    run = make_summary("a", differences=SettingsDifference(values={}, source="recipe"))
    columns = make_columns([run], [], TableFormat(width=200))
    assert [c.title for c in fit_columns(columns, 200)[0]] == [
        *("name", "state", "step", "accuracy", "reward", "recipe", "model", "age"),
    ]


def make_different(name: str, values: dict[str, Any], **others: Any) -> RunSummary:
    """Returns the summary of a run with these differences from its recipe."""
    return make_summary(name, differences=SettingsDifference(values=values, source="recipe"), **others)


def test_what_is_equal_in_all_runs_is_said_once_on_a_terminal() -> None:
    values = [{"steps": 9, "eval.problems": 50 + i, "optim.lr": 10.0**-i} for i in (4, 5)]
    runs = [make_different(f"r{i}", value) for i, value in enumerate(values)]
    table = format_runs(runs, [], TableFormat(width=80))
    # What says how a run learns comes before how it is measured, and names are short where that is clear.
    assert "lr=1e-4 problems=54  2h" in table.lines[1].text and "lr=1e-5 problems=55  2h" in table.lines[2].text
    assert "recipe" not in table.lines[0].text and "model" not in table.lines[0].text
    assert table.notes == ["all runs: recipe quickstart, model tiny, steps=9"]
    # A run that does not differ from the recipe does not share its settings; nor does a single run share anything.
    mixed = format_runs([runs[0], make_different("x", {})], [], TableFormat(width=80))
    assert "steps=9" in mixed.lines[1].text and mixed.notes == ["all runs: recipe quickstart, model tiny"]
    alone = format_runs(runs[:1], [], TableFormat(width=100))
    assert "steps=9" in alone.lines[1].text and "quickstart" in alone.lines[1].text
    piped = format_runs(runs, [], TableFormat(width=None))
    assert "optim.lr=1e-4 eval.problems=54 steps=9  quickstart" in piped.lines[1].text and piped.notes == []


def test_a_short_name_of_a_setting_is_used_where_only_one_has_it() -> None:
    settings = {"batch.samples": 4, "eval.samples": 1, "optim.lr": 1e-4}
    runs = [make_different(f"r{i}", {"batch.samples": i, "optim.lr": i / 10}, settings=settings) for i in (1, 2)]
    assert "batch.samples=1 lr=0.1" in list_lines(runs, [], TableFormat(width=100))[1]


def test_runs_of_a_sweep_are_told_apart() -> None:
    sweep = SweptSettings(axes=("optim.lr", "seed"), own=("threads",))
    runs = [
        make_different(f"grid/00{i}-optim.lr=1e-4-batch.samples=4-seed={i}", {"optim.lr": 1e-4, "seed": i}, sweep=sweep)
        for i in (1, 2)
    ]
    runs.append(make_different("001-no-sweep", {"optim.lr": 1e-4}))
    lines = list_lines(runs, [], TableFormat(width=80))
    assert lines[1].startswith("grid/001 ") and lines[2].startswith("grid/002 ") and lines[3].startswith("001-no-sweep")
    assert "seed=1" in lines[1] and "seed=2" in lines[2]
    assert list_lines(runs, [], TableFormat(width=None))[1].startswith("grid/001-optim.lr=1e-4-")


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_no_row_is_wider_than_the_terminal_whatever_columns_are_asked_for(width: int) -> None:
    metrics = ["optim.lr", "seed", "entropy", "reward/mean", "save.keep_best", "sampling.stop"]
    table = format_runs([make_summary("a-name-of-a-run-that-is-long-enough"), *RUNS], metrics, TableFormat(width=width))
    assert max(measure_width(line.text) for line in table.lines[:6]) <= width
    shown = table.lines[0].text.split()
    left = [title for title in ("state", "step", "accuracy", "reward", *metrics) if title not in shown]
    note = next(note for note in table.notes if note.startswith("no room for: "))
    # What the user asked for comes before what is always shown.
    assert left and all(title in note for title in left) and ("optim.lr" in shown) == (width > 30)


def test_accuracies_of_the_validation_split_are_marked() -> None:
    validation = make_summary("v", split="validation", accuracy=0.68)
    test = make_summary("t", split="test")
    lines = list_lines([validation, test], [], TableFormat(width=80))
    assert "0.680v @100" in lines[1] and "0.500 @100" in lines[2]
    (both, choice) = describe_splits([validation, test], "accuracy")
    assert both.startswith("v = measured on the validation split; the other accuracies are on the test split")
    assert "--eval.split validation" in choice
    assert describe_splits([validation], "best") == ["v = measured on the validation split"]
    assert describe_splits([test], "date") == [] and describe_splits([test], "best") == [choice]
    assert describe_splits([make_summary("n", split="test", accuracy=math.nan)], "accuracy") == []
    assert make_record(validation)["accuracy_split"] == "validation"
    assert make_record(make_summary("n", split="test", accuracy=math.nan))["accuracy_split"] is None


def test_a_record_is_json_whatever_the_run_has() -> None:
    odd: dict[str, Any] = {"a": math.nan, "b": [math.inf, {"c": date(2026, 1, 31)}], "d": 10**400, "e": b"x", "f": None}
    run = make_summary(
        "\udcff", metrics={"loss": math.nan, "x": -math.inf}, settings=odd, updated=1e300, accuracy=math.nan
    )
    record = json.loads(json.dumps(make_record(run), allow_nan=False))
    assert record["metrics"] == {"loss": None, "x": None} and record["accuracy"] is record["accuracy_step"] is None
    assert record["settings"]["a"] is None and record["settings"]["b"] == [None, {"c": "2026-01-31"}]
    assert (
        record["started"] == "2001-09-09T01:46:40+00:00" and record["updated"] is None and record["eta_seconds"] is None
    )
    assert record["curve"]["metric"] == "reward/mean" and record["curve"]["values"][-1] == 1.0
    assert record["differences"] == {"optim.lr": 1e-4, "seed": 0} and record["differences_from"] == "recipe"


def test_mean_rewards_have_a_column_of_their_own() -> None:
    rewards = {"accuracy": math.nan, "eval_reward": -3.5, "best_eval_reward": -2.0, "best_step": 50}
    one = make_summary("a", split="validation", **rewards)
    alone = list_lines([one], [], TableFormat(width=None))
    assert "eval reward" in alone[0] and "accuracy" not in alone[0] and "-3.5v @100" in alone[1]
    both = list_lines([one, make_summary("b")], [], TableFormat(width=None))
    assert "accuracy" in both[0] and "eval reward" in both[0]
    record = make_record(one)
    assert (record["eval_reward"], record["best_eval_reward"], record["best_step"]) == (-3.5, -2.0, 50)
    assert record["accuracy"] is None and "eval_reward" not in make_record(make_summary("b"))
    worse = make_summary("c", **{**rewards, "eval_reward": -4.0, "best_eval_reward": -4.0})
    assert [run.name for run in sort_runs([worse, one], "eval_reward", False)] == ["a", "c"]
    assert [run.name for run in sort_runs([worse, one], "best", False)] == ["a", "c"]
    assert [run.name for run in select_runs([worse, one], [parse_filter("eval_reward>-4")])] == ["a"]
