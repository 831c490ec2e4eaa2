"""A report as one HTML file: no script, nothing from elsewhere, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from cohort.inspect.explain.records import Fact, GroupLine, GroupReport, Report, SampleReport, Token
from cohort.inspect.explain.words import number, signed
from cohort.logs.escape import one_line, visible
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
_FAINT = 0.12  # of full colour: the smallest push is seen too


def page(report: Report) -> str:
    """The whole document."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(report.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(report.title)}</h1>",
        _facts(report.facts),
        *(f'<p class="note">{_text(note, 1000)}</p>' for note in report.notes),
        _groups(report.groups, report.group.line.index),
        *_group(report.group),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str, limit: int = 1000) -> str:
    return escape(one_line(text, limit))


def _facts(facts: Sequence[Fact]) -> str:
    rows = (f"<tr><th>{_text(label)}</th><td>{_text(value)}</td></tr>" for label, value in facts)
    return f"<table>{''.join(rows)}</table>"


def _groups(lines: Sequence[GroupLine], chosen: int) -> str:
    rows = ["<tr><th>group</th><th>share</th><th>reward</th><th>prompt</th><th></th></tr>"]
    for line in sorted(lines, key=lambda line: -line.share):
        cells = (str(line.index), f"{line.share:.1%}", line.rewards, line.prompt_id, line.note)
        mark = ' class="chosen"' if line.index == chosen else ""
        rows.append(f"<tr{mark}>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
    return f"<h2>groups</h2><table>{''.join(rows)}</table>"


def _group(group: GroupReport) -> Iterable[str]:
    line = group.line
    yield f"<h2>group {line.index} · {_text(line.prompt_id)} · {line.share:.1%} of the signal</h2>"
    yield _facts(group.facts)
    yield from _tokens(group.prompt, 0.0)
    kinds = " · ".join(f'<span class="{kind}">{kind}</span>' for kind in ("prompt", "environment", "forced"))
    pushes = ((1.0, "pushed up"), (0.1, "a little"), (-1.0, "pushed down"), (-0.1, "a little"))
    tints = " ".join(f'<span style="{_tint(push)}">{words}</span>' for push, words in pushes)
    yield f'<p>{kinds} · {tints} · <span class="held">no gradient</span></p>'
    for sample in group.samples:
        yield _heading(sample)
        yield _facts(sample.facts)
        yield from _tokens(sample.tokens, group.strongest)


def _heading(sample: SampleReport) -> str:
    if sample.fate:
        effect = f"out of the loss: {_text(sample.fate)}"
    elif sample.push == 0:
        effect = "no push"
    else:
        way = "up" if sample.push > 0 else "down"
        effect = f'<span class="{way}">{way} {signed(sample.push)}</span>'
    return f"<h3>sample {sample.index} · {sample.share:.1%} of the signal · {effect}</h3>"


def _tokens(tokens: Sequence[Token], strongest: float) -> Iterable[str]:
    for provenance, stretch in groupby(tokens, key=lambda t: t.provenance):
        kind = Provenance(provenance).name.lower()
        spans = "".join(_span(token, kind, strongest) for token in stretch)
        yield f'<div class="kind">{kind}</div><pre>{spans}</pre>'


def _span(token: Token, kind: str, strongest: float) -> str:
    text = escape(visible(token.text)).replace("\n", "⏎\n")
    about = [f"id {token.id}", kind]
    if token.logprob is not None:
        about.append(f"logprob {number(token.logprob)}")
    if token.push:
        about.append(f"push {signed(token.push)}, {token.share:.2%} of the signal")
    if token.idle:
        about.append(f"no gradient: {token.idle}")
    style = f' style="{_tint(token.push / strongest)}"' if token.push and strongest else ""
    classes = f"{kind} held" if token.idle else kind
    return f'<span class="{classes}"{style} title="{escape(" · ".join(about))}">{text}</span>'


def _tint(push: float) -> str:
    """A background for a push between -1 and 1."""
    strength = _FAINT + (1 - _FAINT) * min(1.0, abs(push))
    return f"background:rgba({_COLOURS[1 if push > 0 else -1]},{strength:.2f})"
