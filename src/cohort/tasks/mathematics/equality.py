r"""Comparison of two mathematical answers: by spelling, by structure, as numbers, and as expressions.

Cheap and exact comparisons come first: the spelling, then numbers as fractions. Only the remaining cases are parsed.
Expressions are compared by their values at fixed points: exactly where these are fractions, and else to 100 digits.
math-verify's `verify` (gold first) compares only equations that are no multiple of each other, and expressions with
unknown functions.

The rules differ from math-verify on purpose:

- An exact gold needs an exact answer: 0.333333 is not 1/3, and 3e-10 is not 4e-10 (math-verify rounds to six decimals).
  A gold with decimals and at least three digits counts as rounded: 1/3 equals a gold of 0.333, but 0.3334 does not.
- Single letters are unknowns, not units: 6m is not 6. Capital and small letters differ: r is not R.
- A pair has an order, a list has none. An interval keeps its brackets. 52_8 is not 52_7. 2(3) is 6. "2 3" is no number.
- A list that is longer than the gold list is wrong, whatever it contains.
- Unfinished work is no answer. A gold number needs a number: 2 + 3 is not 5, nor is \sqrt{25}, but 2^{10} is 1024.
  An answer that contains a formula of the problem is right only if the gold contains that formula too.
- 50% is 50 if the problem mentions percent, and 0.5 otherwise. A base is right only if the gold has it.

The size of costly work is estimated before the work starts (characters, nesting, digits, powers, factorials). So the
verdict "over the grader's work limit" is the same on every machine. Sums, integrals, limits and determinants are not
evaluated: an answer with one of them is right only if it is spelt like the gold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.base import OVER_LIMIT
from cohort.tasks.mathematics.cleaning import clean_latex
from cohort.tasks.mathematics.names import have_same_meaning, names_value
from cohort.tasks.mathematics.notation import (
    Items,
    Leaf,
    Node,
    OverLimit,
    is_number_with_commas,
    read_structure,
    split_sides,
)
from cohort.tasks.mathematics.quantity import Quantity, read_quantity
from cohort.tasks.mathematics.symbolic import (
    LETTER_COMMANDS,
    SLASH_FRACTION,
    VALUE_TOLERANCE,
    are_close,
    are_equal_by_math_verify,
    choose_points,
    collect_letters,
    evaluate_at,
    have_same_values,
    make_equation,
    parse_latex,
)

WRONG_VALUE = "wrong value"

_SET_COMMAND = re.compile(r"\\(?:setminus|cap|cup|mathbb)(?![a-zA-Z])")
_BASE_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMBER_IN_BASE = re.compile(rf"([-+]?[0-9A-Z.]+)_\{{?([0-9]+|{'|'.join(_BASE_WORDS)})\}}?")
# A single letter, or a word. Two small letters are not a word here: they may be a product.
_WORD = re.compile(r"[A-Za-z]|[A-Za-z]{3,}|[A-Z]{2,}")
_POWER, _TIMES_SIGN = r"[0-9]+\^(?:[0-9]|\{[0-9]+\})", r"(?:\\cdot|\\times|\*)"
_PRODUCT_OF_POWERS = re.compile(rf"[-+]?(?:[0-9]+{_TIMES_SIGN})?{_POWER}(?:{_TIMES_SIGN}{_POWER})*")
_OPERATOR_OR_COMMAND, _FRACTION = re.compile(r"[-+*/^!(\\]"), re.compile(r"\\frac|\\overline|[0-9]/[0-9]")
_OPERATION = re.compile(rf"[-+*/^!(]|\\(?!{LETTER_COMMANDS})")
_PLAIN_ARITHMETIC = re.compile(r"(?:[-+*/^!().0-9{} ]|\\(?:frac|cdot|times|div|binom)(?![a-zA-Z]))+")
_FORMULA = re.compile(r"\\\[(.{1,999}?)\\\]|\\\((.{1,999}?)\\\)|(?<!\\)\$([^$]+)\$", re.DOTALL)
_PERCENT = re.compile(r"%|per ?cent|\bpct\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison: whether the answer equals the gold answer. `reason` says why not; "" if it does."""

    equal: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _ComparisonRules:
    """Rules for numbers: the relative `tolerance` between equal ones, and whether the problem mentions percent."""

    tolerance: float
    is_percent_problem: bool


