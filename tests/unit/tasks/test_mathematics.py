"""Tests of the mathematics tasks: finding answers, comparing them, work limits, prompts, and sources of rows."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohort.errors import TaskError
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import get_task, load_rows, make_plain_answer
from cohort.tasks.grading import grade
from cohort.tasks.mathematics.cleaning import clean_latex
from cohort.tasks.mathematics.equality import compare
from cohort.tasks.mathematics.notation import MAX_CHARS, read_structure
from cohort.tasks.mathematics.quantity import read_quantity
from cohort.tasks.mathematics.task import AIME24, INSTRUCTION, Math12k, Math500, Minerva, Olympiad, make_row
from cohort.tasks.ref import TaskRef
from cohort.tasks.self_check import run_self_check
from tests.unit.tasks.tables.mathematics import HOSTILE, IN_A_PROBLEM, SAME_OR_NOT, WITHIN_ONE_PERCENT

NAMES = ("math12k", "math500", "aime24", "amc", "minerva", "olympiad")
HALF = {"id": "0", "problem": "?", "answer": "\\frac{1}{2}"}


# ---- comparing answers


@pytest.mark.parametrize(("gold", "answer", "same", "why"), SAME_OR_NOT)
def test_equal_or_not(gold: str, answer: str, same: bool, why: str) -> None:
    result = compare(gold, answer)
    assert result.equal == same, why
    assert (result.reason == "") == same
    assert compare(gold, gold).equal


@pytest.mark.parametrize(("gold", "answer", "same", "why"), WITHIN_ONE_PERCENT)
def test_equal_within_a_tolerance(gold: str, answer: str, same: bool, why: str) -> None:
    assert compare(gold, answer, tolerance=0.01).equal == same, why


@pytest.mark.parametrize(("problem", "gold", "answer", "same", "why"), IN_A_PROBLEM)
def test_equal_or_not_given_the_problem(problem: str, gold: str, answer: str, same: bool, why: str) -> None:
    assert compare(gold, answer, problem=problem).equal == same, why
    assert compare(gold, gold, problem=problem).equal


def test_the_tables_are_large_enough() -> None:
    assert len({row[:2] for row in SAME_OR_NOT}) >= 200
    assert sum(not row[2] for row in SAME_OR_NOT) >= 80
    assert len(HOSTILE) >= 40


def test_comparison_is_not_symmetric() -> None:
    """A gold value accepts an equation that ends with it, but a gold equation does not accept one of its sides.

    A rounded gold accepts the exact value, but an exact gold does not accept a rounded value.
    """
    assert compare("5", "x + 1 = 5").equal
    assert not compare("x + 1 = 5", "5").equal
    assert compare("0.333", "\\frac{1}{3}").equal
    assert not compare("\\frac{1}{3}", "0.333").equal


@pytest.mark.parametrize(
    "text", ["1/0", "1 2 3", "..", "1..2", "--1", "%", "1,2", "\\frac{1}{}", "0x10", "1e", "\u00b2"]
)
def test_text_that_is_not_one_number(text: str) -> None:
    assert read_quantity(text) is None


def test_any_text_can_be_compared() -> None:
    for text in (
        "",
        ",",
        ",,",
        "=",
        "x=",
        "=5",
        "\\pm",
        "\\cup",
        "\\in",
        "(",
        "[]",
        "()",
        "\\{\\}",
        "\\begin{pmatrix}",
        "<",
    ):
        assert compare("5", text).equal == (text == "=5")
        assert not compare(text, "5").equal or text == "=5"
        read_structure(clean_latex(text))


@pytest.mark.parametrize(
    ("problem", "gold", "copied", "worked_out"),
    [
        ("Simplify $\\sqrt{18}$.", "3\\sqrt{2}", "\\sqrt{18}", "3 \\sqrt2"),
        ("Expand $(x+2)(x+3)$.", "x^2+5x+6", "(x + 2)(x + 3)", "6 + 5x + x^2"),
        ("What is $2^{10}$?", "1024", "2^{10}", "1024"),
        ("Express $\\frac{1}{\\sqrt{2}}$ rationalised.", "\\frac{\\sqrt{2}}{2}", "\\dfrac1{\\sqrt2}", "\\sqrt{2}/2"),
        ("Factor $x^2 - 1$.", "(x-1)(x+1)", "y = x^2-1", "(x+1)(x-1)"),
    ],
)
def test_a_copy_of_the_problem_is_wrong(problem: str, gold: str, copied: str, worked_out: str) -> None:
    row = {"id": "0", "problem": problem, "answer": gold}
    for text, correct, reason in ((copied, 0, "the answer repeats the problem"), (worked_out, 1, ""), (gold, 1, "")):
        outcome = grade(Math500(), row, make_plain_answer(f"\\boxed{{{text}}}"))
        assert (outcome.parts["correct"], outcome.reason) == (correct, reason)


def test_finished_values_may_be_copied_from_the_problem() -> None:
    """Values, names and text that is spelt like the gold are finished, so copying them is right."""
    for problem, gold, answer in (
        ("Is it $-3$ or $\\frac{1}{2}$?", "\\frac{1}{2}", "1/2"),
        ("Which is larger, $2^{30}$ or $3^{20}$?", "3^{20}", "3^{20}"),
        ("For $x \\in [-2,7]$, where is it positive?", "x \\in [-2,7]", "[-2,7]"),
        ("Is $n$ even or odd?", "\\text{even}", "even"),
    ):
        row = {"id": "0", "problem": problem, "answer": gold}
        assert grade(Math500(), row, make_plain_answer(f"\\boxed{{{answer}}}")).parts["correct"] == 1


# ---- work limits


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong_within_two_seconds(name: str) -> None:
    gold, answer, reason = HOSTILE[name]
    # The first comparison imports sympy, which must not count.
    compare("\\sqrt{2}", "\\sqrt{3}")
    begin = time.process_time()
    result = compare(gold, answer)
    assert time.process_time() - begin < 2.0
    assert not result.equal
    assert reason in result.reason
    begin = time.process_time()
    assert not compare(answer, gold).equal, "a hostile gold"
    assert time.process_time() - begin < 2.0


def test_long_arithmetic_is_refused_before_it_is_done() -> None:
    """A time limit by a signal would not end it: long arithmetic in C does not see signals."""
    answer = "\\frac{3^{2000000}+1}{2^{3000000}+1}"
    begin = time.process_time()
    assert "work limit" in compare("\\sqrt{5}", answer).reason
    assert time.process_time() - begin < 0.5


def test_cases_that_math_verify_gets_wrong() -> None:
    """The reasons why `equality` does not rely on math-verify alone. If one changes, `equality` may become simpler."""
    from math_verify import LatexExtractionConfig, parse, verify

    def is_same_by_math_verify(gold: str, answer: str) -> bool:
        one, other = (parse(f"${text}$", [LatexExtractionConfig()]) for text in (gold, answer))
        return verify(one, other)

    for gold, answer in (
        ("6m", "6"),
        ("3R^2", "3r^2"),
        ("\\frac{1}{3}", "0.333333"),
        ("8.224 \\times 10^{-19}", "2.88 \\times 10^{-19}"),
        ("1,2", "(2,1)"),
        ("52_8", "52_7"),
        ("5", "2(3)"),
        ("10", "5 5"),
        ("(1,2)", "\\{1, 2\\}"),
    ):
        assert is_same_by_math_verify(gold, answer)
        assert not compare(gold, answer).equal
    for gold, answer in (
        ("\\cos 58^\\circ", "\\sin 32^\\circ"),
        ("(5,\\infty)", "x > 5"),
        ("\\frac{35}{2} \\pi", "35/2 \\pi"),
    ):
        assert not is_same_by_math_verify(gold, answer)
        assert compare(gold, answer).equal


QUICK = """
from collections.abc import Mapping
from typing import ClassVar
from cohort.tasks.base import task
from cohort.tasks.mathematics.task import Mathematics
from cohort.tasks.places import Place

