r"""Whether two mathematical answers are the same: the only module that uses math-verify, its LaTeX parser and sympy.

Cheap and exact comparisons come first: spelling, then numbers as fractions. What is left is parsed. Expressions are
compared by their values at fixed points, to 25 digits; equations that are no multiple of each other and unknown
functions by math-verify's `verify`, gold first. Different from math-verify on purpose:

- An exact gold wants an exact answer: 0.333333 is not 1/3, nor 3e-10 4e-10 (math-verify rounds to six decimals). A gold
  of three or more digits with decimals counts as rounded: 1/3 is 0.333, but 0.3334 is not.
- Single letters are unknowns, not units, and capital letters are other letters: 6m is not 6, nor r R.
- A pair has an order and a list has none, an interval keeps its brackets, 52_8 is not 52_7, 2(3) is 6, 2 3 is nothing.
- A longer list than the gold's is wrong, whatever is in it.
- Work left undone is no answer: a gold that is a number wants one (2 + 3 is not 5, nor \sqrt{25}; but 2^{10} is 1024),
  and what holds a formula of the problem is right only if the gold holds it too.
- 50% is 50 if the problem speaks of percent, and otherwise 0.5. A base is right only if the gold has it.

What could take long is counted before it is done (characters, nesting, digits, the size of powers and factorials), so
that "over the grader's work limit" is the same on every machine. Sums, integrals, limits and determinants are not
worked out: an answer with one in it is right only if it is spelt like the gold.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.base import OVER_LIMIT
from cohort.tasks.mathematics.notation import Items, Leaf, Node, OverLimit, clean, is_grouped, is_name, read, split
from cohort.tasks.mathematics.quantity import Quantity, read_quantity

MAX_LEAF = 300  # characters that are parsed
MAX_DIGITS = 200  # of a number that is parsed
MAX_BITS = 50_000  # of a number on the way
MAX_FUNCTIONS = 5  # in one another
DIGITS = 40  # that values are worked out to
SLACK = 1e-25  # relative, between values that were worked out
PACKAGE, EXTRA = "math_verify", "cohort[math]"
WRONG = "wrong value"

_SETS = re.compile(r"\\(?:setminus|cap|cup|mathbb)(?![a-zA-Z])")
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASED = re.compile(rf"([-+]?[0-9A-Z.]+)_\{{?([0-9]+|{'|'.join(_BASES)})\}}?")
_WORD = re.compile(r"[A-Za-z]|[A-Za-z]{3,}|[A-Z]{2,}")
_LETTERS = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|varphi|chi|psi|"
    "omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega"
)
_KNOWN = re.compile(
    rf"(?:{_LETTERS}|frac|sqrt|cdot|times|div|infty|binom|lfloor|rfloor|lceil|rceil|ln|log|exp|max|min|dot|le|ge|ne|"
    "(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|setminus|cap|cup|mathbb|prime)"
)
_POWER, _DOT = r"[0-9]+\^(?:[0-9]|\{[0-9]+\})", r"(?:\\cdot|\\times|\*)"
_POWERS = re.compile(rf"[-+]?(?:[0-9]+{_DOT})?{_POWER}(?:{_DOT}{_POWER})*")
_OVER = re.compile(r"(?<![\w.})^!])([0-9]+)/([0-9]+)(?![0-9.^!])")
_MIXED = re.compile(r"(?<![\w.^_])([0-9]+) ?(\\frac\{[0-9]+\}\{[0-9]+\})")
_TIMES = re.compile(r"(?<=[0-9])(?<![_^][0-9]) ?(?=\(|\\frac)")  # but not in \sin^2(x) and \log_2(x)
_UNDONE, _DIVIDED = re.compile(r"[-+*/^!(\\]"), re.compile(r"\\frac|\\overline|[0-9]/[0-9]")
_OPERATION = re.compile(rf"[-+*/^!(]|\\(?!{_LETTERS})")
_ARITHMETIC = re.compile(r"(?:[-+*/^!().0-9{} ]|\\(?:frac|cdot|times|div|binom)(?![a-zA-Z]))+")
_FORMULA = re.compile(r"\\\[(.{1,999}?)\\\]|\\\((.{1,999}?)\\\)|(?<!\\)\$([^$]+)\$", re.DOTALL)
_PERCENT = re.compile(r"%|per ?cent", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether an answer is equal to the gold one; if not, why."""

    equal: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Terms:
    """What decides besides gold and answer: numbers this close are equal, and what 50% is."""

    tolerance: float
    in_percent: bool


class _Unreadable(Exception):
    """Text that the parser must not have; never leaves this module."""


