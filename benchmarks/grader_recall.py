r"""How the mathematics grader judges the gold answers of the data sets, written as people write them, and spoiled ones.

    COHORT_DATA=FOLDER python benchmarks/grader_recall.py [--rows 3000] [--peer 0.03] [--show 5] [--out results.json]

Every gold answer is rewritten in many ways that mean the same: with dollar signs, names, units, percent signs, commas,
words, other fractions, several boxes. Each should be right. Then it is spoiled: another number, another sign, swapped
coordinates, a missing or a further value. Each should be wrong. The table has one line per way of writing: how many
there are, and how many the grader calls right. --show prints misjudged ones. With --peer, math-verify judges a sample.

These ways of writing and the grader were made together, on these answers. So the table shows what is read and what
broke since, but does not estimate how often the grader is right about a model's answers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from cohort.tasks.base import Task, get_task, load_rows, make_plain_answer
from cohort.tasks.mathematics.cleaning import clean_latex
from cohort.tasks.mathematics.notation import Items, read_structure, split_outside_brackets
from cohort.tasks.mathematics.quantity import read_quantity
from cohort.types import Row

SETS = (
    ("math500", "test"),
    ("aime24", "test"),
    ("amc", "test"),
    ("minerva", "test"),
    ("olympiad", "test"),
    ("math12k", "train"),
)
_FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}")
_INTEGER = re.compile(r"-?\d+")
_THOUSANDS = re.compile(r"\d{4,}")
_DIGITS = re.compile(r"(?<![\d.])\d+")
_TO_UNICODE = {"-": "\u2212", r"\pi": "\u03c0", r"\cdot": "\u00b7", r"\infty": "\u221e", r"\cup": "\u222a"}


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold answer: as it is in the data, cleaned, as values of a list, and the text of its problem.

    `values` has one entry unless the gold is a list without order. `kind` is the kind of `Items`, or "" for one value.
    """

    text: str
    clean: str
    values: tuple[str, ...]
    kind: str
    problem: str

    @property
    def is_number(self) -> bool:
        """Whether the gold answer is one written number."""
        return not self.kind and read_quantity(self.clean) is not None

    @property
    def is_value(self) -> bool:
        """Whether the gold answer is one value with a digit, no equation and no word."""
        return (
            not self.kind
            and re.search(r"\d", self.clean) is not None
            and r"\approx" not in self.clean
            and not re.search(r"=|[a-zA-Z]{3}", re.sub(r"\\[a-zA-Z]+", "", self.clean))
        )


def read_gold(row: Row) -> Gold:
    """Returns the gold answer of a row with its values."""
    clean = clean_latex(row["answer"])
    node = read_structure(row["answer"])
    kind = node.kind if isinstance(node, Items) else ""
    separated = tuple(value.strip() for value in split_outside_brackets(clean, ",;")[0] if value.strip())
    is_list = isinstance(node, Items) and kind == "any" and len(separated) == len(node.items) > 1
    return Gold(row["answer"], clean, separated if is_list else (clean,), kind, row["problem"])


def box(*texts: str) -> list[str]:
    """Returns one completion per text, with the text in a box at its end."""
    return [f"So it is $\\boxed{{{text}}}$." for text in texts]


# ---- ways of writing the same answer. Each returns completions, none where it does not apply.


def rewrite_plainly(gold: Gold) -> list[str]:
    """As it is, cleaned, with dollar signs, a full stop, in bold, and in answer tags."""
    inside = (gold.text, gold.clean, f"${gold.clean}$", f"\\({gold.clean}\\)", f"{gold.clean}.", f" {gold.clean} ")
    return [
        *box(*inside),
        f"**\\boxed{{{gold.clean}}}**",
        f"<answer>{gold.clean}</answer>",
        f"\\[\\boxed{{{gold.clean}}}.\\]",
    ]


def rewrite_with_words(gold: Gold) -> list[str]:
    """After "The answer is", and a number in \\text or in bold."""
    texts = [
        f"\\text{{The answer is }} {gold.clean}",
        f"\\text{{Answer: }} {gold.clean}",
        f"The answer is {gold.clean}",
    ]
    if gold.is_number and "\\" not in gold.clean:
        texts += [f"\\text{{{gold.clean}}}", f"\\mathbf{{{gold.clean}}}", f"\\textbf{{{gold.clean}}}"]
    return box(*texts)


