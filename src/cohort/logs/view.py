"""What a view is told, and the guard that keeps a broken one from stopping the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from cohort.errors import ConfigError, nearest
from cohort.evaluation.records import Evaluation
from cohort.run.machine import program
from cohort.run.store.records import Curve

KINDS = ("auto", "live", "plain", "json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What is known when a run starts or goes on."""

    path: str
    recipe: str
    model: str
    task: str  # or the data that it learns from
    algo: str
    num_steps: int
    first_step: int  # steps already done
    batch: str  # "32 prompts x 8 samples"
    curve: Curve = field(default_factory=Curve)
    values: dict[int, float] = field(default_factory=dict)  # the curve's, of the steps already done
    evaluates: bool = True
    evaluations: list[Evaluation] = field(default_factory=list)
    name: str = ""  # of the run
    config: dict[str, Any] = field(default_factory=dict)  # as in config.yaml: every value, nothing secret


@dataclass(frozen=True, kw_only=True, slots=True)
class Showcase:
    """A sample worth reading. Its text is as the model wrote it: a view must escape it."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    note: str = ""  # finish reason, the grader's reason


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step that has been recorded."""

    step: int
    num_steps: int
    metrics: dict[str, float]
    eta: float  # seconds
    showcase: Showcase | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How a run ended, or was left."""

    path: str
    step: int
    num_steps: int
    seconds: float  # of this session
    first: Evaluation | None
    last: Evaluation | None
    complete: bool  # every step done and evaluated
    next_commands: list[str] = field(default_factory=list)  # worth trying now; for the terminal only

    def lines(self) -> list[str]:
        """The closing words, the same in the terminal and in the run card."""
        said: list[str] = []
        if not self.complete:
            said.append(
                f"stopped after step {self.step} of {self.num_steps}; go on with: {program()} resume {self.path}"
            )
        if self.first and self.last and self.last.step > self.first.step:
            a, b = self.first, self.last
            said.append(f"held-out accuracy {a.accuracy:.2f} -> {b.accuracy:.2f}")
            said.append(
                f"95% intervals {a.low:.3f} to {a.high:.3f} -> {b.low:.3f} to {b.high:.3f},"
                f" {b.setting.num_problems} problems x {b.setting.num_samples}"
            )
        elif self.last:
            said.append(f"held-out accuracy {self.last.accuracy:.2f} at step {self.last.step}")
        said.append(f"run {self.path}")
        return said


class View(Protocol):
    """Shows a run. Called from the loop's thread only."""

    def start(self, header: Header) -> None: ...

    def phase(self, name: str) -> None:
        """What the run is busy with now: "training", "evaluating", "saving"."""

    def step(self, report: StepReport) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def event(self, step: int, kind: str, text: str) -> None: ...

    def finish(self, summary: Summary) -> None: ...

    def close(self) -> None:
        """Give the terminal back; also called when the run fails, possibly twice."""


class Guarded:
    """A view whose failure ends the view, not the run. What went wrong is told once: to `tell`, else on stderr."""

    def __init__(self, view: View, tell: Callable[[str], None] | None = None) -> None:
        self.view: View | None = view
        self._tell = tell

    def start(self, header: Header) -> None:
        self._call(lambda view: view.start(header))

    def phase(self, name: str) -> None:
        self._call(lambda view: view.phase(name))

    def step(self, report: StepReport) -> None:
        self._call(lambda view: view.step(report))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._call(lambda view: view.evaluation(evaluation))

    def event(self, step: int, kind: str, text: str) -> None:
        self._call(lambda view: view.event(step, kind, text))

    def finish(self, summary: Summary) -> None:
        self._call(lambda view: view.finish(summary))

    def close(self) -> None:
        self._call(lambda view: view.close())

    def _call(self, what: Callable[[View], Any]) -> None:
        if self.view is None:
            return
        try:
            what(self.view)
        # The boundary: terminals close, pipes break, encodings lack characters, foreign packages do as they like.
        except (Exception, SystemExit) as error:
            broken, self.view = self.view, None
            with suppress(Exception, SystemExit):
                broken.close()
            if self._tell is not None:
                self._tell(_described(error))
                return
            with suppress(Exception):
                print(f"the progress view failed ({error!r}); the run goes on without it", file=sys.stderr)


def _described(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # it is foreign code too
        return type(error).__name__


class Several:
    """Views side by side, told in this order. Each is to be guarded: none may keep the news from the next."""

    def __init__(self, views: Sequence[View]) -> None:
        self.views = tuple(views)

    def start(self, header: Header) -> None:
        for view in self.views:
            view.start(header)

    def phase(self, name: str) -> None:
        for view in self.views:
            view.phase(name)

    def step(self, report: StepReport) -> None:
        for view in self.views:
            view.step(report)

    def evaluation(self, evaluation: Evaluation) -> None:
        for view in self.views:
            view.evaluation(evaluation)

    def event(self, step: int, kind: str, text: str) -> None:
        for view in self.views:
            view.event(step, kind, text)

    def finish(self, summary: Summary) -> None:
        for view in self.views:
            view.finish(summary)

    def close(self) -> None:
        for view in self.views:
            view.close()


def make_view(kind: str = "auto", stream: TextIO | None = None) -> View:
    """The view for a stream: live on a terminal, plain lines elsewhere, JSON lines on request."""
    stream = sys.stdout if stream is None else stream
    if kind not in KINDS:
        raise ConfigError(f'unknown log "{kind}".{nearest(kind, KINDS)}')
    if kind == "json":
        from cohort.logs.jsonlines import JsonView

        return Guarded(JsonView(stream))
    if kind == "live" or (kind == "auto" and _is_terminal(stream)):
        from cohort.logs.live import LiveView

        return Guarded(LiveView(stream))
    from cohort.logs.plain import PlainView

    return Guarded(PlainView(stream))


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "")