def compare(gold: str, answer: str, tolerance: float = 0.0, problem: str = "") -> Comparison:
    r"""Compare an answer with the gold one; numbers within the relative `tolerance` are equal.

    >>> compare(r"\frac{1}{2}", "0.50").equal, compare("(1, 2)", "(2, 1)").equal, compare("1, 2", r"\{2, 1\}").equal
    (True, False, True)
    >>> compare("5", "5, 6").reason
    '2 values, not 1'
    """
    try:
        wanted, given = read(gold), read(answer)
        if isinstance(wanted, Items) and wanted.kind == "any" and is_grouped(answer):
            given = read(answer, grouped=False)  # 45,135,225 is three angles
        terms = _Terms(tolerance, _PERCENT.search(problem) is not None)
        reason = _difference(wanted, given, terms)
        if reason and isinstance(wanted, Items) and _SETS.search(answer):
            reason = _symbolic(_set_difference, clean(gold), clean(answer)) and reason
        if not reason and isinstance(given, Leaf) and _is_copied(given.text, wanted, problem):
            reason = "it repeats the problem"
    except (OverLimit, RecursionError) as over:
        reason = f"{OVER_LIMIT}: {'nested too deeply' if isinstance(over, RecursionError) else over}"
    return Comparison(not reason, reason)


def _is_copied(answer: str, gold: Node, problem: str) -> bool:
    """Whether an answer with something left to do in it stands in the problem, or holds a formula of it, as E + 0 does.

    What stands in the gold answer too is no copy, nor is a whole number or a decimal.
    """
    spelling, wanted = _written(_sides(answer)[-1]), _written(gold.text) if isinstance(gold, Leaf) else ""
    if not _UNDONE.search(spelling) or (read_quantity(spelling) is not None and not _DIVIDED.search(spelling)):
        return False
    if spelling in _written(clean(problem)) and spelling not in wanted:
        return True
    return any(_holds(spelling, formula) and formula not in wanted for formula in _formulas(problem))


def _written(text: str) -> str:
    return _OVER.sub(r"\\frac{\1}{\2}", _spelling(text))


def _formulas(problem: str) -> set[str]:
    """What stands between dollars, and the sides of it: that which has four characters and an operation."""
    whole = [clean(next(filter(None, found.groups()))) for found in _FORMULA.finditer(problem)]
    written = {_written(side) for text in whole for side in (text, *text.split("="))}
    return {text for text in written if len(text) >= 4 and _OPERATION.search(text) and read_quantity(text) is None}


def _holds(text: str, part: str) -> bool:
    """Whether it is in the text, and not in the middle of a number or a word: 2x+1 is not in 12x+1, but x+1 in 1x+1."""
    before = r"(?<![0-9.])" if part[0].isdigit() else r"(?<![02-9.a-zA-Z\\])" if part[0].isalpha() else ""
    after = r"(?![0-9])" if part[-1].isdigit() else ""
    return re.search(before + re.escape(part) + after, text) is not None


# ---- structure: these say why the answer is not the gold one, or ""


def _difference(gold: Node, answer: Node, terms: _Terms) -> str:
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _leaf_difference(gold.text, answer.text, terms)
    if isinstance(gold, Leaf) or isinstance(answer, Leaf):
        wanted, given = (1 if isinstance(node, Leaf) else len(node.items) for node in (gold, answer))
        return _count_difference(wanted, given)
    if gold.kind == "()" and answer.bare:
        answer = replace(answer, kind="()")  # x = 1, y = 2 for (1, 2)
    if len(gold.items) != len(answer.items):
        return _count_difference(len(gold.items), len(answer.items))
    if gold.kind != answer.kind:
        return "other brackets than the gold answer's"
    if gold.kind == "any":
        return _unordered_difference(gold.items, answer.items, terms)
    pairs = zip(gold.items, answer.items, strict=True)
    return next(filter(None, (_difference(one, other, terms) for one, other in pairs)), "")


def _count_difference(wanted: int, given: int) -> str:
    return f"{given} value{'s' if given > 1 else ''}, not {wanted}"


def _unordered_difference(gold: tuple[Node, ...], answer: tuple[Node, ...], terms: _Terms) -> str:
    left = list(answer)
    for one in sorted(gold, key=lambda node: node not in left):  # what is spelt alike first: it needs no work
        for index, other in enumerate(left):
            if one == other or not _difference(one, other, terms):
                del left[index]
                break
        else:
            return "a value is missing or wrong"
    return ""


# ---- leaves


def _leaf_difference(gold: str, answer: str, terms: _Terms) -> str:
    if not answer:
        return "the answer is empty"
    if _spelling(gold) == _spelling(answer):
        return ""
    wanted, given = _sides(gold), _sides(answer)
    if len(wanted) > 1 and len(given) > 1 and not (is_name(wanted[0]) and _spelling(wanted[0]) == _spelling(given[0])):
        return _symbolic(_equation_difference, wanted, given)
    if len(wanted) > 1 and len(given) == 1 and not is_name(wanted[0]) and read_quantity(wanted[0]) is None:
        return "not an equation"
    return _value_difference(wanted[-1], given[-1], terms)