@task("quick-math")
class Quick(Mathematics):
    work_seconds: ClassVar[float] = 1.0
    places: ClassVar[Mapping[str, Place]] = {"test": Place(file="none.jsonl", hub="", split="test")}
"""


def test_an_answer_that_hangs_in_spite_of_the_limits_is_ended_and_wrong(tmp_path: Path) -> None:
    """sympy does not stop solving the second equation; the scoring pool ends it, and the other answers are scored."""
    (tmp_path / "quick.py").write_text(QUICK)
    plane = {"id": "1", "problem": "?", "answer": "5x - 7y + 11z + 4 = 0"}
    answers = [
        (HALF, make_plain_answer("\\boxed{0.5}")),
        (plane, make_plain_answer("\\boxed{x^{z}+y^{x}\\sin(zy)=z^{y}}")),
        (plane, make_plain_answer("\\boxed{-5x + 7y - 11z = 4}")),
        (HALF, make_plain_answer("\\boxed{\\sqrt{2}}")),
    ]
    begin = time.monotonic()
    with ScoringPool(TaskRef(name="quick-math", path=str(tmp_path / "quick.py"))) as pool:
        outcomes = pool.score(answers)
        assert [o.parts.get("correct") for o in outcomes] == [1, 0, 1, 0]
        assert outcomes[1].reason == "over the grader's work limit of 1 s"
        assert (pool.num_over_limit, pool.num_failures, pool.num_restarts) == (1, 0, 1)
    assert time.monotonic() - begin < 60


# ---- finding the answer

# completion, correct, format, a part of the reason; the gold answer is 1/2
COMPLETIONS = [
    ("So it is $\\boxed{\\frac{1}{2}}$.", 1, 1, ""),
    ("\\boxed{0.5}", 1, 1, ""),
    ("\\boxed {1/2}", 1, 1, ""),
    ("\\boxed{\\text{The}} ... \\boxed{\\frac12}", 1, 0, ""),
    ("\\boxed{\\boxed{0.5}}", 1, 0, ""),
    ("\\boxed{7} no, \\boxed{0.5}", 1, 0, ""),
    ("\\boxed{0.5} no, \\boxed{7}", 0, 0, "wrong value"),
    ("\\boxed{0.5} and \\boxed{7", 1, 0, ""),
    ("<answer>0.5</answer>", 1, 0, ""),
    ("<answer>\\boxed{0.5}</answer>", 1, 1, ""),
    ("<answer>The answer is \\boxed{0.5}, as was shown.</answer>", 1, 1, ""),
    ("\\boxed{7} <answer>0.5</answer>", 1, 0, ""),
    ("<answer>7</answer> \\boxed{0.5}", 1, 1, ""),
    ("<think>\\boxed{7}</think> \\boxed{0.5}", 1, 1, ""),
    ("<think>\\boxed{0.5}</think> It is 0.5.", 0, 0, "no boxed answer"),
    ("<think> is it \\boxed{0.5}? Or", 0, 0, "no boxed answer"),
    ("it was thought</think>\\boxed{0.5}", 1, 1, ""),
    ("The answer is 0.5.", 0, 0, "no boxed answer"),
    ("The answer is $\\frac{1}{2}$. #### 0.5", 0, 0, "no boxed answer"),
    ("", 0, 0, "no boxed answer"),
    ("\\boxed{}", 0, 0, "empty"),
    ("\\boxed{ }", 0, 0, "empty"),
    ("\\boxed{0.5", 0, 0, "not closed"),
    ("\\boxed{\\frac{1}{2}", 0, 0, "not closed"),
    ("<answer>0.5", 0, 0, "not closed"),
    ("\\boxed 0.5", 0, 0, "not closed"),
    ("\\boxed{\\{0.5\\}}", 1, 1, ""),
    ("\\boxed{0.5, 0.25}", 0, 1, "2 values"),
    ("\\boxed{0.5 \\text{ or } 2}", 0, 1, "2 values"),
    ("\\boxed{x}", 0, 1, "wrong value"),
    ("\\boxed{?}", 0, 0, "not a number"),
    ("\\boxed{~}", 0, 0, "empty"),
    ("\\boxed{,}", 0, 0, "empty"),
    ("\\boxed{.}", 0, 0, "empty"),
    ("\\boxed{\\text{}}", 0, 0, "empty"),
    ("\\boxed{\\infty}", 0, 1, "not a number"),
    ("\\boxed{" + "1" * MAX_CHARS * 2 + "}", 0, 1, "work limit"),
    ("0.5 " * 100_000 + "\\boxed{0.5}", 1, 1, ""),
    ("\\boxed{" * 50_000 + "}" * 50_000, 0, 0, "work limit"),
    ("{" * 1_000_000 + "\\boxed{0.5}", 1, 1, ""),
    ("\ud800\0\\boxed{0.5}", 1, 1, ""),
]


@pytest.mark.parametrize(("text", "correct", "formatted", "reason"), COMPLETIONS, ids=range(len(COMPLETIONS)))
def test_answers_are_found_in_completions(text: str, correct: int, formatted: int, reason: str) -> None:
    outcome = grade(Math500(), HALF, make_plain_answer(text))
    assert outcome.parts == {"correct": correct, "format": formatted}
    assert reason in outcome.reason
    assert (outcome.reason == "") == bool(correct)


# completion, gold, correct: boxes that are joined are one list, and others are parted
SEVERAL_BOXES = [
    ("\\boxed{(2,2)} and \\boxed{(6,2)}", "(2,2),(6,2)", 1),
    ("$$\\boxed{(6, 2)} \\quad \\text{and} \\quad \\boxed{(2, 2)}$$", "(2,2),(6,2)", 1),
    ("They are $\\boxed{3}$, $\\boxed{2}$, and $\\boxed{1}$.", "1,2,3", 1),
    ("\\[\\boxed{1}; \\boxed{2}\\]", "1,2", 1),
    ("\\boxed{\\boxed{1} and \\boxed{2}}", "1,2", 1),
    ("<answer>\\boxed{1} or \\boxed{2}</answer>", "1,2", 1),
    ("\\boxed{1,234} and \\boxed{5}", "1234, 5", 1),
    ("\\boxed{1, 2} and \\boxed{3}", "1,2,3", 1),
    ("Thus $k = \\boxed{45}$ and $n = \\boxed{2}$.", "k = 45, n = 2", 1),
    ("Thus $n = \\boxed{45}$ and $k = \\boxed{2}$.", "k = 45, n = 2", 0),
    ("So $x=\\boxed{1}$, $y=\\boxed{2}$.", "(1,2)", 1),
    ("So $x=\\boxed{2}$, $y=\\boxed{1}$.", "(1,2)", 0),
    ("$x_1 = \\boxed{3}$, $x_2 = \\boxed{4}$", "x = 4, x = 3", 1),
    ("So $a + b = \\boxed{3}$, $c = \\boxed{4}$.", "c = 4, 3", 1),
    # several guesses
    ("\\boxed{1} and \\boxed{2} and \\boxed{3}", "1,2", 0),
    ("\\boxed{1} and \\boxed{2}", "1,2,3", 0),
    ("\\boxed{1} and \\boxed{1}", "1,2", 0),
    ("\\boxed{3} or \\boxed{4}", "4", 0),
    ("\\boxed{3}, \\boxed{4}", "3", 0),
    (", ".join(f"\\boxed{{{n}}}" for n in range(100)), "99", 0),
    (", ".join(f"\\boxed{{{n}}}" for n in range(100)), "98, 99", 0),
    ("\\boxed{(1,2)}, \\boxed{(3,4)}", "(3,4)", 0),
    # parted boxes: the last one counts
    ("First I got \\boxed{3}. No: \\boxed{4}", "4", 1),
    ("First I got \\boxed{3}. No: \\boxed{4}", "3,4", 0),
    ("\\boxed{3}, no, \\boxed{4}", "3,4", 0),
    ("\\boxed{3} and not \\boxed{4}", "3,4", 0),
    ("\\boxed{3}\n\n\\boxed{4}", "4", 1),
    ("\\boxed{3} \\boxed{4}", "4", 1),
    ("\\boxed{\\frac12} = \\boxed{0.5}", "0.5", 1),
    ("$a = \\boxed{3}$, $b = \\boxed{4}$, so $a+b = \\boxed{7}$", "7", 1),
    ("\\boxed{3}," + " " * 100 + "\\boxed{4}", "3,4", 0),
    ("\\boxed{3}, <answer>\\boxed{4}</answer>", "4", 1),
    ("\\boxed{3}, \\boxed{4", "3", 1),
]


@pytest.mark.parametrize(("text", "gold", "correct"), SEVERAL_BOXES, ids=range(len(SEVERAL_BOXES)))
def test_joined_boxes_are_one_list_and_others_are_parted(text: str, gold: str, correct: int) -> None:
    outcome = grade(Math500(), {"id": "0", "problem": "?", "answer": gold}, make_plain_answer(text))
    assert outcome.parts == {"correct": correct, "format": 0}


@pytest.mark.parametrize(
    "text",
    ["\\boxed{1}, " * 100_000, "\\boxed{1}" + "," * 200_000 + "\\boxed{2}", "\\boxed{" * 2 + "\\boxed{1}," * 50_000],
)
def test_many_boxes_are_wrong_within_two_seconds(text: str) -> None:
    begin = time.process_time()
    outcome = grade(Math500(), {"id": "0", "problem": "?", "answer": "1,2"}, make_plain_answer(text))
    assert time.process_time() - begin < 2.0
    assert outcome.parts["correct"] == 0


def test_a_gold_answer_in_several_boxes_of_the_solution_is_a_list() -> None:
    solution = "By symmetry $x$ is \\boxed{3} or \\boxed{-3}."
    assert make_row({"problem": "?", "solution": solution})["answer"] == "3, -3"


def test_several_accepted_forms_and_a_tolerance() -> None:
    row = {"id": "0", "problem": "?", "answer": "6630.65", "answers": ["6630"]}
    verdicts = {
        text: grade(Minerva(), row, make_plain_answer(f"\\boxed{{{text}}}")).parts["correct"]
        for text in ("6630", "6700")
    }
    assert verdicts == {"6630": 1, "6700": 0}
    assert grade(Minerva(tolerance=0), row, make_plain_answer("\\boxed{6631}")).parts["correct"] == 0
    assert grade(Minerva(), row, make_plain_answer("\\boxed{6631}")).parts["correct"] == 1
    assert grade(Math500(), row, make_plain_answer("\\boxed{6631}")).parts["correct"] == 0


# ---- prompts


def test_prompts_of_the_three_styles() -> None:
    row = {"problem": "1+1?"}
    assert Math500().prompt(row) == [{"role": "user", "content": f"1+1?\n\n{INSTRUCTION}"}]
    system, user = Math500(style="qwen_math").prompt(row)
    assert system == {
        "role": "system",
        "content": "Please reason step by step, and put your final answer within \\boxed{}.",
    }
    assert user == {"role": "user", "content": "1+1?"}
    assert Math500(style="none").prompt(row) == [user]


# ---- sources of rows


def write_rows(path: Path, rows: list) -> str:
    """Writes the rows as JSON Lines and returns the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


