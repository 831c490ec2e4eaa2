r"""How a mathematical answer is written: its LaTeX cleaned, and read as lists, pairs, intervals and matrices of leaves.

What has an order and what has none is decided here, by the brackets alone: `1, 2`, `\{2, 1\}` and `1 \text{ and } 2`
are values in any order, `(1, 2)` is a pair or an open interval, `[1, 2)` an interval, `x > 2` is `(2, \infty)`,
`3 \pm 1` two values, `1,234` one number unless it stands in brackets. Leaves are for `equality` to compare.

Every scan is a single pass over at most `MAX_CHARS` characters, and nesting is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CHARS = 1_000
MAX_DEPTH = 16  # of brackets in brackets


class OverLimit(Exception):
    """An answer that is too much work to compare; says what there is too much of."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value, as cleaned LaTeX."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several values. `kind`: "any" order; "()" in order, or an open interval; "[]", "[)", "(]"; "matrix" of "row"s."""

    kind: str
    items: tuple[Node, ...]
    bare: bool = False  # written without brackets


Node = Leaf | Items

# ---- cleaning
_UNICODE = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2010\u2011", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\t\r\n", " ")
    | dict.fromkeys("\u00b7\u22c5", r"\cdot ")
    | {"\u00d7": r"\times ", "\u00f7": "/", "\u2044": "/", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u221a": r"\sqrt "}
    | {"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u222a": r"\cup ", "\u2208": r"\in ", "\u2248": r"\approx "}
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u03b8": r"\theta ", "\u00b2": "^2", "\u00b3": "^3"}
    | {"\u2205": r"\emptyset "}
)
_RULES = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\\\\[[0-9.]+ ?[a-z]{2}\]", r"\\\\"),  # space between the rows of a matrix
        (r"\\?\$|(?<!\\)\\[()\[\]]", ""),  # money, mathematics mode
        (r"(?<![\w)}])(?:\*\*|`)|(?:\*\*|`)(?![\w({\\])", ""),  # Markdown; 1**2 is not 12
        (r"(?<=\d)(?:,\s*\\!\s*|\{,\}|\\[,!]\s*)(?=\d{3}(?!\d))", ""),  # 10,\!080
        (r"\\right\s*\.|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle)(?![a-zA-Z])|(?<!\\)\\!", ""),
        (r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\s+", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"^ *\\text(?:bf)? ?\{ ?\([A-E]\) ?\} ?(?=[-\d\\])(?!\\(?:text|math|mbox))", ""),  # (A) 5, but not (A) (B)
        (r"^ *\\text ?\{ ?[Tt]he (?:final )?answer is:? ?\} ?(?=\S)", ""),
        (r"(?<=\S),? ?\\(?:text|mbox) ?\{[ ,]*(?:for (?:all|every)|where)(?![a-zA-Z]).*", ""),
        (r"\\(?:boldsymbol|(?:text)?color ?\{\w+\}) ?(?:\{([^{}]*)\})?", r"\1"),
        (r"\\[lr]vert(?![a-zA-Z])", "|"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\leq(?:slant)?(?![a-zA-Z])|\\lt(?![a-zA-Z])=|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\frac\s*(\w|\\pi)\s*(\w)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\w|\\pi)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w)", r"\1{\2}"),
        (r"((?:\\frac|\})\{\d{1,3}),(\d{3})(?=\})", r"\1\2"),  # \frac{20,000}{\pi}
        (r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\w)", r"\\sqrt\1{\2}"),
        (r"\(([0-9A-Z]+)\)(?=_)", r"\1"),  # (52)_8
        (r"_\{\(([0-9]+)\)\}", r"_{\1}"),  # 52_{(8)}
        (r"\\?%|(?<![a-zA-Z\\])per ?cent(?:age)?(?![a-zA-Z])", "%"),
        (r"(?<![\w\\.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w|\.\d)", r"\1\\times 10^{\2}"),  # 4.5e33
        (r"(?<=\d)(?:\^\{?\s*(?:\\prime\s*)+\}?|'{1,2})", ""),  # seconds of arc
        (r"(?<![a-zA-Z]{2})([a-zA-Z])''(?![a-zA-Z'])", r"\1^{\\prime \\prime}"),
        (r"(?<![a-zA-Z]{2})([a-zA-Z])'(?![a-zA-Z'])", r"\1^{\\prime}"),
    )
)
_TEXT = re.compile(
    r"\\(text|mbox|hbox|math|operatorname)(?:bf|it|rm|sf|tt|normal)?\s*"
    r"\{((?:[^{}]|\^\{-?\d\})*)\}(\^\{?-?\d+\}?)?"
)
_AND = re.compile(r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
_HOURS = re.compile(r"\s*[ap]\.?\s?m\.?\s*", re.IGNORECASE)
_FACTOR = r"(?:[mgshdACFJKLNTVW\u00c5]|[A-Za-z]{2,})(?:\^?[23]|\^\{-?[1-3]\})?"
_UNIT = re.compile(rf"\D*[A-Za-z]{{2}}[23]?\D*|\s*{_FACTOR}(?:[\s/]+{_FACTOR})*\s*")  # no number hides in a unit
_NO_UNIT = re.compile(  # cm squared is a unit, 5 squared is not 5
    r"\s*(?:squared|cubed)\b|.*\b(?:(?:hundred|thousand|million|billion|trillion|dozen)s?|pi|factorial|plus|minus|"
    r"half|twice|one|two|three|four|five|six|seven|eight|nine|ten)\b",
    re.IGNORECASE,
)
_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_CIRCLE = r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z]))\s*(?:[CF](?![a-zA-Z]))?"
_DEGREES, _ANGLE = re.compile(_CIRCLE), re.compile(rf"(\d+(?:\.\d+)?){_CIRCLE}")

# ---- structure
_TOKEN = re.compile(r"\\\\|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPEN = {"(", "[", "{", r"\{", r"\begin"}
_CLOSE = {")", "]", "}", r"\}", r"\end"}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(.*)\\end\{\1\}", re.DOTALL)
_NAME = re.compile(
    r"(?:[A-Z]{2,}|[A-Za-z]|\\(?!(?:pi|infty|frac|sqrt|ln|log)(?![a-zA-Z]))[a-zA-Z]+(?:\s*[A-Z]{1,3})?)"
    r"(?:_\{?\\?\w+\s*\}?)?(?:'*|\^\{(?:\\prime ?){1,2}\})(?:\s*\([a-zA-Z](?:,\s*[a-zA-Z])*\))?"
)
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def read(text: str, grouped: bool = True) -> Node:
    r"""The answer as a tree. `grouped`: commas between groups of three digits are part of a number.

    >>> read(r"$x = 3$ \text{ and } x = 10,\!080")
    Items(kind='any', items=(Leaf(text='x = 3'), Leaf(text='x = 10080')), bare=True)
    >>> read(r"\left( 1, \dfrac12 \right]")
    Items(kind='(]', items=(Leaf(text='1'), Leaf(text='\\frac{1}{2}')), bare=False)
    """
    if len(text) > MAX_CHARS:
        raise OverLimit(f"more than {MAX_CHARS} characters")
    return _node(clean(text), grouped)


def is_grouped(text: str) -> bool:
    """Whether it is one number with commas, or else several of three digits: `45,135,225`."""
    return len(text) <= MAX_CHARS and _THOUSANDS.fullmatch(clean(text)) is not None


def is_name(text: str) -> bool:
    """Whether it names what a value is of, as the left sides of `x = 5`, `f(x) = 2x` and `AB = 7` do."""
    return _NAME.fullmatch(text.strip()) is not None


def clean(text: str) -> str:
    r"""One spelling for what is written in several ways; units are left out.

    >>> clean(r"$\left(3,\,\dfrac12\right)$.")
    '(3, \\frac{1}{2})'
    >>> clean(r"15 \mbox{ cm}^2"), clean(r"\text{(C)}"), clean(r"90^{\circ}")
    ('15', '(C)', '90')
    """
    text = text.translate(_UNICODE)
    for pattern, spelling in _RULES:
        text = pattern.sub(spelling, text)
    for _ in range(3):  # \text in \text
        text = _TEXT.sub(_without_text, text)
    text = _AND.sub(",", text)
    if _TRIG.search(text):  # the sine of 30 degrees is not that of 30
        text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _DEGREES.sub(" ", text)
    return text.lstrip(" ,;:").rstrip(" .,;:")


def _without_text(found: re.Match[str]) -> str:
    """What is left of \\text{...}: nothing of a unit, which follows a value and ends it; otherwise the words."""
    macro, words, power = found.groups()
    before, after = found.string[: found.start()].rstrip(), found.string[found.end() :].lstrip()
    ends = not after or after.startswith(
        (",", ";", ".", ")", "]", "}", "&", r"\text", r"\mbox", r"\mathrm", r"\}", r"\\")
    )
    follows = before[-1:].isalnum() or before.endswith(("}", ")", "%", "!"))
    is_unit = (
        macro != "operatorname" and _UNIT.fullmatch(words) and not (_HOURS.fullmatch(words) or _NO_UNIT.match(words))
    )
    if is_unit and follows and ends and not _AND.search(words):
        return " "
    return words + (power or "")


def split(text: str, at: Iterable[str]) -> tuple[list[str], list[str]]:
    r"""The pieces between the given tokens, and the tokens; what stands in brackets is not cut.

    >>> split(r"(1,2), \{3,4\}", ",")
    (['(1,2)', ' \\{3,4\\}'], [','])
    """
    pieces, found, start, depth = [], [], 0, 0
    wanted = {*at}
    for token in _TOKEN.finditer(text):
        word = token[0]
        depth += (word in _OPEN) - (word in _CLOSE)
        if depth > MAX_DEPTH:
            raise OverLimit(f"more than {MAX_DEPTH} nested brackets")
        if depth < 0:
            break
        if depth == 0 and word in wanted:
            pieces.append(text[start : token.start()])
            found.append(word)
            start = token.end()
    if depth != 0:  # brackets that do not match: nothing to go by
        return [text], []
    return [*pieces, text[start:]], found


def _node(text: str, grouped: bool) -> Node:
    union, _ = split(text, [r"\cup"])
    if len(union) > 1:
        return _any([_node(part, False) for part in union])
    if grouped and _THOUSANDS.fullmatch(text.strip()):
        return Leaf(text.strip().replace(",", ""))
    parts = [part for part in split(text, ",;")[0] if part.strip()]
    if len(parts) > 1:
        return _any([_single(part.strip()) for part in parts], bare=True)
    return _single(parts[0].strip() if parts else "")


def _any(nodes: list[Node], bare: bool = False) -> Node:
    """In any order; lists in it are part of it."""
    flat: list[Node] = []
    for node in nodes:
        flat += node.items if isinstance(node, Items) and node.kind == "any" else [node]
    return flat[0] if len(flat) == 1 else Items("any", tuple(flat), bare)


def _single(text: str) -> Node:
    """What is not a list: a matrix, something in brackets, a relation, a value."""
    sides, _ = split(text, [r"\in"])
    if len(sides) == 2:
        return _node(sides[1], False)
    if matrix := _MATRIX.fullmatch(text):
        body = matrix[2].removeprefix("{").partition("}")[2] if matrix[1] == "array" else matrix[2]
        rows = [row for row in split(body, [r"\\"])[0] if row.strip()]
        return Items("matrix", tuple(Items("row", tuple(map(_leaf, split(row, "&")[0]))) for row in rows))
    if brackets := _enclosed(text):
        if text.startswith("(") and text.count(r"\pm") == 1 and "," in text:  # (0, \pm 2) is two pairs
            return _any([_single(signed) for signed in _signed(text)])
        return _bracketed(*brackets)
    sides, _ = split(text, "=")
    if len(sides) > 1 and isinstance(value := _node(sides[-1], False), Items):
        return value
    return _relation(text) or _leaf(text)


def _leaf(text: str) -> Node:
    if r"\pm" in text:
        return _any([Leaf(signed.strip().removeprefix("+").lstrip()) for signed in _signed(text)])
    return Leaf(text.strip().rstrip(" .,;:"))


def _signed(text: str) -> list[str]:
    r"""With either sign for `\pm`, and for `\mp` the sign that goes with it."""
    return [text.replace(r"\pm", a).replace(r"\mp", b) for a, b in (("+", "-"), ("-", "+"))]


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Brackets around the whole: the opening one, what is inside, the closing one."""
    tokens = [token[0] for token in _TOKEN.finditer(text)]
    if len(tokens) < 2 or tokens[0] not in _OPEN - {r"\begin"} or tokens[-1] not in _CLOSE:
        return None
    depth = 0
    for index, word in enumerate(tokens):
        depth += (word in _OPEN) - (word in _CLOSE)
        if depth == 0:
            whole = index == len(tokens) - 1
            return (tokens[0], "".join(tokens[1:-1]), tokens[-1]) if whole else None
    return None