def _spelling(text: str) -> str:
    """For comparing texts: without spaces and needless braces, and words and hours in small letters."""
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text))
    return text.replace(".", "").lower() if re.fullmatch(r"[A-Za-z.'-]{2,}|.*:.*", text) else text


def _sides(text: str) -> list[str]:
    r"""What stands around "=", the value last. Of `4\pi \approx 12.57` the first side counts."""
    exact, *near = split(text, [r"\approx"])[0]
    text = near[0] if near and (not exact.strip() or is_name(exact)) else exact
    sides = [side.strip() for side in split(text, "=")[0]]
    return sides[::-1] if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]) else sides  # 5 = x


def _value_difference(gold: str, answer: str, terms: _Terms) -> str:
    if _spelling(gold) == _spelling(answer):
        return ""
    wanted, given = read_quantity(gold), read_quantity(answer)
    if wanted is not None and given is not None:
        return "" if wanted.matches(given, terms.tolerance, terms.in_percent) else WRONG
    based = [_BASED.fullmatch(side.replace(" ", "")) for side in (gold, answer)]
    if any(based):
        return "" if _same_based(based[0], based[1], answer) else WRONG
    if any(_WORD.fullmatch(side) for side in (gold, answer)):
        return WRONG
    # what was rounded may be said exactly, with roots and \pi, but not as a sum of digits
    is_exact = wanted is not None and not (wanted.rounding or terms.tolerance)
    is_undone = is_exact or (wanted is not None and _ARITHMETIC.fullmatch(answer))
    if is_undone and not _POWERS.fullmatch(answer.replace(" ", "")):
        return "not a number, or not worked out"
    return _symbolic(_expression_difference, gold, answer, wanted, terms.tolerance)


def _same_based(gold: re.Match[str] | None, answer: re.Match[str] | None, text: str) -> bool:
    """A base that the answer leaves out is the gold one; a gold without a base has none to be named."""
    if gold is None:
        return False
    if answer is None:
        return gold[1] == text.replace(" ", "")
    bases = {str(_BASES.index(found[2]) + 2) if found[2] in _BASES else found[2] for found in (gold, answer)}
    return gold[1] == answer[1] and len(bases) == 1


def _symbolic(difference: Callable[..., str], *sides: Any) -> str:
    """sympy and the parser raise errors of every kind, for what they cannot read and for what they cannot work out."""
    try:
        return difference(*sides)
    except (OverLimit, TaskError, MemoryError, RecursionError):
        raise
    except Exception:
        return "it cannot be read as mathematics"


def _expression_difference(gold: str, answer: str, number: Quantity | None, tolerance: float) -> str:
    given, wanted = _parse(answer), _parse(gold)
    rounding = 0.0 if number is None or "." in answer else float(number.rounding)
    agree = _agree(wanted, given, max(tolerance, SLACK), rounding)
    return "" if (_verify(wanted, given) if agree is None else agree) else WRONG


def _equation_difference(gold: list[str], answer: list[str]) -> str:
    """Equal if one is a multiple of the other, or math-verify finds the same solutions."""
    if {_spelling(gold[0]), _spelling(gold[-1])} == {_spelling(answer[0]), _spelling(answer[-1])}:
        return ""
    given, wanted = ((_parse(sides[0]), _parse(sides[-1])) for sides in (answer, gold))
    one, other = wanted[0] - wanted[1], given[0] - given[1]
    if _letters(one) != _letters(other):
        return "another equation"
    ratios = [_at(one / other, point) for point in _points(one, other)]
    if None not in ratios and all(abs(r - ratios[0]) <= SLACK * abs(r) and r != 0 for r in ratios):
        return ""
    from sympy import Eq

    same = _verify(Eq(*wanted, evaluate=False), Eq(*given, evaluate=False))
    return "" if same else "another equation"


def _set_difference(gold: str, answer: str) -> str:
    r"""Of numbers, however put together: `\mathbb{R} \setminus \{1\}` is `(-\infty, 1) \cup (1, \infty)`."""
    given, wanted = _parse(answer), _parse(gold)
    return "" if wanted.symmetric_difference(given).is_empty else WRONG


