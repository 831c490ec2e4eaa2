"""Answers in many spellings, each with the expected verdict worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from cohort.tasks.answers import find_answer, read_expression, read_value, simplify_latex
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import make_plain_answer
from cohort.tasks.countdown import Countdown
from cohort.tasks.expression import (
    MAX_BITS,
    MAX_CHARS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_OPERATIONS,
    evaluate,
    read_number,
)
from cohort.tasks.grading import grade

TIMES, DOT, OVER, MINUS, DASH = "\u00d7", "\u00b7", "\u00f7", "\u2212", "\u2013"

# Text, correct, format, a piece of the reason. The right answer is 1200.
ARITHMETIC = [
    ("<answer>1200</answer>", 1, 1, ""),
    ("<think>3*400</think><answer>1200</answer>", 1, 1, ""),
    ("<answer> 1200 </answer>", 1, 1, ""),
    ("<answer>\n1200\n</answer>\n", 1, 1, ""),
    ("<answer>1,200</answer>", 1, 1, ""),
    ("<answer>1200.0</answer>", 1, 1, ""),
    ("<answer>1,200.00</answer>", 1, 1, ""),
    ("<answer>+1200</answer>", 1, 1, ""),
    ("<answer>01200</answer>", 1, 1, ""),
    ("<answer>1200.</answer>", 1, 1, ""),
    ("<answer>$1200$</answer>", 1, 1, ""),
    ("<answer>**1200**</answer>", 1, 1, ""),
    ("<answer>`1200`</answer>", 1, 1, ""),
    ("<answer>**1200.**</answer>", 1, 1, ""),
    ("<answer>1200*</answer>", 0, 1, "not a number"),
    ("<answer>****</answer>", 0, 0, "not a number"),
    ("<answer>3*400 = 1200</answer>", 1, 1, ""),
    ("<answer>x = 1200.</answer>", 1, 1, ""),
    ("<answer>\\(1200\\)</answer>", 1, 1, ""),
    ("<answer>1{,}200</answer>", 1, 1, ""),
    ("<answer>\\boxed{1200}</answer>", 1, 1, ""),
    ("the answer is \\boxed{1200}", 1, 0, ""),
    ("$\\boxed{ 1,200 }$.", 1, 0, ""),
    ("\\boxed{7} no, \\boxed{1200}", 1, 0, ""),
    ("\\boxed{\\boxed{1200}}", 1, 0, ""),
    ("\\boxed {1200}", 1, 0, ""),
    ("<answer>7</answer> wait <answer>1200</answer>", 1, 0, ""),
    ("<answer>1200</answer> or <answer>7", 1, 0, ""),
    ("<answer><answer>1200</answer></answer>", 1, 0, ""),
    ("</answer><answer>1200</answer>", 1, 0, ""),
    ("<answer>1200</answer></answer>", 1, 0, ""),
    ("<answer>7</answer> \\boxed{1200}", 0, 1, "wrong value"),
    ("<answer>1200</answer> <answer>7</answer>", 0, 0, "wrong value"),
    ("<answer>-1200</answer>", 0, 1, "wrong value"),
    (f"<answer>{MINUS}1200</answer>", 0, 1, "wrong value"),
    ("<answer>1200.5</answer>", 0, 1, "wrong value"),
    ("<answer>1200 = 3*400</answer>", 0, 1, "not a number"),
    ("<answer>3*400</answer>", 0, 1, "not a number"),  # repeating the question is no answer
    ("<answer>1100+100</answer>", 0, 1, "not a number"),
    ("<answer>\\frac{2400}{2}</answer>", 0, 1, "not a number"),
    ("<answer>1200 or 7</answer>", 0, 1, "not a number"),
    ("<answer>1199 1200</answer>", 0, 1, "not a number"),
    ("<answer>1 200</answer>", 0, 1, "not a number"),
    ("<answer>12e2</answer>", 0, 1, "not a number"),
    ("<answer>0x4b0</answer>", 0, 1, "not a number"),
    ("<answer>--1200</answer>", 0, 1, "not a number"),
    ("<answer>twelve hundred</answer>", 0, 1, "not a number"),
    ("<answer>\u0661\u0662\u0660\u0660</answer>", 0, 1, "not a number"),  # Arabic-Indic digits
    ("<answer>nan</answer>", 0, 1, "not a number"),
    ("<answer>12,00</answer>", 0, 1, "misplaced comma"),
    ("<answer>1,2,0,0</answer>", 0, 1, "misplaced comma"),
    ("<answer></answer>", 0, 0, "not a number"),  # a tag with nothing to read in it has no format
    ("<answer>?</answer>", 0, 0, "not a number"),
    ("<answer>\u200b</answer>", 0, 0, "not a number"),
    ("<answer>\u3164</answer>", 0, 0, "not a number"),  # a letter without a visible shape
    ("<answer> \n </answer>", 0, 0, "not a number"),
    ("<answer>\\boxed{}</answer>", 0, 1, "not a number"),
    # ---- thoughts are not answers
    ("<think><answer>1200</answer>", 0, 0, "thoughts do not end"),
    ("<think><answer>1200</answer></think>", 0, 0, "no closed answer tag"),
    ("<think>\\boxed{1200}</think>", 0, 0, "no answer tag"),
    ("<think>\\boxed{1200}", 0, 0, "thoughts do not end"),
    ("<think>3*400", 0, 0, "thoughts do not end"),
    ("<think>a</think><think><answer>1200</answer>", 0, 0, "thoughts do not end"),
    ("<answer>1200</answer></think>", 0, 0, "no closed answer tag"),  # the prompt opened the thoughts
    ("3*400</think><answer>1200</answer>", 1, 1, ""),
    ("<think>3*400</think>\n<answer>1200</answer><think>sure?", 1, 1, ""),
    ("<think><answer>7</answer></think><answer>1200</answer>", 1, 0, ""),
    ("<think><answer>1200</answer></think><answer>7</answer>", 0, 0, "wrong value"),
    ("<answer>" + "1" * (MAX_DIGITS + 1) + "</answer>", 0, 1, "digits"),
    ("<answer>" + "1" * (MAX_CHARS + 1) + "</answer>", 0, 1, "longer than"),
    ("1200", 0, 0, "no answer tag"),
    ("", 0, 0, "no answer tag"),
    ("<answer>1200", 0, 0, "no closed answer tag"),
    ("1200</answer>", 0, 0, "no closed answer tag"),
    ("</answer>1200<answer>", 0, 0, "no closed answer tag"),
    ("</answer>\\boxed{1200}<answer>", 1, 0, ""),
    ("<ANSWER>1200</ANSWER>", 0, 0, "no answer tag"),
    ("\\boxed{1200", 0, 0, "no answer tag"),
    ("\\boxed{{1200}", 0, 0, "no answer tag"),
    ("\ud800<answer>1200</answer>", 1, 1, ""),  # a lone surrogate
]

# Text between answer tags, correct, a piece of the reason. The numbers 3 8 2 1 have to make 24.
COUNTDOWN = [
    ("3*8*(2-1)", 1, ""),
    ("(2 - 1) * 8 * 3", 1, ""),
    ("3*8*(2-1) = 24", 1, ""),
    ("3*8*(2-1) = 24*1 = 24", 1, ""),
    ("3*8*(2-1)=24.", 1, ""),
    ("$3 \\times 8 \\times (2 - 1)$", 1, ""),
    ("\\boxed{3 \\cdot 8 \\cdot (2-1)}", 1, ""),
    ("\\left(2-1\\right) \\times 3 \\times 8", 1, ""),
    ("\\frac{3*8}{2-1}", 1, ""),
    ("\\dfrac{3 \\times 8}{\\frac{2}{1} - 1}", 0, "not exactly the given numbers"),
    ("\\frac{\\frac{8}{1}*3}{1}*2", 0, "not exactly the given numbers"),
    ("3 \\times 8 \\div (2 - 1)", 1, ""),
    (f"3{TIMES}8{TIMES}(2{MINUS}1)", 1, ""),
    (f"3{DOT}8{OVER}(2{DASH}1)", 1, ""),
    ("**(2-1)*3*8**", 1, ""),
    ("-(1-2)*3*8", 1, ""),
    ("(3)*((8))*(2-1)", 1, ""),
    ("8/(1/3)/(2-1)", 0, "not exactly the given numbers"),
    ("3*8", 0, "not exactly the given numbers"),
    ("24", 0, "not exactly the given numbers"),
    ("3*8*(2-1)*1", 0, "not exactly the given numbers"),
    ("3*8*(2-1)+0", 0, "not exactly the given numbers"),
    ("3+8+2+1", 0, "misses the target"),
    ("3*8*(2-1)=25", 0, "which it is not"),
    ("24 = 3*8*(2-1)", 1, ""),  # the target first
    ("24 = 3*8*(2-1) = 24", 1, ""),
    ("24 = 24 = 3*8*(2-1)", 0, "not exactly the given numbers"),
    ("24 = 24", 0, "not exactly the given numbers"),
    ("25 = 3*8*(2-1)", 0, 'it says "= 25"'),
    ("24 = 3*8", 0, "not exactly the given numbers"),
    ("20+4 = 3*8*(2-1)", 0, "not exactly the given numbers"),
    ("24 = 3+8+2+1", 0, 'it says "= 24"'),
    ("3*8*(2-1) (=24)", 1, ""),
    ("3*8*(2-1) ( = 24 ).", 1, ""),
    ("3*8*(2-1) (=25)", 0, 'it says "= 25"'),
    ("3*8 (=24) * (2-1)", 0, "ends where"),
    ("3*8*(2-1) = ?", 0, "which it is not"),
    ("38-12-2", 0, "not exactly the given numbers"),
    ("3 8 * 2 1", 0, "unexpected '8'"),
    ("3*8(2-1)", 1, ""),  # a product without a sign, before a parenthesis
    ("(2-1)(3*8)", 1, ""),
    ("8 (2-1) * 3", 1, ""),
    ("(2-1)3*8", 0, "unexpected '3'"),
    ("3 x 8 x (2 - 1)", 1, ""),
    ("3x8x(2-1)", 1, ""),
    ("3 X 8 X (2 - 1)", 1, ""),
    ("(2 - 1) x 8 x 3", 1, ""),
    ("x*8*(2-1)", 0, "unexpected character 'x'"),
    ("3 xx 8*(2-1)", 0, "unexpected character 'x'"),
    ("3*8*(2-1) x", 0, "unexpected character 'x'"),
    ("[2-1]*8*3", 1, ""),
    ("3[8(2-1)]", 1, ""),
    ("[2-1)*8*3", 0, "not closed"),
    ("(2-1]*8*3", 0, "not closed"),
    ("8/3(2+1)", 0, "misses the target"),  # evaluated from the left: the 3 divides only the 8
    ("3**8**2**1", 0, "'**' is not allowed"),
    ("3*8//(2-1)", 0, "'//' is not allowed"),
    ("3*8^(2-1)", 0, "unexpected character"),
    ("3*8/(2-1-1)", 0, "division by zero"),
    ("3*8*(2-1", 0, "not closed"),
    ("3*8*2-1)", 0, "unexpected ')'"),
    ("3*8*", 0, "ends where"),
    ("*3", 0, "'*' where a number"),
    ("", 0, "empty"),
    ("__import__('os').system('true')", 0, "unexpected character"),
    ("3*8*(2-1) \x1b[31m", 0, "unexpected character '\\x1b'"),
    ("\uff13*8*(2-1)", 0, "unexpected character"),  # a full-width digit
    ("(" * 99 + "3" + ")" * 99, 0, "nested"),
    ("-" * 99 + "3", 0, "operations"),
    ("3+" * 99 + "3", 0, "operations"),
]


def test_there_are_enough_cases() -> None:
    assert len(ARITHMETIC) + len(COUNTDOWN) >= 100


@pytest.mark.parametrize(("text", "correct", "form", "reason"), ARITHMETIC)
def test_arithmetic_answers(text: str, correct: int, form: int, reason: str) -> None:
    outcome = grade(Arithmetic(), {"id": "0", "answer": 1200}, make_plain_answer(text))
    assert outcome.parts == {"correct": correct, "format": form}
    assert reason in outcome.reason
    assert bool(outcome.reason) == (correct == 0)


@pytest.mark.parametrize(("text", "correct", "reason"), COUNTDOWN)
def test_countdown_answers(text: str, correct: int, reason: str) -> None:
    row = {"id": "0", "nums": [3, 8, 2, 1], "target": 24}
    outcome = grade(Countdown(), row, make_plain_answer(f"<answer>{text}</answer>"))
    assert outcome.parts == {"correct": correct, "format": float(text != "")}
    assert reason in outcome.reason
    assert bool(outcome.reason) == (correct == 0)


# Completions of a model. The numbers 44 19 35 have to make 98, or 26 88 44 33 to make 85.
@pytest.mark.parametrize(
    ("text", "nums", "correct", "form"),
    [
        ("<think>44+19</think><answer>44+19+35</answer>", [44, 19, 35], 1, 1),
        ("<think><answer>44+19+35</answer>", [44, 19, 35], 0, 0),
        ("<think><answer>44+19+35</answer></think>", [44, 19, 35], 0, 0),
        ("<answer>98 = 44 + 19 + 35</answer>", [44, 19, 35], 1, 1),
        ("<answer>[44+19]+35</answer>", [44, 19, 35], 1, 1),
        ("<answer>44+19+35 (=98)</answer>", [44, 19, 35], 1, 1),
        ("<answer>98 = 98</answer>", [44, 19, 35], 0, 1),
        ("<answer>26(88/44) + 33</answer>", [26, 88, 44, 33], 1, 1),
        ("<answer>26 x (88/44) + 33</answer>", [26, 88, 44, 33], 1, 1),
        ("<answer>26\\left(\\frac{88}{44}\\right) + 33</answer>", [26, 88, 44, 33], 1, 1),
        ("<answer>26(2) + 33</answer>", [26, 88, 44, 33], 0, 1),
        ("<answer></answer>", [44, 19, 35], 0, 0),
        ("<answer>?</answer>", [44, 19, 35], 0, 0),
        ("<answer>\u200b</answer>", [44, 19, 35], 0, 0),
    ],
)
def test_countdown_completions(text: str, nums: list[int], correct: int, form: int) -> None:
    row = {"id": "0", "nums": nums, "target": 98 if len(nums) == 3 else 85}
    assert grade(Countdown(), row, make_plain_answer(text)).parts == {"correct": correct, "format": form}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("10-4-3", 3),  # from the left
        ("100/10/5", 2),
        ("2*-3", -6),
        ("-2*-3", 6),
        ("-(2+3)", -5),
        ("1 - -1", 2),
        ("1/3*3", 1),
        ("0.1+0.2", Fraction(3, 10)),
        (".5*4", 2),
        ("1,000*2", 2000),
        ("7/2", Fraction(7, 2)),
        ("\t2 *\u00a03 ", 6),
    ],
)
def test_evaluate(text: str, value: Fraction) -> None:
    assert evaluate(text).value == value


def test_the_numbers_are_those_written() -> None:
    assert evaluate("-3*(4 - 1,000)/.5").numbers == (3, 4, 1000, Fraction(1, 2))


def test_each_limit_lets_its_last_value_through() -> None:
    assert evaluate("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH).value == 7
    assert evaluate("1+" * MAX_OPERATIONS + "1").value == MAX_OPERATIONS + 1
    assert evaluate("9" * MAX_DIGITS).value == 10**MAX_DIGITS - 1
    assert read_number("9" * MAX_DIGITS).value == 10**MAX_DIGITS - 1
    assert evaluate(" " * (MAX_CHARS - 1) + "7").value == 7
    big = "9" * 120  # 399 bits: five factors fit in 2048, six do not
    assert evaluate("*".join([big] * 4)).value is not None
    assert evaluate("(" + "*".join(["9" * 80] * 6) + ")").value is not None
    assert 6 * 80 * 3.33 < MAX_BITS < 1.01 * 6 * 103 * 3.33


def test_over_each_limit_there_is_a_reason() -> None:
    over = {
        "(" * (MAX_DEPTH + 1) + "7" + ")" * (MAX_DEPTH + 1): "nested",
        "1+" * (MAX_OPERATIONS + 1) + "1": "operations",
        "9" * (MAX_DIGITS + 1): "digits",
        " " * MAX_CHARS + "7": "longer",
    }
    for text, reason in over.items():
        assert evaluate(text).value is None
        assert reason in evaluate(text).reason


def test_nested_fractions_become_plain() -> None:
    assert simplify_latex("\\frac{1}{\\frac{2}{3}}") == "((1)/(((2)/(3))))"
    assert evaluate(simplify_latex("\\frac{1}{\\frac{2}{3}}")).value == Fraction(3, 2)


def test_a_word_that_starts_like_a_latex_operator_is_not_one() -> None:
    assert evaluate(simplify_latex("2 \\timesx 3")).value is None


def test_value_and_expression_take_their_own_side_of_the_equals_sign() -> None:
    assert read_value("3*8 = 24").value == 24
    assert read_expression("3*8 = 24").numbers == (3, 8)


def test_many_unclosed_boxes_are_scanned_once() -> None:
    text = "\\boxed{" * 50_000 + "7" + "<answer>" * 50_000
    assert find_answer(text).text is None


def test_the_forced_prefix_belongs_to_the_answer() -> None:
    from cohort.types import Answer

    answer = Answer(text="12</answer>", full="<answer>12</answer>", finish="stop", num_tokens=2, conversation=[])
    assert grade(Arithmetic(), {"id": "0", "answer": 12}, answer).parts == {"correct": 1, "format": 1}