def compare(gold: str, answer: str, tolerance: float = 0.0, problem: str = "") -> Comparison:
    r"""Returns whether an answer equals the gold answer, both in LaTeX, and if not, why.

    Numbers within the relative `tolerance` are equal. The text of the `problem` decides what a percentage means, and an
    answer that only copies a formula of it is not equal. Neither is one that takes too much work to compare. Raises
    TaskError if math-verify is needed and not installed.

    >>> compare(r"\frac{1}{2}", "0.50").equal, compare("(1, 2)", "(2, 1)").equal, compare("1, 2", r"\{2, 1\}").equal
    (True, False, True)
    >>> compare("5", "5, 6").reason
    '2 values, not 1'
    """
    try:
        gold_node, answer_node = read_structure(gold), read_structure(answer)
        # Where the gold is a list, "45,135,225" is three angles and not one number with commas.
        if isinstance(gold_node, Items) and gold_node.kind == "any" and is_number_with_commas(answer):
            answer_node = read_structure(answer, join_thousands=False)
        rules = _ComparisonRules(tolerance, _PERCENT.search(problem) is not None)
        reason = _find_difference(gold_node, answer_node, rules)
        # Sets that are put together differently have different structures but may hold the same numbers.
        if reason and isinstance(gold_node, Items) and _SET_COMMAND.search(answer):
            reason = _find_symbolic_difference(_find_set_difference, clean_latex(gold), clean_latex(answer)) and reason
        # In "Simplify E", a copy of E equals the gold, but it is no answer.
        if not reason and isinstance(answer_node, Leaf) and _is_copied(answer_node.text, gold_node, problem):
            reason = "the answer repeats the problem"
    except (OverLimit, RecursionError) as over:
        reason = f"{OVER_LIMIT}: {'nested too deeply' if isinstance(over, RecursionError) else over}"
    return Comparison(not reason, reason)


def _is_copied(answer: str, gold: Node, problem: str) -> bool:
    """Returns whether an unfinished answer occurs in the problem, or contains a formula E of it, as E + 0 does.

    Unfinished is an answer with an operator, a fraction or a command; other written numbers are finished. Of an
    equation only the value side counts. Text that occurs in the gold answer too is not counted as copied.
    """
    spelling = _normalise_spelling_and_fractions(split_sides(answer)[-1])
    gold_spelling = _normalise_spelling_and_fractions(gold.text) if isinstance(gold, Leaf) else ""
    is_number = read_quantity(spelling) is not None and not _FRACTION.search(spelling)
    if not _OPERATOR_OR_COMMAND.search(spelling) or is_number:
        return False
    if spelling in _normalise_spelling_and_fractions(clean_latex(problem)) and spelling not in gold_spelling:
        return True
    formulas = _find_formulas(problem)
    return any(_contains_formula(spelling, formula) and formula not in gold_spelling for formula in formulas)


def _normalise_spelling_and_fractions(text: str) -> str:
    r"""Returns the text with normalised spelling (see `_normalise_spelling`) and with a/b written as \frac{a}{b}."""
    return SLASH_FRACTION.sub(r"\\frac{\1}{\2}", _normalise_spelling(text))


def _find_formulas(problem: str) -> set[str]:
    r"""Returns the formulas between $...$, \(...\) or \[...\] in the problem, and their sides around "=", normalised.

    Keeps only those with at least four characters and an operation that are not just a number.
    """
    whole = [clean_latex(next(filter(None, match.groups()))) for match in _FORMULA.finditer(problem)]
    spellings = {_normalise_spelling_and_fractions(side) for text in whole for side in (text, *text.split("="))}
    return {text for text in spellings if len(text) >= 4 and _OPERATION.search(text) and read_quantity(text) is None}


def _contains_formula(text: str, formula: str) -> bool:
    """Returns whether the formula occurs in the text, but not only inside a longer number or word.

    It must not begin inside a number or word, nor end inside a number. A factor before a letter counts as inside:
    neither 2x+1 nor x+1 occurs in 12x+1. But x+1 occurs in 1x+1, because the factor 1 changes nothing.
    """
    before = r"(?<![0-9.])" if formula[0].isdigit() else r"(?<![02-9.a-zA-Z\\])" if formula[0].isalpha() else ""
    after = r"(?![0-9])" if formula[-1].isdigit() else ""
    return re.search(before + re.escape(formula) + after, text) is not None


# ---- structure. Every function named `_find_..._difference` returns why the answer is not the gold answer, or "".


