"""A picture of a run as the terminal showed it: replays a run directory through the live view into an SVG.

python -m scripts.record_run runs/2026-11-15-quickstart-k3f9 docs/quickstart.svg
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console

from cohort.config.document import variant_name
from cohort.logs.live import LiveView
from cohort.logs.view import Header, StepReport, Summary
from cohort.loops.stats import showcase
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import load_rollouts, rollout_path, rollout_steps


def main(run: Path, out: Path) -> None:
    directory = RunDirectory.open(run)
    config, evaluations = directory.config, directory.evaluations()
    console = Console(record=True, width=100, height=40, file=io.StringIO(), force_terminal=True, highlight=False)
    view = LiveView(console.file, console=console)
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    with Reader(directory.database) as reader:
        for row in reader.metrics():
            steps[row.step][row.name] = row.value
    header = Header(
        path=str(run),
        recipe=config.recipe,
        model=config.model,
        task=variant_name("task", config.task),
        algo=variant_name("algo", config.algo),
        num_steps=config.steps,
        first_step=0,
        batch=f"{config.batch.prompts} prompts x {config.batch.samples} samples",
    )
    view._header = header  # not started: the frame is drawn once, at the end
    divided = max(rollout_steps(directory.rollouts), key=lambda s: steps[s]["reward/std"])
    for number in sorted(s for s in steps if s):
        groups = load_rollouts(rollout_path(directory.rollouts, number)) if number == divided else []
        shown = showcase(number, groups)
        report = StepReport(step=number, num_steps=config.steps, metrics=steps[number], eta=0.0, showcase=shown)
        view.step(report)
    for evaluation in evaluations.values():
        view.evaluation(evaluation)
    seconds = sum(m.get("time/step", 0.0) for m in steps.values())
    view._begin -= seconds
    view.phase("done")
    console.print(view.frame())
    first, last = evaluations[0], evaluations[config.steps]
    view.finish(
        Summary(
            path=str(run),
            step=config.steps,
            num_steps=config.steps,
            seconds=seconds,
            first=first,
            last=last,
            complete=True,
        )
    )
    out.write_text(console.export_svg(title="make quickstart"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
