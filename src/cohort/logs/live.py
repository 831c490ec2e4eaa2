"""The live view: one frame, redrawn in place, that tells how the run is doing at a glance.

Everything that came from a model, a row or a task is escaped and shown as `Text`, never as markup.
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
from cohort.logs.escape import one_line
from cohort.logs.view import Header, Showcase, StepReport, Summary
from cohort.run.store.records import Curve


class LiveView:
    """Give a `console` (for instance one that records) to draw elsewhere than on the stream."""

    def __init__(self, stream: TextIO, console: Console | None = None) -> None:
        self.console = console or Console(file=stream, highlight=False, markup=False, emoji=False)
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
        self._header = header
        self._values = dict(header.values)
        self._evaluations = list(header.evaluations)
        self._begin = time.monotonic()
        # Twice a second is alive enough, and leaves the cores to the training.
        self._live = Live(console=self.console, get_renderable=self.frame, refresh_per_second=2)
        self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        self._phase = name

    def step(self, report: StepReport) -> None:
        self._report = report
        drawn = Curve().metric if self._header is None else self._header.curve.metric
        if drawn in report.metrics:
            self._values[report.step] = report.metrics[drawn]
        self._showcase = report.showcase or self._showcase
        self._phase = "training"

    def evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.append(evaluation)

    def event(self, step: int, kind: str, text: str) -> None:
        if kind == "checkpoint":  # the newest will do: it must not push a failure out of sight
            for old in [e for e in self._events if e[1] == kind]:
                self._events.remove(old)
        self._events.append((step, kind, text))

    def finish(self, summary: Summary) -> None:
        self._phase = "done" if summary.complete else "stopped"
        self.close()
        styles = {"held-out": "bold green", "stopped": "bold yellow"}
        for line in summary.lines():
            style = styles.get(line.split(" ")[0], "dim")
            self.console.print(Text(one_line(line, 1000), style=style), soft_wrap=True)
        for number, command in enumerate(summary.next_commands):
            lead = "     " if number else "next "
            self.console.print(Text(lead, style="dim").append(one_line(command, 1000), style="cyan"), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def frame(self) -> ConsoleRenderable | RichCast:
        """The whole picture at this moment; it fits the height of the terminal."""
        if self._header is None:
            return Text("")
        header, width, height = self._header, self.console.width, self.console.height
        metrics = self._report.metrics if self._report else {}
        step = self._report.step if self._report else header.first_step
        eta = self._report.eta if self._report else float("nan")
        curve_height = 8 if height >= 34 else 5 if height >= 26 else 3
        parts: list[ConsoleRenderable] = [
            panels.title(header, self._phase),
            panels.progress(step, header.num_steps, time.monotonic() - self._begin, eta),
            panels.middle(
                panels.curve(header, self._values, self._evaluations, max(16, width - 46), curve_height),
                panels.numbers(header.curve, metrics, self._values, self._evaluations, curve_height + 1),
            ),
            panels.stages(metrics, width),
        ]
        used = 2 + 1 + curve_height + 4 + 2 + len(self._events)
        room = min(10, height - used - 4)
        if self._showcase is not None and room >= 2:
            parts.append(panels.sample(self._showcase, width, room))
        if self._events:
            parts.append(panels.events(list(self._events)))
        return Group(*parts)
