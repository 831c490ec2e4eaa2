"""Reading of single numbers in many spellings. Whole completions are in `test_gsm8k`."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.tasks.expression import MAX_CHARS, MAX_DIGITS
from cohort.tasks.numbers import find_marked_answer, read_last_number, read_quantity

attack = settings(max_examples=200, derandomize=True, deadline=None, database=None)

# Spellings of a whole number, then texts around it. Every spelling is tested in every text.
SPELLINGS = {
    "plain": str,
    "commas": "{:,}".format,
    "latex commas": lambda n: f"{n:,}".replace(",", "{,}"),
    "tight commas": lambda n: f"{n:,}".replace(",", ",\\!"),
    "spaces": lambda n: f"{n:,}".replace(",", " "),
    "thin spaces": lambda n: f"{n:,}".replace(",", "\u2009"),
    "latex spaces": lambda n: f"{n:,}".replace(",", "\\,"),
    "point": "{}.".format,
    "cents": "{:,}.00".format,
    "sign": "{:+}".format,
    "minus sign": lambda n: str(n).replace("-", "\u2212"),
    "en dash": lambda n: str(n).replace("-", "\u2013"),
    "zeros": lambda n: f"{'-' if n < 0 else ''}00{abs(n)}",
}
SETTINGS = [
    "{}",
    " {} ",
    "${}",
    "\\${}",
    "{}$",
    "${}$",
    "\u20ac{}",
    "USD {}",
    "{} dollars",
    "{} miles per hour",
    "{}\\text{{ apples}}",
    "{} cm^2",
    "{}\\,\\mathrm{{km}}",
    "{}%",
    "{}\\%",
    "**{}**",
    "({})",
    "= {}",
    "x = {}",
    "5 + 13 = {}",
    "The answer is {}",
    "Answer: {}",
    "{} (in words)",
]
MARKERS = ["#### {}", "so\n#### {}\n", "\\boxed{{{}}}", "<answer>{}</answer>", "<think>1</think><answer>{}</answer>"]

whole = st.one_of(st.integers(-9, 9), st.integers(-9999, 9999), st.integers(-(10**15), 10**15))
soup = st.text(alphabet="0123456789+-*/().,:;=\\{}$%<>#answerboxdfcti \n\u2212\u00bd^!_`", max_size=120)
pieces = st.sampled_from(
    [
        *(
            "####",
            "\\boxed{",
            "}",
            "{",
            "<answer>",
            "</answer>",
            "<think>",
            "</think>",
            "\\frac{",
            "\\text{",
            "18",
            "1,200",
        ),
        *(" ", "\n", "-", "/", "$", "**", "=", "is", ":", "or", "million", "cm^2", ".", "(", ")", "\ud800", "\x00"),
    ]
)
anything = st.one_of(st.text(max_size=200), soup, st.lists(pieces, max_size=40).map("".join))


@attack
@given(whole, st.sampled_from(sorted(SPELLINGS)), st.sampled_from(SETTINGS), st.sampled_from(MARKERS))
def test_a_whole_number_is_read_back(number: int, spelling: str, setting: str, marker: str) -> None:
    text = marker.format(setting.format(SPELLINGS[spelling](number)))
    marked = find_marked_answer(text)
    assert marked.text is not None
    assert read_quantity(marked.text).value == number, text


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_spelling_goes_with_every_setting(spelling: str, setting: str) -> None:
    for number in (0, 18, -5, 1200, -1234567):
        assert read_quantity(setting.format(SPELLINGS[spelling](number))).value == number


@attack
@given(st.fractions(max_denominator=999))
def test_a_fraction_is_read_back_and_a_whole_one_is_a_division(value: Fraction) -> None:
    sign, size = "-" if value < 0 else "", abs(value)
    above, below = size.numerator, size.denominator
    for text in (f"{sign}{above}/{below}", f"{sign}\\frac{{{above}}}{{{below}}}", f"{sign}{above} / {below} of a mile"):
        read = read_quantity(text)
        assert read.value == (value if below > 1 else None), text
        assert read.reason == ("" if below > 1 else "a division left undone")
    if below > 1 and above > below:
        assert read_quantity(f"{sign}{above // below} {above % below}/{below}").value == value


@attack
@given(st.integers(-(10**9), 10**9), st.integers(1, 6))
def test_a_decimal_is_read_back(scaled: int, places: int) -> None:
    value = Fraction(scaled, 10**places)
    digits = f"{abs(scaled):0{places + 1}}"
    text = f"{'-' if scaled < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    assert read_quantity(text).value == value
    assert read_quantity(f"${text} per day").value == value
    assert read_last_number(f"It comes to {text}, I think.").value == value


@attack
@given(whole, whole, st.sampled_from([" or ", " and ", ", ", "; ", " to ", "+", "*", "^", ":", "\n", " = 1, ", " x "]))
def test_two_numbers_are_never_one(one: int, other: int, between: str) -> None:
    assert read_quantity(f"{one}{between}{other}").value is None


@attack
@given(anything)
def test_nothing_raises_and_every_refusal_has_a_reason(text: str) -> None:
    marked = find_marked_answer(text)
    assert (marked.text is None) == bool(marked.reason)
    for read in (read_quantity(text), read_last_number(text)):
        assert (read.value is None) == bool(read.reason)


@attack
@given(anything, whole)
def test_whatever_stands_before_it_the_last_marker_counts(text: str, number: int) -> None:
    marked = find_marked_answer(f"{text}</think>\n#### {number}")
    assert marked.text is not None
    assert read_quantity(marked.text).value == number
    assert "hashes" in marked.kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("#### 18", {"hashes"}),
        (r"\boxed{18}", {"boxed"}),
        ("<answer>18</answer>", {"tags"}),
        (r"<answer>\boxed{18}</answer>", {"tags", "boxed"}),
        (r"#### \boxed{18}", {"boxed"}),  # the hashes have nothing of their own after them
        ("#### 18 <answer>7</answer>", {"hashes", "tags"}),
        ("#### eighteen", set()),
        (r"\boxed{} <answer></answer> ####", set()),
        (r"\boxed{18", set()),
        (r"<think>\boxed{18}</think>", set()),
        ("18", set()),
    ],
)
def test_which_kinds_of_marker_hold_a_number(text: str, kinds: set[str]) -> None:
    assert find_marked_answer(text).kinds == kinds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("So she makes 9 * 2 = $18 every day.", 18),
        ("It is 18", 18),
        ("18 eggs, of which 4 are broken", 4),
        ("It costs $1,200.50.", Fraction(2401, 2)),
        ("It falls to -5 degrees.", -5),
        ("It falls to \u22125.", -5),
        ("She lost -$5.", -5),
        ("from 10-20", 20),  # a range, not a sign
        ("5 - 3", 3),
        ("x-18", 18),
        (".5", Fraction(1, 2)),
        ("18...", 18),
        ("<think>7</think> It is 18. <think>9", 18),
    ],
)
def test_the_last_number(text: str, value: Fraction) -> None:
    assert read_last_number(text).value == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no number"),
        ("none at all", "no number"),
        ("\u0661\u0668", "no number"),
        ("<think>18</think>", "no number"),
        ("<think>18", "thoughts do not end"),
        ("it is 18,20", "misplaced comma"),
        ("1" * (MAX_DIGITS + 1), "digits"),
    ],
)
def test_no_last_number(text: str, reason: str) -> None:
    assert read_last_number(text).value is None
    assert reason in read_last_number(text).reason


def test_each_limit_lets_its_last_value_through() -> None:
    assert read_quantity("9" * MAX_DIGITS).value == 10**MAX_DIGITS - 1
    assert "digits" in read_quantity("9" * (MAX_DIGITS + 1)).reason
    assert read_quantity(" " * (MAX_CHARS - 2) + "18").value == 18
    assert "longer" in read_quantity(" " * (MAX_CHARS - 1) + "18").reason


def test_emphasis_is_not_taken_for_a_product_nor_a_product_for_emphasis() -> None:
    assert read_quantity("**1**").value == 1
    assert read_quantity("5*100*200").value is None  # without the asterisks it would be 5 100 200
    assert read_quantity("2**3**4").value is None
