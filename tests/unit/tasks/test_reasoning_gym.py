"""The adapter to reasoning-gym, on a stand-in for the package: rows, settings, mixtures, answers, refusals.

tests/peers/test_reasoning_gym.py has the package itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.cli.main import main
from cohort.config.differences import find_differences, flatten_settings
from cohort.config.document import keep_recorded
from cohort.config.load import change_config, dump_config, load_config, parse_config
from cohort.config.yaml_text import read_yaml
from cohort.errors import CohortError, ConfigError, TaskError
from cohort.tasks.base import check_packages, load_rows, make_plain_answer, make_with_defaults
from cohort.tasks.grading import grade
from cohort.tasks.reasoning_gym import package, task
from cohort.tasks.reasoning_gym.faults import EVALUATED, PARSED_BY_SYMPY, find_setting_fault
from cohort.tasks.reasoning_gym.mixture import interleave, read_mixture
from cohort.tasks.reasoning_gym.screens import find_code
from cohort.tasks.reasoning_gym.task import ReasoningGym, make_task
from cohort.tasks.ref import TaskRef, compute_grader_digest
from cohort.tasks.self_check import run_self_check
from tests.helpers.stand_in_gym import installed, make_module

SUMS = ["--task", "reasoning_gym", "--task.dataset", "sums"]


@pytest.fixture(autouse=True)
def gym() -> Iterator[Any]:
    module = make_module()
    with installed(module):
        yield module


def score(made: ReasoningGym, row: dict[str, Any], text: str) -> tuple[float, float, str]:
    """Returns correct, score and reason of a completion."""
    outcome = grade(made, row, make_plain_answer(text))  # type: ignore[arg-type]
    return outcome.parts["correct"], outcome.parts["score"], outcome.reason


def test_rows_are_the_same_every_time_and_no_question_is_in_both_splits() -> None:
    made = make_task(dataset="sums", train_size=300, test_size=100)
    train, test = load_rows(made, "train"), load_rows(made, "test")  # type: ignore[arg-type]
    assert (len(train), len(test)) == (300, 100)
    assert [train, test] == [load_rows(made, split) for split in ("train", "test")]  # type: ignore[arg-type]
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert len({row["question"] for row in train + test}) == 400
    # Sizes do not move a row to the other split, and another seed begins elsewhere.
    longer = load_rows(make_task(dataset="sums", train_size=500, test_size=50), "test")  # type: ignore[arg-type]
    assert longer == test[:50]
    assert load_rows(make_task(dataset="sums", seed=5000, test_size=50), "test") != longer  # type: ignore[arg-type]


def test_the_stream_goes_on_behind_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [package.make_entry(package.DatasetKey(name="sums"), 3, index).question for index in range(25)]
    monkeypatch.setattr(package, "PIECE", 10)
    pieces = [package.make_entry(package.DatasetKey(name="sums"), 3, index).question for index in range(25)]
    assert pieces == whole


def test_too_few_problems_are_an_error_that_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "MAX_FRUITLESS", 50)
    rows = make_task(dataset="words", train_size=100).rows("train")
    with pytest.raises(TaskError, match=r"no more train problems .* after (\d) rows .* set --task.train-size \1"):
        list(rows)
    # The advice is enough for both splits, whichever is read first.
    for split in ("train", "test"):
        with pytest.raises(TaskError) as caught:
            list(make_task(dataset="words", train_size=100, test_size=100).rows(split))
        sizes = [
            int(number) for number in re.findall(r"(?<=-size )\d+(?=[ ,])", str(caught.value).partition("; set")[2])
        ]
        advised = make_task(dataset="words", train_size=sizes[0], test_size=sizes[1])
        assert sum(len(list(advised.rows(each))) for each in ("train", "test")) == 7
    # "a" has the empty text as its answer, which could not be earned.
    made = make_task(dataset="words", train_size=1, test_size=1)
    found = [row for split in ("train", "test") for row in made._iterate_problems("words", split)]
    assert sorted(row["answer"] for row in found) == list("bcdefgh")


def test_settings_of_the_data_set_are_flags() -> None:
    config = load_config("quickstart", [*SUMS, "--task.min-terms", "3", "--task.signs", " - ", "--task.limit", "7"])
    made: Any = config.task
    assert isinstance(made, ReasoningGym) and (made.min_terms, made.signs, made.limit) == (3, (" - ",), 7)
    assert " - " in next(iter(made.rows("train")))["question"]
    assert made.chance == 0.5
    assert not hasattr(made, "board"), "a dict cannot be a flag"
    # A run records them, and a scoring worker makes the same task from plain values.
    assert parse_config(dump_config(config)) == config
    assert TaskRef.from_task(made).load() == made
    assert compute_grader_digest(made).startswith("reasoning_gym-")


def test_what_came_with_the_data_set_is_no_difference_from_the_recipe() -> None:
    config = load_config("quickstart", [*SUMS, "--task.min-terms", "3"])
    settings = flatten_settings(read_yaml(dump_config(config), "it"))
    found = find_differences(settings, "cohort train quickstart")
    assert found.values == {"task": "reasoning_gym", "task.dataset": "sums", "task.min_terms": 3}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task.min-term", "3"], "unknown flag --task.min-term. Did you mean --task.min-terms?"),
        (["--task.min-terms", "x"], '--task.min-terms must be a whole number, not "x".'),
        (["--task.style", "quiet"], '--task.style must be one of plain, loud, not "quiet".'),
        (["--task.min-terms", "9"], "refuses its settings: max_terms must be >= min_terms"),
        (["--task.level", "3"], "has the levels 0 to 2, not 3; correct --task.level"),
        (["--task.level", "x"], "--task.level must be a whole number"),
        (["--task.level", "-2"], "levels 0 to 2, not -2"),
        (["--task.train-size", "0"], "train_size and test_size from 1"),
        (["--task.seed", "-1"], "a seed from 0"),
        (["--task.format", "plain", "--task.instructions", "package"], "the package's prompt asks for tags"),
        (["--task.board", "3"], "unknown flag --task.board"),
    ],
)
def test_wrong_settings_are_named(args: list[str], message: str) -> None:
    with pytest.raises(CohortError) as caught:
        load_config("quickstart", [*SUMS, *args])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sumz", 'reasoning-gym has no data set "sumz". Did you mean "sums"?'),
        ("puzzle24", "the data set puzzle24 of reasoning-gym is refused: its grader does not compare the numbers"),
        ("sums:1,puzzle24", "puzzle24 of reasoning-gym is refused"),
        ("word_ladder", "PYTHONHASHSEED=0"),
        ("sums:0", 'the share "0" of the data set sums is no number above 0'),
        ("sums:x", 'the share "x"'),
        ("sums,sums", "the data set sums is named twice"),
    ],
)
def test_data_sets_that_cannot_be_used_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_config("quickstart", ["--task", "reasoning_gym", "--task.dataset", text])
    assert message in str(caught.value)
    with pytest.raises(TaskError):
        ReasoningGym(dataset=text)


@pytest.mark.parametrize(
    ("operators", "parentheses", "is_refused"),
    [("+*", False, True), ("-/", False, True), ("+-", False, False), ("*/", False, False), ("+*", True, False)],
)
def test_settings_with_wrong_right_answers_are_refused(operators: str, parentheses: bool, is_refused: bool) -> None:
    config = SimpleNamespace(operators=tuple(operators), allow_parentheses=parentheses)
    assert ("left to right" in find_setting_fault("basic_arithmetic", config)) == is_refused
    assert find_setting_fault("sums", config) == ""


def test_a_fixed_hash_seed_allows_the_data_sets_that_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert make_task(dataset="word_ladder").dataset == "word_ladder"
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(TaskError, match="every process makes other rows"):
        make_task(dataset="word_ladder")


def test_a_level_changes_the_defaults_and_flags_go_on_top() -> None:
    assert make_task(dataset="sums", level=2).max_terms == 4  # type: ignore[attr-defined]
    made: Any = load_config("quickstart", [*SUMS, "--task.level", "1", "--task.min-terms", "3"]).task
    assert (made.level, made.min_terms, made.max_terms, made.style) == (1, 3, 3, "loud")
    with pytest.raises(TaskError, match="words of reasoning-gym has no curriculum"):
        make_task(dataset="words", level=0)
    with pytest.raises(TaskError, match="a data set for the level"):
        ReasoningGym(level=1)


def test_another_data_set_keeps_what_does_not_depend_on_it() -> None:
    first = load_config("quickstart", [*SUMS, "--task.test-size", "77", "--task.min-terms", "3", "--reward.score", "1"])
    second = parse_config(dump_config(first))
    made: Any = change_config(second, ["--task.dataset", "words", "--task.format", "plain"]).task
    assert (made.dataset, made.test_size, made.format, made.min_terms) == ("words", 77, "plain", 2)
    same: Any = change_config(second, ["--task.test-size", "5"])
    assert same.task.min_terms == 3 and same.reward["score"] == 1


def test_only_right_answers_are_paid_unless_a_flag_says_otherwise() -> None:
    assert load_config("quickstart", SUMS).reward == {"correct": 1.0, "score": 0.0}
    paid = load_config("quickstart", [*SUMS, "--reward.score", "1", "--reward.correct", "0"])
    assert paid.reward == {"correct": 0.0, "score": 1.0}


def test_mixtures_alternate_by_their_shares_and_report_each_data_set() -> None:
    args = ["--task", "reasoning_gym", "--task.dataset", "sums:2,n_queens", "--task.sums-min-terms", "3"]
    made: Any = load_config("quickstart", [*args, "--task.train-size", "9"]).task
    assert made.sums_min_terms == 3 and made.n_queens_min_terms == 2
    rows = list(made.rows("train"))
    assert [row["dataset"] for row in rows[:6]] == ["sums", "n_queens", "sums", "sums", "n_queens", "sums"]
    assert all(row["question"].count("+") == 2 for row in rows if row["dataset"] == "sums")
    parts = [{"correct": float(row["dataset"] == "sums"), "score": 0.5} for row in rows]
    assert made.summary(rows, parts) == {
        "mean score": 0.5,
        **{"sums, correct": 1.0, "sums, score": 0.5, "n_queens, correct": 0.0, "n_queens, score": 0.5},
    }
    assert make_task(dataset="sums").summary(rows[:2], parts[:2]) == {"mean score": 0.5}
    assert parse_config(dump_config(load_config("quickstart", args))) == load_config("quickstart", args)
    assert read_mixture("a+b:3") == read_mixture("a:1, b:3.0") and read_mixture("") == ()


@pytest.mark.parametrize("text", ["a:1,b:1", "a:5,b:1", "a:1,b:2,c:4", "a:0.1,b:0.3"])
def test_no_data_set_falls_behind_its_share(text: str) -> None:
    shares = read_mixture(text)
    total = sum(share.weight for share in shares)
    names = list(islice(interleave(shares), 200))
    for end in range(1, 201):
        for share in shares:
            assert abs(names[:end].count(share.name) - end * share.weight / total) < 1


def test_answers_and_what_they_earn(gym: Any) -> None:
    made = make_task(dataset="sums", train_size=5)
    row = next(iter(made.rows("train")))
    gold = row["answer"]
    assert score(made, row, made.gold(row)) == (1, 1, "")
    assert score(made, row, made.gold(row)) == (1, 1, ""), "the grader's changes of the entry do not stay"
    assert score(made, row, f"<think>no <answer>1</answer></think><answer> {gold}\n</answer>")[:2] == (1, 1)
    assert score(made, row, f"<answer>{gold} or so</answer>") == (0, 0.5, "wrong, score 0.5")
    assert score(made, row, "<answer>nonsense</answer>") == (0, 0.05, "wrong, score 0.05")
    for empty in ("", " ", "<answer></answer>", "<answer> \n\u200b</answer>", "no tag", f"<answer>{gold}"):
        assert score(made, row, empty)[:2] == (0, 0) and score(made, row, empty)[2]
    assert score(made, row, f"<think><answer>{gold}</answer>") == (0, 0, "the thought does not end")
    assert score(made, row, f"<answer>{'1' * 30_000}</answer>")[2] == "the answer is longer than 20000 characters"
    assert score(made, row, "<answer>boom</answer>") == (0, 0, "the grader cannot read the answer (ValueError: boom)")
    assert score(made, row, "<answer>much</answer>")[:2] == (0, 0)
    assert run_self_check(made).num_gold > 0  # type: ignore[arg-type]


def test_plain_answers_are_the_text_after_the_thoughts() -> None:
    made = make_task(dataset="sums", format="plain")
    row = next(iter(made.rows("train")))
    assert made.prompt(row)[0]["content"].endswith("Write only the final answer.")
    assert score(made, row, f"<think>hm</think>\n{row['answer']} ") == (1, 1, "")
    assert score(made, row, " ")[:2] == (0, 0)
    assert score(made, row, f"<think>{row['answer']}") == (0, 0, "the thought does not end")


def test_prompts() -> None:
    row = {"question": "Add 1+2."}
    assert make_task(dataset="sums", instructions="none").prompt(row) == [{"role": "user", "content": "Add 1+2."}]
    assert make_task(dataset="sums", instructions="package").prompt(row) == [
        {"role": "system", "content": "Answer in <answer> tags."},
        {"role": "user", "content": "Add 1+2."},
    ]
    assert "<answer>" in make_task(dataset="sums").prompt(row)[0]["content"]


def test_an_answer_that_would_be_run_does_not_reach_the_grader() -> None:
    made = make_task(dataset="n_queens")
    row = next(iter(made.rows("train")))
    graded = package.open_piece(made.make_key("n_queens"), 0).graded
    correct, partial, reason = score(made, row, "<answer>__import__('os').getcwd()</answer>")
    assert (correct, partial) == (0, 0) and "would run it as Python" in reason and graded == []
    assert score(made, row, f"<answer>{row['answer']}</answer>")[0] == 1 and graded == [row["answer"]]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "exec(chr(49))",
        "open(1)",
        "x.__class__",
        "x. subs(x, 1)",
        "[x for x in y]",
        "lambda: 1",
        "Integral(x, x)",
        "f'{x}'",
        "sin(x)\x00",
        "x\\y",
        "\u212frf(x)",
    ],
)
def test_the_screen_for_sympy_lets_only_expressions_through(text: str) -> None:
    assert all(find_code(name, text) for name in PARSED_BY_SYMPY)
    assert find_code("sums", text) == ""


def test_the_screens_let_answers_through() -> None:
    for text in ("3*x**2/2 + C", "-exp(x)*sin(2*x) + 1.5", "(50 - 3)*2 + 10/5", "sqrt(x) + log(Abs(x))", "a*b^2"):
        assert not any(find_code(name, text) for name in PARSED_BY_SYMPY), text
    for text in ("[['Q', '_'], ['_', 'Q']]", "1 2 3", "ABCD", "0 1\n1 0"):
        assert not any(find_code(name, text) for name in EVALUATED), text


def test_a_row_that_comes_out_differently_is_not_graded() -> None:
    made = make_task(dataset="sums")
    row = next(iter(made.rows("train")))
    with pytest.raises(TaskError, match="is not the problem that was asked"):
        score(made, {**row, "question": "Add 1+1."}, "<answer>2</answer>")


def test_rows_without_a_right_answer_have_no_gold() -> None:
    made = make_task(dataset="boxnet", train_size=1, test_size=1)
    assert run_self_check(made).num_rows > 0  # type: ignore[arg-type]
    assert made.gold is None  # type: ignore[comparison-overlap]


def test_without_a_data_set_there_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "reasoning_gym"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(
        ["boxnet", "n_queens", "puzzle24", "sums", "word_ladder", "words"]
    )
    assert lines[3].endswith("Sums of a few numbers (levels 0 to 2)") and "REFUSED" in lines[2]
    assert main(["data", "reasoning_gym", "--out", "-"]) == 2
    assert "needs a data set: add --task.dataset NAME" in capsys.readouterr().err
    assert main(["data", "reasoning_gym", "--task.dataset", "sums", "--out", "-", "--n", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 2 and "noise" not in shown
    assert main(["data", "reasoning_gym", "--task.dataset", "sums"]) == 2
    assert "--out is missing" in capsys.readouterr().err


def test_help_has_the_settings_of_the_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "reasoning_gym", "--task.dataset", "sums", "--help"])
    assert "--task.min-terms" in capsys.readouterr().out
    assert main(["train", "quickstart", *SUMS, "--help"]) == 0
    assert "--task.min-terms" in capsys.readouterr().out


def test_a_missing_package_is_one_line_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = dump_config(load_config("quickstart", [*SUMS, "--task.min-terms", "3"]))
    with installed(None):
        assert main(["data", "reasoning_gym", "--task.dataset", "sums", "--out", "-"]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1 and "run pip install 'cohort[reasoning-gym]'" in shown
        assert main(["train", "tiny_reasoning_gym"]) == 2
        assert "run pip install 'cohort[reasoning-gym]'" in capsys.readouterr().err
        # What was recorded can still be read, without the package.
        recorded: Any = parse_config(text, find=keep_recorded)
        assert recorded.task.min_terms == 3 and recorded.task.dataset == "sums"
        with pytest.raises(TaskError, match="is not installed"):
            parse_config(text)
        # The class itself can be made: help and lists of tasks need it.
        assert make_with_defaults(ReasoningGym).dataset == ""


def test_the_package_is_looked_for_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_task(dataset="sums")
    check_packages(made)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install 'cohort\[reasoning-gym\]'"):
        check_packages(made)  # type: ignore[arg-type]


def test_another_version_causes_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "get_version", lambda: "9.9")
    with caplog.at_level(logging.WARNING):
        package.load_package()
        package.load_package()
    assert [record.getMessage() for record in caplog.records] == [
        "reasoning-gym 9.9 is installed, but its graders were checked in version 0.1.25; check this one with "
        "benchmarks/reasoning_gym_check.py, or run pip install reasoning-gym==0.1.25"
    ]


def test_python_gets_the_same_task_with_one_call() -> None:
    with pytest.raises(TaskError, match='has no setting "terms" here; use one of dataset, level'):
        make_task(dataset="sums", terms=3)
    with pytest.raises(TaskError, match="has the settings of sums, but dataset"):
        type(make_task(dataset="sums"))(dataset="words")
    assert make_task(dataset="sums") == make_task(dataset="sums")
    # The registered class has the package's defaults.
    assert list(ReasoningGym(dataset="sums", train_size=5).rows("train")) == list(
        make_task(dataset="sums", train_size=5).rows("train")
    )
    with pytest.raises(TaskError, match='no split "traces"'):
        next(iter(make_task(dataset="sums").rows("traces")))


def test_settings_of_another_data_set_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown flag --task\.min-terms"):
        load_config("quickstart", ["--task", "reasoning_gym", "--task.min-terms", "3"])
