"""Which instructions an answer follows: by the letter, and after the usual small talk was taken away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cohort.tasks.ifeval.instructions.registry import INSTRUCTIONS, Arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """Which instructions of a row an answer follows, in their order: by the letter, and with some leniency."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def follow(names: Sequence[str], arguments: Sequence[Arguments], text: str) -> Followed:
    """Check a text against a row's instructions. An empty text follows none.

    >>> follow(["punctuation:no_comma", "startend:quotation"], [{}, {}], 'Sure:\\n"Yes"')
    Followed(strict=(True, False), loose=(True, True))
    """
    checks = [(INSTRUCTIONS[name].check, given) for name, given in zip(names, arguments, strict=True)]
    strict = [text.strip() != "" and check(text, **given) for check, given in checks]
    relaxed = [] if all(strict) else [*_relaxed(text)]
    loose = [
        is_followed or any(check(other, **given) for other in relaxed)
        for is_followed, (check, given) in zip(strict, checks, strict=True)
    ]
    return Followed(strict=tuple(strict), loose=tuple(loose))


def _relaxed(text: str) -> Iterator[str]:
    """The text without its asterisks, its first line, its last line, or several of these."""
    _, _, no_first = text.partition("\n")
    no_last, _, _ = text.rpartition("\n")
    _, _, neither = no_last.partition("\n")
    cut = dict.fromkeys((text, no_first.strip(), no_last.strip(), neither.strip()))
    others = dict.fromkeys((*cut, *(other.replace("*", "") for other in cut)))
    return (other for other in others if other != text and other.strip())
