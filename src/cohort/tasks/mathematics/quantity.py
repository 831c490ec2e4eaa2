r"""Written numbers, read exactly: 1,234.50, \frac{1}{2}, 1\frac{4}{5}, 3/4, 62.5%, 3\times 10^{-2}, 0.\overline{27}.

A fraction of fractions is a number too, without sums in it: \frac{\frac{1}{2}}{3}. The text must have been cleaned by
`cleaning`. A unit after the number is ignored. Text that is not exactly one number
in one of these spellings is no quantity. Only fractions are computed, and the digits are counted before that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Longest text of a number that is read.
MAX_DIGITS = 400

_NUMBER = r"(?:\d{1,3}(?:[ ,]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
# a number with a sign, or a quotient of two, which a fraction inside a fraction becomes
_RATIO = rf"[-+]?(?:{_NUMBER})(?:/(?:{_NUMBER}))?"
_INNER_FRACTION = re.compile(rf"(?<=\{{)([-+]?)\\frac\{{({_RATIO})\}}\{{({_RATIO})\}}(?=\}})", re.ASCII)
# Levels of fractions inside a fraction that are read.
MAX_NESTED_FRACTIONS = 8
_POWER_OF_TEN = r"10\^(?:\{(?P<power>[-+]?\d{1,3})\}|(?P<digit>\d))"
# The accepted spellings. `read_quantity` looks at the named groups of the first one that matches the whole text.
_FORMS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"(?P<number>{_NUMBER})",
        rf"(?P<whole>\d+)?\\frac\{{(?P<above>{_RATIO})\}}\{{(?P<below>{_RATIO})\}}",
        rf"(?:(?P<whole>\d+) )?(?P<above>{_NUMBER})/(?P<below>{_NUMBER})",
        rf"(?P<number>{_NUMBER})(?:\\times|\\cdot|\*){_POWER_OF_TEN}",
        _POWER_OF_TEN,
        r"(?P<number>\d*\.\d*)\\overline\{(?P<period>\d+)\}",
    )
)
_BRACKETED = re.compile(r"^\(([\d.\\][^()]*)\)$")
_UNITS = (
    "cm|mm|km|nm|ft|feet|foot|inch|inches|in|mi|miles?|yards?|yd|meters?|metres?|kg|mg|lbs?|pounds?|ounces?|oz|grams?|"
    "ml|lit(?:er|re)s?|gallons?|hours?|hrs?|minutes?|mins?|seconds?|secs?|ms|days?|weeks?|months?|years?|yrs?|mph|"
    "dollars?|cents?|euros?|USD|degrees?|deg|radians?|rad|units?|square|cubic|sq|Hz|kHz|MHz|eV|keV|MeV|kJ|mol|"
    "people|students?|ways?|points?|sides?|digits?|integers?|solutions?|values?|times|pairs?|coins?|games?|cards?"
)
# One unit at the end of the text, perhaps with a power and "per" another unit: "cm^2", "km/h".
_UNIT = re.compile(rf"(?<=[\d}}) ])(?:{_UNITS})\.?(?:\^\{{?[23]\}}?)?(?: ?(?:/|per) ?[a-z]+(?:\^\{{?[23]\}}?)?)?$")


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact number as it was written. `decimals` counts the digits after the point. A value of 50% is 50."""

    value: Fraction
    decimals: int = 0
    is_percent: bool = False

    @property
    def max_rounding_error(self) -> Fraction:
        """How far the exact value may be from a number that looks rounded: half of its last digit. 0 for other numbers.

        A number looks rounded if it has decimals and at least three digits, not counting zeros at its beginning.
        """
        digits = len(str(abs(int(self.value * 10**self.decimals))))
        return Fraction(1, 2 * 10**self.decimals) if self.decimals and digits >= 3 else Fraction(0)

    def matches(self, answer: Quantity, tolerance: float, is_percent_problem: bool) -> bool:
        """Returns whether an answer equals this gold number, within the relative `tolerance` or the rounding error.

        The rounding error is allowed only to an answer without decimals. To a gold of 50%, the answers 50 and 0.5 are
        both right. To a gold without the sign, an answer of 50% means 50 if the problem mentions percent
        (`is_percent_problem`) and 0.5 otherwise.
        """
        values = [answer.value]
        if self.is_percent and not answer.is_percent:
            values.append(answer.value * 100)
        elif answer.is_percent and not (self.is_percent or is_percent_problem):
            values = [answer.value / 100]
        # An answer with decimals must repeat the rounded gold; only an exact answer may differ by its rounding error.
        slack = max(abs(self.value) * Fraction(tolerance), Fraction(0) if answer.decimals else self.max_rounding_error)
        return any(abs(self.value - value) <= slack for value in values)


