r"""Cleaning of the LaTeX of an answer: one spelling for what can be written in several ways.

Every rule is a single pass, and `notation` gives it at most `MAX_CHARS` characters.
"""

from __future__ import annotations

import re
import unicodedata

_UNICODE_TO_LATEX = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2010\u2011", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\t\r\n", " ")
    | dict.fromkeys("\u00b7\u22c5", r"\cdot ")
    | {"\u00d7": r"\times ", "\u00f7": "/", "\u2044": "/", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u221a": r"\sqrt "}
    | {"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u222a": r"\cup ", "\u2208": r"\in ", "\u2248": r"\approx "}
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u03b8": r"\theta ", "\u2205": r"\emptyset "}
    | {"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}"}
    | {"\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}"}
    # signs of double width, which Chinese text has
    | {"\uff0c": ",", "\uff1b": ";", "\uff1a": ":", "\uff1d": "=", "\uff05": "%", "\uff08": "(", "\uff09": ")"}
)
_RAISED_DIGITS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_LOWERED_DIGITS = re.compile("[\u2080-\u2089]+")
_ROOT_SIGN = re.compile(r"\u221a\s*(?:(\d+)|\(([^()]*)\))", re.ASCII)
_ANSWER_IS = r"(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)? ?:?"
# Pairs of a pattern and its replacement, applied in this order: later patterns rely on the spelling of earlier ones.
_CLEANING_RULES = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        # extra space between the rows of a matrix
        (r"\\\\\[[0-9.]+ ?[a-z]{2}\]", r"\\\\"),
        # dollar signs, and delimiters of mathematics mode
        (r"\\?\$|(?<!\\)\\[()\[\]]", ""),
        # bold and code marks of Markdown, but not ** between digits: 1**2 is not 12
        (r"(?<![\w)}])(?:\*\*|`)|(?:\*\*|`)(?![\w({\\])", ""),
        # separators of thousands in LaTeX
        (r"(?<=\d)(?:,\s*\\!\s*|\{,\}|\\[,!]\s*)(?=\d{3}(?!\d))", ""),  # 10,\!080
        # sizes of brackets and text, and spaces
        (r"\\right\s*\.|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle)(?![a-zA-Z])|(?<!\\)\\!", ""),
        (r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\s+", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        # the letter of a choice before its value, as in (A) 5; two choices, as in (A) (B), stay
        (r"^ *\\text(?:bf)? ?\{ ?\([A-E]\) ?\} ?(?=[-\d\\])(?!\\(?:text|math|mbox))", ""),
        # "The answer is" before the value, and a condition ("for all x", "where x > 0") after it
        (rf"^ *\\text(?:bf|it|rm)? ?\{{ ?{_ANSWER_IS} ?\}} ?:? ?(?=\S)", ""),
        (rf"^ *{_ANSWER_IS}(?![a-zA-Z]) ?(?=\S)", ""),
        (r"(?<=\S),? ?\\(?:text|mbox) ?\{[ ,]*(?:for (?:all|every)|where)(?![a-zA-Z]).*", ""),
        # bold and colour
        (r"\\(?:boldsymbol|(?:text)?color ?\{\w+\}) ?(?:\{([^{}]*)\})?", r"\1"),
        # one spelling for brackets, relations and the empty set
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
        (r"((?:\\frac|\})\{\d{1,3}),(\d{3})(?=\})", r"\1\2"),  # \frac{20,000}{\pi}
        # brackets around a number or its base: (52)_8, 52_{(8)}
        (r"\(([0-9A-Z]+)\)(?=_)", r"\1"),
        (r"_\{\(([0-9]+)\)\}", r"_{\1}"),
        (r"\\?%|(?<![a-zA-Z\\])(?:[Pp]er ?cent(?:age)?|[Pp]ct\.?)(?![a-zA-Z])", "%"),
        (r"(?<![\w\\.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w|\.\d)", r"\1\\times 10^{\2}"),  # 4.5e33
        # roots and constants without LaTeX: 3sqrt(2), 2pi
        (r"(?<!\\)sqrt ?(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])infinity(?![a-zA-Z])", r"\\infty "),
        # minutes and seconds of arc after a digit, and derivatives after a letter
        (r"(?<=\d)(?:\^\{?\s*(?:\\prime\s*)+\}?|'{1,2})", ""),
        (r"(?<![a-zA-Z]{2})([a-zA-Z])''(?![a-zA-Z'])", r"\1^{\\prime \\prime}"),
        (r"(?<![a-zA-Z]{2})([a-zA-Z])'(?![a-zA-Z'])", r"\1^{\\prime}"),
    )
)
_TEXT_MACRO = re.compile(
    r"\\(text|mbox|hbox|math|operatorname)(?:bf|it|rm|sf|tt|normal)?\s*"
    r"\{((?:[^{}]|\^\{-?\d\})*)\}(\^\{?-?\d+\}?)?"
)
_AND = re.compile(r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
_AM_OR_PM = re.compile(r"\s*[ap]\.?\s?m\.?\s*", re.IGNORECASE)
_UNIT_FACTOR = r"(?:[mgshdACFJKLNTVW\u00c5]|[A-Za-z]{2,})(?:\^?[23]|\^\{-?[1-3]\})?"
# \D keeps numbers out: a unit that is dropped must not contain a value
_UNIT = re.compile(rf"\D*[A-Za-z]{{2}}[23]?\D*|\s*{_UNIT_FACTOR}(?:[\s/]+{_UNIT_FACTOR})*\s*")
# Words that change a number and so are no units. "cm squared" is a unit, but "5 squared" is not 5.
_NUMBER_WORD = re.compile(
    r"\s*(?:squared|cubed)\b|.*\b(?:(?:hundred|thousand|million|billion|trillion|dozen)s?|pi|factorial|plus|minus|"
    r"half|twice|one|two|three|four|five|six|seven|eight|nine|ten)\b",
    re.IGNORECASE,
)
# a fraction or root without braces around an argument, or with braces inside the first one
_OMITTED_BRACES = re.compile(r"\\frac(?![a-zA-Z])(?!\{[^{}]*\}\{)|\\sqrt(?![a-zA-Z])(?!(?:\[[^\[\]]*\])?\{)")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
# Levels of fractions and roots inside one another whose braces are added.
MAX_NESTED_ARGUMENTS = 16
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREE_PATTERN = r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z]))\s*(?:[CF](?![a-zA-Z]))?"
_DEGREE_SIGN, _ANGLE = re.compile(_DEGREE_PATTERN), re.compile(rf"(\d+(?:\.\d+)?){_DEGREE_PATTERN}")


