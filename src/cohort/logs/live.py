"""Live view of a run: one frame on the terminal that is redrawn in place.

Text from a model, a row or a task is escaped and shown as `Text`, never as markup.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TextIO

from rich.console import Console, ConsoleRenderable, Group, RichCast
from rich.live import Live
from rich.text import Text

from cohort.evaluation.records import Evaluation
from cohort.logs import panels
from cohort.logs.console import make_console
from cohort.logs.escape import escape_line
from cohort.logs.view import Header, Showcase, StepReport, Summary
from cohort.run.store.records import Curve


class LiveView:
    """Shows a run as a frame that is redrawn. A given `console` is drawn on instead of the stream."""

    def __init__(self, stream: TextIO, console: Console | None = None) -> None:
        self.console = console or make_console(stream)
        self._live: Live | None = None
        self._header: Header | None = None
        self._report: StepReport | None = None
        self._showcase: Showcase | None = None
        self._values: dict[int, float] = {}
        self._evaluations: list[Evaluation] = []
        self._events: deque[tuple[int, str, str]] = deque(maxlen=3)
        self._phase = "starting"
        self._begin = time.monotonic()

    def start(self, header: Header) -> None:
        """Starts to draw the frame on the terminal, twice per second, from a thread of its own.

        Curve and evaluations begin with those from before a resume.
        """
        self._header = header
        self._values = dict(header.values)
        self._evaluations = list(header.evaluations)
        self._begin = time.monotonic()
        # Twice per second looks alive and leaves the cores to the training.
        self._live = Live(console=self.console, get_renderable=self.render_frame, refresh_per_second=2)
        self._live.start(refresh=True)

    def show_phase(self, name: str) -> None:
        """Sets the phase that the next frame shows."""
        self._phase = name

    def show_step(self, report: StepReport) -> None:
        """Makes the next frame show this step: its metrics, one more point of the curve, and its showcase sample.

        Without a sample, the last one stays. Without the curve's metric, no point is added. The phase becomes
        "training".
        """
        self._report = report
        metric = Curve().metric if self._header is None else self._header.curve.metric
        if metric in report.metrics:
            self._values[report.step] = report.metrics[metric]
        # A step without a showcase leaves the last one on the screen.
        self._showcase = report.showcase or self._showcase
        self._phase = "training"

    def show_evaluation(self, evaluation: Evaluation) -> None:
        """Adds the evaluation to those that the next frame shows."""
        self._evaluations.append(evaluation)

    def show_event(self, step: int, kind: str, text: str) -> None:
        """Adds an event to the list of the last three, which the next frame shows.

        A checkpoint takes the place of earlier checkpoints.
        """
        # Only the newest checkpoint is shown, so that checkpoints do not push a failure out of the short list.
        if kind == "checkpoint":
            for old in [e for e in self._events if e[1] == kind]:
                self._events.remove(old)
        self._events.append((step, kind, text))

    def finish(self, summary: Summary) -> None:
        """Ends the frame, which stays, and prints the closing lines and the commands to try next below it."""
        self._phase = "done" if summary.complete else "stopped"
        self.close()
        styles = {"held-out": "bold green", "stopped": "bold yellow"}
        for line in summary.format_lines():
            style = styles.get(line.split(" ")[0], "dim")
            self.console.print(Text(escape_line(line, 1000), style=style), soft_wrap=True)
        for number, command in enumerate(summary.next_commands):
            lead = "     " if number else "next "
            self.console.print(
                Text(lead, style="dim").append(escape_line(command, len(command)), style="cyan"), soft_wrap=True
            )

    def close(self) -> None:
        """Stops to redraw the frame and gives the terminal back. Does nothing the second time."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def render_frame(self) -> ConsoleRenderable | RichCast:
        """Returns the whole frame for rich to draw, made from what was shown so far; an empty text before `start`.

        The height of the terminal decides how high the curve is, and whether there is room for the sample.
        """
        if self._header is None:
            return Text("")
        header = self._header
        width = self.console.width
        height = self.console.height
        metrics = self._report.metrics if self._report else {}
        step = self._report.step if self._report else header.first_step
        eta = self._report.eta if self._report else float("nan")
        # A low terminal gets a lower curve.
        curve_height = 8 if height >= 34 else 5 if height >= 26 else 3
        parts: list[ConsoleRenderable] = [
            panels.draw_title(header, self._phase),
            panels.draw_progress(step, header.num_steps, time.monotonic() - self._begin, eta),
            panels.place_side_by_side(
                panels.draw_curve(header, self._values, self._evaluations, max(16, width - 46), curve_height),
                panels.draw_numbers(header.curve, metrics, self._values, self._evaluations, curve_height + 1),
            ),
            panels.draw_stages(metrics, width),
        ]
        # The lines that are left for the sample: those of the panels above, the events and the borders are taken.
        used = 2 + 1 + curve_height + 4 + 2
        events = panels.wrap_events(list(self._events), width, height - used - 3)
        used += len(events)
        room = min(10, height - used - 4)
        if self._showcase is not None and room >= 2:
            parts.append(panels.draw_sample(self._showcase, width, room))
        parts += events
        return Group(*parts)
