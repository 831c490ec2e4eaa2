r"""A written number, read exactly: 1,234.50, \frac{1}{2}, 1\frac{4}{5}, 3/4, 62.5%, 3\times 10^{-2}, 0.\overline{27}.

For text that `notation` has cleaned. A unit after the number is left out. What is not one number in one of these
spellings is no quantity; nothing is computed but a fraction, and digits are counted first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400  # of a number, and of the power of ten it is multiplied by

_NUMBER = r"(?:\d{1,3}(?:[ ,]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_TEN = r"10\^(?:\{(?P<power>[-+]?\d{1,3})\}|(?P<digit>\d))"
_FORMS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"(?P<number>{_NUMBER})",
        rf"(?P<whole>\d+)?\\frac\{{(?P<above>[-+]?(?:{_NUMBER}))\}}\{{(?P<below>[-+]?(?:{_NUMBER}))\}}",
        rf"(?:(?P<whole>\d+) )?(?P<above>{_NUMBER})/(?P<below>{_NUMBER})",
        rf"(?P<number>{_NUMBER})(?:\\times|\\cdot|\*){_TEN}",
        _TEN,
        r"(?P<number>\d*\.\d*)\\overline\{(?P<period>\d+)\}",
    )
)
_UNITS = (
    "cm|mm|km|nm|ft|feet|foot|inch|inches|in|mi|miles?|yards?|yd|meters?|metres?|kg|mg|lbs?|pounds?|ounces?|oz|grams?|"
    "ml|lit(?:er|re)s?|gallons?|hours?|hrs?|minutes?|mins?|seconds?|secs?|ms|days?|weeks?|months?|years?|yrs?|mph|"
    "dollars?|cents?|euros?|USD|degrees?|deg|radians?|rad|units?|square|cubic|sq|Hz|kHz|MHz|eV|keV|MeV|kJ|mol|"
    "people|students?|ways?|points?|sides?|digits?|integers?|solutions?|values?|times|pairs?|coins?|games?|cards?"
)
_UNIT = re.compile(rf"(?<=[\d}}) ])(?:{_UNITS})\.?(?:\^\{{?[23]\}}?)?(?: ?(?:/|per) ?[a-z]+(?:\^\{{?[23]\}}?)?)?$")


@dataclass(frozen=True, slots=True)
class Quantity:
    """`decimals`: digits after the point as written. A percentage is its number: 50% is 50."""

    value: Fraction
    decimals: int = 0
    percent: bool = False

    @property
    def rounding(self) -> Fraction:
        """How far an exact value may be from this: half of the last digit, if this looks rounded, else nothing."""
        digits = len(str(abs(int(self.value * 10**self.decimals))))
        return Fraction(1, 2 * 10**self.decimals) if self.decimals and digits >= 3 else Fraction(0)

    def matches(self, answer: Quantity, tolerance: float, in_percent: bool) -> bool:
        """Whether an answer is this gold number; `in_percent`: the problem speaks of percent.

        To a gold of 50%, 50 left the sign out and 0.5 worked it in. 50% to a gold without the sign is 50 if the problem
        speaks of percent, and otherwise 0.5.
        """
        values = [answer.value]
        if self.percent and not answer.percent:
            values.append(answer.value * 100)
        elif answer.percent and not (self.percent or in_percent):
            values = [answer.value / 100]
        slack = max(abs(self.value) * Fraction(tolerance), Fraction(0) if answer.decimals else self.rounding)
        return any(abs(self.value - value) <= slack for value in values)


def read_quantity(text: str) -> Quantity | None:
    r"""The number, if that is what the text is.

    >>> read_quantity("62.5%")
    Quantity(value=Fraction(125, 2), decimals=1, percent=True)
    >>> read_quantity(r"1\frac{4}{5}").value, read_quantity("12 square feet").value, read_quantity("12 x")
    (Fraction(9, 5), Fraction(12, 1), None)
    """
    text = " ".join(text.split())
    for _ in range(3):  # square feet, miles per hour
        text = _UNIT.sub("", text).rstrip()
    percent, text = text.endswith("%"), text.removesuffix("%").rstrip()
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)  # between digits it says something
    if len(text) > MAX_DIGITS:
        return None
    found = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
    if found is None:
        return None
    part = found.groupdict()
    if part.get("above"):
        below = _exact(part["below"])
        value = int(part["whole"] or 0) + _exact(part["above"]) / below if below else None
        return None if value is None else Quantity(sign * value, percent=percent)
    number, period, power = part.get("number") or "1", part.get("period"), part.get("power") or part.get("digit")
    decimals = len(number.partition(".")[2])
    value = _exact(number) * Fraction(10) ** int(power or 0)
    if period:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)
    return Quantity(sign * value, 0 if period or power else decimals, percent)


def _exact(number: str) -> Fraction:
    plain = number.replace(",", "").replace(" ", "").rstrip(".")
    return Fraction(int(plain)) if plain.isdigit() else Fraction(plain or "0")