def clean_latex(text: str) -> str:
    r"""Returns the text with one spelling for common LaTeX that can be written in several ways.

    Drops dollar signs, sizes, spacing, degree signs, units in \text{...} (a bare "5 cm" stays), "The answer is" at the
    beginning, and punctuation at both ends. Adds omitted braces of fractions and roots. "and" and "or" become commas.
    Degrees under a sine or the like become radians.

    >>> clean_latex(r"$\left(3,\,\dfrac12\right)$.")
    '(3, \\frac{1}{2})'
    >>> clean_latex(r"15 \mbox{ cm}^2"), clean_latex(r"\text{(C)}"), clean_latex(r"90^{\circ}")
    ('15', '(C)', '90')
    """
    if not text.isascii():
        text = _ROOT_SIGN.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
        text = _RAISED_DIGITS.sub(lambda digits: _make_script("^", digits[0]), text)
        text = _LOWERED_DIGITS.sub(lambda digits: _make_script("_", digits[0]), text)
    text = text.translate(_UNICODE_TO_LATEX)
    for pattern, spelling in _CLEANING_RULES:
        text = pattern.sub(spelling, text)
    text = _BraceWriter(text).write() if _OMITTED_BRACES.search(text) else text
    # Text macros may be nested; each pass replaces the innermost ones.
    for _ in range(3):
        text = _TEXT_MACRO.sub(_replace_text_macro, text)
    text = _AND.sub(",", text)
    # Degrees are dropped, except under a sine or cosine: there they are converted, since sin(30) means radians.
    if _TRIGONOMETRIC.search(text):
        text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    text = _DEGREE_SIGN.sub(" ", text)
    return text.lstrip(" ,;:").rstrip(" .,;:")