def _find_difference(gold: Node, answer: Node, rules: _ComparisonRules) -> str:
    """Returns why an answer is not the gold answer, both given as trees; "" if they are equal.

    Compares the number of values, their brackets and order, then value by value. A list without brackets may stand for
    a gold pair, in its order.
    """
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _find_leaf_difference(gold.text, answer.text, rules)
    if isinstance(gold, Leaf) or isinstance(answer, Leaf):
        num_gold, num_answer = (1 if isinstance(node, Leaf) else len(node.items) for node in (gold, answer))
        return _describe_count_difference(num_gold, num_answer)
    # "x = 1, y = 2" may be written for the pair (1, 2).
    if gold.kind == "()" and answer.is_bare:
        answer = replace(answer, kind="()")
    if len(gold.items) != len(answer.items):
        return _describe_count_difference(len(gold.items), len(answer.items))
    if gold.kind != answer.kind:
        return "the brackets differ from those of the gold answer"
    if gold.kind == "any":
        return _find_unordered_difference(gold.items, answer.items, rules)
    pairs = zip(gold.items, answer.items, strict=True)
    return next(filter(None, (_find_difference(one, other, rules) for one, other in pairs)), "")


def _describe_count_difference(num_gold: int, num_answer: int) -> str:
    """Returns the reason for an answer with another number of values than the gold answer, as in "2 values, not 1"."""
    return f"{num_answer} value{'s' if num_answer > 1 else ''}, not {num_gold}"


def _find_unordered_difference(gold: tuple[Node, ...], answer: tuple[Node, ...], rules: _ComparisonRules) -> str:
    """Returns why two lists of equal length do not hold the same values in any order; "" if they do.

    Every gold value takes one equal value of the answer.
    """
    remaining = list(answer)
    # Values that are spelt alike go first, since they need no symbolic work.
    for one in sorted(gold, key=lambda node: node not in remaining):
        for index, other in enumerate(remaining):
            if one == other or not _find_difference(one, other, rules):
                del remaining[index]
                break
        else:
            return "a value is missing or wrong"
    return ""


# ---- leaves


def _find_leaf_difference(gold: str, answer: str, rules: _ComparisonRules) -> str:
    """Returns why two single answers differ; "" if they are equal. An empty answer is wrong.

    They are compared by spelling, then as equations if both are equations, then by their values. Of "x = 5" only the
    value counts if both have the same name or only one is an equation. An equation that names no value needs an
    equation as its answer.
    """
    if not answer:
        return "the answer is empty"
    if _normalise_spelling(gold) == _normalise_spelling(answer):
        return ""
    gold_sides, answer_sides = split_sides(gold), split_sides(answer)
    # "x = 5" against "x = 6" names one value: only the values are compared, not the equations.
    has_same_name = have_same_meaning(gold_sides[0], answer_sides[0])
    if len(gold_sides) > 1 and len(answer_sides) > 1 and not has_same_name:
        return _find_symbolic_difference(_find_equation_difference, gold_sides, answer_sides)
    # A gold of "0.5 = 50%" states one number twice, but "7 = 11a + c" is an equation.
    is_value = names_value(gold_sides[0]) or all(read_quantity(side) is not None for side in gold_sides)
    if len(gold_sides) > 1 and len(answer_sides) == 1 and not is_value:
        return "the answer is not an equation"
    return _find_value_difference(gold_sides[-1], answer_sides[-1], rules)


def _normalise_spelling(text: str) -> str:
    """Returns the text without spaces (except between digits) and without braces around one character after _ or ^.

    Words of two letters or more, and text with a colon (times of day), also lose their full stops and become lower
    case.
    """
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text))
    return text.replace(".", "").lower() if re.fullmatch(r"[A-Za-z.'-]{2,}|.*:.*", text) else text


def _find_value_difference(gold: str, answer: str, rules: _ComparisonRules) -> str:
    """Returns why two values, given as LaTeX, differ; "" if they are equal.

    They are compared by spelling, as numbers, as numbers with a base, as words, and last as expressions. An expression
    that is not worked out does not equal an exact gold number, unless it is a product of powers.
    """
    if _normalise_spelling(gold) == _normalise_spelling(answer):
        return ""
    gold_number, answer_number = read_quantity(gold), read_quantity(answer)
    if gold_number is not None and answer_number is not None:
        is_equal = gold_number.matches(answer_number, rules.tolerance, rules.is_percent_problem)
        return "" if is_equal else WRONG_VALUE
    based = [_NUMBER_IN_BASE.fullmatch(side.replace(" ", "")) for side in (gold, answer)]
    if any(based):
        return "" if _is_same_number_in_base(based[0], based[1], answer) else WRONG_VALUE
    if any(_WORD.fullmatch(side) for side in (gold, answer)):
        return WRONG_VALUE
    # To an exact gold number, an expression is unfinished work. To a rounded one, an exact expression with roots or \pi
    # is allowed, but arithmetic on digits is not. A product of powers is always allowed: numbers are written that way.
    is_exact = gold_number is not None and not (gold_number.max_rounding_error or rules.tolerance)
    is_unfinished = is_exact or (gold_number is not None and _PLAIN_ARITHMETIC.fullmatch(answer))
    if is_unfinished and not _PRODUCT_OF_POWERS.fullmatch(answer.replace(" ", "")):
        return "the answer is not a number, or it is not worked out"
    return _find_symbolic_difference(_find_expression_difference, gold, answer, gold_number, rules.tolerance)