def _bracketed(left: str, inside: str, right: str) -> Node:
    parts = [_single(part.strip()) for part in split(inside, ",;")[0] if part.strip()]
    kind = left + right
    if len(parts) == 1 and kind in ("()", "[]", "{}", r"\{\}"):
        return parts[0]
    if kind == "()" and parts:
        return Items("()", tuple(parts))
    if kind in ("[]", "[)", "(]") and len(parts) == 2:
        return Items(kind, tuple(parts))
    if kind in (r"\{\}", "[]", "{}") and parts:
        return _any(parts)
    return _leaf(left + inside + right)


def _relation(text: str) -> Node | None:
    r"""`x > 2`, `1 \le x < 2` and `x \ne 0` as intervals."""
    sides, signs = split(text, [*_FLIPPED, r"\ne"])
    sides = [side.strip() for side in sides]
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        sides, signs = sides[::-1], [_FLIPPED.get(signs[0], signs[0])]
    if len(sides) == 2 and is_name(sides[0]) and not is_name(sides[1]):
        below, above = Leaf(r"-\infty"), Leaf(r"\infty")
        match signs[0]:
            case "<" | r"\le":
                return Items("()" if signs[0] == "<" else "(]", (below, _leaf(sides[1])))
            case ">" | r"\ge":
                return Items("()" if signs[0] == ">" else "[)", (_leaf(sides[1]), above))
        return _any([Items("()", (below, _leaf(sides[1]))), Items("()", (_leaf(sides[1]), above))])
    if len(sides) == 3 and is_name(sides[1]) and signs[0] in _FLIPPED and signs[1] in _FLIPPED:
        if signs[0] in (">", r"\ge"):
            sides, signs = sides[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
        if {*signs} <= {"<", r"\le"}:
            kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
            return Items(kind, (_leaf(sides[0]), _leaf(sides[2])))
    return None
