"""`cohort compare A B`: two evaluations of the same problems, problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.arguments import read
from cohort.cli.output import table
from cohort.errors import ConfigError

if TYPE_CHECKING:
    from cohort.evaluation.compare import Comparison, Pair


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to show."""

    show: int = 5
    """How many problems won and lost are listed; 0 = none, -1 = all."""
    json: bool = False
    """One JSON object instead, for programs."""


def run(args: list[str]) -> None:
    about = (
        "Whether B is better than A: the paired difference with its 95% interval and p-value, and the problems that "
        "were won and lost. A and B are files written by `cohort eval`, or run directories, whose last evaluation "
        "counts (RUN@STEP: that of a step). Evaluations of other problems or with another grader are refused."
    )
    (first, second), options = read("compare", ["A", "B"], about, Options(), args)
    if options.show < -1:
        raise ConfigError(f"--show is {options.show}; it must be at least -1.")
    from cohort.evaluation.compare import compare, find_evaluation

    found = compare(find_evaluation(Path(first)), find_evaluation(Path(second)))
    print(found.to_json() if options.json else report(found, options.show))


def report(found: Comparison, show: int) -> str:
    """A comparison as tables."""
    a, b, d = found.first, found.second, found.difference
    rows = []
    for name, e in (("A", a), ("B", b)):
        model = e.setting.model + (f" step {e.step}" if e.step else "")
        rows.append([name, model, f"{e.accuracy:.3f}", f"{e.low:.3f} to {e.high:.3f}"])
    sure = {1: "B is better", -1: "A is better", 0: "no difference can be told"}[d.verdict]
    lines = [
        table([a.setting.task, "model", "accuracy", "95% interval"], rows),
        "",
        f"B - A: {d.mean:+.3f}, 95% interval {d.low:+.3f} to {d.high:+.3f}, p = {d.p:.2g} ({d.test}): {sure}",
        f"of {found.num_problems} problems B wins {d.wins}, loses {d.losses}, and is equal on "
        f"{found.num_problems - d.wins - d.losses}",
        *(f"note: {note}" for note in found.notes),
    ]
    if show:
        lines += _listed("won by B", found.won, show) + _listed("lost by B", found.lost, show)
    return "\n".join(lines)


def _listed(title: str, pairs: Sequence[Pair], show: int) -> list[str]:
    from cohort.logs.escape import one_line

    if not pairs:
        return []
    shown = pairs if show < 0 else pairs[:show]
    rest = f", the first {len(shown)}" if len(shown) < len(pairs) else ""
    lines = ["", f"{title} ({len(pairs)}{rest}):"]
    for pair in shown:
        lines.append(f"  {pair.first:.2f} -> {pair.second:.2f}  {pair.id}: {one_line(pair.question, 90)}")
    return lines