def _is_same_number_in_base(gold: re.Match[str] | None, answer: re.Match[str] | None, answer_text: str) -> bool:
    """Returns whether two numbers such as 52_8 agree in digits and base.

    The matches are those of `_NUMBER_IN_BASE`, None for text without a base. An answer without a base is taken to be in
    the base of the gold. If the gold has no base, the answer is wrong.
    """
    if gold is None:
        return False
    if answer is None:
        return gold[1] == answer_text.replace(" ", "")
    bases = {str(_BASE_WORDS.index(match[2]) + 2) if match[2] in _BASE_WORDS else match[2] for match in (gold, answer)}
    return gold[1] == answer[1] and len(bases) == 1


def _find_symbolic_difference(find_difference: Callable[..., str], *arguments: Any) -> str:
    """Returns `find_difference(*arguments)`, or a reason if that fails because a text cannot be read or evaluated.

    OverLimit, TaskError, MemoryError and RecursionError are still raised.
    """
    try:
        return find_difference(*arguments)
    except (OverLimit, TaskError, MemoryError, RecursionError):
        raise
    # sympy and the parser raise every kind of exception, for text they cannot read and for values they cannot compute.
    except Exception:
        return "the answer or the gold answer cannot be read as mathematics"


def _find_expression_difference(gold: str, answer: str, gold_number: Quantity | None, tolerance: float) -> str:
    """Returns why two expressions differ; "" if they have the same values within the relative `tolerance`.

    Where values cannot be computed, math-verify decides. `gold_number` is the gold as a number, or None: an answer
    without a decimal point may differ from a rounded gold by half of the gold's last digit. Raises what `parse_latex`
    raises.
    """
    answer_expression, gold_expression = parse_latex(answer), parse_latex(gold)
    rounding = 0.0 if gold_number is None or "." in answer else float(gold_number.max_rounding_error)
    is_equal = have_same_values(gold_expression, answer_expression, max(tolerance, VALUE_TOLERANCE), rounding)
    if is_equal is None:
        is_equal = are_equal_by_math_verify(gold_expression, answer_expression)
    return "" if is_equal else WRONG_VALUE


def _find_equation_difference(gold_sides: list[str], answer_sides: list[str]) -> str:
    """Returns why two equations differ; "" if one is a multiple of the other, or if math-verify calls them equal.

    The arguments are the sides of the equations; only the first and the last side count, and they may be swapped.
    Raises what `parse_latex` raises.
    """
    gold_spellings = {_normalise_spelling(gold_sides[0]), _normalise_spelling(gold_sides[-1])}
    if gold_spellings == {_normalise_spelling(answer_sides[0]), _normalise_spelling(answer_sides[-1])}:
        return ""
    answer_terms = (parse_latex(answer_sides[0]), parse_latex(answer_sides[-1]))
    gold_terms = (parse_latex(gold_sides[0]), parse_latex(gold_sides[-1]))
    # left - right: two such differences with a constant ratio belong to multiples of one equation
    one, other = gold_terms[0] - gold_terms[1], answer_terms[0] - answer_terms[1]
    if collect_letters(one) != collect_letters(other):
        return "the equation differs from the gold one"
    ratios = [evaluate_at(one / other, point) for point in choose_points(one, other)]
    if None not in ratios and all(ratio != 0 and are_close(ratios[0], ratio) for ratio in ratios):
        return ""
    is_equal = are_equal_by_math_verify(make_equation(*gold_terms), make_equation(*answer_terms))
    return "" if is_equal else "the equation differs from the gold one"


def _find_set_difference(gold: str, answer: str) -> str:
    r"""Returns why two sets of numbers differ; "" if they have the same content. Raises what `parse_latex` raises.

    For example, `\mathbb{R} \setminus \{1\}` is `(-\infty, 1) \cup (1, \infty)`.
    """
    answer_set, gold_set = parse_latex(answer), parse_latex(gold)
    return "" if gold_set.symmetric_difference(answer_set).is_empty else WRONG_VALUE
