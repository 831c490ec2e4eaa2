"""`cohort replay RUN --step N [--algo.x value ...] [--optim.x value ...] [--learner.x value ...] [--json]`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cohort.cli.arguments import read_arguments
from cohort.cli.output import format_table
from cohort.config import flags
from cohort.errors import ConfigError
from cohort.logs.printing import print_note, print_result
from cohort.run.finding import find_run, require_run

if TYPE_CHECKING:
    from cohort.inspect.replay import MetricComparison, ReplayResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which step to replay, and how to print the result."""

    step: int | None = None
    """The step to do again, counted from 1; required."""
    json: bool = False
    """Print one JSON object instead, for programs."""
    trust: bool = False
    """Run the Python files that the run's config names. Needed for a task or an algorithm in a file of its own, unless
    --task or --algo names that file."""


ABOUT = (
    "Do the update of a step of a run again, from its stored rollouts and the nearest checkpoint before it. "
    "Without other settings this gives the stored metrics, on a CPU to the last bit. With settings of --algo, --optim "
    "and --learner, written as for cohort train, it shows what they change in that one update. The run is only read."
)


def run(args: list[str]) -> None:
    """Runs `cohort replay` with `args`, the words after it: does a step again and prints how its metrics differ.

    Progress goes to stderr. Raises ConfigError if --step is missing.
    """
    own, settings = _split_settings(args)
    (where,), options = read_arguments("replay", ["RUN"], ABOUT, Options(), own)
    if options.step is None:
        raise ConfigError("--step is missing; write: cohort replay RUN --step N, where N is the number of a step.")
    path = find_run(where)
    require_run(path)
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.inspect.replay import replay_step
    from cohort.logs.jsonlines import replace_non_finite

    replayed = replay_step(path, options.step, settings, _print_progress, options.trust)
    if options.json:
        print_result(json.dumps(replace_non_finite({"run": where, **replayed.to_json()})))
    else:
        print_result(_format_result(replayed))


def _split_settings(args: list[str]) -> tuple[list[str], list[str]]:
    """Returns (words and flags of the command itself, flags that are settings of the run).

    The command's own flags are --step, --json, --trust and --help. A word after a flag goes with that flag.
    """
    own: list[str] = []
    settings: list[str] = []
    # A word without dashes belongs to the flag before it, so it goes where that flag went.
    target = own
    for arg in args:
        if arg.startswith("--"):
            target = own if arg in flags.HELP or arg.partition("=")[0] in ("--step", "--json", "--trust") else settings
        target.append(arg)
    return own, settings


def _print_progress(text: str) -> None:
    """Prints what is being done to stderr, because standard output has only the result."""
    print_note(f"{text} ...")


def _format_result(replayed: ReplayResult) -> str:
    """Returns the replay's result as text: base, changed settings, a table of the metrics that differ, and notes.

    Without differing metrics, a line says so in place of the table.
    """
    lines = [f"step {replayed.step} from {_describe_base(replayed)}"]
    lines += [f"changed: {name} {old} -> {new}" for name, (old, new) in replayed.changed.items()]
    differing = replayed.differing_rows
    num_same = len(replayed.rows) - len(differing)
    if not differing:
        verdict = "no effect on this step" if replayed.changed else "reproduced exactly"
        lines.append(f"{verdict}: {num_same} metrics are equal to the last bit, {_summarize_metrics(replayed)}")
    else:
        if not replayed.changed:
            lines.append(f"not reproduced: {len(differing)} of {len(replayed.rows)} metrics differ")
        lines += [
            "",
            format_table(["metric", "stored", "replayed", "difference"], [_format_row(row) for row in differing]),
            "",
        ]
        lines.append(f"equal to the last bit: {num_same} other metrics")
    return "\n".join([*lines, *replayed.notes])


def _summarize_metrics(replayed: ReplayResult) -> str:
    """Returns the replayed loss, gradient norm and learning rate as text, such as "loss 0.5, lr 1e-05".

    Names that the result lacks are left out.
    """
    return ", ".join(
        f"{r.name} {_format_number(r.replayed)}" for r in replayed.rows if r.name in ("loss", "grad_norm", "lr")
    )


def _describe_base(replayed: ReplayResult) -> str:
    """Returns a text that says what the replay began from and which steps it re-applied before the replayed one."""
    base, last = replayed.base, replayed.step - 1
    origin = f"the checkpoint of step {base}" if base else "the initial model"
    if base == last:
        return origin
    return f"{origin}, step {last} re-applied" if base + 1 == last else f"{origin}, steps {base + 1}-{last} re-applied"


def _format_row(row: MetricComparison) -> list[str]:
    """Returns the cells of a metric in the table: name, stored value, replayed value, difference."""
    return [row.name, _format_number(row.stored), _format_number(row.replayed), _format_number(row.difference, "+.3g")]


def _format_number(value: float | None, form: str = ".6g") -> str:
    """Returns a number as text in the Python format `form`; "-" for None."""
    return "-" if value is None else format(value, form)
