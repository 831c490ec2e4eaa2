"""The run card, run.md: what was run and how, its results, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cohort.config.document import dump_config
from cohort.config.schema import RunConfig
from cohort.evaluation.records import Evaluation
from cohort.logs.escape import escape_all
from cohort.run.machine import Machine
from cohort.run.store.records import EventRow, RunDescription

EXTENSION = "extension"
"""The kind of event that tells that a run got more steps than it had before."""

_MAX_TABLE_ROWS = 12
_HELD_OUT = ("loss", "perplexity", "nll", "reward/margin")  # what is measured of given answers that are held out
# Kinds of events that are neither skips nor failures.
_NO_INCIDENTS = ("checkpoint", "command", "run", EXTENSION)


@dataclass(frozen=True, kw_only=True, slots=True)
class CardData:
    """Everything that the card shows."""

    name: str
    config: RunConfig
    description: RunDescription
    step: int  # completed
    command: str
    threads: int  # per rank
    machine: Machine
    closing: list[str]  # the last lines of the terminal output
    evaluations: Sequence[Evaluation] = ()
    series: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # metric -> step -> value
    events: Sequence[EventRow] = ()
    fates: Mapping[str, int] = field(default_factory=dict)  # number of samples by fate; "" = trained on
    picture: str = ""  # name of the file beside the card that has the curves of the run; "" = there is none
    ranks: int = 1  # processes that trained together when the card was written


def render_card(data: CardData) -> str:
    """Returns the run card, the text of run.md, as Markdown.

    Its sections are summary, results, the picture of the curves and training metrics (if there are any), skips and
    failures, command, machine and settings. Characters that act on a terminal are escaped.
    """
    sections = [
        _render_summary(data),
        _render_results(data),
        f"![Curves of the run]({data.picture})" if data.picture else "",
        _render_training_table(data),
        _render_incidents(data),
        _render_command(data),
        _render_machine(data),
        _render_settings(data),
    ]
    return escape_all("\n\n".join(section for section in sections if section) + "\n")


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
    """Returns the section "Results": the last lines of the terminal output, and a table of the evaluations, if any.

    So is a table of what was measured on held-out examples.
    """
    lines = ["## Results", "", *(f"    {line}" for line in data.closing)]
    if data.evaluations:
        # All evaluations of a run have the same task, split and numbers.
        e = data.evaluations[-1]
        lines += [
            "",
            f"H{e.title[1:]}: task `{e.setting.task}`, split `{e.setting.split}`, {e.setting.num_problems} problems,"
            f" {e.setting.num_samples} sample(s) each, 95% intervals.",
        ]
        pairs = pairwise(data.evaluations)
        if changes := [(a.step, b.step) for a, b in pairs if a.setting.grader != b.setting.grader]:
            where = ", ".join(f"steps {a} and {b}" for a, b in changes)
            many = "accuracies" if e.accuracy is not None else "rewards"
            lines += ["", f"The grader has changed between {where}: {many} before and after cannot be compared."]
        rows = [_make_evaluation_row(e) for e in data.evaluations]
        lines += ["", *_format_table(("step", e.measure, "interval", "mean tokens", "finish"), rows)]
        if labels := list(data.evaluations[-1].accuracies):
            own = [(e.step, *(f"{e.accuracies[label]:.3f}" for label in labels)) for e in data.evaluations]
            lines += ["", "Accuracy of each task:", "", *_format_table(("step", *labels), own)]
    if idle := data.description.not_evaluated:
        lines += ["", f"{idle[0].upper()}{idle[1:]}."]
    held_out = [(name, data.series[f"eval/{name}"]) for name in _HELD_OUT if data.series.get(f"eval/{name}")]
    if held_out:
        steps = sorted({step for _, series in held_out for step in series})
        lines += ["", "Measured on the held-out examples:", ""]
        lines += _format_table(
            ("step", *(name for name, _ in held_out)),
            [(step, *(f"{s[step]:.4g}" if step in s else "" for _, s in held_out)) for step in steps],
        )
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

    It counts the recorded events by kind, except those that tell of no incident, lists what the run leaves out of its
    data, and sums metrics that the description of the run names, such as the number of samples that could not be
    scored. Updates that were skipped are counted if there are any. Samples that were left out of the loss are counted
    with their reasons, those in groups with equal rewards among them.
    """
    counts: dict[str, int] = {}
    for event in data.events:
        if event.kind not in _NO_INCIDENTS:
            counts[event.kind] = counts.get(event.kind, 0) + 1
    lines = [f"- {kind}: {count}" for kind, count in sorted(counts.items())]
    lines += [f"- {line}" for line in data.description.left_out]
    if num_bad := sum(data.series.get("updates/bad", {}).values()):
        lines.append(f"- updates skipped because their gradient was not finite: {num_bad:.0f}")
    lines += [f"- {words}: {sum(data.series.get(name, {}).values()):.0f}" for words, name in data.description.totals]
    if left_out := {fate: num for fate, num in data.fates.items() if fate}:
        reasons = ", ".join(f"{fate} {num}" for fate, num in left_out.items())
        lines.append(
            f"- samples left out of the loss: {sum(left_out.values())} of {sum(data.fates.values())} ({reasons})"
        )
    return "\n".join(["## Skips and failures", "", *(lines or ["none"])])


