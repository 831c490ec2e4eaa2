"""Verdicts on an answer: which instructions it follows, strictly and after usual small talk is removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cohort.tasks.ifeval.instructions.registry import INSTRUCTIONS, Arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionResults:
    """Which instructions of a row an answer follows, one entry per instruction in their order.

    `strict` judges the answer itself. `loose` is also true if a shortened variant follows the instruction.
    """

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def check_instructions(names: Sequence[str], arguments: Sequence[Arguments], text: str) -> InstructionResults:
    """Returns which instructions of a row a text follows, strictly and loosely. A blank text follows none.

    `names` are the instructions and `arguments` their arguments, in the same order. An instruction is followed loosely
    if the text, or the text without its asterisks, its first line or its last line, follows it.

    >>> check_instructions(["punctuation:no_comma", "startend:quotation"], [{}, {}], 'Sure:\\n"Yes"')
    InstructionResults(strict=(True, False), loose=(True, True))
    """
    checks = [(INSTRUCTIONS[name].check, kwargs) for name, kwargs in zip(names, arguments, strict=True)]
    strict = [text.strip() != "" and check(text, **kwargs) for check, kwargs in checks]
    # The variants cost up to seven more checks, so they are made only if they can change a verdict.
    variants = [] if all(strict) else [*_make_loose_variants(text)]
    loose = [
        is_followed or any(check(variant, **kwargs) for variant in variants)
        for is_followed, (check, kwargs) in zip(strict, checks, strict=True)
    ]
    return InstructionResults(strict=tuple(strict), loose=tuple(loose))


def _make_loose_variants(text: str) -> Iterator[str]:
    """Yields variants of a text: without its asterisks, its first line, its last line, and all combinations of these.

    Variants without a line have no spaces around them. Leaves out blank variants, repeated ones and the text itself.
    """
    _, _, no_first = text.partition("\n")
    no_last, _, _ = text.rpartition("\n")
    _, _, neither = no_last.partition("\n")
    # dicts instead of sets, to keep the order
    cut = dict.fromkeys((text, no_first.strip(), no_last.strip(), neither.strip()))
    variants = dict.fromkeys((*cut, *(variant.replace("*", "") for variant in cut)))
    return (variant for variant in variants if variant != text and variant.strip())
