"""The run card, run.md: what was run and how, its results, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cohort.config.document import dump_config
from cohort.config.schema import RunConfig
from cohort.evaluation.records import Evaluation
from cohort.run.machine import Machine
from cohort.run.store.records import EventRow, RunDescription

_MAX_TABLE_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class CardData:
    """Everything that the card shows."""

    name: str
    config: RunConfig
    description: RunDescription
    step: int  # completed
    command: str
    threads: int
    machine: Machine
    closing: list[str]  # the last lines of the terminal output
    evaluations: Sequence[Evaluation] = ()
    series: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # metric -> step -> value
    events: Sequence[EventRow] = ()


def render_card(data: CardData) -> str:
    """Returns the run card, the text of run.md, as Markdown.

    Its sections are summary, results, training metrics (if there are any), skips and failures, command, machine and
    settings.
    """
    sections = [
        _render_summary(data),
        _render_results(data),
        _render_training_table(data),
        _render_incidents(data),
        _render_command(data),
        _render_machine(data),
        _render_settings(data),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _render_summary(data: CardData) -> str:
    """Returns the title and one paragraph about the run.

    It names recipe, model, task or data, algorithm, steps, batch and seed, and says whether the run is complete.
    """
    config, about = data.config, data.description
    state = "complete" if data.step >= config.steps else f"stopped after step {data.step} of {config.steps}"
    return (
        f"# {data.name}\n\n"
        f"Recipe `{config.recipe or 'none'}`: model `{config.model}`, {about.source_is} `{about.source}`,"
        f" algorithm `{about.algo}`, {config.steps} steps of {about.batch},"
        f" seed {config.seed}. This run is {state}."
    )


def _render_results(data: CardData) -> str:
    """Returns the section "Results": the last lines of the terminal output, and a table of the evaluations, if any."""
    lines = ["## Results", "", *(f"    {line}" for line in data.closing)]
    if data.evaluations:
        # All evaluations of a run have the same task, split and numbers.
        e = data.evaluations[-1]
        lines += [
            "",
            f"Held-out accuracy: task `{e.setting.task}`, split `{e.setting.split}`, {e.setting.num_problems} problems,"
            f" {e.setting.num_samples} sample(s) each, 95% intervals.",
        ]
        rows = [_make_evaluation_row(e) for e in data.evaluations]
        lines += ["", *_format_table(("step", "accuracy", "interval", "mean tokens", "finish"), rows)]
    return "\n".join(lines)


def _render_training_table(data: CardData) -> str:
    """Returns the section "Training": a table of metrics at up to _MAX_TABLE_ROWS evenly spaced steps.

    Its columns are the metrics that the description of the run names and that have values. "" if there are none.
    """
    columns = [(title, data.series[name]) for title, name in data.description.columns if data.series.get(name)]
    steps = sorted({step for _, series in columns for step in series})
    if not steps:
        return ""
    # Evenly spaced, the first and the last step included.
    shown = sorted({steps[round(i * (len(steps) - 1) / (_MAX_TABLE_ROWS - 1))] for i in range(_MAX_TABLE_ROWS)})
    rows = [(step, *(f"{s[step]:.4g}" if step in s else "" for _, s in columns)) for step in shown]
    return "\n".join(["## Training", "", *_format_table(("step", *(title for title, _ in columns)), rows)])


def _render_incidents(data: CardData) -> str:
    """Returns the section "Skips and failures"; it says "none" if there is nothing to list.

    It counts the recorded events by kind, except those that every run has, and sums metrics that the description of the
    run names, such as the number of samples that could not be scored.
    """
    counts: dict[str, int] = {}
    for event in data.events:
        # These three kinds belong to every run.
        if event.kind not in ("checkpoint", "command", "run"):
            counts[event.kind] = counts.get(event.kind, 0) + 1
    lines = [f"- {kind}: {count}" for kind, count in sorted(counts.items())]
    lines += [f"- {words}: {sum(data.series.get(name, {}).values()):.0f}" for words, name in data.description.totals]
    return "\n".join(["## Skips and failures", "", *(lines or ["none"])])


def _render_command(data: CardData) -> str:
    """Returns the section "Do it again": the recorded command of the run, and what equal numbers need.

    Without a recorded command it names `cohort train` with the recipe.
    """
    command = data.command or shlex.join(["cohort", "train", data.config.recipe])
    return (
        f"## Do it again\n\n    {command}\n\n"
        f"The same numbers, bit for bit, need the same versions and {data.threads} thread(s) on a CPU."
    )


def _render_machine(data: CardData) -> str:
    """Returns the section "Where": processor, memory, GPU, operating system, and versions of Python and packages."""
    m = data.machine
    packages = ", ".join(f"{name} {version}" for name, version in m.packages.items())
    accelerator = f", {m.accelerator}" if m.accelerator else ""
    return (
        f"## Where\n\n- {m.processor}, {m.num_cores} core(s), {m.memory} memory{accelerator};"
        f" {data.threads} thread(s)\n- {m.system}\n- Python {m.python}, {packages}"
    )


def _render_settings(data: CardData) -> str:
    """Returns the section "Settings": the config of the run as YAML. Sections that are off are left out."""
    return f"## Settings\n\n```yaml\n{dump_config(data.config).rstrip()}\n```"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a Markdown table: `head`, a rule, then `rows`. All columns are aligned to the right."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---:' for _ in head)}|"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]


def _make_evaluation_row(e: Evaluation) -> tuple[object, ...]:
    """Returns the cells of a row of the evaluation table: step, accuracy, interval, mean tokens and finish reasons."""
    interval = f"{e.low:.3f} to {e.high:.3f}"
    return e.step, f"{e.accuracy:.3f}", interval, f"{e.mean_tokens:.1f}", _format_shares(e.finishes)


def _format_shares(finishes: Mapping[str, int]) -> str:
    """Returns the share of each finish reason, in alphabetical order, like "length 10%, stop 90%".

    `finishes` has the number of samples per reason.
    """
    total = max(1, sum(finishes.values()))
    return ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(finishes.items()))