def read_quantity(text: str) -> Quantity | None:
    r"""Returns the number that the whole text, cleaned LaTeX, states, or None if it is not a single written number.

    Fractions, mixed numbers, percentages, powers of ten and repeating decimals are read. Units at the end are ignored
    if they are on a fixed list; other words make the result None, and so do more than MAX_DIGITS characters.

    >>> read_quantity("62.5%")
    Quantity(value=Fraction(125, 2), decimals=1, is_percent=True)
    >>> read_quantity(r"1\frac{4}{5}").value, read_quantity("12 square feet").value, read_quantity("12 x")
    (Fraction(9, 5), Fraction(12, 1), None)
    """
    text = drop_units(" ".join(text.split()))
    is_percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    # Spaces go, except between digits: "2 1/2" is a mixed number, and "1 234" is one number, but "5 5" is none.
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)
    if len(text) > MAX_DIGITS:
        return None
    # -(5/4) is a number; a second sign inside is not
    text = _compute_inner_fractions(_BRACKETED.sub(r"\1", text))
    match = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
    if match is None:
        return None
    part = match.groupdict()
    if part.get("above"):
        # a fraction, perhaps with a whole number before it; a denominator of 0 is no number
        above, below = _parse_ratio(part["above"]), _parse_ratio(part["below"])
        if above is None or not below:
            return None
        return Quantity(sign * (int(part["whole"] or 0) + above / below), is_percent=is_percent)
    # a decimal, perhaps with a power of ten or with digits that repeat without end
    number = part.get("number") or "1"
    period = part.get("period")
    power = part.get("power") or part.get("digit")
    decimals = len(number.partition(".")[2])
    value = _parse_decimal(number) * Fraction(10) ** int(power or 0)
    if period:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)
    return Quantity(sign * value, 0 if period or power else decimals, is_percent)


def drop_units(text: str) -> str:
    """Returns the text without units on a fixed list at its end, perhaps with several words, as in "square feet"."""
    for _ in range(3):
        text = _UNIT.sub("", text).rstrip()
    return text


def _compute_inner_fractions(text: str) -> str:
    r"""Returns the text with fractions that are the whole argument of a fraction written as quotients.

    >>> _compute_inner_fractions(r"\frac{\frac{1}{2}}{-\frac{3}{4}}")
    '\\frac{1/2}{-3/4}'
    """
    for _ in range(MAX_NESTED_FRACTIONS):
        if text.count("\\frac") < 2:
            break
        text = _INNER_FRACTION.sub(_write_quotient, text)
    return text


def _write_quotient(fraction: re.Match[str]) -> str:
    """Returns a fraction of numbers or quotients as one quotient of whole numbers; unchanged if it divides by 0."""
    above, below = _parse_ratio(fraction[2]), _parse_ratio(fraction[3])
    if above is None or not below:
        return fraction[0]
    value = -above / below if fraction[1] == "-" else above / below
    return f"{value.numerator}/{value.denominator}"


def _parse_ratio(text: str) -> Fraction | None:
    """Returns the exact value of a number with a sign or of a quotient of two numbers; None if it divides by 0."""
    above, slash, below = text.partition("/")
    divisor = _parse_decimal(below) if slash else Fraction(1)
    return _parse_decimal(above) / divisor if divisor else None


def _parse_decimal(number: str) -> Fraction:
    """Returns the exact value of digits with at most one point, perhaps after a sign.

    Commas and spaces between groups are ignored. Without any digit the value is 0.
    """
    plain = number.replace(",", "").replace(" ", "").rstrip(".")
    return Fraction(int(plain)) if plain.isdigit() else Fraction(plain or "0")