def _render_command(data: CardData) -> str:
    """Returns the section "Do it again": the recorded command of the run, its extensions, and what equal numbers need.

    Without a recorded command it says so: run.db was rebuilt then.
    """
    lines = ["## Do it again", ""]
    lines.append(f"    {data.command}" if data.command else "The command was lost with run.db. All settings are below.")
    extensions = [f"- {event.text}" for event in data.events if event.kind == EXTENSION]
    if extensions:
        about = "This run was extended with `cohort resume RUN --steps N`, so its command alone makes another one:"
        lines += ["", about, "", *extensions]
    also = ", the same extensions after the same steps," if extensions else ""
    needs = f"the same versions{also} and {data.threads} thread(s) on a CPU"
    return "\n".join([*lines, "", f"The same numbers, bit for bit, need {needs}."])


def _render_machine(data: CardData) -> str:
    """Returns the section "Where": processor, memory, GPU, operating system, and versions of Python and packages."""
    m = data.machine
    packages = ", ".join(f"{name} {version}" for name, version in m.packages.items())
    accelerator = f", {m.accelerator}" if m.accelerator else ""
    threads = f"{data.threads} thread(s)" + (f" in each of {data.ranks} ranks" if data.ranks > 1 else "")
    return (
        f"## Where\n\n- {m.processor}, {m.num_cores} core(s), {m.memory} memory{accelerator};"
        f" {threads}\n- {m.system}\n- Python {m.python}, {packages}"
    )


def _render_settings(data: CardData) -> str:
    """Returns the section "Settings": the config of the run as YAML. Sections that are off are left out."""
    return f"## Settings\n\n```yaml\n{dump_config(data.config).rstrip()}\n```"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a Markdown table: `head`, a rule, then `rows`. All columns are aligned to the right."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---:' for _ in head)}|"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]


def _make_evaluation_row(e: Evaluation) -> tuple[object, ...]:
    """Returns a row of the evaluation table: step, accuracy or reward, interval, mean tokens and finish reasons."""
    return e.step, f"{e.value:.3f}", e.format_interval(), f"{e.mean_tokens:.1f}", _format_shares(e.finishes)


def _format_shares(finishes: Mapping[str, int]) -> str:
    """Returns the share of each finish reason, in alphabetical order, like "length 10%, stop 90%".

    `finishes` has the number of samples per reason.
    """
    total = max(1, sum(finishes.values()))
    return ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(finishes.items()))
