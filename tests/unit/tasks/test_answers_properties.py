"""Random and hostile texts: the parser and the graders never raise, never take long, and accept only right answers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.tasks.answers import find_answer, read_expression, read_value
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import make_plain_answer
from cohort.tasks.countdown import Countdown
from cohort.tasks.expression import MAX_OPERATIONS, evaluate
from cohort.tasks.grading import grade

attack = settings(max_examples=150, derandomize=True, deadline=None, database=None)

Tree = tuple  # (text, value or None when it divides by zero, numbers)

numbers = st.integers(0, 999).map(lambda n: (str(n), Fraction(n), (n,)))


def join(parts: tuple[Tree, str, Tree, bool]) -> Tree:
    """Returns an expression with all parentheses, so that its expected value depends on no precedence rules."""
    (left, a, used_left), operator, (right, b, used_right), negate = parts
    value: Fraction | None = None
    if a is not None and b is not None and not (operator == "/" and b == 0):
        value = {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[operator](b)
    sign = "-" if negate else ""
    return (
        f"{sign}({left} {operator} {right})",
        -value if value is not None and negate else value,
        used_left + used_right,
    )


trees = st.recursive(numbers, lambda t: st.tuples(t, st.sampled_from("+-*/"), t, st.booleans()).map(join), max_leaves=8)
soup = st.text(alphabet="0123456789+-*/()., =\\{}$<>answerboxdfct\u00d7\u2212\u00f7^!", max_size=120)
tagged = st.lists(
    st.sampled_from(["<answer>", "</answer>", "\\boxed{", "}", "{", "\\frac{", "1", "24", "=", " ", "(", ")", "*"]),
    max_size=40,
).map("".join)
anything = st.one_of(st.text(max_size=200), soup, tagged)


@attack
@given(trees)
def test_evaluate_agrees_with_exact_fractions(tree: Tree) -> None:
    text, value, used = tree
    result = evaluate(text)
    assert result.value == value
    if value is None:
        assert result.reason == "division by zero"
    else:
        assert Counter(result.numbers) == Counter(used)


@attack
@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 99)), min_size=1, max_size=12))
def test_precedence_agrees_with_python(terms: list[tuple[str, int]]) -> None:
    products: list[list[int]] = [[1]]  # a sum of products: the expected value needs only + and *
    for index, (operator, number) in enumerate(terms):
        if operator == "*" and index:
            products[-1].append(number)
        else:
            products.append([-1 if operator == "-" and index else 1, number])
    expected = 0
    for factors in products[1:]:
        product = 1
        for factor in factors:
            product *= factor
        expected += product
    text = "".join(f"{operator if i else ''}{number}" for i, (operator, number) in enumerate(terms))
    assert evaluate(text).value == expected


@attack
@given(anything)
def test_nothing_raises_and_work_is_bounded(text: str) -> None:
    for result in (evaluate(text), read_value(text), read_expression(text)):
        assert (result.value is None) == bool(result.reason)
        assert result.num_operations <= MAX_OPERATIONS + 1
    found = find_answer(text)
    assert (found.text is None) == bool(found.reason)


@attack
@given(anything, st.integers(-(10**9), 10**9))
def test_arithmetic_grader_survives_anything(text: str, answer: int) -> None:
    for shown in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}"):
        outcome = grade(Arithmetic(), {"id": "0", "answer": answer}, make_plain_answer(shown))
        assert outcome.parts["correct"] in (0, 1)
        assert bool(outcome.reason) == (outcome.parts["correct"] == 0)


@attack
@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_arithmetic_is_correct_exactly_for_the_value(answer: int, said: int) -> None:
    outcome = grade(Arithmetic(), {"id": "0", "answer": answer}, make_plain_answer(f"<answer>{said:,}</answer>"))
    assert outcome.parts["correct"] == float(said == answer)


@attack
@given(anything, st.lists(st.integers(1, 99), min_size=1, max_size=4), st.integers(-5, 999))
def test_countdown_grader_survives_anything(text: str, nums: list[int], target: int) -> None:
    row = {"id": "0", "nums": nums, "target": target}
    outcome = grade(Countdown(), row, make_plain_answer(f"<answer>{text}</answer>"))
    assert bool(outcome.reason) == (outcome.parts["correct"] == 0)


@attack
@given(
    trees,
    st.lists(st.integers(0, 999), min_size=1, max_size=4),
    st.integers(0, 999),
    st.booleans(),
    st.booleans(),
)
def test_countdown_is_correct_exactly_when_numbers_and_value_are(
    tree: Tree, nums: list[int], target: int, right_numbers: bool, right_target: bool
) -> None:
    text, value, used = tree
    nums = list(used) if right_numbers else nums
    if right_target and value is not None and value.denominator == 1:
        target = int(value)
    row = {"id": "0", "nums": nums, "target": target}
    outcome = grade(Countdown(), row, make_plain_answer(f"<answer>{text}</answer>"))
    assert outcome.parts["correct"] == float(Counter(used) == Counter(nums) and value == target)


@attack
@given(st.lists(st.sampled_from(list("123468+-*/()")), min_size=3, max_size=9).map("".join))
def test_a_correct_countdown_verdict_means_every_given_digit_once(text: str) -> None:
    """Single digits only, so the multiset can be read off the text without any parser."""
    row = {"id": "0", "nums": [2, 3, 4], "target": 24}
    outcome = grade(Countdown(), row, make_plain_answer(f"<answer>{text}</answer>"))
    if outcome.parts["correct"]:
        assert sorted(c for c in text if c.isdigit()) == ["2", "3", "4"]
