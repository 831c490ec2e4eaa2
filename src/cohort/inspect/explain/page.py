"""A report as one HTML file: no script, nothing loaded from elsewhere, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from cohort.inspect.explain.records import Fact, GroupLine, GroupReport, Report, ReportPhrases, SampleReport, ShownToken
from cohort.inspect.explain.words import format_number, format_share, format_signed
from cohort.logs.escape import escape_all, escape_line, escape_text
from cohort.types import Provenance

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1.5rem 0 0; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 0 1rem 0 0; vertical-align: top; }
th { font-weight: normal; color: GrayText; white-space: nowrap; }
.note { border-left: 3px solid #d29922; padding-left: .7rem; }
.chosen { font-weight: bold; }
.kind { color: GrayText; font-size: .8rem; }
pre { font: 14px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0;
  padding: .4rem .6rem; border: 1px solid #8884; border-radius: 4px; }
.prompt { opacity: .65; } .environment { color: #0969da; } .forced { color: #a040c0; } .target { color: #0a7d5a; }
.held { text-decoration: underline wavy #d29922; }
.up { color: #2da44e; } .down { color: #cf222e; }
"""
_COLOURS = {1: "46,160,67", -1: "248,81,73"}  # up, down
_FAINT = 0.12  # opacity of the faintest colour, so that it is visible too


def render_page(report: Report) -> str:
    """Returns the report as a whole HTML document."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_escape(report.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_escape(report.title)}</h1>",
        _render_facts(report.facts),
        *(f'<p class="note">{_escape(note, 1000)}</p>' for note in report.notes),
        _render_overview(report.groups, report.group.line.index, report.words),
        *_render_group(report.group, report.words),
        "</body></html>",
    ]
    # Everything above is escaped already. A text that is forgotten one day must not act on a terminal either.
    return escape_all("\n".join(parts) + "\n")


def _escape(text: str, limit: int = 1000) -> str:
    """Returns a text escaped for HTML and terminals, in one line, cut after `limit` characters of the original text."""
    return escape(escape_line(text, limit))


def _render_facts(facts: Sequence[Fact]) -> str:
    """Returns an HTML table with one row per fact: its label and its text."""
    rows = (f"<tr><th>{_escape(label)}</th><td>{_escape(value)}</td></tr>" for label, value in facts)
    return f"<table>{''.join(rows)}</table>"


def _render_overview(lines: Sequence[GroupLine], chosen: int, words: ReportPhrases) -> str:
    """Returns a heading and an HTML table of all groups, largest share first.

    The row of the group with the index `chosen` is marked.
    """
    rows = [f"<tr><th>{words.group}</th><th>share</th><th>{words.value}</th><th>prompt</th><th></th></tr>"]
    for line in sorted(lines, key=lambda line: -(line.share or 0.0)):
        cells = (str(line.index), format_share(line.share), line.value, line.prompt_id, line.note)
        mark = ' class="chosen"' if line.index == chosen else ""
        rows.append(f"<tr{mark}>{''.join(f'<td>{_escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<h2>{words.group}s</h2><table>{''.join(rows)}</table>"


def _render_group(group: GroupReport, words: ReportPhrases) -> Iterable[str]:
    """Yields the HTML elements for one group: heading, facts, prompt, legend of the colours, and samples."""
    line = group.line
    share = f"{format_share(line.share)} of the {words.share}"
    yield f"<h2>{words.group} {line.index} · {_escape(line.prompt_id)} · {share}</h2>"
    yield _render_facts(group.facts)
    yield from _render_tokens(group.prompt, 0.0)
    kinds = " · ".join(f'<span class="{kind}">{kind}</span>' for kind in ("prompt", "environment", "forced"))
    meanings = [(sign, meaning) for sign, meaning in ((1, words.up), (-1, words.down)) if meaning]
    shades = [shade for sign, meaning in meanings for shade in ((sign, meaning), (0.1 * sign, "a little"))]
    tints = " ".join(f'<span style="{_make_background(colour)}">{meaning}</span>' for colour, meaning in shades)
    yield f'<p>{kinds} · {tints} · <span class="held">no gradient</span></p>'
    for sample in group.samples:
        yield _render_heading(sample, words)
        yield _render_facts(sample.facts)
        yield from _render_tokens(sample.tokens, group.strongest)


def _render_heading(sample: SampleReport, words: ReportPhrases) -> str:
    """Returns the HTML heading of a sample: its share and the direction of its push, or its fate."""
    if sample.fate:
        effect = f"out of the loss: {_escape(sample.fate)}"
    elif sample.push == 0:
        effect = "no push" if sample.share is not None else "push not known"
    else:
        way = "up" if sample.push > 0 else "down"
        effect = f'<span class="{way}">{way} {format_signed(sample.push)}</span>'
    return f"<h3>{_escape(sample.title)} · {format_share(sample.share)} of the {words.share} · {effect}</h3>"


def _render_tokens(tokens: Sequence[ShownToken], strongest: float) -> Iterable[str]:
    """Yields one HTML block per stretch of neighbouring tokens with the same provenance.

    A token whose colour shows `strongest` gets it in full.
    """
    for provenance, stretch in groupby(tokens, key=lambda t: t.provenance):
        kind = Provenance(provenance).name.lower()
        spans = "".join(_render_token(token, kind, strongest) for token in stretch)
        yield f'<div class="kind">{kind}</div><pre>{spans}</pre>'


def _render_token(token: ShownToken, kind: str, strongest: float) -> str:
    """Returns a token as a coloured HTML span, with id, provenance, log-probabilities and push in a tooltip.

    The tooltip also says why a token in the loss has no gradient. `kind` is the provenance, which is also a CSS class.
    A token whose colour shows `strongest` gets it in full.
    """
    text = escape(escape_text(token.text)).replace("\n", "⏎\n")
    about = [f"id {token.id}", kind]
    if token.logprob is not None:
        about.append(f"logprob {format_number(token.logprob)}")
    if token.ref_logprob is not None:
        about.append(f"by the reference {format_number(token.ref_logprob)}")
    if token.push:
        about.append(f"push {format_signed(token.push)}, {token.share or 0.0:.2%} of the signal")
    if token.zero_reason:
        about.append(f"no gradient: {token.zero_reason}")
    # Tokens without a colour keep the style of their provenance.
    style = f' style="{_make_background(token.colour / strongest)}"' if token.colour and strongest else ""
    classes = f"{kind} held" if token.zero_reason else kind
    return f'<span class="{classes}"{style} title="{escape(" · ".join(about))}">{text}</span>'


def _make_background(colour: float) -> str:
    """Returns the CSS of a background colour: green for a `colour` above 0, else red. It is full at -1 and 1."""
    # The opacity grows from faint to full.
    strength = _FAINT + (1 - _FAINT) * min(1.0, abs(colour))
    return f"background:rgba({_COLOURS[1 if colour > 0 else -1]},{strength:.2f})"
