"""run.md: what was run, how, what came of it, how to do it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cohort.config.document import dump
from cohort.config.schema import RunConfig
from cohort.evaluation.records import Evaluation
from cohort.run.machine import Environment
from cohort.run.store.records import About, EventRow

_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class CardData:
    """Everything the card tells."""

    name: str
    config: RunConfig
    about: About
    step: int  # completed
    command: str
    threads: int
    environment: Environment
    closing: list[str]  # the closing lines of the run
    evaluations: Sequence[Evaluation] = ()
    series: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # metric -> step -> value
    events: Sequence[EventRow] = ()


def render_card(data: CardData) -> str:
    """The card as Markdown."""
    sections = [
        _what(data),
        _results(data),
        _curve(data),
        _incidents(data),
        _again(data),
        _where(data),
        _how(data),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _what(data: CardData) -> str:
    config, about = data.config, data.about
    state = "complete" if data.step >= config.steps else f"stopped after step {data.step} of {config.steps}"
    return (
        f"# {data.name}\n\n"
        f"Recipe `{config.recipe or 'none'}`: model `{config.model}`, {about.source_is} `{about.source}`,"
        f" algorithm `{about.algo}`, {config.steps} steps of {about.batch},"
        f" seed {config.seed}. This run is {state}."
    )


def _results(data: CardData) -> str:
    lines = ["## Results", "", *(f"    {line}" for line in data.closing)]
    if data.evaluations:
        e = data.evaluations[-1]
        lines += [
            "",
            f"Held-out accuracy: task `{e.setting.task}`, split `{e.setting.split}`, {e.setting.num_problems} problems,"
            f" {e.setting.num_samples} sample(s) each, 95% intervals.",
        ]
        rows = [_evaluation_row(e) for e in data.evaluations]
        lines += ["", *_table(("step", "accuracy", "interval", "mean tokens", "finish"), rows)]
    return "\n".join(lines)


def _curve(data: CardData) -> str:
    columns = [(title, data.series[name]) for title, name in data.about.columns if data.series.get(name)]
    steps = sorted({step for _, series in columns for step in series})
    if not steps:
        return ""
    shown = sorted({steps[round(i * (len(steps) - 1) / (_ROWS - 1))] for i in range(_ROWS)})
    rows = [(step, *(f"{s[step]:.4g}" if step in s else "" for _, s in columns)) for step in shown]
    return "\n".join(["## Training", "", *_table(("step", *(title for title, _ in columns)), rows)])


def _incidents(data: CardData) -> str:
    counts: dict[str, int] = {}
    for event in data.events:
        if event.kind not in ("checkpoint", "command", "run"):
            counts[event.kind] = counts.get(event.kind, 0) + 1
    told = [f"- {kind}: {count}" for kind, count in sorted(counts.items())]
    told += [f"- {words}: {sum(data.series.get(name, {}).values()):.0f}" for words, name in data.about.totals]
    return "\n".join(["## Skips and failures", "", *(told or ["none"])])


def _again(data: CardData) -> str:
    command = data.command or shlex.join(["cohort", "train", data.config.recipe])
    return (
        f"## Do it again\n\n    {command}\n\n"
        f"The same numbers, bit for bit, need the same versions and {data.threads} thread(s) on a CPU."
    )


def _where(data: CardData) -> str:
    e = data.environment
    packages = ", ".join(f"{name} {version}" for name, version in e.packages.items())
    accelerator = f", {e.accelerator}" if e.accelerator else ""
    return (
        f"## Where\n\n- {e.processor}, {e.num_cores} core(s), {e.memory} memory{accelerator};"
        f" {data.threads} thread(s)\n- {e.system}\n- Python {e.python}, {packages}"
    )


def _how(data: CardData) -> str:
    return f"## Settings\n\n```yaml\n{dump(data.config).rstrip()}\n```"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---:' for _ in head)}|"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]


def _evaluation_row(e: Evaluation) -> tuple[object, ...]:
    interval = f"{e.low:.3f} to {e.high:.3f}"
    return e.step, f"{e.accuracy:.3f}", interval, f"{e.mean_tokens:.1f}", _shares(e.finishes)


def _shares(finishes: Mapping[str, int]) -> str:
    total = max(1, sum(finishes.values()))
    return ", ".join(f"{name} {count / total:.0%}" for name, count in sorted(finishes.items()))
