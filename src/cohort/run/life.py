"""The life of a run: it starts or resumes, records every step, evaluates, saves, stops when asked, and finishes.

The newest checkpoint alone decides where a run continues. Everything else is written before the checkpoint that covers
it. What is newer than the newest checkpoint is removed when the run is resumed, and those steps are done again. So a
run may be killed at any moment: it continues as if it had not been.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType

import torch

from cohort.config.schema import RunConfig
from cohort.errors import RunError
from cohort.evaluation.records import Evaluation
from cohort.logs.escape import escape_line
from cohort.logs.metrics_file import MetricsFile
from cohort.logs.view import CombinedView, GuardedView, Header, StepReport, Summary, View, make_view
from cohort.run import checkpoint
from cohort.run.card import CardData, render_card
from cohort.run.directory import RunDirectory
from cohort.run.job import Job, StepRecord
from cohort.run.machine import describe_machine, program_name
from cohort.run.signals import StopSignals
from cohort.run.store.db import Store
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import make_rollout_path, remove_rollouts, save_rollouts
from cohort.system import clock
from cohort.system.disk import format_size, write_atomically
from cohort.types import Group


class Run:
    """A run under way. Use it as `with Run(...) as run:`, loop over `run.steps()`, then call `run.finish()`.

    Entering locks the directory, goes back to the newest checkpoint and replaces the handlers of stop signals. It
    raises RunError if `config` differs from the settings of the run (only `steps` may grow). Leaving puts the handlers
    back and unlocks the directory, and records the error if there was one. An error of a sink is reported and does not
    stop the run.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        job: Job,
        view: View | None = None,
        sinks: Mapping[str, View] | None = None,
    ) -> None:
        self.directory = directory
        self.config = config
        self.step = 0  # completed steps
        self.evaluations: dict[int, Evaluation] = {}  # by step
        self._job = job
        self._description = job.describe()
        # A sink that raises is reported once and then left out.
        guarded = [GuardedView(sink, partial(self._record_sink_failure, name)) for name, sink in (sinks or {}).items()]
        # Sinks come first: one may ask for a password at its start, and may take long at its end.
        self._view = CombinedView([*guarded, make_view() if view is None else view])
        self._metrics = MetricsFile(directory.metrics, directory.database)
        self._signals = StopSignals()
        self._store: Store | None = None  # None = not open
        self._pending: list[tuple[str, str]] = []  # (kind, text) of events that are not in run.db yet
        self._started = self._step_began = time.perf_counter()
        self._first_step = 0  # completed steps when this process began

    def __enter__(self) -> Run:
        self.directory.lock()
        try:
            self.directory.require_same_settings(self.config)
            self.directory.extend_to(self.config.steps)
            self._store = Store(self.directory.database)
            self._recover(self._store)
            self._signals.install()
        except BaseException:
            self._close()
            raise
        self._view.start(self._make_header())
        if self.step >= self.config.steps:
            more = f"{program_name()} resume {self.directory.path} --steps {2 * self.config.steps}"
            self._view.show_event(self.step, "run", f"all {self.config.steps} steps are done; train on with: {more}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            text = f"stopped by {type(error).__name__}; go on with: {program_name()} resume {self.directory.path}"
            # The disk may be what failed.
            with suppress(RunError):
                self.record_event("run", text)
                self._write_pending_events()
        self._close()

    @property
    def is_stopping(self) -> bool:
        """Whether a first Ctrl-C, SIGTERM or closed terminal (SIGHUP) has asked the run to stop after this step."""
        return bool(self._signals.requested)

    def steps(self) -> Iterator[int]:
        """Yields the number of each remaining step, counted from 0, until the last one or a signal to stop.

        The loop must end each step with `end_step`. Evaluates before the first of them if that is due. After a signal,
        saves a checkpoint if this process has completed a step and it has none.
        """
        self._started = time.perf_counter()
        if not self.is_stopping:
            self._evaluate_if_due()
        while self.step < self.config.steps and not self.is_stopping:
            step = self.step
            # Time that was spent on evaluation and saving does not belong to the step.
            clock.read_and_reset()
            self._step_began = time.perf_counter()
            yield step
            assert self.step == step + 1, f"step {step} did not end with end_step"
        # The signal may have come after `end_step` had decided not to save.
        if self.is_stopping and self.step > self._first_step:
            self._save_checkpoint()

    def record_event(self, kind: str, text: str) -> None:
        """Shows an event (a skip, a failure) at once, and keeps it to be written to run.db.

        It is written when the step under way ends, or when the run finishes or is left. `kind` is one word, like
        "failure".
        """
        self.show_notice(kind, text)
        self._pending.append((kind, text))

    def show_notice(self, kind: str, text: str) -> None:
        """Shows a text on terminal and sinks, under the number of the step under way. Nothing is written to run.db."""
        self._view.show_event(self.step + 1, kind, text)

    def end_step(self, step: int, record: StepRecord) -> None:
        """Records the step `step`, counted from 0, as number `step` + 1 in run.db, metrics.jsonl and a rollout file.

        There is no rollout file if the record has no groups. Time metrics are added, `record.problem` becomes an event,
        and old rollout files are removed. Then evaluates and saves a checkpoint if they are due. If the run has been
        asked to stop, saves a checkpoint and does not evaluate.
        """
        assert step == self.step, f"step {step} ended while step {self.step} was under way"
        # What is recorded counts completed steps, from 1.
        number = step + 1
        metrics = {**record.metrics, **self._compute_times(record.metrics)}
        if record.problem:
            self.record_event("failure", record.problem)
        fresh: list[Group] = []
        if record.groups is not None:
            size = save_rollouts(make_rollout_path(self.directory.rollouts, number), record.groups)
            metrics["rollouts/bytes"] = float(size)
            # Reused groups have rows already, in the step that sampled them.
            fresh = [g for g in record.groups if not g.reused]
        self._require_store().write_step(number, metrics, fresh, self._pending)
        self._pending = []
        self._metrics.append()
        self.step = number
        self._remove_old_rollouts()
        self._view.show_step(
            StepReport(
                step=number,
                num_steps=self.config.steps,
                metrics=metrics,
                eta=self._estimate_remaining_seconds(),
                showcase=record.showcase,
            )
        )
        if not self.is_stopping:
            self._evaluate_if_due()
        if self.is_stopping or self._is_save_due():
            self._save_checkpoint()

    def finish(self) -> Summary:
        """Makes the last evaluation and checkpoint if all steps are done and they are missing, and writes the run card.

        It does not evaluate if the run has been asked to stop. Returns what the terminal shows at the end: steps done,
        seconds, first and last evaluation, whether the run is complete, and commands to try next.
        """
        if self.step >= self.config.steps:
            if not self.is_stopping:
                self._evaluate_if_due()
            if self.step:
                self._save_checkpoint()
                # A kill may have come between the last checkpoint and the removal of older ones.
                self._prune_checkpoints()
        self._write_pending_events()
        summary = self._make_summary()
        write_atomically(self.directory.card, self._render_card(summary))
        self._view.finish(summary)
        return summary

    def _recover(self, store: Store) -> None:
        """Restores the newest checkpoint, if there is one, and removes everything that the run wrote after it.

        Without a checkpoint, goes back to step 0. Sets `step` and `evaluations`, and records the event that the run
        started or resumed.
        """
        checkpoint.remove_leftovers(self.directory.checkpoints)
        path = checkpoint.find_latest(self.directory.checkpoints)
        state = checkpoint.load(path) if path else None
        if state:
            # This may raise, so it comes before anything is removed.
            self._job.restore(state)
        self.step = self._first_step = state.step if state else 0
        # From here on, everything that is newer than the checkpoint is removed.
        store.remove_after(self.step)
        self.directory.remove_after(self.step)
        self._metrics.rewrite()
        self.evaluations = self.directory.load_evaluations()
        with Reader(self.directory.database) as reader:
            was_started = bool(reader.read_events(kind="run"))
        store.write_event(self.step, "run", f"resumed after step {self.step}" if was_started else "started")

    def _evaluate_if_due(self) -> None:
        """Evaluates the current weights and records the result, if that is due, not done yet, and the job can evaluate.

        Evaluations are due before the first step, after the last one, and after every `eval.every` steps (0 = only
        those two).
        """
        every = self.config.eval.every
        number = self.step
        due = number in (0, self.config.steps) or (every > 0 and number % every == 0)
        if self._job.evaluate is None or not due or number in self.evaluations:
            return
        self._view.show_phase("evaluating")
        evaluation = self._job.evaluate(number)
        assert evaluation.step == number, f"evaluation of step {evaluation.step} instead of {number}"
        # Rows before the file: if the file exists, the rows do too. After a kill in between, both are made again.
        self._require_store().write_evaluation(number, evaluation.metrics)
        self._metrics.append()
        self.directory.save_evaluation(evaluation)
        self.evaluations[number] = evaluation
        self._view.show_evaluation(evaluation)
        self._view.show_phase("training")

    def _find_best_step(self) -> int:
        """Returns the step above 0 with the best held-out accuracy, the earliest of equal ones; 0 if there is none."""
        trained = [e for step, e in self.evaluations.items() if step > 0]
        return max(trained, key=lambda e: (e.accuracy, -e.step)).step if trained else 0

    def _is_save_due(self) -> bool:
        """Returns whether a checkpoint of the current step is due.

        It is due every `save.every` steps (0 = never), after the last step and, with `save.keep_best`, if this step has
        the best held-out accuracy so far.
        """
        every = self.config.save.every
        number = self.step
        scheduled = number == self.config.steps or (every > 0 and number % every == 0)
        return scheduled or (self.config.save.keep_best and number == self._find_best_step())

    def _save_checkpoint(self) -> None:
        """Saves a checkpoint of the current step, removes old ones, and records the event.

        Does nothing if the step has a checkpoint.
        """
        folder = self.directory.checkpoints
        if self.step in checkpoint.list_steps(folder):
            return
        self._view.show_phase("saving")
        begin = time.perf_counter()
        state = self._job.make_checkpoint(self.step)
        assert state.step == self.step, f"checkpoint of step {state.step} instead of {self.step}"
        path = checkpoint.save(folder, state, self._job.write_model)
        self._prune_checkpoints()

        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        text = f"{path.name}, {format_size(size)}, {time.perf_counter() - begin:.1f} s"
        self._require_store().write_event(self.step, "checkpoint", text)
        self._view.show_event(self.step, "checkpoint", text)
        self._view.show_phase("training")

    def _prune_checkpoints(self) -> None:
        """Removes the checkpoints that neither `save.keep_last` nor `save.keep_best` keeps. The newest always stays."""
        keep = {self._find_best_step()} if self.config.save.keep_best else set()
        checkpoint.prune(self.directory.checkpoints, keep_last=self.config.save.keep_last, keep=keep)

    def _remove_old_rollouts(self) -> None:
        """Removes the rollout files of all but the last `save.rollouts` steps. `save.rollouts` = 0 keeps all.

        Those that a resume from the newest checkpoint would reuse are kept.
        """
        if not self.config.save.rollouts:
            return
        oldest = self.step - self.config.save.rollouts
        if self._description.reads_back:
            saved = max(checkpoint.list_steps(self.directory.checkpoints), default=0)
            oldest = min(oldest, saved - self._description.reads_back)
        remove_rollouts(self.directory.rollouts, lambda step: step > oldest)

    def _compute_times(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the time metrics of the step: seconds of each stage and of the whole step, and tokens per second.

        `metrics` has the token counts; a rate without its count or its stage is left out. Resets the clock of the
        stages. Names begin with "time/", so that a comparison of two runs can leave them out.
        """
        seconds = time.perf_counter() - self._step_began
        stages = clock.read_and_reset()
        times = {f"time/stage/{name}": value for name, value in stages.items()} | {"time/step": seconds}
        # (name of the rate, metric that it counts, seconds to divide by)
        rates = (
            ("tokens_per_s", "tokens/sampled", seconds),
            ("sampled_per_s", "tokens/sampled", stages.get("rollout")),
            ("trained_per_s", "tokens", stages.get("update")),
        )
        for name, counted, spent in rates:
            if counted in metrics and spent is not None:
                times[f"time/{name}"] = metrics[counted] / max(spent, 1e-9)
        return times

    def _estimate_remaining_seconds(self) -> float:
        """Returns the seconds that the remaining steps will take, at the mean speed since this start or resume."""
        done = self.step - self._first_step
        return (time.perf_counter() - self._started) / max(1, done) * (self.config.steps - self.step)

    def _make_header(self) -> Header:
        """Returns what terminal and sinks show at the start.

        After a resume it includes the earlier evaluations and the earlier values of one metric, the curve of the run.
        """
        config, about = self.config, self._description
        with Reader(self.directory.database) as reader:
            values = reader.read_series(about.curve.metric)
        return Header(
            path=str(self.directory.path),
            recipe=config.recipe,
            model=config.model,
            task=about.source,
            algo=about.algo,
            num_steps=config.steps,
            first_step=self.step,
            batch=about.batch,
            curve=about.curve,
            values=values,
            has_evaluation=self._job.evaluate is not None,
            evaluations=list(self.evaluations.values()),
            name=self.directory.path.resolve().name,
            config=self.directory.dump_settings(),
        )

    def _make_summary(self) -> Summary:
        """Returns what terminal and sinks show at the end.

        It is `complete` if the last step is done and, unless the job has no evaluation, evaluated. Only then does it
        name commands to try next.
        """
        evaluations = [self.evaluations[step] for step in sorted(self.evaluations)]
        evaluated = self._job.evaluate is None or self.config.steps in self.evaluations
        complete = self.step >= self.config.steps and evaluated
        return Summary(
            path=str(self.directory.path),
            step=self.step,
            num_steps=self.config.steps,
            seconds=time.perf_counter() - self._started,
            first=evaluations[0] if evaluations else None,
            last=evaluations[-1] if evaluations else None,
            complete=complete,
            next_commands=self._format_next_commands() if complete else [],
        )

    def _format_next_commands(self) -> list[str]:
        """Returns the commands that the job suggests to try next, each as one line for a shell."""
        return [shlex.join(command) for command in self._job.suggest_commands(self.directory.path, self.step)]

    def _render_card(self, summary: Summary) -> str:
        """Returns the run card as Markdown: from run.db, all evaluations of the run, and the lines of `summary`."""
        accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
        with Reader(self.directory.database) as reader:
            names = {row.name for row in reader.read_metrics() if not row.name.startswith("time/")}
            series = {name: reader.read_series(name) for name in names}
            events = reader.read_events()
        return render_card(
            CardData(
                name=self.directory.path.name,
                config=self.config,
                description=self._description,
                step=self.step,
                command=next((event.text for event in events if event.kind == "command"), ""),
                threads=torch.get_num_threads(),
                machine=describe_machine(accelerator),
                closing=summary.format_lines(),
                evaluations=[self.evaluations[step] for step in sorted(self.evaluations)],
                series=series,
                events=events,
            )
        )

    def _record_sink_failure(self, name: str, problem: str) -> None:
        """Records the event that the sink `name` failed because of `problem`. The run goes on without the sink."""
        self.record_event("sink", f"{name} failed ({escape_line(problem, 300)}); the run goes on without it")

    def _write_pending_events(self) -> None:
        """Writes the recorded events that are not in run.db yet, under the number of the last completed step."""
        if self._pending:
            self._require_store().write_step(self.step, {}, events=self._pending)
            self._pending = []

    def _require_store(self) -> Store:
        """Returns the open writer of run.db. Raises RunError if the run is not inside its `with` block."""
        if self._store is None:
            raise RunError("this run is not open: use it inside `with Run(...) as run:`.")
        return self._store

    def _close(self) -> None:
        """Puts the signal handlers back, closes views and run.db, and unlocks the directory.

        First writes pending events. Ignores errors of run.db.
        """
        self._signals.restore()
        self._view.close()
        if self._store is not None:
            # A sink may have reported a failure while it was closed.
            with suppress(RunError):
                self._write_pending_events()
            with suppress(RunError):
                self._store.close()
            self._store = None
        self.directory.unlock()