# ---- sympy


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    """A sympy expression, not worked out; raises what the parser raises, or OverLimit."""
    latex = _checked(text)
    try:
        from latex2sympy2_extended import latex2sympy
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig
        from sympy import Float, I, Rational, Symbol, evaluate
    except ImportError as error:
        raise TaskError(f"comparing mathematical answers needs math-verify: pip install '{EXTRA}'") from error
    with evaluate(r"\binom" not in latex):  # the parser works these out, and nothing else
        parsed = latex2sympy(
            latex,
            is_real=True,
            normalization_config=NormalizationConfig(boxed="none"),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    _bits(parsed)
    if _functions(parsed) > MAX_FUNCTIONS:
        raise OverLimit(f"more than {MAX_FUNCTIONS} nested functions")
    exact = {number: Rational(str(number)) for number in parsed.atoms(Float)}
    return parsed.xreplace(exact | {Symbol("i", real=True): I})


def _checked(text: str) -> str:
    """Text that the parser may have: not too much of it, and nothing in it that it would work out or misread."""
    if len(text) > MAX_LEAF:
        raise OverLimit(f"an expression of more than {MAX_LEAF} characters")
    if re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text):
        raise OverLimit(f"a number of more than {MAX_DIGITS} digits")
    commands = re.findall(r"\\([a-zA-Z]+)", text)
    if not text.isprintable() or not text.isascii() or not all(map(_KNOWN.fullmatch, commands)):
        raise _Unreadable
    if re.search(r"[0-9.] +[0-9.]|[%']", text):  # of y' the parser would make y
        raise _Unreadable
    text = _OVER.sub(r"\\frac{\1}{\2}", text)  # 1/2 x: the parser would put x below
    return _TIMES.sub(r"\\cdot ", _MIXED.sub(r"(\1+\2)", text))


def _bits(node: Any, letter: float = 2.0) -> float:
    """About how many bits the largest number has that comes up in working this out; the tree is not worked out yet."""
    if node.is_Number and node.is_finite:
        size = float(max(part.bit_length() for part in Fraction(str(node)).as_integer_ratio()))
    elif not node.args:
        size = letter  # and constants: the points are small
    else:
        parts = [_bits(arg, letter) for arg in node.args]
        kind = type(node).__name__
        if kind in ("Pow", "exp", "factorial", "binomial"):  # a product of as many as the last says
            last = node.args[-1]
            factors = abs(float(last)) if last.is_Number else 2.0 ** min(parts[-1], 64)
            by_hand = kind == "binomial" and not node.args[0].is_Number
            size = max(2.0, parts[0]) * factors * (16 if by_hand else 1)
        else:
            size = sum(parts)
    if size > MAX_BITS:
        raise OverLimit(f"numbers of more than {MAX_BITS} bits")
    return size


def _functions(node: Any) -> int:
    """How many functions are in one another."""
    return max(map(_functions, node.args), default=0) + bool(node.is_Function)


_POINTS = ((11, 4, 9, 3), (2, 1, 7, 3), (25, 3, 11, 2), (-8, 3, 5, 1), (5, -4, 7, 1))


def _points(*expressions: Any) -> list[dict[Any, Any]]:
    """Where expressions are compared: every letter has its own value, of either sign; whole if the gold has floors."""
    from sympy import Integer, Rational, ceiling, floor

    letters = sorted(set().union(*(e.free_symbols for e in expressions)), key=str)
    if expressions[0].has(floor, ceiling):  # every remainder up to 12, and no letter in step with another
        for expression in expressions:
            _bits(expression, 5.0)
        return [{s: Integer(6 + (5 * i + (i + 1) * k) % 13) for i, s in enumerate(letters)} for k in range(13)]
    rows = _POINTS if letters else _POINTS[:1]
    return [{s: Rational(a + b * i, c + d * i) for i, s in enumerate(letters)} for a, b, c, d in rows]


def _letters(expression: Any) -> set[str]:
    return {str(symbol) for symbol in expression.free_symbols}


def _at(expression: Any, point: dict[Any, Any]) -> Any:
    """The value as a sympy number, perhaps a complex one; None if it is not a finite number."""
    from sympy import Derivative
    from sympy.core.function import AppliedUndef

    if expression.has(Derivative, AppliedUndef):
        return None
    value = expression.xreplace(point).evalf(DIGITS)
    parts = value.as_real_imag()
    return value if all(part.is_Number and part.is_finite for part in parts) else None


def _agree(gold: Any, answer: Any, slack: float, rounding: float) -> bool | None:
    """Whether the values are the same at every point; None if they cannot be worked out."""
    if _letters(gold) != _letters(answer):
        return False
    for point in _points(gold, answer):
        one, other = _at(gold, point), _at(answer, point)
        if one is None or other is None:
            return None
        is_real = one.is_real and other.is_real
        if not is_real and any(value < 0 for value in point.values()):
            continue  # which root or logarithm is meant there is a matter of convention
        if abs(one - other) > max(slack * abs(one) if one else SLACK, rounding):
            return False
    return True


def _verify(gold: Any, answer: Any) -> bool:
    """math-verify's own comparison. Its time-out is off: it rests on a signal that long arithmetic does not heed."""
    from math_verify import verify

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it would warn that the time-out is off
    return bool(verify(gold, answer, timeout_seconds=None))
