"""A report on a terminal or, where there is none, as plain text. Everything shown by colour is also said in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cohort.inspect.explain.records import Fact, GroupLine, GroupReport, Report, ReportPhrases, SampleReport, ShownToken
from cohort.inspect.explain.words import format_share, format_signed
from cohort.logs.console import make_console
from cohort.logs.escape import escape_line, escape_text
from cohort.types import Provenance

CALM = "bright_black"
HEAD = "bold cyan"
UP = "green"
DOWN = "red"
LIMITED = "yellow"  # out of the loss, or without a gradient
_MARKS = {Provenance.PROMPT: CALM, Provenance.ENVIRONMENT: "blue", Provenance.FORCED: "magenta"}
# Faint and full background (red, green, blue) of tokens that are pushed up (1) and down (-1).
_TINTS = {1: ((232, 245, 233), (76, 175, 80)), -1: ((255, 235, 238), (239, 83, 80))}
_MAX_GROUPS = 20  # lines of the overview
_LABEL_WIDTH = 15  # characters
_MAX_PROMPT_TOKENS = 4000
_MIN_ROOM = 24  # columns that a text needs beside its label; with less it is left to the terminal to break
_LEAD = re.compile(r"  .{15} │ | *\S(?:\S| \S)* {2,}(?=\S)| *(?:! )?")  # what stands before a text


def print_report(report: Report, file: IO[str] | None = None) -> None:
    """Prints a report to `file`; None = standard output. Uses colours on a terminal only.

    On a terminal, lines that do not fit are broken between words, those about facts below the fact. Elsewhere no line
    is broken.
    """
    console = make_console(file)
    for line in _render_report(report, coloured=console.is_terminal and not console.no_color):
        for row in _wrap_line(line, console) if console.file.isatty() else [line]:
            console.print(row, soft_wrap=True)


def _wrap_line(line: Text, console: Console) -> list[Text]:
    """Returns a line as rows that fit on the terminal. Further rows begin below the text behind the label."""
    lead = _LEAD.match(line.plain)
    place = lead.end() if lead else 0
    room = console.width - place
    if line.cell_len <= console.width or room < _MIN_ROOM:
        return [line]
    head, body = line.divide([place])
    # The margin of a model's text goes on.
    margin = Text(" " * (place - 2) + "│ ", style=CALM) if head.plain.endswith(" │ ") else Text(" " * place)
    rows = body.wrap(console, room)
    return [Text.assemble(head if number == 0 else margin, row) for number, row in enumerate(rows)]


def _render_report(report: Report, coloured: bool) -> Iterable[Text]:
    """Yields the lines of the whole report. `coloured` says whether colours will be seen: then a legend is included."""
    yield Text(escape_line(report.title), style=HEAD)
    yield from _render_facts(report.facts)
    for note in report.notes:
        yield Text.assemble(("  ! ", LIMITED), escape_line(note, 1000))
    yield Text()
    yield from _render_overview(report.groups, report.group.line.index, report.words)
    yield Text()
    yield from _render_group(report.group, report.words, coloured)


def _render_facts(facts: Sequence[Fact]) -> Iterable[Text]:
    """Yields one line per fact: its label in a column of fixed width, then its text.

    The text is escaped, and cut after 1000 characters.
    """
    for label, value in facts:
        yield Text.assemble("  ", (f"{label:<{_LABEL_WIDTH}}", CALM), " ", escape_line(value, 1000))


def _render_overview(lines: Sequence[GroupLine], chosen: int, words: ReportPhrases) -> Iterable[Text]:
    """Yields the lines of a table of the groups, largest share first.

    The first 20 groups have a line each, the rest have one line together. `chosen` is the index of the group that is
    marked, because it is shown below; it has no mark if it is among the rest.
    """
    ordered = sorted(lines, key=lambda line: -(line.share or 0.0))
    rows = [[words.group, "share", words.value, "prompt", ""]]
    for line in ordered[:_MAX_GROUPS]:
        mark = "<- below" if line.index == chosen else ""
        note = "  ".join(x for x in (escape_line(line.note), mark) if x)
        rows.append([str(line.index), format_share(line.share), line.value, escape_line(line.prompt_id, 40), note])
    # Widths are counted in terminal cells, because wide characters take two. The last column is not padded.
    widths = [max(cell_len(row[i]) for row in rows) for i in range(4)]
    for number, row in enumerate(rows):
        cells = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=False)]
        style = CALM if number == 0 else "bold" if row[0] == str(chosen) else ""
        yield Text("  " + "  ".join([*cells, row[4]]).rstrip(), style=style)
    if rest := ordered[_MAX_GROUPS:]:
        shares = [line.share for line in rest if line.share is not None]
        # A share that is not known is not 0.
        together = f" with {sum(shares):.1%} together" if len(shares) == len(rest) else ""
        yield Text(f"  and {len(rest)} more{together}", style=CALM)


def _render_group(group: GroupReport, words: ReportPhrases, coloured: bool) -> Iterable[Text]:
    """Yields the lines about one group: heading, facts, prompt, legend (only if `coloured`) and samples.

    Only the first 4000 tokens of the prompt are shown.
    """
    line = group.line
    share = f"{format_share(line.share)} of the {words.share}"
    yield Text(f"{words.group} {line.index} · {escape_line(line.prompt_id)} · {share}", style=HEAD)
    yield from _render_facts(group.facts)
    yield from _render_tokens(group.prompt[:_MAX_PROMPT_TOKENS], 0.0)
    if len(group.prompt) > _MAX_PROMPT_TOKENS:
        yield Text(f"  ... {len(group.prompt) - _MAX_PROMPT_TOKENS} more prompt tokens", style=CALM)
    if coloured:
        yield _render_legend(words)
    for sample in group.samples:
        yield Text()
        yield _render_heading(sample, words)
        yield from _render_facts(sample.facts)
        yield from _render_tokens(sample.tokens, group.strongest)


def _render_heading(sample: SampleReport, words: ReportPhrases) -> Text:
    """Returns the first line about a sample: its share and the direction of its push, or its fate."""
    head = Text.assemble((sample.title, "bold"), f" · {format_share(sample.share)} of the {words.share} · ")
    if sample.fate:
        head.append(f"out of the loss: {escape_line(sample.fate)}", style=LIMITED)
    elif sample.push == 0:
        head.append("no push" if sample.share is not None else "push not known", style=LIMITED)
    else:
        head.append(
            f"{'up' if sample.push > 0 else 'down'} {format_signed(sample.push)}", style=UP if sample.push > 0 else DOWN
        )
    return head


def _render_legend(words: ReportPhrases) -> Text:
    """Returns one line that explains the colours of the tokens."""
    parts: list[str | tuple[str, str]] = ["  colours: "]
    for kind, style in _MARKS.items():
        parts += [(kind.name.lower(), style), ", "]
    for meaning, colour in ((words.up, 1.0), (words.down, -1.0)):
        if meaning:
            parts += [(meaning, _make_background(colour)), " ", ("a little", _make_background(0.1 * colour)), " "]
    return Text.assemble(*parts, ("no gradient", f"{LIMITED} underline"))


def _render_tokens(tokens: Sequence[ShownToken], strongest: float) -> Iterable[Text]:
    """Yields the text of tokens, with a new line for each change of provenance and each line break.

    A margin in front of each line keeps a model's text from looking like a part of the report. A token whose colour
    shows `strongest` gets it in full.
    """
    # Each stretch of tokens with the same provenance gets its label once, on its first line.
    for provenance, stretch in groupby(tokens, key=lambda t: t.provenance):
        text = Text()
        for token in stretch:
            text.append(escape_text(token.text).replace("\n", "⏎\n"), style=_choose_style(token, strongest))
        label = Provenance(provenance).name.lower()
        for line in text.split("\n"):
            yield Text.assemble("  ", (f"{label:<{_LABEL_WIDTH}}", CALM), (" │ ", CALM), line)
            label = ""


def _choose_style(token: ShownToken, strongest: float) -> str:
    """Returns the rich style of a token: limited, coloured by `ShownToken.colour` or, if that is 0, by its provenance.

    The colour of `strongest` is full.
    """
    if token.zero_reason:
        return f"{LIMITED} underline"
    if token.colour and strongest:
        return _make_background(token.colour / strongest)
    return _MARKS.get(Provenance(token.provenance), "")


def _make_background(colour: float) -> str:
    """Returns the rich style of black text on green (`colour` above 0) or red. The colour is full at -1 and 1."""
    faint, full = _TINTS[1 if colour > 0 else -1]
    mixed = [round(a + (b - a) * min(1.0, abs(colour))) for a, b in zip(faint, full, strict=True)]
    return "#000000 on #{:02x}{:02x}{:02x}".format(*mixed)
