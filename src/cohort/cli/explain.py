"""`cohort explain RUN [--step N] [--group G] [--html FILE]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cohort.cli.arguments import read
from cohort.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which step, and what of it."""

    step: int | None = None
    """A step whose rollouts are kept; None = the newest."""
    group: str = ""
    """A group's index, or else a prompt's id; by default the group with the largest share of the signal."""
    html: str = ""
    """Write one self-contained HTML file instead of printing."""


def run(args: list[str]) -> None:
    about = "Why a step of the run in RUN did what it did: which samples and tokens were pushed, how far, and why."
    (where,), options = read("explain", ["RUN"], about, Options(), args)
    out = Path(options.html) if options.html else None
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f'there is no folder "{out.parent}" for --html; make it first.')
    if out is not None and out.is_dir():
        raise ConfigError(f"--html {out} is a folder; name a file.")
    from cohort.inspect.explain.page import page
    from cohort.inspect.explain.report import explain
    from cohort.inspect.explain.screen import show

    report = explain(Path(where), options.step, options.group)
    if out is None:
        show(report)
    else:
        out.write_text(page(report), encoding="utf-8")
        print(f"wrote {out}")