MATH_TRAIN = [
    {"problem": "a", "answer": "1", "level": 3, "subject": "Algebra", "split": "train"},
    {"problem": "b", "answer": "2", "level": "Level 5"},
    {"problem": "c", "answer": "3", "level": None},
    {"problem": "d", "answer": ""},
    {"problem": "e", "answer": "5", "level": 1},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COHORT_DATA", str(tmp_path))
    write_rows(tmp_path / "math_train_12k.jsonl", MATH_TRAIN)
    write_rows(
        tmp_path / "math500.jsonl", [{"problem": "e", "answer": "5", "level": 1}, {"problem": "f", "answer": "(1,2)"}]
    )
    write_rows(tmp_path / "aime24.jsonl", [{"problem": "g", "answer": "025"}, {"problem": "h", "answer": 7}])
    write_rows(tmp_path / "amc.jsonl", [{"problem": "i", "answer": "142"}])
    write_rows(tmp_path / "minerva_math.jsonl", [{"problem": "j", "answer": "0.01", "answers": ["0.01", "0.02"]}])
    write_rows(tmp_path / "olympiadbench.jsonl", [{"problem": "k", "answer": "$-1$,$2$"}])
    return tmp_path


def test_rows_of_every_task(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train = load_rows(Math12k(), "train")
    # d has no answer, and e is in the test set
    assert [row["problem"] for row in train] == ["a", "b", "c"]
    assert "without an answer left out: 1" in caplog.text
    assert [row.get("level") for row in train] == [3, 5, None]
    assert [row["problem"] for row in load_rows(Math12k(levels=(3, 4)), "train")] == ["a"]
    assert [row["answer"] for row in load_rows(Math12k(levels=(3, 4)), "test")] == ["5", "(1,2)"]
    assert [row["answer"] for row in load_rows(AIME24(), "test")] == ["025", "7"]
    assert load_rows(Minerva(), "test")[0]["answers"] == ["0.02"]
    for name in NAMES:
        task = get_task(name)()
        rows = load_rows(task, "test")
        assert [grade(task, row, make_plain_answer(task.gold(row))).parts for row in rows] == [
            {"correct": 1, "format": 1}
        ] * len(rows)
    assert run_self_check(Math12k()).num_gold == 5


def test_sets_for_testing_have_no_train_rows(folder: Path) -> None:
    for name in NAMES[1:]:
        with pytest.raises(TaskError, match=f"{name} is for testing only and has no train rows"):
            load_rows(get_task(name)(), "train")
    with pytest.raises(TaskError, match="for testing"):
        load_rows(Math500(data=str(folder / "math_{split}.jsonl")), "train")


def test_rows_of_other_files(tmp_path: Path) -> None:
    mine = write_rows(tmp_path / "mine_test.jsonl", [{"question": "q", "final": "7"}])
    assert load_rows(Olympiad(data=mine, columns=("answer=final",)), "test")[0]["problem"] == "q"
    solved = write_rows(tmp_path / "solved.jsonl", [{"problem": "p", "solution": "We get \\boxed{\\frac{1}{2}}."}])
    assert load_rows(Minerva(data=solved), "test")[0]["answer"] == "\\frac{1}{2}"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"answer": "1"}, 'column "problem" has .*, not a text'),
        ({"problem": " ", "answer": "1"}, 'column "problem" has .*, not a text'),
        ({"problem": "p"}, 'column "answer" has .*, neither a text nor a number'),
        ({"problem": "p", "answer": True}, 'column "answer" has .*, neither a text nor a number'),
        ({"problem": "p", "answer": ["1"]}, 'column "answer" has .*, neither a text nor a number'),
        ({"problem": "p", "solution": "no box"}, 'column "answer" has .*, neither a text nor a number'),
        ({"problem": "p", "answer": "1", "answers": "2"}, 'column "answers" has .*, not a list of texts'),
    ],
)
def test_bad_rows_are_refused(raw: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_row(raw)
    path = write_rows(tmp_path / "bad.jsonl", [{"problem": "good", "answer": "1"}, raw])
    with pytest.raises(TaskError, match=f"bad.jsonl, line 2.*{message}"):
        load_rows(Math500(data=path), "test")


def test_settings_are_checked() -> None:
    for settings, message in (
        ({"levels": (0,)}, "levels among 1 2 3 4 5"),
        ({"style": "loud"}, 'task "math12k" has a setting that is not allowed: it needs style among'),
    ):
        with pytest.raises(TaskError, match=message):
            Math12k(**settings)
    with pytest.raises(TaskError, match=r'task "minerva" .* it needs a tolerance'):
        Minerva(tolerance=1.5)
    for name in NAMES:
        task = get_task(name)()
        assert TaskRef.from_task(task).load() == task
        assert (task.work_seconds, task.max_tokens) == (5.0, 3000)


# ---- math-verify is missing, or imported by workers only


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find_spec(name))
    with pytest.raises(
        TaskError, match=r"scoring math500 needs the module math_verify, .*pip install 'cohort\[math\]'"
    ):
        ScoringPool(Math500())
    assert Math500().prompt(HALF)


