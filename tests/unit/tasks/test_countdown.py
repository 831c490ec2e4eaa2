"""The task countdown: generated problems, rows from files, prompts and settings."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from cohort.cli.main import main
from cohort.config.document import dump_config, parse_config
from cohort.config.load import load_config
from cohort.errors import TaskError
from cohort.tasks.base import load_rows, make_plain_answer
from cohort.tasks.countdown import Countdown, _parenthesise
from cohort.tasks.grading import grade
from cohort.tasks.ref import TaskRef
from cohort.tasks.self_check import run_self_check
from cohort.tasks.splits import SPLITS
from cohort.types import Answer

SMALL = Countdown(train_size=400, test_size=100)
SETTINGS = {
    "default": SMALL,
    "tiny": Countdown(max_numbers=3, max_number=9, max_target=30, min_target=1, train_size=100, test_size=30),
    "wide": Countdown(min_numbers=4, max_number=1000, max_target=5000, train_size=100, test_size=30),
}


@pytest.mark.parametrize("task", SETTINGS.values(), ids=SETTINGS)
def test_every_problem_is_solved_by_its_solution(task: Countdown) -> None:
    assert run_self_check(task, 30).num_gold == 60
    for split in SPLITS:
        for row in load_rows(task, split):
            outcome = grade(task, row, make_plain_answer(task.gold(row)))
            assert outcome.parts == {"correct": 1, "format": 1}
            assert task.min_numbers <= len(row["nums"]) <= task.max_numbers
            assert all(1 <= n <= task.max_number for n in row["nums"])
            assert task.min_target <= row["target"] <= task.max_target


def test_splits_share_no_numbers_whatever_the_settings() -> None:
    used: dict[str, set[tuple[int, ...]]] = {split: set() for split in SPLITS}
    for task in SETTINGS.values():
        for split in SPLITS:
            used[split] |= {tuple(sorted(row["nums"])) for row in task.rows(split)}
    for one, other in (("train", "test"), ("train", "traces"), ("test", "traces")):
        assert used[one] and used[other]
        assert not used[one] & used[other]


def test_rows_are_the_same_every_time_and_problems_are_distinct() -> None:
    rows = list(SMALL.rows("train"))
    assert rows == list(SMALL.rows("train"))
    assert rows[:50] == list(islice(replace(SMALL, train_size=50).rows("train"), 50))
    assert len({(tuple(sorted(r["nums"])), r["target"]) for r in rows}) == 400


def test_solutions_use_all_four_operators() -> None:
    solutions = [row["solution"] for row in replace(SMALL, train_size=3000).rows("train")]
    for operator in "+-*/(":
        assert any(operator in s for s in solutions), operator
    assert not any(re.search(r"\(\(.*\)\)$|\(\d+\)|^\([^()]*\)$", s) for s in solutions)


@pytest.mark.parametrize(
    ("left", "operator", "right", "text"),
    [
        (("2+3", "+"), "+", ("4-1", "-"), "2+3+4-1"),
        (("2+3", "+"), "-", ("4-1", "-"), "2+3-(4-1)"),
        (("2+3", "+"), "*", ("4*1", "*"), "(2+3)*4*1"),
        (("2*3", "*"), "/", ("4*1", "*"), "2*3/(4*1)"),
        (("2*3", "*"), "-", ("4/1", "/"), "2*3-4/1"),
        (("7", ""), "*", ("4-1", "-"), "7*(4-1)"),
    ],
)
def test_solutions_have_the_parentheses_they_need(left: tuple, operator: str, right: tuple, text: str) -> None:
    assert _parenthesise((0, *left), operator, False) + operator + _parenthesise((0, *right), operator, True) == text


def test_the_prompt_names_numbers_and_target() -> None:
    row = {"id": "0", "nums": [3, 8, 2], "target": 24}
    assert SMALL.prompt(row) == [{"role": "user", "content": "Make 24 from 3, 8, 2."}]
    assert "each number once" in replace(SMALL, instructions=True).prompt(row)[0]["content"]


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_from_a_file_are_test_rows(tmp_path: Path) -> None:
    rows = [
        {"nums": [47, 76, 55, 60], "target": 24, "solution": "((76 - 47) + 55) - 60"},
        {"nums": [78, 43, 41], "target": 76, "solution": "78 - (43 - 41)"},
    ]
    task = Countdown(data=write(tmp_path / "some.jsonl", rows))
    loaded = load_rows(task, "test")
    assert [row["nums"] for row in loaded] == [[47, 76, 55, 60], [78, 43, 41]]
    assert [grade(task, row, make_plain_answer(task.gold(row))).parts["correct"] for row in loaded] == [1, 1]
    with pytest.raises(TaskError, match=r"for testing only.*\{split\}"):
        load_rows(task, "train")


def test_a_problem_of_test_is_not_in_train_in_any_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = [{"nums": [1, 2, 3], "target": 6}, {"nums": [1, 2, 3], "target": 7}, {"nums": [1, 2, 4], "target": 6}]
    file = write(tmp_path / "c_train.jsonl", train)
    write(tmp_path / "c_test.jsonl", [{"nums": [3, 1, 2], "target": 6, "solution": "3+1+2"}])
    task = Countdown(data=str(tmp_path / "c_{split}.jsonl"))
    assert [(row["nums"], row["target"]) for row in load_rows(task, "train")] == [([1, 2, 3], 7), ([1, 2, 4], 6)]
    assert caplog.messages == [f"countdown: {file}: rows of test left out of train: 1 (first: line 1)"]
    assert load_rows(task, "test") == [{"id": "1-2-3=6", "nums": [3, 1, 2], "target": 6, "solution": "3+1+2"}]


def test_another_order_or_solution_is_the_same_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"nums": [3, 1, 2], "target": 6, "solution": "3+1+2"},
        {"nums": [1, 2, 3], "target": 6, "solution": "1*2*3"},
        {"nums": [1, 23], "target": 24},
        {"nums": [3, 1, 2], "target": 6},
    ]
    file = write(tmp_path / "c.jsonl", rows)
    assert [row["nums"] for row in load_rows(Countdown(data=file), "test")] == [[3, 1, 2], [1, 23]]
    assert caplog.messages == [f"countdown: {file}: repeated rows left out: 2 (first: line 2 repeats 1)"]


def test_a_table_of_other_names_is_read(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    file.write_text('numbers,goal\n"[47, 76, 55, 60]",24\n"[78,43,41]",76\n')
    rows = load_rows(Countdown(data=str(file), columns=("nums=numbers", "target=goal")), "test")
    assert rows == [
        {"id": "47-55-60-76=24", "nums": [47, 76, 55, 60], "target": 24, "solution": ""},
        {"id": "41-43-78=76", "nums": [78, 43, 41], "target": 76, "solution": ""},
    ]
    with pytest.raises(
        TaskError, match=r'some.csv, line 2 has no column "nums" .* --task.columns nums=COLUMN target=COLUMN'
    ):
        load_rows(Countdown(data=str(file)), "test")
    with pytest.raises(
        TaskError,
        match=r'has "number=", but countdown reads no such column; correct --task.columns\. Did you mean "nums"\?',
    ):
        load_rows(Countdown(data=str(file), columns=("number=goal",)), "test")
    file.write_text('nums,target\n"[1, 2]",3\n"[1, 2",3\n')
    with pytest.raises(TaskError, match=r"some\.csv, line 3: needs nums"):
        load_rows(Countdown(data=str(file)), "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"nums": [1, 2], "target": 3}\nnot json\n', "bad.jsonl, line 2 cannot be read as JSON"),
        ('{"nums": [1, 2], "target": 3}\n\n{"nums": [1, 2.5], "target": 3}\n', "bad.jsonl, line 3: needs nums"),
        ('{"nums": [1, "2"], "target": 3}\n', "line 1: needs nums"),
        ('{"nums": [1, true], "target": 3}\n', "line 1: needs nums"),
        ('{"nums": [1, -2], "target": 3}\n', "line 1: needs nums"),
        ('{"nums": [1, 2]}\n', 'line 1 has no column "target"'),
        ('{"nums": [], "target": 0}\n', "line 1: needs nums"),
        ("[1]\n", r"line 1 is \[1\]; correct it: a row must be a JSON object"),
        ("\n", "no rows"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(TaskError, match=message):
        load_rows(Countdown(data=str(tmp_path / "bad.jsonl")), "test")


def test_a_file_and_its_columns_are_given_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = write(tmp_path / "c_test.jsonl", [{"numbers": [3, 1, 2], "target": 6}])
    given = ["--task.data", str(tmp_path / "c_{split}.jsonl"), "--task.columns", "nums=numbers"]
    assert main(["data", "countdown", "--out", "-", "--split", "test", *given]) == 0
    assert json.loads(capsys.readouterr().out)["messages"] == [{"role": "user", "content": "Make 6 from 3, 1, 2."}]
    assert main(["data", "countdown", "--out", "-", "--split", "test", *given, "goal=target"]) == 2
    assert 'columns has "goal=", but countdown reads no such column' in capsys.readouterr().err
    assert main(["data", "countdown", "--out", "-", "--task.data", file]) == 2
    assert "one path, which is for testing only" in capsys.readouterr().err
    config = load_config("quickstart", ["--task", "countdown", *given])
    assert config.task == Countdown(data=str(tmp_path / "c_{split}.jsonl"), columns=("nums=numbers",))
    assert parse_config(dump_config(config)) == config
    assert TaskRef.from_task(config.task).load() == config.task


def test_a_missing_file_and_a_missing_solution_are_clear(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"cannot read .*nowhere"):
        load_rows(Countdown(data=str(tmp_path / "nowhere.jsonl")), "test")
    with pytest.raises(TaskError, match="has no solution"):
        SMALL.gold({"id": "7", "nums": [1], "target": 1, "solution": ""})


@pytest.mark.parametrize(
    "settings",
    [
        {"min_numbers": 1},
        {"max_numbers": 9},
        {"min_target": 200},
        {"operators": "^"},
        {"max_number": 0},
        {"test_size": 0},
        {"columns": ("nums=numbers",)},
    ],
)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(TaskError, match='task "countdown" has a setting that is not allowed: it needs'):
        Countdown(**settings)


@pytest.mark.skipif("COHORT_DATA" not in os.environ, reason="needs the data sets in $COHORT_DATA")
def test_the_reference_set_is_solved_by_its_solutions(caplog: pytest.LogCaptureFixture) -> None:
    task = Countdown(data="$COHORT_DATA/countdown_{split}.jsonl")
    rows = load_rows(task, "test")
    assert len(rows) == 1024
    train = load_rows(task, "train")
    assert len(train) == 4000
    assert not caplog.messages
    for row in rows + train:
        assert grade(task, row, make_plain_answer(task.gold(row))).parts == {"correct": 1, "format": 1}
        assert grade(task, row, make_plain_answer(f"<answer>{row['target']}</answer>")).parts["correct"] == 0


def test_a_prompt_may_end_with_an_open_thought_to_continue() -> None:
    task = Countdown(think=True, instructions=True, test_size=1)
    row = next(iter(task.rows("test")))
    user, opened = task.prompt(row)
    assert user["role"] == "user" and opened["role"] == "assistant" and opened["content"].endswith("<think>")
    forced = Answer(
        text=f" 1 + 1</think><answer>{row['solution']}</answer>",
        full=f"{opened['content']} 1 + 1</think><answer>{row['solution']}</answer>",
        finish="stop",
        num_tokens=9,
        conversation=[],
    )
    assert grade(task, row, forced).parts == {"correct": 1.0, "format": 1.0}
    for text in (f" <answer>{row['solution']}</answer>", f" <answer>{row['solution']}</answer></think>"):
        never = replace(forced, text=text, full=opened["content"] + text)  # the answer is only in the thoughts
        assert grade(task, row, never).parts == {"correct": 0.0, "format": 0.0}