def rewrite_with_name(gold: Gold) -> list[str]:
    """After a name and an equals sign."""
    names = (
        "x",
        "f(x)",
        "a_1",
        "AB",
        "|AB|",
        r"\angle ABC",
        r"\text{Area}",
        r"\overline{AB}",
        "[ABC]",
        r"\frac{AB}{CD}",
    )
    return box(*(f"{name} = {gold.clean}" for name in names)) if gold.is_value else []


def rewrite_with_unit(gold: Gold) -> list[str]:
    """With a unit after a number."""
    units = (
        r"\text{ cm}",
        r"\text{ cm}^2",
        " cm",
        r"\,\text{cm}^2",
        r"\text{ units}",
        r"\ \text{square units}",
        " units",
    )
    more = (
        r"\text{ square feet}",
        r"\,\mathrm{m}",
        r"~\mathrm{km/h}",
        r"\text{ ways}",
        " square units",
        r"\text{ m/s}",
    )
    return box(*(gold.clean + unit for unit in units + more)) if gold.is_number and "%" not in gold.clean else []


def rewrite_as_asked(gold: Gold) -> list[str]:
    """With a sign of degrees, dollars or percent, if the problem mentions it."""
    if not gold.is_number:
        return []
    number = gold.clean.removesuffix("%").strip()
    texts: list[str] = []
    if re.search(r"degree|angle|\\circ", gold.problem):
        texts += [
            number + sign for sign in (r"^\circ", r"^{\circ}", " degrees", r"\text{ degrees}", "\u00b0", r"\degree")
        ]
    if re.search(r"dollar|\\\$", gold.problem):
        texts += [rf"\${number}", f"${number}", f"{number} dollars", rf"{number}\text{{ dollars}}"]
        texts += [rf"\text{{\${number}}}"] if "\\" not in number else []
    if re.search(r"%|percent", gold.problem) or gold.clean.endswith("%"):
        signs = ("%", r"\%", r" \%", " percent", r"\text{ percent}", " per cent", " pct", r"\text{ pct}", r"\,\%")
        texts += [number + sign for sign in signs]
    return box(*texts)


def rewrite_digits(gold: Gold) -> list[str]:
    """A whole number with separators of thousands, with a zero after the point, or with a plus sign."""
    if not gold.is_number or not _INTEGER.fullmatch(gold.clean):
        return []
    texts = [f"{gold.clean}.0", f"{gold.clean}.00", f"{gold.clean}.", gold.clean.replace("-", "\u2212")]
    if _THOUSANDS.search(gold.clean):
        texts += [
            f"{int(gold.clean):,}".replace(",", comma) for comma in (",", "{,}", r"\,", r",\!", " ", r"\ ", "\u202f")
        ]
    return box(*texts)


def rewrite_fractions(gold: Gold) -> list[str]:
    """Fractions of another size, without braces, inside fractions, with a slash, as a decimal or mixed number."""
    if not _FRACTION.search(gold.clean):
        return []
    texts = [gold.clean.replace(r"\frac", size) for size in (r"\dfrac", r"\tfrac", r"\cfrac", r"\frac ")]
    texts.append(re.sub(r"\\frac\{(\d)\}\{(\w)\}", r"\\frac\1\2", gold.clean))
    texts.append(re.sub(r"\\frac\{(\d)\}", r"\\frac\1", gold.clean))
    texts.append(re.sub(r"\\frac\{(\d+)\}\{(\d)\}(?!\d)", r"\\frac{\1}\2", gold.clean))
    texts.append(_FRACTION.sub(r"\1\\frac{\\frac{\2}{\3}}{1}", gold.clean))
    texts.append(_FRACTION.sub(r"\1\\dfrac{1}{\\tfrac{\3}{\2}}", gold.clean))
    if whole := _FRACTION.fullmatch(gold.clean):
        sign, above, below = whole.groups()
        value = Fraction(int(above), int(below))
        texts += [f"{sign}{above}/{below}", f"{sign}({above}/{below})", rf"\frac{{{sign}{above}}}{{{below}}}"]
        texts += [rf"{sign}\left(\frac{{{above}}}{{{below}}}\right)", f"{sign} {above} / {below}"]
        if value > 1 and value.denominator > 1:
            texts.append(rf"{sign}{int(value)}\frac{{{value.numerator % value.denominator}}}{{{value.denominator}}}")
        if 10**6 % value.denominator == 0:
            texts.append(f"{sign}{float(value)}")
    return box(*texts)