def test_a_missing_package_is_named_in_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "latex2sympy2_extended", None)
    # comparing numbers needs no package
    assert grade(Math500(), HALF, make_plain_answer("\\boxed{0.5}")).parts["correct"] == 1
    with pytest.raises(TaskError, match=r"needs math-verify, .* run pip install 'cohort\[math\]'"):
        grade(Math500(), HALF | {"answer": "\\pi"}, make_plain_answer("\\boxed{\\sin(7^{\\circ})}"))


PARENT = """
import sys
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import make_plain_answer
from cohort.tasks.mathematics.task import Math500

task, row = Math500(), {"id": "0", "problem": "?", "answer": "\\\\sqrt{18}"}
task.prompt(row)
with ScoringPool(task) as pool:
    print([o.parts["correct"] for o in pool.score([(row, make_plain_answer("\\\\boxed{3\\\\sqrt{2}}"))])])
print(sorted({"sympy", "math_verify", "latex2sympy2_extended"} & sys.modules.keys()))
"""


def test_only_workers_import_sympy() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[1.0]\n[]\n", done.stderr


# ---- the real sets

DATA = pytest.mark.skipif("COHORT_DATA" not in os.environ, reason="COHORT_DATA names no folder")
SIZES = {"math500": 500, "aime24": 30, "amc": 83, "minerva": 272, "olympiad": 675}


