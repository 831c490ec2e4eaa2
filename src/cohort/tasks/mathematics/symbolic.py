"""Comparison of mathematical expressions with sympy: reads LaTeX, bounds the work, and compares values at points.

The only module that uses math-verify, its LaTeX parser and sympy.
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.mathematics.notation import OverLimit

PACKAGE, EXTRA = "math_verify", "cohort[math]"

# Limits of what is given to the parser: characters of an expression, digits of one number in it.
MAX_EXPRESSION_CHARS = 300
MAX_DIGITS = 200
# Bars of absolute values: the parser tries all ways to pair them.
MAX_BARS = 12
# Limits of an evaluation: estimated bits of the largest number that occurs, and functions inside one another.
MAX_BITS = 50_000
MAX_FUNCTIONS = 5
# Values that are not fractions are computed to 120 digits, and equal values may differ by this relative error. So
# 2^{100} - \sqrt{2} and 2^{100} - \sqrt{3} differ.
EVALUATED_DIGITS = 120
VALUE_TOLERANCE = 1e-100

LETTER_COMMANDS = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|varphi|chi|psi|"
    "omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega"
)
# The commands that the parser may see. Sums, integrals and limits are left out on purpose: it would evaluate them.
_KNOWN_COMMAND = re.compile(
    rf"(?:{LETTER_COMMANDS}|frac|sqrt|cdot|times|div|infty|binom|lfloor|rfloor|lceil|rceil|ln|log|exp|max|min|dot|le|"
    "ge|ne|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|setminus|cap|cup|mathbb|prime)"
)
# The parser reads these two letters as the gamma function or Euler's constant. No text that it may see has the others.
_LETTER_GAMMA = re.compile(r"\\gamma(?![a-zA-Z])")
_CAPITAL_GAMMA = re.compile(r"\\Gamma(?![a-zA-Z])(?! ?\()")
SLASH_FRACTION = re.compile(r"(?<![\w.})^!])([0-9]+)/([0-9]+)(?![0-9.^!])")
_MIXED_NUMBER = re.compile(r"(?<![\w.^_])([0-9]+) ?(\\frac\{[0-9]+\}\{[0-9]+\})")
# The place of a product sign that is left out, as in 2(3); not the one after an index or a power: \sin^2(x), \log_2(x).
# An index of an index, which LaTeX does not allow: the parser's time would grow exponentially with their number.
_DOUBLE_INDEX = re.compile(r"_ ?(?:[A-Za-z0-9]|\{[^{}]*\})? ?_")
_OMITTED_TIMES = re.compile(r"(?<=[0-9])(?<![_^][0-9]) ?(?=\(|\\frac)")


class Unreadable(Exception):
    """Raised for text that must not reach the parser. `equality` catches it."""


@lru_cache(maxsize=256)
def parse_latex(text: str) -> Any:
    """Returns cleaned LaTeX as a sympy expression with exact numbers, real letters, and `i` as the imaginary unit.

    It is not simplified, except around decimals and `i`, whose replacement makes sympy evaluate. Results are cached.
    Raises OverLimit for too much work, Unreadable for text that the parser must not see, TaskError if math-verify is
    not installed, and whatever the parser raises.
    """
    latex = _prepare_latex(text)
    try:
        from latex2sympy2_extended import latex2sympy
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig
        from sympy import Float, I, Rational, Symbol, evaluate, nan, zoo
    except ImportError as error:
        raise TaskError(
            f"comparing mathematical answers needs math-verify, which is not installed; run pip install '{EXTRA}'"
        ) from error
    # The parser evaluates binomials and nothing else. That is switched off, since their size is not checked yet.
    with evaluate(r"\binom" not in latex):
        parsed = latex2sympy(
            latex,
            is_real=True,
            normalization_config=NormalizationConfig(boxed="none"),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    # Everything that divides by 0 would be equal.
    if parsed.has(nan, zoo):
        raise Unreadable
    _estimate_bits(parsed)
    if _count_nested_functions(parsed) > MAX_FUNCTIONS:
        raise OverLimit(f"more than {MAX_FUNCTIONS} nested functions")
    # Decimals become exact fractions, and the letter i becomes the imaginary unit.
    exact = {number: Rational(str(number)) for number in parsed.atoms(Float)}
    return parsed.xreplace(exact | {Symbol("i", real=True): I})


def _prepare_latex(text: str) -> str:
    """Returns the text with fractions, mixed numbers and omitted product signs spelled so that the parser reads them.

    Raises OverLimit if the text is too long, a number in it has too many digits, or it has too many bars. Raises
    Unreadable for characters that are not printable ASCII, for commands that are not on a fixed list, for two numbers
    with only spaces between them, for an index of an index, and for % and '.
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        raise OverLimit(f"an expression of more than {MAX_EXPRESSION_CHARS} characters")
    if re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text):
        raise OverLimit(f"a number of more than {MAX_DIGITS} digits")
    commands = re.findall(r"\\([a-zA-Z]+)", text)
    if not text.isprintable() or not text.isascii() or not all(map(_KNOWN_COMMAND.fullmatch, commands)):
        raise Unreadable
    if text.count("|") > MAX_BARS:
        raise OverLimit(f"more than {MAX_BARS} bars")
    # The parser would read y' as y, and "5 5" as a sum.
    if re.search(r"[0-9.] +[0-9.]|[%']", text) or _DOUBLE_INDEX.search(text):
        raise Unreadable
    # In "1/2 x" the parser would put x into the denominator.
    text = SLASH_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _CAPITAL_GAMMA.sub(r"\\Upsilon", _LETTER_GAMMA.sub(r"\\upsilon", text))
    return _OMITTED_TIMES.sub(r"\\cdot ", _MIXED_NUMBER.sub(r"(\1+\2)", text))


