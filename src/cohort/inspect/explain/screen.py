"""A report on a terminal, or as plain text where there is none: what colour says is also said in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cohort.inspect.explain.records import Fact, GroupLine, GroupReport, Report, SampleReport, Token
from cohort.inspect.explain.words import signed
from cohort.logs.escape import one_line, visible
from cohort.types import Provenance

CALM, HEAD, UP, DOWN, HELD = "bright_black", "bold cyan", "green", "red", "yellow"
_MARKS = {Provenance.PROMPT: CALM, Provenance.ENVIRONMENT: "blue", Provenance.FORCED: "magenta"}
_TINTS = {1: ((232, 245, 233), (76, 175, 80)), -1: ((255, 235, 238), (239, 83, 80))}  # faint and full: up, down
_MOST_GROUPS = 20
_LABEL = 15
_PROMPT_LIMIT = 4000  # tokens


def show(report: Report, file: IO[str] | None = None) -> None:
    """Print it. Lines are as long as they are: a terminal folds them, a pipe gets them whole."""
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    for line in _lines(report, coloured=console.is_terminal and not console.no_color):
        console.print(line, soft_wrap=True)


def _lines(report: Report, coloured: bool) -> Iterable[Text]:
    yield Text(one_line(report.title), style=HEAD)
    yield from _facts(report.facts)
    for note in report.notes:
        yield Text.assemble(("  ! ", HELD), one_line(note, 1000))
    yield Text()
    yield from _groups(report.groups, report.group.line.index)
    yield Text()
    yield from _group(report.group, coloured)


def _facts(facts: Sequence[Fact]) -> Iterable[Text]:
    for label, value in facts:
        yield Text.assemble("  ", (f"{label:<{_LABEL}}", CALM), " ", one_line(value, 1000))


def _groups(lines: Sequence[GroupLine], chosen: int) -> Iterable[Text]:
    """The groups by their share of the signal; the tail of a long list is summed up."""
    ordered = sorted(lines, key=lambda line: -line.share)
    rows = [["group", "share", "reward", "prompt", ""]]
    for line in ordered[:_MOST_GROUPS]:
        mark = "<- below" if line.index == chosen else ""
        fate = "  ".join(x for x in (one_line(line.note), mark) if x)
        rows.append([str(line.index), f"{line.share:.1%}", line.rewards, one_line(line.prompt_id, 40), fate])
    widths = [max(cell_len(row[i]) for row in rows) for i in range(4)]
    for number, row in enumerate(rows):
        cells = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=False)]
        style = CALM if number == 0 else "bold" if row[0] == str(chosen) else ""
        yield Text("  " + "  ".join([*cells, row[4]]).rstrip(), style=style)
    if rest := ordered[_MOST_GROUPS:]:
        yield Text(f"  and {len(rest)} more with {sum(line.share for line in rest):.1%} together", style=CALM)


def _group(group: GroupReport, coloured: bool) -> Iterable[Text]:
    yield Text(
        f"group {group.line.index} · {one_line(group.line.prompt_id)} · {group.line.share:.1%} of the signal",
        style=HEAD,
    )
    yield from _facts(group.facts)
    yield from _tokens(group.prompt[:_PROMPT_LIMIT], 0.0)
    if len(group.prompt) > _PROMPT_LIMIT:
        yield Text(f"  ... {len(group.prompt) - _PROMPT_LIMIT} more prompt tokens", style=CALM)
    if coloured:
        yield _legend()
    for sample in group.samples:
        yield Text()
        yield _heading(sample)
        yield from _facts(sample.facts)
        yield from _tokens(sample.tokens, group.strongest)


def _heading(sample: SampleReport) -> Text:
    head = Text.assemble((f"sample {sample.index}", "bold"), f" · {sample.share:.1%} of the signal · ")
    if sample.fate:
        head.append(f"out of the loss: {one_line(sample.fate)}", style=HELD)
    elif sample.push == 0:
        head.append("no push", style=HELD)
    else:
        head.append(
            f"{'up' if sample.push > 0 else 'down'} {signed(sample.push)}", style=UP if sample.push > 0 else DOWN
        )
    return head


def _legend() -> Text:
    parts: list[str | tuple[str, str]] = ["  colours: "]
    for kind, style in _MARKS.items():
        parts += [(kind.name.lower(), style), ", "]
    for words, push in (("pushed up", 1.0), ("a little", 0.1), ("pushed down", -1.0), ("a little", -0.1)):
        parts += [(words, _tint(push)), " "]
    return Text.assemble(*parts, ("no gradient", f"{HELD} underline"))


def _tokens(tokens: Sequence[Token], strongest: float) -> Iterable[Text]:
    """A line for every stretch of one provenance and every line in it, behind a margin no text can imitate."""
    for provenance, stretch in groupby(tokens, key=lambda t: t.provenance):
        text = Text()
        for token in stretch:
            text.append(visible(token.text).replace("\n", "⏎\n"), style=_style(token, strongest))
        label = Provenance(provenance).name.lower()
        for line in text.split("\n"):
            yield Text.assemble("  ", (f"{label:<{_LABEL}}", CALM), (" │ ", CALM), line)
            label = ""


def _style(token: Token, strongest: float) -> str:
    if token.idle:
        return f"{HELD} underline"
    if token.push and strongest:
        return _tint(token.push / strongest)
    return _MARKS.get(Provenance(token.provenance), "")


def _tint(push: float) -> str:
    """Black on a colour between faint and full, for a push between -1 and 1."""
    faint, full = _TINTS[1 if push > 0 else -1]
    mixed = [round(a + (b - a) * min(1.0, abs(push))) for a, b in zip(faint, full, strict=True)]
    return "#000000 on #{:02x}{:02x}{:02x}".format(*mixed)
