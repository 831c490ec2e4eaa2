"""Views: what shows the progress of a run, the records they get, and the guard that keeps a broken view from a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from cohort.errors import ConfigError, suggest_name
from cohort.evaluation.records import Evaluation
from cohort.logs.printing import print_note
from cohort.run.machine import program_name
from cohort.run.store.records import Curve

KINDS = ("auto", "live", "plain", "json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Facts about a run that are known when it starts or resumes."""

    path: str
    recipe: str
    model: str
    task: str  # or the data of supervised fine-tuning
    algo: str
    num_steps: int
    first_step: int  # number of steps already done
    batch: str  # for instance "32 prompts x 8 samples"
    curve: Curve = field(default_factory=Curve)
    values: dict[int, float] = field(default_factory=dict)  # of the curve's metric, by step already done
    has_evaluation: bool = True
    measured: str = "held-out accuracy"  # what evaluations measure, in words
    evaluations: list[Evaluation] = field(default_factory=list)  # already done
    name: str = ""  # of the run
    config: dict[str, Any] = field(default_factory=dict)  # all settings as in config.yaml, nothing secret


@dataclass(frozen=True, kw_only=True, slots=True)
class Showcase:
    """A sample worth reading. The texts are not escaped: a view must escape them."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    note: str = ""  # why the completion ended and the grader's reason


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A finished step, already stored in the run directory."""

    step: int
    num_steps: int
    metrics: dict[str, float]
    eta: float  # seconds until the run ends; NaN = not known
    showcase: Showcase | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How a run ended, or where it stopped."""

    path: str
    step: int
    num_steps: int
    seconds: float  # since this start or resume
    first: Evaluation | None
    last: Evaluation | None
    complete: bool  # every step done and evaluated, or ended by a rule
    ended_by: str = ""  # the rule that ended the run before its last step; "" = none
    next_commands: list[str] = field(default_factory=list)  # commands to try next; not in the run card

    @property
    def is_comparable(self) -> bool:
        """Whether there are two evaluations, of different steps and by the same grader."""
        a, b = self.first, self.last
        return a is not None and b is not None and b.step > a.step and a.setting.grader == b.setting.grader

    def format_lines(self) -> list[str]:
        """Returns the closing lines of a run, which are the same on the terminal and in the run card.

        They say how to continue the run if it is not complete, the held-out accuracy or reward if it was evaluated
        (first and last with intervals, if there are two by the same grader), and the run directory.
        """
        lines: list[str] = []
        if not self.complete:
            resume = f"{program_name()} resume {self.path}"
            lines.append(f"stopped after step {self.step} of {self.num_steps}; go on with: {resume}")
        elif self.ended_by:
            lines.append(f"ended after step {self.step} of {self.num_steps}: {self.ended_by}")
        lines += self._format_accuracy()
        lines.append(f"run {self.path}")
        return lines

    def _format_accuracy(self) -> list[str]:
        """Returns the lines about the held-out accuracy or reward; [] if nothing was evaluated.

        They name the steps if the last step was not evaluated. The first and the last evaluation are shown together
        only if they have the same grader.
        """
        a, b = self.first, self.last
        if a is None or b is None:
            return []
        if not self.is_comparable:
            why = f"; no comparison with step {a.step}, because the grader has changed in between"
            is_other = a.setting.grader != b.setting.grader
            return [f"{b.title} {b.value:.2f} at step {b.step}{why if is_other else ''}"]
        is_old = b.step < self.step
        steps = [f" at step {e.step}" if is_old else "" for e in (a, b)]
        late = f"; step {self.step} is not evaluated" if is_old else ""
        intervals = f"95% intervals {a.format_interval()} -> {b.format_interval()}"
        return [
            f"{b.title} {a.value:.2f}{steps[0]} -> {b.value:.2f}{steps[1]}{late}",
            f"{b.format_interval() if b.low is None else intervals},"
            f" {b.setting.num_problems} problems x {b.setting.num_samples}",
        ]


class View(Protocol):
    """Shows the progress of a run. All methods are called from the thread of the training loop."""

    def start(self, header: Header) -> None:
        """Shows that the run starts or resumes. Called once, before all other methods except perhaps `close`."""

    def show_phase(self, name: str) -> None:
        """Shows what the run does now: "training", "evaluating" or "saving"."""

    def show_step(self, report: StepReport) -> None:
        """Shows a finished step: its metrics and the time that remains."""

    def show_evaluation(self, evaluation: Evaluation) -> None:
        """Shows a finished evaluation."""

    def show_event(self, step: int, kind: str, text: str) -> None:
        """Shows an event of a step. `kind` is, for instance, "checkpoint" or "engine". `text` is not escaped yet."""

    def finish(self, summary: Summary) -> None:
        """Shows how the run ended, or at which step a signal stopped it. Not called if the run fails."""

    def close(self) -> None:
        """Releases the terminal. Also called when the run fails, possibly before `start`, and possibly twice."""


class GuardedView:
    """A view whose failure ends the view and not the run.

    The failure is reported once: `tell` is called with it or, if that is None, it is printed to stderr.
    """

    def __init__(self, view: View, tell: Callable[[str], None] | None = None) -> None:
        self.view: View | None = view
        self._tell = tell

    def start(self, header: Header) -> None:
        """Calls `start` of the guarded view, if it has not failed yet. Reports an exception, raises none."""
        self._call_view(lambda view: view.start(header))

    def show_phase(self, name: str) -> None:
        """Calls `show_phase` of the guarded view, if it has not failed yet. Reports an exception, raises none."""
        self._call_view(lambda view: view.show_phase(name))

    def show_step(self, report: StepReport) -> None:
        """Calls `show_step` of the guarded view, if it has not failed yet. Reports an exception, raises none."""
        self._call_view(lambda view: view.show_step(report))

    def show_evaluation(self, evaluation: Evaluation) -> None:
        """Calls `show_evaluation` of the guarded view, if it has not failed yet. Reports an exception, raises none."""
        self._call_view(lambda view: view.show_evaluation(evaluation))

    def show_event(self, step: int, kind: str, text: str) -> None:
        """Calls `show_event` of the guarded view, if it has not failed yet. Reports an exception, raises none."""
        self._call_view(lambda view: view.show_event(step, kind, text))

    def finish(self, summary: Summary) -> None:
        """Calls `finish` of the guarded view, if it has not failed yet. Reports an exception, raises none."""
        self._call_view(lambda view: view.finish(summary))

    def close(self) -> None:
        """Calls `close` of the guarded view, if it has not failed yet. Reports an exception, raises none."""
        self._call_view(lambda view: view.close())

    def _call_view(self, action: Callable[[View], Any]) -> None:
        """Calls `action` with the view, unless the view has failed before.

        If `action` raises an Exception or SystemExit, the view is closed and never called again. The failure is passed
        to `tell` or, without it, printed to stderr.
        """
        if self.view is None:
            return
        try:
            action(self.view)
        # Terminals close, pipes break, encodings lack characters, and the packages of sinks raise anything.
        except (Exception, SystemExit) as error:
            # The view is given up before it is closed, so that nothing calls it again.
            broken, self.view = self.view, None
            with suppress(Exception, SystemExit):
                broken.close()
            if self._tell is not None:
                self._tell(_describe_error(error))
                return
            with suppress(Exception):
                print_note(f"the progress view failed ({error!r}); the run goes on without it")


def _describe_error(error: BaseException) -> str:
    """Returns the repr of an error; only the name of its type if that repr fails."""
    try:
        return repr(error)
    # The error may come from another package, and so does its repr.
    except Exception:
        return type(error).__name__


class CombinedView:
    """Several views as one, called in this order. Each must be guarded: a failure would skip the views after it."""

    def __init__(self, views: Sequence[View]) -> None:
        self.views = tuple(views)

    def start(self, header: Header) -> None:
        """Calls `start` of each view, in order."""
        for view in self.views:
            view.start(header)

    def show_phase(self, name: str) -> None:
        """Calls `show_phase` of each view, in order."""
        for view in self.views:
            view.show_phase(name)

    def show_step(self, report: StepReport) -> None:
        """Calls `show_step` of each view, in order."""
        for view in self.views:
            view.show_step(report)

    def show_evaluation(self, evaluation: Evaluation) -> None:
        """Calls `show_evaluation` of each view, in order."""
        for view in self.views:
            view.show_evaluation(evaluation)

    def show_event(self, step: int, kind: str, text: str) -> None:
        """Calls `show_event` of each view, in order."""
        for view in self.views:
            view.show_event(step, kind, text)

    def finish(self, summary: Summary) -> None:
        """Calls `finish` of each view, in order."""
        for view in self.views:
            view.finish(summary)

    def close(self) -> None:
        """Calls `close` of each view, in order."""
        for view in self.views:
            view.close()


def make_view(kind: str = "auto", stream: TextIO | None = None) -> View:
    """Returns a view that prints to `stream` (None = standard output) and whose failure does not end the run.

    `kind` is "live", "plain", "json" or "auto", which is live on a terminal that can redraw and plain elsewhere. Raises
    ConfigError for another kind.
    """
    stream = sys.stdout if stream is None else stream
    if kind not in KINDS:
        raise ConfigError(
            f'unknown progress view "{kind}" for log.{suggest_name(kind, KINDS)} Correct the argument log.'
        )
    # Only the module of the chosen view is imported: the live view needs rich, the others do not.
    if kind == "json":
        from cohort.logs.jsonlines import JsonView

        return GuardedView(JsonView(stream))
    if kind == "live" or (kind == "auto" and _is_terminal(stream)):
        from cohort.logs.live import LiveView

        return GuardedView(LiveView(stream))
    from cohort.logs.plain import PlainView

    return GuardedView(PlainView(stream))


def _is_terminal(stream: TextIO) -> bool:
    """Returns whether the stream is a terminal that can redraw a frame: not if TERM is unset, empty or "dumb"."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "")