@DATA
@pytest.mark.parametrize("name", NAMES)
def test_every_gold_answer_of_the_real_sets_is_right(name: str) -> None:
    task = get_task(name)()
    rows = load_rows(task, "train" if name == "math12k" else "test")
    assert len(rows) == SIZES.get(name, 11_993)
    for row in rows:
        outcome = grade(task, row, make_plain_answer(f"We find\n\\[\\boxed{{{row['answer']}}}\\]"))
        assert outcome.parts == {"correct": 1, "format": 1}, (row["answer"], outcome.reason)


REWRITTEN = {
    "dfrac": lambda a: a.replace("\\frac", "\\dfrac"),
    "dollars": lambda a: f"${a}$.",
    "brackets": lambda a: f"\\({a}\\)",
    "display": lambda a: f"\\displaystyle {a}",
    "no left": lambda a: a.replace("\\left", "").replace("\\right", ""),
    "square": lambda a: a.replace("pmatrix", "bmatrix"),
    "degrees": lambda a: a.replace("^\\circ", "^{\\circ}"),
    "named": lambda a: a if set("=<>,;") & set(a) or "\\" in a else f"x = {a}",
}


@DATA
@pytest.mark.parametrize("name", ["math500", "olympiad", "minerva"])
def test_golds_of_the_real_sets_as_models_write_them(name: str) -> None:
    """Rewritten golds are right, and the gold of the next problem is wrong, unless it is the same."""
    golds = [row["answer"] for row in load_rows(get_task(name)(), "test")]
    for gold in golds:
        for way, rewrite in REWRITTEN.items():
            answer = rewrite(gold.strip("$") if gold.count("$") <= 2 and "\\$" not in gold else gold)
            assert compare(gold, answer).equal, (way, gold, answer)
    values = [clean_latex(gold).rpartition("=")[2].strip() for gold in golds]
    same = [(a, b) for a, b in zip(values, values[1:] + values[:1], strict=True) if compare(a, b).equal]
    assert all(a == b or read_quantity(a) == read_quantity(b) for a, b in same), same
    assert len(same) < len(golds) // 20