def _estimate_bits(node: Any, letter_bits: float = 2.0) -> float:
    """Returns an estimate of the bits of the largest number that occurs when the unevaluated sympy tree is evaluated.

    The values that letters get have `letter_bits` bits. Raises OverLimit above MAX_BITS.
    """
    if node.is_Number and node.is_finite:
        size = float(max(part.bit_length() for part in Fraction(str(node)).as_integer_ratio()))
    elif not node.args:
        size = letter_bits  # a letter, or a constant such as pi
    else:
        parts = [_estimate_bits(arg, letter_bits) for arg in node.args]
        kind = type(node).__name__
        # These are products whose number of factors is about the value of the last argument.
        if kind in ("Pow", "exp", "factorial", "binomial"):
            last = node.args[-1]
            num_factors = abs(float(last)) if last.is_Number else 2.0 ** min(parts[-1], 64)
            # sympy multiplies a binomial of a letter factor by factor, which costs more
            is_letter_binomial = kind == "binomial" and not node.args[0].is_Number
            size = max(2.0, parts[0]) * num_factors * (16 if is_letter_binomial else 1)
        else:
            size = sum(parts)
    if size > MAX_BITS:
        raise OverLimit(f"numbers of more than {MAX_BITS} bits")
    return size


def _count_nested_functions(node: Any) -> int:
    """Returns the greatest number of functions inside one another in a sympy tree: 2 for sin(ln(x)) + cos(x)."""
    return max(map(_count_nested_functions, node.args), default=0) + bool(node.is_Function)


# One row (a, b, c, d) per point: letter number i gets the value (a + b * i) / (c + d * i).
_POINT_COEFFICIENTS = ((11, 4, 9, 3), (2, 1, 7, 3), (25, 3, 11, 2), (-8, 3, 5, 1), (5, -4, 7, 1))


def choose_points(*expressions: Any) -> list[dict[Any, Any]]:
    """Returns the points at which expressions are compared: one dict per point, from each symbol to its value.

    There are five, with different fractions for all letters, positive and negative; without letters one empty dict. If
    the first expression, the gold, has floors or ceilings, there are 13 points with whole numbers from 6 to 18, and
    OverLimit is raised if these make too much work.
    """
    from sympy import Integer, Rational, ceiling, floor

    letters = sorted(set().union(*(e.free_symbols for e in expressions)), key=str)
    if expressions[0].has(floor, ceiling):
        # Each letter takes all values from 6 to 18, so that all remainders up to 12 occur. Each one moves in steps of
        # its own, so that no two letters change together. The values have 5 bits, more than the usual points.
        for expression in expressions:
            _estimate_bits(expression, 5.0)
        return [{s: Integer(6 + (5 * i + (i + 1) * k) % 13) for i, s in enumerate(letters)} for k in range(13)]
    rows = _POINT_COEFFICIENTS if letters else _POINT_COEFFICIENTS[:1]
    return [{s: Rational(a + b * i, c + d * i) for i, s in enumerate(letters)} for a, b, c, d in rows]


def collect_letters(expression: Any) -> set[str]:
    """Returns the names of the unknowns in a sympy expression."""
    return {str(symbol) for symbol in expression.free_symbols}


