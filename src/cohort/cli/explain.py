"""`cohort explain RUN [--step N] [--group G] [--html FILE]`: what the update of a step did to each token, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cohort.cli.arguments import read_arguments
from cohort.errors import ConfigError
from cohort.logs.printing import print_result
from cohort.run.finding import find_run, require_run
from cohort.system.disk import is_standard_output, write_atomically


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which step and group to explain, and where to."""

    step: int | None = None
    """A step whose rollouts are kept; None = the newest."""
    group: str = ""
    """The group (example, pair) to show in detail: its index or the id of its prompt. Default: the one with most of the
    signal or loss."""
    html: str = ""
    """Write one self-contained HTML file instead of printing."""


def run(args: list[str]) -> None:
    """Runs `cohort explain` with `args`, the words after it: prints the report of a step or writes it as HTML.

    Raises ConfigError for wrong flags, RunError if there is no such run, step or group.
    """
    about = (
        "Explain a step of a run: which samples and tokens its update made more or less likely, and why. Of given "
        "answers: the tokens that surprised the model (sft), scores, margin and weight of pairs (dpo)."
    )
    (where,), options = read_arguments("explain", ["RUN"], about, Options(), args)
    # Mistakes in --html are found before the step is loaded.
    out = Path(options.html) if options.html else None
    if out is not None and not out.parent.is_dir():
        raise ConfigError(
            f'there is no folder "{out.parent}" for the file in --html; make the folder, or name another file.'
        )
    if out is not None and out.is_dir():
        raise ConfigError(f"--html {out} is a folder; name a file to write, for example {out}/step.html.")
    path = find_run(where)
    require_run(path)
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.inspect.explain.page import render_page
    from cohort.inspect.explain.report import explain_step
    from cohort.inspect.explain.screen import print_report

    report = explain_step(path, options.step, options.group)
    if out is None:
        print_report(report)
    else:
        write_atomically(out, render_page(report))
        # Standard output has the page, and nothing else.
        if not is_standard_output(out):
            print_result(f"wrote {out}")