def rewrite_spelling(gold: Gold) -> list[str]:
    """With other spaces, brackets that grow, roots without braces, signs of Unicode, and without LaTeX."""
    unicode = re.sub(r"\\sqrt\{(\d+)\}", "\u221a\\1", gold.clean)
    for command, sign in _TO_UNICODE.items():
        unicode = unicode.replace(command, sign)
    growing = gold.clean.replace("(", r"\left(").replace(")", r"\right)")
    plain = re.sub(r"\\sqrt\{(\d+)\}", r"sqrt(\1)", gold.clean).replace(r"\pi", "pi").replace(r"\cdot", "*")
    texts = [unicode, re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", gold.clean), plain]
    texts += [growing] if gold.clean.count("(") == gold.clean.count(")") else []
    if not gold.is_number:
        texts += [re.sub(r"([+=,])", r" \1 ", gold.clean), gold.clean.replace(",", r",\ ")]
    return box(*texts)


def rewrite_pair(gold: Gold) -> list[str]:
    """The coordinates of a point with their names, or in boxes of their own; a matrix in other brackets."""
    texts = [gold.clean.replace("pmatrix", "bmatrix"), gold.clean.replace("&", " & ")] if gold.kind == "matrix" else []
    if gold.kind != "()" or gold.clean[:1] != "(" or not 2 <= len(parts := split_pair(gold)) <= 3:
        return box(*texts)
    names = ("x", "y", "z")[: len(parts)]
    equations = [f"{name} = {part}" for name, part in zip(names, parts, strict=True)]
    boxes = [f"${name} = \\boxed{{{part}}}$" for name, part in zip(names, parts, strict=True)]
    texts = [f"({', '.join(names)}) = {gold.clean}", ", ".join(equations), r",\quad ".join(equations)]
    return [*box(*texts), f"So {', '.join(boxes)}.", f"So {', '.join(boxes[:-1])} and {boxes[-1]}."]


def split_pair(gold: Gold) -> list[str]:
    """Returns the coordinates of a gold answer in brackets."""
    return [part.strip() for part in split_outside_brackets(gold.clean[1:-1], ",")[0]]


def rewrite_list(gold: Gold) -> list[str]:
    """A list in another order, with words between its values, in braces, with names, and in several boxes."""
    if len(gold.values) < 2:
        return []
    values = gold.values[::-1]
    *first, last = values
    joined = ", ".join(values)
    texts = [joined, "; ".join(values), rf"\{{{joined}\}}", rf"{', '.join(first)} \text{{ and }} {last}"]
    texts += [
        rf"{', '.join(first)}, \text{{ and }} {last}",
        f"{', '.join(first)} and {last}",
        rf"\left\{{{joined}\right\}}",
    ]
    texts += [rf"{', '.join(first)} \text{{ or }} {last}", rf"{', '.join(first)}\quad\text{{and}}\quad {last}"]
    if not any("=" in value for value in values):
        texts += [", ".join(f"x = {value}" for value in values), rf"x \in \{{{joined}\}}"]
        texts += [", ".join(f"x_{number} = {value}" for number, value in enumerate(values, 1))]
    boxes = [f"\\boxed{{{value}}}" for value in values]
    several = [", ".join(boxes), f"{', '.join(boxes[:-1])} and {boxes[-1]}", r" \quad \text{and} \quad ".join(boxes)]
    dollars = [f"${each}$" for each in boxes]
    return [
        *box(*texts),
        *several,
        f"They are {', '.join(dollars[:-1])}, and {dollars[-1]}.",
        f"$${'; '.join(boxes)}$$",
    ]


def rewrite_words(gold: Gold) -> list[str]:
    """A word or a letter in \\text, in bold, in brackets, in small and large letters."""
    if (
        gold.kind
        or not re.fullmatch(r"\(?[A-Za-z][A-Za-z ]*\)?", gold.clean)
        or (gold.clean.islower() and len(gold.clean) < 3)
    ):
        return []
    word = gold.clean.strip("()")
    texts = [word, rf"\text{{{word}}}", rf"\textbf{{{word}}}", rf"\mathrm{{{word}}}", f"{word}.", rf"\text{{{word}.}}"]
    if len(word) == 1:
        return box(*texts, f"({word})", rf"\textbf{{({word})}}", rf"\text{{({word})}}")
    return box(*texts, word.lower(), word.capitalize())


def rewrite_interval(gold: Gold) -> list[str]:
    """An interval as an inequality, or with a name."""
    match = re.fullmatch(r"([\[(])([^,]+),([^,]+)([\])])", gold.clean)
    if match is None or gold.kind not in ("[]", "[)", "(]"):
        return []
    left, low, high, right = match.groups()
    below, above = ("<" if left == "(" else r"\le"), ("<" if right == ")" else r"\leq")
    texts = [f"x \\in {gold.clean}"]
    if low.strip() == r"-\infty":
        texts.append(f"x {above} {high}")
    elif high.strip() == r"\infty":
        texts.append(f"{low} {below} x")
    else:
        texts.append(f"{low} {below} x {above} {high}")
    return box(*texts)


# ---- ways of spoiling it


def spoil_number(gold: Gold) -> list[str]:
    """One number in it larger by one, with a digit more, or with its digits turned round."""
    texts: list[str] = []
    # Of an answer with an approximation only the exact part is read.
    for number in _DIGITS.finditer(gold.clean if r"\approx" not in gold.clean else ""):
        digits = number[0]
        others = {str(int(digits) + 1), digits + "1", str(int(digits) + 10), digits[::-1].lstrip("0") or "7"}
        for other in sorted(others - {digits, str(int(digits))}):
            texts.append(gold.clean[: number.start()] + other + gold.clean[number.end() :])
    return box(*texts[:12])


def spoil_sign(gold: Gold) -> list[str]:
    """Another sign of the whole or of one term."""
    texts = [
        gold.clean[: m.start()] + "+-"[m[0] == "+"] + gold.clean[m.end() :] for m in re.finditer(r"[-+]", gold.clean)
    ]
    if gold.is_value and re.search(r"[1-9a-z]", gold.clean) and r"\pm" not in gold.clean:
        texts.append(gold.clean[1:] if re.fullmatch(r"-[^-+]*", gold.clean) else f"-({gold.clean})")
    return box(*texts)


def spoil_order(gold: Gold) -> list[str]:
    """The coordinates of a pair swapped, or a fraction upside down."""
    if gold.kind in ("()", "[]", "[)", "(]") and gold.clean[:1] in "([" and gold.clean[-1:] in ")]":
        parts = split_pair(gold)
        turned = parts[1:] + parts[:1]
        if turned != parts:
            return box(f"{gold.clean[0]}{', '.join(turned)}{gold.clean[-1]}")
    whole = _FRACTION.fullmatch(gold.clean)
    return (
        box(f"{whole[1]}\\frac{{{whole[3]}}}{{{whole[2]}}}") if whole and whole[2] != whole[3] and int(whole[2]) else []
    )


def spoil_list(gold: Gold) -> list[str]:
    """A value left out, a further one, one twice; a second guess beside a single value; in one box and in several."""
    if len(gold.values) > 1:
        lists = [gold.values[1:], gold.values[:-1], (*gold.values, "12345"), (*gold.values[:-1], gold.values[0])]
        lists = [values for values in lists if sorted(values) != sorted(gold.values)]
    elif not gold.kind and gold.is_value:
        lists = [(gold.clean, "12345"), ("12345", gold.clean)]
    else:
        return []
    several = [", ".join(f"$\\boxed{{{value}}}$" for value in values) for values in lists]
    return [*box(*(", ".join(values) for values in lists)), *several]


def spoil_brackets(gold: Gold) -> list[str]:
    """An interval with another bracket at one end."""
    if gold.kind not in ("[]", "[)", "(]") or gold.clean[:1] not in "([" or gold.clean[-1:] not in ")]":
        return []
    turned = {"(": "[", "[": "(", ")": "]", "]": ")"}
    return box(turned[gold.clean[0]] + gold.clean[1:], gold.clean[:-1] + turned[gold.clean[-1]])


REWRITINGS: tuple[Callable[[Gold], list[str]], ...] = (
    rewrite_plainly,
    rewrite_with_words,
    rewrite_with_name,
    rewrite_with_unit,
    rewrite_as_asked,
    rewrite_digits,
    rewrite_fractions,
    rewrite_spelling,
    rewrite_list,
    rewrite_pair,
    rewrite_words,
    rewrite_interval,
)
SPOILINGS: tuple[Callable[[Gold], list[str]], ...] = (
    spoil_number,
    spoil_sign,
    spoil_order,
    spoil_list,
    spoil_brackets,
)


@dataclass(kw_only=True)
class Count:
    """How many answers of one way of writing were judged, and how many are right to the grader and to math-verify."""

    is_right: bool
    num_answers: int = 0
    num_accepted: int = 0
    num_peer_answers: int = 0
    num_peer_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Misjudged:
    """An answer whose verdict is not the expected one."""

    way: str
    gold: str
    completion: str
    reason: str


def generate_cases(golds: list[Gold]) -> Iterator[tuple[str, bool, Gold, str]]:
    """Yields the name of the way of writing, whether the answer is right, the gold answer, and the completion."""
    for gold in golds:
        for ways, is_right in ((REWRITINGS, True), (SPOILINGS, False)):
            for way in ways:
                for completion in dict.fromkeys(way(gold)):
                    yield way.__name__, is_right, gold, completion


def accepts_by_math_verify(gold: Gold, completion: str) -> bool:
    """Returns whether math-verify, as it is set by default, calls a completion right."""
    from math_verify import parse, verify

    try:
        return bool(verify(parse(f"\\boxed{{{gold.text}}}"), parse(completion)))
    # It raises every kind of exception for text that it cannot read.
    except Exception:
        return False


def load_golds(max_rows: int, seed: int = 0) -> list[Gold]:
    """Returns at most `max_rows` gold answers of all data sets, drawn at random; answers that are no number first.

    Equal answers to different problems are left out, since most are small numbers.
    """
    golds: dict[str, Gold] = {}
    for name, split in SETS:
        for row in load_rows(get_task(name)(), split):
            golds.setdefault(row["answer"], read_gold(row))
    shuffled = random.Random(seed).sample([*golds.values()], len(golds))
    return sorted(shuffled, key=lambda gold: gold.is_number)[:max_rows]


def judge(task: Task, golds: list[Gold], peer_share: float) -> tuple[dict[str, Count], list[Misjudged], float]:
    """Returns counts per way of writing, the misjudged answers, and the seconds that the grader took per answer.

    `peer_share` is the share of answers that math-verify judges too.
    """
    counts: dict[str, Count] = {}
    misjudged: list[Misjudged] = []
    chosen = random.Random(1)
    seconds = 0.0
    for way, is_right, gold, completion in generate_cases(golds):
        count = counts.setdefault(way, Count(is_right=is_right))
        row = {"id": "0", "problem": gold.problem, "answer": gold.text}
        begin = time.process_time()
        verdict = task.score(row, make_plain_answer(completion))
        seconds += time.process_time() - begin
        accepted = bool(verdict.parts["correct"])
        count.num_answers += 1
        count.num_accepted += accepted
        if accepted != is_right:
            misjudged.append(Misjudged(way, gold.text, completion, verdict.reason))
        if chosen.random() < peer_share:
            count.num_peer_answers += 1
            count.num_peer_accepted += accepts_by_math_verify(gold, completion)
    return counts, misjudged, seconds / max(1, sum(count.num_answers for count in counts.values()))


def format_table(counts: dict[str, Count]) -> str:
    """Returns a Markdown table with one line per way of writing."""
    lines = [
        "| way of writing | should be | answers | called right | math-verify calls right |",
        "|---|---|---:|---:|---:|",
    ]
    for way, count in counts.items():
        peer = f"{count.num_peer_accepted} of {count.num_peer_answers}" if count.num_peer_answers else ""
        share = f"{count.num_accepted} ({count.num_accepted / count.num_answers:.1%})"
        lines.append(f"| {way} | {'right' if count.is_right else 'wrong'} | {count.num_answers} | {share} | {peer} |")
    return "\n".join(lines)


def main() -> None:
    """Reads the flags, judges all answers, and prints the table, the time, and examples of misjudged answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="at most so many gold answers")
    parser.add_argument("--peer", type=float, default=0.0, help="share of the answers that math-verify judges too")
    parser.add_argument("--show", type=int, default=0, help="print so many misjudged answers per way of writing")
    parser.add_argument("--out", type=Path, help="write counts as JSON")
    flags = parser.parse_args()
    counts, misjudged, seconds = judge(get_task("math500")(), load_golds(flags.rows), flags.peer)
    print(format_table(counts))
    print(f"\n{seconds * 1e6:.0f} microseconds per answer")
    for way in counts:
        for wrong in [each for each in misjudged if each.way == way][: flags.show]:
            print(f"{way}: {wrong.gold}  <-  {wrong.completion}  ({wrong.reason or 'called right'})")
    if flags.out:
        flags.out.write_text(json.dumps({way: asdict(count) for way, count in counts.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