def evaluate_at(expression: Any, point: dict[Any, Any]) -> Any:
    """Returns the value of a sympy expression at a point (a dict from symbols to values) as a sympy number.

    It is an exact fraction where the expression consists of fractions, sums, products, powers and factorials, and has
    120 digits otherwise. None if the value is not a finite number, also because a letter has no value in `point`, or if
    the expression has derivatives or unknown functions.
    """
    from sympy import Derivative, Rational
    from sympy.core.function import AppliedUndef

    if (exact := _evaluate_exactly(expression, point)) is not None:
        return Rational(exact.numerator, exact.denominator)
    if expression.has(Derivative, AppliedUndef):
        return None
    value = expression.xreplace(point).evalf(EVALUATED_DIGITS)
    parts = value.as_real_imag()
    return value if all(part.is_Number and part.is_finite for part in parts) else None


def _evaluate_exactly(node: Any, point: dict[Any, Any]) -> Fraction | None:
    """Returns the exact value of a sympy tree at a point; None if it has anything but rational operations.

    The tree must be within the limits of `_estimate_bits`.
    """
    if node.is_Rational or (node.is_Symbol and node in point):
        number = point.get(node, node)
        return Fraction(int(number.p), int(number.q))
    kind = type(node).__name__
    if kind not in ("Add", "Mul", "Pow", "factorial", "binomial"):
        return None
    values: list[Fraction] = []
    for arg in node.args:
        if (value := _evaluate_exactly(arg, point)) is None:
            return None
        values.append(value)
    if kind in ("Add", "Mul"):
        return sum(values, Fraction(0)) if kind == "Add" else math.prod(values, start=Fraction(1))
    are_whole = all(value.denominator == 1 for value in values)
    first, last = values[0], values[-1]
    if kind == "Pow":
        return first ** int(last) if last.denominator == 1 and (first or last > 0) else None
    # Of other numbers sympy knows the values.
    if not are_whole or min(values) < 0:
        return None
    return Fraction(math.factorial(int(first)) if kind == "factorial" else math.comb(int(first), int(last)))


def are_close(one: Any, other: Any, tolerance: float = VALUE_TOLERANCE) -> bool:
    """Returns whether two sympy numbers are equal within a tolerance relative to the first; fractions without one.

    A first number of 0 has a fixed tolerance. A `tolerance` above VALUE_TOLERANCE holds for fractions too.
    """
    if tolerance <= VALUE_TOLERANCE and one.is_Rational and other.is_Rational:
        return bool(one == other)
    return bool(abs(one - other) <= (tolerance * abs(one) if one else VALUE_TOLERANCE))


def have_same_values(gold: Any, answer: Any, tolerance: float, rounding: float) -> bool | None:
    """Returns whether two sympy expressions have the same letters and the same value at every chosen point.

    Values may differ by `tolerance` relative to the gold, or by `rounding`; a gold value of 0 has a fixed tolerance.
    Points with a negative letter and a value that is not real decide nothing. None means that a value cannot be
    computed.
    """
    if collect_letters(gold) != collect_letters(answer):
        return False
    for point in choose_points(gold, answer):
        gold_value, answer_value = evaluate_at(gold, point), evaluate_at(answer, point)
        if gold_value is None or answer_value is None:
            return None
        is_real = gold_value.is_real and answer_value.is_real
        # Which root or logarithm of a negative number is meant is a convention: such points decide nothing.
        if not is_real and any(value < 0 for value in point.values()):
            continue
        is_rounded = rounding and abs(gold_value - answer_value) <= rounding
        if not is_rounded and not are_close(gold_value, answer_value, tolerance):
            return False
    return True


def make_equation(left: Any, right: Any) -> Any:
    """Returns the sympy equation left = right, not simplified."""
    from sympy import Eq

    return Eq(left, right, evaluate=False)


def are_equal_by_math_verify(gold: Any, answer: Any) -> bool:
    """Returns whether math-verify's own comparison calls two sympy expressions equal. It has no time-out.

    Values of unknown functions, as f(2), must be the same in both. Sets the level of math-verify's logger to ERROR.
    """
    from math_verify import verify
    from sympy.core.function import AppliedUndef

    # Of f(2) = 5 and f(3) = 5 math-verify compares only the right sides.
    if gold.atoms(AppliedUndef) != answer.atoms(AppliedUndef):
        return False
    # math-verify's time-out is off, because it relies on a signal that long arithmetic does not notice. The work limits
    # here and the scoring worker's own limit take its place. Without this level, math-verify warns about it.
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    return bool(verify(gold, answer, timeout_seconds=None))
