r"""Names of values: what may stand before the equals sign of an answer that is a value, as in `|AB| = 1` or `f(2) = 5`.

`x + 1 = 5` is no name with a value but an equation, and so is everything else with unknowns. Points have capital
letters. Therefore `\frac{AB}{CD} = 2` states a value, and `\frac{y}{x} = 2` is an equation.
"""

from __future__ import annotations

import re

_INDEX = r"(?:_\{?\\?\w+\s*\}?)?(?:'*|\^\{(?:\\prime ?){1,2}\})"
_NAME = re.compile(
    r"(?:[A-Z]{2,}|[A-Za-z]|\\(?!(?:pi|infty|frac|sqrt|ln|log)(?![a-zA-Z]))[a-zA-Z]+(?:\s*[A-Z]{1,3})?)"
    rf"{_INDEX}(?:\s*\([a-zA-Z](?:,\s*[a-zA-Z])*\))?"
)
# The index of a point is one character or stands in braces: text of many points can be read in one way only.
_POINT_INDEX = r"(?:_(?:[A-Za-z0-9]|\{\s*[A-Za-z0-9]{1,8}\s*\}))?(?:'{0,2}|\^\{(?:\\prime ?){1,2}\})"
_POINT = rf"[A-Z]{_POINT_INDEX} ?"
_POINTS = rf"(?:{_POINT}){{2,6}}"
# a length, an area, an angle, or only points: |AB|, \overline{AB}, [ABC], S_{\triangle ABC}, \angle A, AB
_FIGURE = (
    rf"(?:\| ?{_POINTS}\| ?|\\(?:overline|overrightarrow|vec|widehat|overarc) ?\{{ ?{_POINTS}\}} ?|\[ ?{_POINTS}\] ?|"
    rf"[A-Z]_\{{ ?\\triangle ?{_POINTS}\}} ?|(?:m ?)?\\angle ?(?:{_POINT}){{1,3}}|{_POINTS})"
)
_FIGURE_OR_POINT = rf"(?:{_FIGURE}|{_POINT})"
_FIGURE_OR_LETTER = rf"(?:{_FIGURE}|[A-Za-z]{_POINT_INDEX} ?)"
_COMPOUND_NAME = re.compile(
    "|".join(
        (
            rf"{_FIGURE}(?:(?:[-+/]|\\cdot) ?{_FIGURE}){{0,4}}(?:\^\{{?\d\}}?)?",
            rf"\\frac ?\{{ ?{_FIGURE_OR_POINT}\}} ?\{{ ?{_FIGURE_OR_POINT}\}}",
            # a ratio; no equation of a curve has a colon
            rf"{_FIGURE_OR_LETTER}(?:: ?{_FIGURE_OR_LETTER}){{1,4}}",
            # a value of a function, a probability, and a sine of an angle
            rf"[A-Za-z]{_POINT_INDEX} ?\( ?-?\d{{1,9}}(?:\.\d{{1,9}})? ?\)",
            r"P ?\([A-Z][^()]*\)",
            rf"\\(?:sin|cos|tan) ?(?:\\angle ?)?(?:{_POINT}){{1,3}}",
            # words with a capital, from \text{Area}
            r"[A-Z][a-z]{2,}(?: [a-z]+){0,4}",
        )
    )
)
# Longer text is no name.
MAX_NAME_CHARS = 100
_LENGTH_SIGNS = re.compile(r"\s+|\||\\overline\s*|(?<![A-Za-z])m(?=\s*\\angle)")
_TRAILING_INDEX = re.compile(r"_\{?\w\}?$")
_OWN_LETTER = re.compile(r"[a-z]")


def is_name(text: str) -> bool:
    """Returns whether the text only names a value, as the left sides of `x = 5`, `f(x) = 2x` and `AB = 7` do.

    A name is one letter, several capitals, or a LaTeX command other than \\pi, \\infty, \\frac, \\sqrt, \\ln and \\log;
    an index, primes and letters in parentheses may follow. A word in small letters is no name.
    """
    return _NAME.fullmatch(text.strip()) is not None


def names_value(text: str) -> bool:
    r"""Returns whether the text names a value or describes one: a name, or a length, angle, area, ratio or the like.

    >>> [names_value(text) for text in ("x", "|AB|", r"\frac{NO}{BO}", "V_{1}:V_{2}", "f(2)", "Area")]
    [True, True, True, True, True, True]
    >>> [names_value(text) for text in ("x + 1", "5x", r"\frac{y}{x}", "|z|", "A + B", r"\tan \theta")]
    [False, False, False, False, False, False]
    """
    text = " ".join(text.split())
    return len(text) <= MAX_NAME_CHARS and (is_name(text) or _COMPOUND_NAME.fullmatch(text) is not None)


def have_same_meaning(gold: str, answer: str) -> bool:
    r"""Returns whether the name in an answer means what the name in the gold answer means.

    A length may have bars or a line over it, and one of the names may have an index: x_1 and x. A letter of the
    answer's own, as in `x = 1`, may stand for anything that is not one letter in the gold, as |AB|.

    >>> have_same_meaning("|AB|", "AB"), have_same_meaning("|AB|", "x"), have_same_meaning("|AB|", "BC")
    (True, True, False)
    >>> have_same_meaning("x", "y"), have_same_meaning("x_{1}", "x"), have_same_meaning("x_1", "x_2")
    (False, True, False)
    """
    if not names_value(gold) or not names_value(answer):
        return False
    one, other = (_simplify_name(name) for name in (gold, answer))
    if one == other or _TRAILING_INDEX.sub("", one) == other or one == _TRAILING_INDEX.sub("", other):
        return True
    is_single = _OWN_LETTER.fullmatch(answer.strip()) is not None
    return is_single and (not is_name(gold) or re.fullmatch(r"[A-Z]{2,}", gold.strip()) is not None)


def _simplify_name(name: str) -> str:
    """Returns a name without spaces, signs of length, and braces around an index or a group of points."""
    return re.sub(r"\{(\w+)\}", r"\1", _LENGTH_SIGNS.sub("", name))
