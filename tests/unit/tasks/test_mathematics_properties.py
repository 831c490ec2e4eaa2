"""Random mathematical answers: written in another way they stay right, with another value they are wrong."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cohort.tasks.answers import find_boxes
from cohort.tasks.mathematics.boxes import find_answer
from cohort.tasks.mathematics.cleaning import clean_latex
from cohort.tasks.mathematics.equality import compare
from cohort.tasks.mathematics.quantity import read_quantity

attack = settings(max_examples=150, derandomize=True, deadline=None, database=None)

fractions = st.fractions(-99, 99, max_denominator=99)
lists = st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True)
latex = st.lists(
    st.sampled_from(
        ["\\frac", "\\dfrac", "\\sqrt", "{", "}", "[", "]", "1", "2", "x", " ", "(", ")", "=", ",", "|AB|"]
    ),
    max_size=30,
).map("".join)
# a fraction of fractions: its LaTeX, without braces where they may be left out, and its value
nested = st.recursive(
    st.integers(1, 9).map(lambda digit: (str(digit), Fraction(digit))),
    lambda inner: st.tuples(st.sampled_from(["\\frac", "\\dfrac", "\\tfrac", "\\cfrac"]), inner, inner).map(
        lambda parts: (
            parts[0] + "".join(text if len(text) == 1 else f"{{{text}}}" for text, _ in parts[1:]),
            parts[1][1] / parts[2][1],
        )
    ),
    max_leaves=8,
)


def write_fraction(value: Fraction) -> str:
    """Returns a fraction as LaTeX, a whole number as it is."""
    sign = "-" if value < 0 else ""
    if value.denominator == 1:
        return str(value)
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


@attack
@given(nested, fractions)
def test_a_fraction_of_fractions_is_its_value(fraction: tuple[str, Fraction], other: Fraction) -> None:
    text, value = fraction
    number = read_quantity(clean_latex(text))
    assert number is not None
    assert number.value == value
    assert compare(write_fraction(value), text).equal
    assert compare(write_fraction(other), text).equal == (other == value)


@attack
@given(fractions, fractions)
def test_another_value_is_wrong_however_it_is_written(gold: Fraction, answer: Fraction) -> None:
    written = write_fraction(answer)
    ways = [written, f"${written}$", f"x = {written}", f"|AB| = {written}", f"{written}\\text{{ cm}}", f"{written}."]
    ways += [
        f"The answer is {written}",
        str(answer),
        written.replace("\\frac", "\\dfrac"),
        written.replace("-", "\u2212"),
    ]
    for way in ways:
        assert compare(write_fraction(gold), way).equal == (gold == answer)


@attack
@given(lists, lists, st.sampled_from([", ", " and ", "; ", " \\quad \\text{or} \\quad "]), st.randoms())
def test_several_boxes_are_right_only_if_they_hold_the_gold_list(
    gold: list[int], answer: list[int], joint: str, random: Random
) -> None:
    random.shuffle(shuffled := list(gold))
    boxes = [f"$\\boxed{{{value}}}$" for value in shuffled]
    right = find_answer(joint.join(boxes))[0]
    other = find_answer(joint.join(f"\\boxed{{{value}}}" for value in answer))[0]
    gold_text = ", ".join(map(str, gold))
    assert compare(gold_text, right).equal
    assert compare(gold_text, other).equal == (sorted(gold) == sorted(answer))
    assert not compare(gold_text, find_answer(joint.join(boxes[1:]))[0]).equal


@attack
@given(latex, latex)
def test_any_latex_can_be_compared_and_is_cleaned_once(one: str, other: str) -> None:
    assume(one.strip())
    compare(one, other)
    assert clean_latex(clean_latex(one)) == clean_latex(one)


@attack
@given(st.lists(st.sampled_from(["\\boxed{", "}", "{", "1", ", ", " and "]), max_size=30).map("".join))
def test_boxes_are_in_order_and_not_inside_each_other(text: str) -> None:
    boxes = find_boxes(text)
    assert all(end < start for (_, end), (start, _) in pairwise(boxes))
    answer, is_boxed = find_answer(text)
    assert is_boxed == bool(boxes) == (answer is not None)
