"""The life of a run: start or go on, record every step, evaluate, save, stop when asked, finish.

The checkpoint alone is the truth. Everything else a run writes is recorded before the checkpoint that
vouches for it, and whatever is newer than the newest checkpoint is removed before those steps are done again.
So it does not matter where a run is killed: it goes on as if it had not been.
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
from cohort.logs.escape import one_line
from cohort.logs.metrics_file import MetricsFile
from cohort.logs.view import Guarded, Header, Several, StepReport, Summary, View, make_view
from cohort.run import checkpoint
from cohort.run.card import CardData, render_card
from cohort.run.directory import RunDirectory
from cohort.run.job import Job, StepRecord
from cohort.run.machine import describe_environment, program
from cohort.run.signals import StopSignals
from cohort.run.store.db import Store
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import remove_rollouts, rollout_path, save_rollouts
from cohort.system import clock
from cohort.system.disk import readable_size, write_atomic
from cohort.types import Group


class Run:
    """Use as `with Run(...) as run:`, loop over `run.steps()`, call `run.finish()` after the loop."""

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
        self.step = 0  # completed
        self.evaluations: dict[int, Evaluation] = {}
        self._job = job
        self._about = job.about()
        guarded = [Guarded(sink, partial(self._sink_failed, name)) for name, sink in (sinks or {}).items()]
        # Sinks come first: one may ask for a password at its start, and takes its time at its end.
        self._view = Several([*guarded, make_view() if view is None else view])
        self._metrics = MetricsFile(directory.metrics, directory.database)
        self._signals = StopSignals()
        self._store: Store | None = None
        self._pending: list[tuple[str, str]] = []
        self._started = self._step_began = time.perf_counter()
        self._first_step = 0

    def __enter__(self) -> Run:
        self.directory.lock()
        try:
            self.directory.require_same(self.config)
            self.directory.extend(self.config.steps)
            self._store = Store(self.directory.database)
            self._recover(self._store)
            self._signals.install()
        except BaseException:
            self._close()
            raise
        self._view.start(self._header())
        if self.step >= self.config.steps:
            more = f"{program()} resume {self.directory.path} --steps {2 * self.config.steps}"
            self._view.event(self.step, "run", f"all {self.config.steps} steps are done; train on with: {more}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            text = f"stopped by {type(error).__name__}; go on with: {program()} resume {self.directory.path}"
            with suppress(RunError):  # the disk may be what failed
                self.event("run", text)
                self._flush()
        self._close()

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop: by Ctrl-C, SIGTERM or a closed terminal."""
        return bool(self._signals.requested)

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 0; each must end with `end_step`."""
        self._started = time.perf_counter()
        if not self.stopping:
            self._evaluate_if_due()
        while self.step < self.config.steps and not self.stopping:
            step = self.step
            clock.read_and_reset()  # time spent on evaluation and saving is no part of a step
            self._step_began = time.perf_counter()
            yield step
            assert self.step == step + 1, f"step {step} did not end with end_step"
        if self.stopping and self.step > self._first_step:
            self._save()  # the signal may have come after the step was recorded

    def event(self, kind: str, text: str) -> None:
        """Something worth knowing (a skip, a failure), shown now and recorded with the current step."""
        self.notice(kind, text)
        self._pending.append((kind, text))

    def notice(self, kind: str, text: str) -> None:
        """Shown now, not recorded: what a resumed run says again."""
        self._view.event(self.step + 1, kind, text)

    def end_step(self, step: int, record: StepRecord) -> None:
        """Record the step, evaluate and save when it is time."""
        assert step == self.step, f"step {step} ended while step {self.step} was under way"
        number = step + 1
        metrics = {**record.metrics, **self._times(record.metrics)}
        if record.problem:
            self.event("failure", record.problem)
        fresh: list[Group] = []
        if record.groups is not None:
            size = save_rollouts(rollout_path(self.directory.rollouts, number), record.groups)
            metrics["rollouts/bytes"] = float(size)
            fresh = [g for g in record.groups if not g.reused]  # the others are rows of the step that sampled them
        self._require_store().write_step(number, metrics, fresh, self._pending)
        self._pending = []
        self._metrics.append()
        self.step = number
        self._remove_old_rollouts()
        self._view.step(
            StepReport(
                step=number,
                num_steps=self.config.steps,
                metrics=metrics,
                eta=self._eta(),
                showcase=record.showcase,
            )
        )
        if not self.stopping:
            self._evaluate_if_due()
        if self.stopping or self._save_due():
            self._save()

    def finish(self) -> Summary:
        """Make sure of the last evaluation and checkpoint, write the card, say how it went."""
        if self.step >= self.config.steps:
            if not self.stopping:
                self._evaluate_if_due()
            if self.step:
                self._save()
                self._prune()  # a kill may have come between the last checkpoint and the removal of older ones
        self._flush()
        summary = self._summary()
        write_atomic(self.directory.card, self._card(summary))
        self._view.finish(summary)
        return summary

    def _recover(self, store: Store) -> None:
        """Go back to the newest checkpoint, or to the beginning when there is none yet."""
        checkpoint.clean(self.directory.checkpoints)
        path = checkpoint.latest(self.directory.checkpoints)
        state = checkpoint.load(path) if path else None
        if state:
            self._job.restore(state)  # may refuse, and then nothing has been removed
        self.step = self._first_step = state.step if state else 0
        store.truncate_after(self.step)
        self.directory.remove_after(self.step)
        self._metrics.rewrite()
        self.evaluations = self.directory.evaluations()
        with Reader(self.directory.database) as reader:
            lived = bool(reader.events(kind="run"))
        store.write_event(self.step, "run", f"resumed after step {self.step}" if lived else "started")

    def _evaluate_if_due(self) -> None:
        every, number = self.config.eval.every, self.step
        due = number in (0, self.config.steps) or (every > 0 and number % every == 0)
        if self._job.evaluate is None or not due or number in self.evaluations:
            return
        self._view.phase("evaluating")
        evaluation = self._job.evaluate(number)
        assert evaluation.step == number, f"evaluation of step {evaluation.step} instead of {number}"
        # Rows first: where the file is, they are too. A kill in between repeats both.
        self._require_store().write_evaluation(number, evaluation.metrics)
        self._metrics.append()
        self.directory.save_evaluation(evaluation)
        self.evaluations[number] = evaluation
        self._view.evaluation(evaluation)
        self._view.phase("training")

    def _best_step(self) -> int:
        """The step with the best held-out accuracy, the earliest of equals; 0 when there is none."""
        trained = [e for step, e in self.evaluations.items() if step > 0]
        return max(trained, key=lambda e: (e.accuracy, -e.step)).step if trained else 0

    def _save_due(self) -> bool:
        every, number = self.config.save.every, self.step
        scheduled = number == self.config.steps or (every > 0 and number % every == 0)
        return scheduled or (self.config.save.keep_best and number == self._best_step())

    def _save(self) -> None:
        folder = self.directory.checkpoints
        if self.step in checkpoint.steps(folder):
            return
        self._view.phase("saving")
        begin = time.perf_counter()
        state = self._job.checkpoint(self.step)
        assert state.step == self.step, f"checkpoint of step {state.step} instead of {self.step}"
        path = checkpoint.save(folder, state, self._job.write_model)
        self._prune()
        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        text = f"{path.name}, {readable_size(size)}, {time.perf_counter() - begin:.1f} s"
        self._require_store().write_event(self.step, "checkpoint", text)
        self._view.event(self.step, "checkpoint", text)
        self._view.phase("training")

    def _prune(self) -> None:
        keep = {self._best_step()} if self.config.save.keep_best else set()
        checkpoint.prune(self.directory.checkpoints, keep_last=self.config.save.keep_last, keep=keep)

    def _remove_old_rollouts(self) -> None:
        """Those beyond what is to be kept; but a resume reads back from the checkpoint, not from here."""
        if not self.config.save.rollouts:
            return
        oldest = self.step - self.config.save.rollouts
        if self._about.reads_back:
            saved = max(checkpoint.steps(self.directory.checkpoints), default=0)
            oldest = min(oldest, saved - self._about.reads_back)
        remove_rollouts(self.directory.rollouts, lambda step: step > oldest)

    def _times(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Everything that depends on the clock, under time/: comparisons of two runs leave it out."""
        seconds = time.perf_counter() - self._step_began
        stages = clock.read_and_reset()
        times = {f"time/stage/{name}": value for name, value in stages.items()} | {"time/step": seconds}
        rates = (
            ("tokens_per_s", "tokens/sampled", seconds),
            ("sampled_per_s", "tokens/sampled", stages.get("rollout")),
            ("trained_per_s", "tokens", stages.get("update")),
        )
        for name, counted, spent in rates:
            if counted in metrics and spent is not None:
                times[f"time/{name}"] = metrics[counted] / max(spent, 1e-9)
        return times

    def _eta(self) -> float:
        done = self.step - self._first_step
        return (time.perf_counter() - self._started) / max(1, done) * (self.config.steps - self.step)

    def _header(self) -> Header:
        config, about = self.config, self._about
        with Reader(self.directory.database) as reader:
            values = reader.series(about.curve.metric)
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
            evaluates=self._job.evaluate is not None,
            evaluations=list(self.evaluations.values()),
            name=self.directory.path.resolve().name,
            config=self.directory.settings(),
        )

    def _summary(self) -> Summary:
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
            next_commands=self._next_commands() if complete else [],
        )

    def _next_commands(self) -> list[str]:
        return [shlex.join(command) for command in self._job.next_commands(self.directory.path, self.step)]

    def _card(self, summary: Summary) -> str:
        accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
        with Reader(self.directory.database) as reader:
            names = {row.name for row in reader.metrics() if not row.name.startswith("time/")}
            series = {name: reader.series(name) for name in names}
            events = reader.events()
        return render_card(
            CardData(
                name=self.directory.path.name,
                config=self.config,
                about=self._about,
                step=self.step,
                command=next((event.text for event in events if event.kind == "command"), ""),
                threads=torch.get_num_threads(),
                environment=describe_environment(accelerator),
                closing=summary.lines(),
                evaluations=[self.evaluations[step] for step in sorted(self.evaluations)],
                series=series,
                events=events,
            )
        )

    def _sink_failed(self, name: str, problem: str) -> None:
        self.event("sink", f"{name} failed ({one_line(problem, 300)}); the run goes on without it")

    def _flush(self) -> None:
        """Record what happened after the last complete step."""
        if self._pending:
            self._require_store().write_step(self.step, {}, events=self._pending)
            self._pending = []

    def _require_store(self) -> Store:
        if self._store is None:
            raise RunError("this run is not open: use it as `with Run(...) as run:`.")
        return self._store

    def _close(self) -> None:
        self._signals.restore()
        self._view.close()
        if self._store is not None:
            with suppress(RunError):
                self._flush()  # what a sink said at its end
            with suppress(RunError):
                self._store.close()
            self._store = None
        self.directory.unlock()
