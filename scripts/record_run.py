"""A picture of a finished run as the terminal shows it: an SVG, drawn by the live view from a run directory.

python -m scripts.record_run runs/2026-11-15-quickstart-k3f9 docs/quickstart.svg
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from cohort.config.document import get_variant_name
from cohort.logs.live import LiveView
from cohort.logs.view import Header, StepReport, Summary
from cohort.loops.stats import choose_showcase
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts, make_rollout_path
from scripts.drawing import make_recording_console, write_picture


def draw_run(run: Path, out: Path) -> None:
    """Writes an SVG of the terminal at the end of the run in the folder `run`."""
    directory = RunDirectory.open(run)
    config = directory.config
    evaluations = directory.load_evaluations()
    console = make_recording_console(width=100, height=40)
    view = LiveView(console.file, console=console)
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    with Reader(directory.database) as reader:
        for row in reader.read_metrics():
            steps[row.step][row.name] = row.value
    header = Header(
        path=str(run),
        recipe=config.recipe,
        model=config.model,
        task=get_variant_name("task", config.task),
        algo=get_variant_name("algo", config.algo),
        num_steps=config.steps,
        first_step=0,
        batch=f"{config.batch.prompts} prompts x {config.batch.samples} samples",
    )
    # The view is not started, because the frame is drawn only once, at the end.
    view._header = header
    # The step whose rewards differ most has the most telling answers to show.
    most_varied = max(list_rollout_steps(directory.rollouts), key=lambda s: steps[s]["reward/std"])
    for number in sorted(s for s in steps if s):
        groups = load_rollouts(make_rollout_path(directory.rollouts, number)) if number == most_varied else []
        showcase = choose_showcase(number, groups)
        report = StepReport(step=number, num_steps=config.steps, metrics=steps[number], eta=0.0, showcase=showcase)
        view.show_step(report)
    for evaluation in evaluations.values():
        view.show_evaluation(evaluation)
    seconds = sum(m.get("time/step", 0.0) for m in steps.values())
    # As if the view had begun so long ago.
    view._begin -= seconds
    view.show_phase("done")
    console.print(view.render_frame())
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
    write_picture(console, out, "make quickstart")


if __name__ == "__main__":
    draw_run(Path(sys.argv[1]), Path(sys.argv[2]))
