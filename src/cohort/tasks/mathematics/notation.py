r"""Notation of mathematical answers: reads their LaTeX as a tree of lists, pairs, intervals and matrices.

The leaves of the tree are single values; `equality` compares them. Only the brackets decide whether values have an
order: `1, 2`, `\{2, 1\}` and `1 \text{ and } 2` are values in any order, `(1, 2)` is a pair or an open interval,
`[1, 2)` is an interval, `x > 2` is `(2, \infty)`, and `3 \pm 1` is two values. `1,234` is one number, unless it stands
in brackets.

Every scan is a single pass over at most `MAX_CHARS` characters, and the depth of brackets is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cohort.tasks.mathematics.cleaning import clean_latex
from cohort.tasks.mathematics.names import is_name, names_value
from cohort.tasks.mathematics.quantity import drop_units

MAX_CHARS = 1_000
# depth of brackets inside brackets
MAX_DEPTH = 16


class OverLimit(Exception):
    """Raised for an answer that is too much work to compare. The message says which limit it exceeds."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A single value of an answer, as cleaned LaTeX."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several values of an answer.

    `kind` is "any" for values in any order, "()" for values in order or an open interval, "[]", "[)" or "(]" for other
    intervals, "matrix" for a matrix whose items are of the kind "row". `is_bare`: the values stand without brackets.
    """

    kind: str
    items: tuple[Node, ...]
    is_bare: bool = False


Node = Leaf | Items

_TOKEN = re.compile(r"\\\\|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = {"(", "[", "{", r"\{", r"\begin"}
_CLOSING = {")", "]", "}", r"\}", r"\end"}
_NUMBER_WITH_COMMAS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?: ?%)?")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(.*)\\end\{\1\}", re.DOTALL)
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def read_structure(text: str, join_thousands: bool = True) -> Node:
    r"""Cleans an answer and returns it as a tree of values. Raises OverLimit if it is too long or nested too deeply.

    With `join_thousands`, a text that is only `1,234` or the like is one number; without it, its commas separate
    values. Thousands separators that only LaTeX has, as in `10,\!080`, are always joined. Empty text is an empty leaf.

    >>> read_structure(r"$x = 3$ \text{ and } x = 10,\!080")
    Items(kind='any', items=(Leaf(text='x = 3'), Leaf(text='x = 10080')), is_bare=True)
    >>> read_structure(r"\left( 1, \dfrac12 \right]")
    Items(kind='(]', items=(Leaf(text='1'), Leaf(text='\\frac{1}{2}')), is_bare=False)
    """
    if len(text) > MAX_CHARS:
        raise OverLimit(f"more than {MAX_CHARS} characters")
    return _read_node(clean_latex(text), join_thousands)


def is_number_with_commas(text: str) -> bool:
    """Returns whether the cleaned text is digits in groups of three, as in `45,135,225`: one number, or else a list.

    A sign, decimals, a percent sign, a unit, and a name with "=" are allowed. False for more than MAX_CHARS characters.
    """
    return len(text) <= MAX_CHARS and _join_thousands(clean_latex(text)) is not None


def split_outside_brackets(text: str, separators: Iterable[str]) -> tuple[list[str], list[str]]:
    r"""Splits the text at the separators that stand outside brackets; returns the pieces and the separators in order.

    A separator is one character or one LaTeX command. Pieces keep their spaces. Brackets of different shapes match, as
    in [1, 2); text whose brackets do not balance is returned as one piece. Raises OverLimit for too many
    nested brackets.

    >>> split_outside_brackets(r"(1,2), \{3,4\}", ",")
    (['(1,2)', ' \\{3,4\\}'], [','])
    """
    pieces: list[str] = []
    found_separators: list[str] = []
    start = depth = 0
    wanted = {*separators}
    for token in _TOKEN.finditer(text):
        word = token[0]
        depth += (word in _OPENING) - (word in _CLOSING)
        if depth > MAX_DEPTH:
            raise OverLimit(f"more than {MAX_DEPTH} nested brackets")
        if depth < 0:
            break
        if depth == 0 and word in wanted:
            pieces.append(text[start : token.start()])
            found_separators.append(word)
            start = token.end()
    # Without matching brackets, nothing says which separators are outside of them.
    if depth != 0:
        return [text], []
    return [*pieces, text[start:]], found_separators


def split_sides(text: str) -> list[str]:
    r"""Returns the sides of an answer that is split at "=", in order; one side without "=". The last one is the value.

    "5 = x", where only the second of two sides is a name, is therefore given as ["x", "5"]. Of `4\pi \approx 12.57`
    only the first part counts, unless it is empty or only a name.
    """
    exact, *approximations = split_outside_brackets(text, [r"\approx"])[0]
    text = approximations[0] if approximations and (not exact.strip() or is_name(exact)) else exact
    sides = [side.strip() for side in split_outside_brackets(text, "=")[0]]
    return sides[::-1] if len(sides) == 2 and is_name(sides[1]) and not names_value(sides[0]) else sides


def _read_node(text: str, join_thousands: bool) -> Node:
    """Returns the tree of cleaned text: a union of sets, one number with commas, a list, or a single value.

    Without `join_thousands`, commas always separate values.
    """
    union, _ = split_outside_brackets(text, [r"\cup"])
    if len(union) > 1:
        return _make_unordered([_read_node(part, False) for part in union])
    if join_thousands and (number := _join_thousands(text)):
        return Leaf(number)
    parts = [part for part in split_outside_brackets(text, ",;")[0] if part.strip()]
    if len(parts) > 1:
        return _make_unordered([_read_single(part.strip()) for part in parts], is_bare=True)
    return _read_single(parts[0].strip() if parts else "")


def _join_thousands(text: str) -> str | None:
    """Returns cleaned text that is a number with commas, without them and without a unit; None for other text.

    A name and "=" may stand before the number: `x = 1,234 cm` is `x = 1234`.
    """
    if "," not in text:
        return None
    name, equals, number = text.rpartition("=")
    number = drop_units(number).strip()
    if not _NUMBER_WITH_COMMAS.fullmatch(number) or (equals and not names_value(name)):
        return None
    return f"{name}{equals} {number.replace(',', '')}".strip()


def _make_unordered(nodes: list[Node], is_bare: bool = False) -> Node:
    """Returns values that have no order as one node of the kind "any".

    Nodes of that kind among them are merged into it; a single value is returned alone. `is_bare` marks values that
    stand without brackets.
    """
    flat: list[Node] = []
    for node in nodes:
        flat += node.items if isinstance(node, Items) and node.kind == "any" else [node]
    return flat[0] if len(flat) == 1 else Items("any", tuple(flat), is_bare)


def _read_single(text: str) -> Node:
    """Returns the tree of cleaned text that is no list: a matrix, values in brackets, an inequality, or one value.

    An equation with several values on its right side is read as these values, and "x \\in S" as S. A pair with one \\pm
    is read as two pairs.
    """
    # In "x \in [1, 2]" only the set counts.
    sides, _ = split_outside_brackets(text, [r"\in"])
    if len(sides) == 2:
        return _read_node(sides[1], False)
    if matrix := _MATRIX.fullmatch(text):
        # an array begins with the alignment of its columns in braces
        body = matrix[2].removeprefix("{").partition("}")[2] if matrix[1] == "array" else matrix[2]
        rows = [row for row in split_outside_brackets(body, [r"\\"])[0] if row.strip()]
        return Items(
            "matrix", tuple(Items("row", tuple(map(_read_leaf, split_outside_brackets(row, "&")[0]))) for row in rows)
        )
    if brackets := _split_enclosing_brackets(text):
        # (0, \pm 2) is two pairs
        if text.startswith("(") and text.count(r"\pm") == 1 and "," in text:
            return _make_unordered([_read_single(signed) for signed in _expand_plus_minus(text)])
        return _read_bracketed(*brackets)
    # "(x, y) = (1, 2)" is the pair (1, 2); an equation with one value stays whole
    sides, _ = split_outside_brackets(text, "=")
    if len(sides) > 1 and isinstance(value := _read_node(sides[-1], False), Items):
        return value
    return _read_relation(text) or _read_leaf(text)


def _read_leaf(text: str) -> Node:
    r"""Returns the text as one value, or as two values without order if it contains `\pm`. Final punctuation goes."""
    if r"\pm" in text:
        return _make_unordered([Leaf(signed.strip().removeprefix("+").lstrip()) for signed in _expand_plus_minus(text)])
    return Leaf(text.strip().rstrip(" .,;:"))


def _expand_plus_minus(text: str) -> list[str]:
    r"""Returns two texts: one with + for `\pm` and - for `\mp`, and one with the reverse."""
    return [text.replace(r"\pm", a).replace(r"\mp", b) for a, b in (("+", "-"), ("-", "+"))]


def _split_enclosing_brackets(text: str) -> tuple[str, str, str] | None:
    """Returns the opening bracket, the text inside and the closing bracket, if one pair encloses the whole text.

    Returns None otherwise. Brackets of different shapes may form a pair, as in [1, 2).
    """
    tokens = [token[0] for token in _TOKEN.finditer(text)]
    if len(tokens) < 2 or tokens[0] not in _OPENING - {r"\begin"} or tokens[-1] not in _CLOSING:
        return None
    depth = 0
    for index, word in enumerate(tokens):
        depth += (word in _OPENING) - (word in _CLOSING)
        if depth == 0:
            is_whole = index == len(tokens) - 1
            return (tokens[0], "".join(tokens[1:-1]), tokens[-1]) if is_whole else None
    return None


def _read_bracketed(left: str, inside: str, right: str) -> Node:
    """Returns the tree of brackets with content.

    One value is read without its brackets. Several values in ( ) have an order, two values in [ ], [ ) or ( ] are an
    interval, and values in braces or other square brackets have no order. Everything else is a leaf with its brackets.
    """
    parts = [_read_single(part.strip()) for part in split_outside_brackets(inside, ",;")[0] if part.strip()]
    kind = left + right
    if len(parts) == 1 and kind in ("()", "[]", "{}", r"\{\}"):
        return parts[0]
    if kind == "()" and parts:
        return Items("()", tuple(parts))
    if kind in ("[]", "[)", "(]") and len(parts) == 2:
        return Items(kind, tuple(parts))
    if kind in (r"\{\}", "[]", "{}") and parts:
        return _make_unordered(parts)
    return _read_leaf(left + inside + right)


def _read_relation(text: str) -> Node | None:
    r"""Returns an inequality of a name such as `x > 2` or `1 \le x < 2` as an interval, and `x \ne 0` as two of them.

    None for other text, also for mixed directions as in `1 < x > 0`.
    """
    sides, signs = split_outside_brackets(text, [*_FLIPPED, r"\ne"])
    sides = [side.strip() for side in sides]
    # "2 < x" becomes "x > 2"
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        sides, signs = sides[::-1], [_FLIPPED.get(signs[0], signs[0])]
    if len(sides) == 2 and is_name(sides[0]) and not is_name(sides[1]):
        below, above = Leaf(r"-\infty"), Leaf(r"\infty")
        match signs[0]:
            case "<" | r"\le":
                return Items("()" if signs[0] == "<" else "(]", (below, _read_leaf(sides[1])))
            case ">" | r"\ge":
                return Items("()" if signs[0] == ">" else "[)", (_read_leaf(sides[1]), above))
        return _make_unordered([Items("()", (below, _read_leaf(sides[1]))), Items("()", (_read_leaf(sides[1]), above))])
    # "2 > x > 1" becomes "1 < x < 2"; mixed directions are no interval
    if len(sides) == 3 and is_name(sides[1]) and signs[0] in _FLIPPED and signs[1] in _FLIPPED:
        if signs[0] in (">", r"\ge"):
            sides, signs = sides[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
        if {*signs} <= {"<", r"\le"}:
            kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
            return Items(kind, (_read_leaf(sides[0]), _read_leaf(sides[2])))
    return None
