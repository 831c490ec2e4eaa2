"""The life of a run: it starts or resumes, records every step, evaluates, saves, stops when asked, and finishes.

The newest checkpoint alone decides where a run continues. Everything else is written before the checkpoint that covers
it. What is newer than the newest checkpoint is removed when the run is resumed, and those steps are done again. So a
run may be killed at any moment: it continues as if it had not been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType

from cohort.config.schema import RunConfig
from cohort.errors import RunError
from cohort.evaluation.records import Evaluation, select_comparable
from cohort.logs.escape import escape_line, join_command
from cohort.logs.metrics_file import MetricsFile
from cohort.logs.view import CombinedView, GuardedView, Header, StepReport, Summary, View, make_view
from cohort.loops.stats import compute_times
from cohort.plot.picture import write_card_picture
from cohort.run import checkpoint
from cohort.run.card import render_card
from cohort.run.card_data import read_card_data
from cohort.run.directory import RunDirectory
from cohort.run.job import Job, StepRecord
from cohort.run.machine import program_name
from cohort.run.monitor import StepMonitor
from cohort.run.naming import find_best_step
from cohort.run.recovery import METRICS_CHECKSUM, NUM_STEPS, Notice, restore_newest, take_back_later_steps
from cohort.run.signals import StopSignals
from cohort.run.store.checksum import extend_checksum
from cohort.run.store.db import Store
from cohort.run.store.reader import Reader
from cohort.run.store.records import STOPPED, describe_end
from cohort.run.store.rollouts import make_rollout_path, remove_rollouts, save_rollouts
from cohort.run.together import Command, LeadingJob, agree_on_stop
from cohort.system import clock
from cohort.system.disk import format_size, write_atomically
from cohort.types import Group
from cohort.world import ONE_PROCESS, World

StopCheck = Callable[[int], str]
"""Number of completed steps -> why the run ends here, judged by its run.db; "" = it goes on."""


class Run:
    """A run under way. Use it as `with Run(...) as run:`, loop over `run.steps()`, then call `run.finish()`.

    Entering locks the directory, goes back to the newest checkpoint and replaces the handlers of stop signals. It
    raises RunError if `config` differs from the settings of the run (only `steps` may grow). Leaving puts the handlers
    back and unlocks the directory, and records the error if there was one. An error of a sink is reported and does not
    stop the run.

    With several ranks in `world` this is the run of the first one. The others are `run.together.FollowingRun`.

    `stop_check`, if it is given, is asked after every step, and again for the step at which a run is resumed. So where
    a run ends by it does not depend on interruptions. A run that it ends is complete.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: RunConfig,
        job: Job,
        view: View | None = None,
        sinks: Mapping[str, View] | None = None,
        stop_check: StopCheck | None = None,
        world: World = ONE_PROCESS,
    ) -> None:
        self.directory = directory
        self.config = config
        self.step = 0  # completed steps
        self.ended_by = ""  # why the run ends before its last step; "" = it does not
        self.evaluations: dict[int, Evaluation] = {}  # by step
        self._accuracies: dict[
            int, float
        ] = {}  # or mean rewards, by step; also those of evaluations whose files were removed
        # Of several ranks this is the first: it tells the others what all do next.
        self._job: Job = job if world.size == 1 else LeadingJob(job, world)
        self._world = world
        self._stop_check = stop_check
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
        self._checksum = ""  # of the metrics of all completed steps
        self._monitor = StepMonitor(self.directory.database)

    def __enter__(self) -> Run:
        self.directory.lock()
        try:
            self.directory.require_same_settings(self.config)
            notices = self._recover()
            self._signals.install()
        except BaseException:
            self._close()
            raise
        self._view.start(self._make_header())
        for kind, text in notices:
            self._view.show_event(self.step, kind, text)
        if self.step >= self.config.steps:
            more = f"{program_name()} resume {self.directory.path} --steps {2 * self.config.steps}"
            self._view.show_event(self.step, "run", f"all {self.config.steps} steps are done; train on with: {more}")
        self._lead(Command(name="ready"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            text = f"{STOPPED} {type(error).__name__}; go on with: {program_name()} resume {self.directory.path}"
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
        self._examine_step()
        while self.step < self.config.steps and not self.is_stopping and not self.ended_by:
            step = self.step
            # Time that was spent on evaluation and saving does not belong to the step.
            clock.read_and_reset()
            self._step_began = time.perf_counter()
            self._lead(Command(name="step", step=step))
            yield step
            assert self.step == step + 1, f"step {step} did not end with end_step"
        # The signal may have come after `end_step` had decided not to save.
        if self.is_stopping and self.step > self._first_step:
            self._save_checkpoint()

    def _lead(self, command: Command) -> None:
        """Tells the other ranks, if there are any, what all do next."""
        if isinstance(self._job, LeadingJob):
            self._job.lead(command)

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
        agree_on_stop(self._signals, self._world)
        seconds = time.perf_counter() - self._step_began
        metrics = {**record.metrics, **compute_times(record.metrics, seconds, clock.read_and_reset())}
        if record.problem:
            self.record_event("failure", record.problem)
        for kind, text in self._monitor.check_step(number, record):
            self.record_event(kind, text)
        fresh: list[Group] = []
        if record.groups is not None:
            size = save_rollouts(make_rollout_path(self.directory.rollouts, number), record.groups)
            # Reused groups have rows already, in the step that sampled them. Given examples get none: the user has
            # them, and there may be millions. The size is that of a file from which rows can be written again.
            if not any(g.is_given for g in record.groups):
                metrics["rollouts/bytes"] = float(size)
                fresh = [g for g in record.groups if not g.reused]
        self._require_store().write_step(number, metrics, fresh, self._pending)
        self._pending = []
        self._metrics.append()
        self.step = number
        self._checksum = extend_checksum(self._checksum, metrics)
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
        self._examine_step()
        if self.is_stopping or self._is_save_due():
            self._save_checkpoint()

    def _examine_step(self) -> None:
        """Evaluates if that is due, and asks `stop_check` whether the run ends here. Not if it has been asked to stop.

        What `stop_check` looks at, run.db, must be complete: so it is asked after the evaluation.
        """
        if self.is_stopping:
            return
        self._evaluate_if_due()
        if self._stop_check is not None and 0 < self.step < self.config.steps:
            self.ended_by = self._stop_check(self.step)

    def finish(self) -> Summary:
        """Makes the last evaluation and checkpoint if all steps are done and they are missing, and writes the run card.

        Also draws the picture that the card shows. It does not evaluate if the run has been asked to stop. Returns what
        the terminal shows at the end: steps done, seconds, first and last evaluation, whether the run is complete, and
        commands to try next.
        """
        if self.step >= self.config.steps or self.ended_by:
            if not self.is_stopping:
                self._evaluate_if_due()
            if self.step:
                self._save_checkpoint()
                # A kill may have come between the last checkpoint and the removal of older ones.
                self._prune_checkpoints()
        summary = self._make_summary()
        self._lead(Command(name="end", complete=summary.complete))
        picture, problem = write_card_picture(self.directory.path, self.config)
        if problem:
            self.record_event("picture", problem)
        # By this event `cohort runs` tells a run that was stopped or is done from one that was killed.
        self._pending.append(("run", describe_end(summary.complete, self.ended_by, self._signals.requested)))
        self._write_pending_events()
        about, num_ranks = self._description, self._world.size
        data = read_card_data(self.directory, self.config, about, summary, self.evaluations, picture, num_ranks)
        write_atomically(self.directory.card, render_card(data))
        self._view.finish(summary)
        return summary

    def _recover(self) -> list[Notice]:
        """Goes back to the newest checkpoint, or to step 0 if there is none, and opens run.db.

        Removes everything that the run wrote after that checkpoint. Returns what the user must see: repairs, and that
        the run was extended.
        """
        prepared = self._job.prepare(self.directory.path)
        state = restore_newest(self.directory, self.config, self._job)
        self.step = self._first_step = state.step
        self._checksum = state.checksum
        self._store = Store(self.directory.database)
        earlier = take_back_later_steps(self.directory, state, self._store, self._metrics)
        self.evaluations = earlier.evaluations
        self._accuracies = earlier.accuracies
        return [*prepared, *earlier.notices]

    def _evaluate_if_due(self) -> None:
        """Evaluates the current weights and records the result, if that is due, not done yet, and the job can evaluate.

        Evaluations are due before the first step, after the last one, and after every `eval.every` steps (0 = only
        those two). The last one may be where `stop_check` ends the run.
        """
        every = self.config.eval.every
        number = self.step
        due = number in (0, self.config.steps) or (every > 0 and number % every == 0) or bool(self.ended_by)
        if due:
            self._measure_held_out(number)
        if self._job.evaluate is None or not due or number in self.evaluations:
            return
        self._view.show_phase("evaluating")
        evaluation = self._job.evaluate(number)
        assert evaluation is not None and evaluation.step == number, f"no evaluation of step {number}"
        # Rows before the file: if the file exists, the rows do too. After a kill in between, both are made again.
        self._require_store().write_evaluation(number, evaluation.metrics)
        self._metrics.append()
        self.directory.save_evaluation(evaluation)
        self.evaluations[number] = evaluation
        # Accuracies of another grader do not say which checkpoint is the best.
        others = self.evaluations.keys() - select_comparable(self.evaluations).keys()
        accuracies = {**self._accuracies, number: evaluation.value}
        self._accuracies = {step: accuracy for step, accuracy in accuracies.items() if step not in others}
        self._view.show_evaluation(evaluation)
        self._view.show_phase("training")

    def _measure_held_out(self, number: int) -> None:
        """Measures the held-out examples after step `number` and records the metrics, unless it was done before."""
        if self._job.measure is None:
            return
        # After a resume the database knows what was measured.
        with Reader(self.directory.database) as reader:
            known = {m.name for m in reader.read_metrics(step=number)}
        if any(name.startswith("eval/") for name in known):
            return
        self._view.show_phase("evaluating")
        metrics = self._job.measure()
        self._require_store().write_evaluation(number, metrics)
        self._metrics.append()
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in metrics.items())
        self._view.show_event(number, "held-out", shown)
        self._view.show_phase("training")

    def _is_save_due(self) -> bool:
        """Returns whether a checkpoint of the current step is due.

        It is due every `save.every` steps (0 = never), after the last step and, with `save.keep_best`, if this step has
        the best held-out accuracy or reward so far.
        """
        every = self.config.save.every
        number = self.step
        scheduled = number == self.config.steps or (every > 0 and number % every == 0)
        return scheduled or (self.config.save.keep_best and number == find_best_step(self._accuracies))

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
        state.numbers[NUM_STEPS] = self.config.steps
        state.numbers[METRICS_CHECKSUM] = self._checksum
        path = checkpoint.save(folder, state, self._job.write_model)
        self._prune_checkpoints()

        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        text = f"{path.name}, {format_size(size)}, {time.perf_counter() - begin:.1f} s"
        self._require_store().write_event(self.step, "checkpoint", text)
        self._view.show_event(self.step, "checkpoint", text)
        self._view.show_phase("training")

    def _prune_checkpoints(self) -> None:
        """Removes the checkpoints that neither `save.keep_last` nor `save.keep_best` keeps. The newest always stays."""
        keep = {find_best_step(self._accuracies)} if self.config.save.keep_best else set()
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
            measured=f"held-out {config.measure}",
            evaluations=list(self.evaluations.values()),
            name=self.directory.path.resolve().name,
            config=self.directory.dump_settings(),
        )

    def _make_summary(self) -> Summary:
        """Returns what terminal and sinks show at the end.

        It is `complete` if the last step, or that at which `stop_check` ended the run, is done and, unless the job has
        no evaluation, evaluated. Only then does it name commands to try next.
        """
        evaluations = [self.evaluations[step] for step in sorted(self.evaluations)]
        evaluated = self._job.evaluate is None or self.step in self.evaluations
        complete = (self.step >= self.config.steps or bool(self.ended_by)) and evaluated
        commands = self._job.suggest_commands(self.directory.path, self.step) if complete else []
        return Summary(
            path=str(self.directory.path),
            step=self.step,
            num_steps=self.config.steps,
            seconds=time.perf_counter() - self._started,
            first=evaluations[0] if evaluations else None,
            last=evaluations[-1] if evaluations else None,
            complete=complete,
            ended_by=self.ended_by,
            next_commands=[join_command(command) for command in commands],
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