def _replace_text_macro(macro_match: re.Match[str]) -> str:
    r"""Returns the replacement of one \text{...} macro: a space for a unit, otherwise its words and its power.

    Words are a unit only if they follow a value and nothing of that value comes after them. Words that change a number
    (million, squared), a.m. and p.m., and \operatorname are never a unit.
    """
    macro, words, power = macro_match.groups()
    before = macro_match.string[: macro_match.start()].rstrip()
    after = macro_match.string[macro_match.end() :].lstrip()
    ends_value = not after or after.startswith(
        (",", ";", ".", ")", "]", "}", "&", r"\text", r"\mbox", r"\mathrm", r"\}", r"\\")
    )
    follows_value = before[-1:].isalnum() or before.endswith(("}", ")", "%", "!"))
    is_other_word = _AM_OR_PM.fullmatch(words) or _NUMBER_WORD.match(words)
    is_unit = macro != "operatorname" and _UNIT.fullmatch(words) and not is_other_word
    if is_unit and follows_value and ends_value and not _AND.search(words):
        return " "
    return words + (power or "")


def _make_script(sign: str, digits: str) -> str:
    """Returns raised or lowered digits of Unicode as LaTeX, after ^ or _: one digit as it is, several in braces."""
    plain = "".join(str(unicodedata.digit(digit)) for digit in digits)
    return sign + (plain if len(plain) == 1 else f"{{{plain}}}")


class _BraceWriter:
    r"""Adds the braces that are left out around arguments of \frac and \sqrt, as in \frac12, \frac{1}2, \sqrt\frac12.

    Arguments may be nested up to a limit. A command whose arguments cannot be found stays as it is. The work grows with
    the length of the text: no token is read twice.
    """

    def __init__(self, text: str) -> None:
        self.tokens = _TOKEN.findall(text)
        self.closing: dict[int, int] = {}
        open_braces: list[int] = []
        for index, token in enumerate(self.tokens):
            if token == "{":
                open_braces.append(index)
            elif token == "}" and open_braces:
                self.closing[open_braces.pop()] = index

    def write(self) -> str:
        """Returns the text with braces."""
        return self._render(0, len(self.tokens), 0)

    def _render(self, start: int, stop: int, depth: int) -> str:
        """Returns the tokens from `start` to before `stop` as text with braces; `depth` counts nested arguments."""
        pieces: list[str] = []
        while start < stop:
            text, start = self._read_term(start, stop, depth)
            pieces.append(text)
        return "".join(pieces)

    def _read_term(self, start: int, stop: int, depth: int) -> tuple[str, int]:
        """Returns the text of one token, or of one command with its arguments, and the index of the next token."""
        command = self.tokens[start]
        if command not in (r"\frac", r"\sqrt") or depth > MAX_NESTED_ARGUMENTS:
            return command, start + 1
        start += 1
        text = command
        if command == r"\sqrt" and start < stop and self.tokens[start] == "[" and "]" in self.tokens[start:stop]:
            end = self.tokens.index("]", start, stop) + 1
            text, start = text + "".join(self.tokens[start:end]), end
        for _ in range(2 if command == r"\frac" else 1):
            argument, end = self._read_argument(start, stop, depth + 1)
            if argument is None:
                return text, start
            text, start = f"{text}{{{argument}}}", end
        return text, start

    def _read_argument(self, start: int, stop: int, depth: int) -> tuple[str | None, int]:
        """Returns the text of an argument without its braces, and the index of the token after it.

        The text is None if there is no argument: a group in braces, a letter or digit, or a command.
        """
        while start < stop and self.tokens[start] == " ":
            start += 1
        if start >= stop:
            return None, start
        token = self.tokens[start]
        if token == "{" and self.closing.get(start, stop) < stop:
            end = self.closing[start]
            return self._render(start + 1, end, depth), end + 1
        if token.isalnum() or re.fullmatch(r"\\[a-zA-Z]+", token):
            return self._read_term(start, stop, depth)
        return None, start
