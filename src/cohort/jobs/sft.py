"""The job of supervised fine-tuning: where its examples come from, and how it is saved and described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cohort.algos.imitation import Imitation
from cohort.config.document import get_variant_name
from cohort.config.imitation import SFT, TaskAnswers, Traces
from cohort.data.batch import Batch
from cohort.data.pack import make_batch
from cohort.evaluation.records import Evaluation
from cohort.examples.encode import EncodedExamples
from cohort.jobs.base import TrainingJob
from cohort.jobs.task_eval import TaskEvaluator, describe_no_rows, notice_if_fewer_problems, suggest_evaluation
from cohort.loops import sft
from cohort.ranks.groups import GroupMover
from cohort.run.checkpoint import Checkpoint
from cohort.run.life import Run
from cohort.run.machine import program_name
from cohort.run.store.records import Curve, RunDescription
from cohort.run.together import FollowingRun
from cohort.system.clock import stage
from cohort.tasks.traces import mixture
from cohort.text import Tokenizer
from cohort.types import Group, Provenance
from cohort.world import ONE_PROCESS


def make_trace_source(config: SFT, tokenizer: Tokenizer) -> Callable[[int], list[Group]]:
    """Returns a function from a step, counted from 0, to the synthetic examples of that step.

    The same step always has the same examples.
    """
    data = config.data
    assert isinstance(data, Traces)
    rows = mixture.load_trace_rows(data.rows)

    # A step asks twice: for its batch, and for its record.
    @lru_cache(maxsize=1)
    def make_groups(step: int) -> list[Group]:
        examples = mixture.make_examples(rows, tokenizer, config.seed, step, config.batch.examples, data)
        return [sft.make_example_group(str(n), *example) for n, example in enumerate(examples)]

    return make_groups


@dataclass(kw_only=True)
class SFTJob(TrainingJob):
    """A run of supervised fine-tuning: the model, its learner and the examples."""

    config: SFT
    # From a step, counted from 0, to what it trains on.
    groups: Callable[[int], list[Group]]
    encoded: EncodedExamples = field(default_factory=EncodedExamples)  # those of a file, and what was left out
    held_out: list[Group] = field(default_factory=list)

    evaluator: TaskEvaluator | None = None  # of the config's task
    mover: GroupMover = field(default_factory=lambda: GroupMover(ONE_PROCESS))

    @property
    def evaluate(self) -> Callable[[int], Evaluation | None] | None:
        """A function that measures the accuracy of the run's task; None if it has none."""
        return None if self.evaluator is None else self.evaluator.evaluate

    @property
    def measure(self) -> Callable[[], Mapping[str, float]] | None:
        """A function that measures the loss on the held-out examples; None if there are none."""
        return self._measure if self.held_out else None

    def _measure(self) -> dict[str, float]:
        """Returns loss and perplexity of the held-out examples, as metrics."""
        own = self.mover.select(self.held_out)
        found = self.learner.measure(make_batch(own, loss_on=Provenance.TARGET), Imitation())
        found = sft.add_perplexity(found)
        return {f"eval/{name}": found[name] for name in ("loss", "perplexity")}

    def run_loop(self, run: Run | FollowingRun) -> None:
        """Trains for every remaining step of `run`. First tells the user about rows that are left out."""
        for line in self.encoded.describe():
            run.show_notice("rows", line)
        if notice := self.notice_if_fewer_problems():
            run.show_notice("evaluation", notice)
        self.record_changed_grader(run, self.config.task)
        if self.evaluator is not None:
            outcomes = None if run.directory is None else run.directory.outcomes
            self.evaluator.scorer.keep_outcomes(outcomes, self.mover.world)
        sft.train(run, self.learner, self.make_batch, self._list_own_groups, self.mover.collect_on_first)

    def notice_if_fewer_problems(self) -> str:
        """Returns a notice if the run's task has fewer held-out rows than eval.problems asks for, or none; else ""."""
        if self.config.task is None:
            return ""
        return notice_if_fewer_problems(self.config, 0 if self.evaluator is None else self.evaluator.num_rows)

    @stage("examples")
    def make_batch(self, step: int) -> Batch:
        """Returns the batch of examples that a step, counted from 0, trains on; of several ranks, this rank's part."""
        minibatches = self.config.learner.minibatches
        return make_batch(self._list_own_groups(step), minibatches, Provenance.TARGET, world=self.learner.world)

    def _list_own_groups(self, step: int) -> list[Group]:
        """Returns the examples of a step that this rank trains on."""
        return self.mover.select(self.groups(step), self.config.learner.minibatches)

    def make_checkpoint(self, step: int) -> Checkpoint:
        """Returns the learner's state after `step` completed steps, but no weights."""
        # The examples of a step depend on its number only, so the position in the data is the step.
        return self.checkpoint_learner(step, cursor=step)

    def restore(self, state: Checkpoint) -> None:
        """Restores weights and learner from a checkpoint.

        Raises RunError if it was made with other settings, or if adapters are trained and the base model has changed.
        """
        self.restore_learner(state)

    def describe(self) -> RunDescription:
        """Returns what terminal and run card say about this run: data, batch, and which metrics to show."""
        return RunDescription(
            source=self._describe_data(),
            source_is="data",
            algo="sft",
            batch=f"{self.config.batch.examples} examples",
            curve=Curve(label="loss", metric="loss", rising=False),
            columns=(
                ("loss", "loss"),
                ("perplexity", "perplexity"),
                ("target tokens", "tokens"),
                ("gradient norm", "grad_norm"),
                ("learning rate", "lr"),
            ),
            left_out=tuple(self.encoded.describe()),
            not_evaluated=describe_no_rows(self.config) if self.config.task and self.evaluator is None else "",
        )

    def _describe_data(self) -> str:
        """Returns the name of the data and, if these are the answers of a task, the name of that."""
        name = get_variant_name("data", self.config.data)
        return f"{name} ({self.config.task.name})" if isinstance(self.config.data, TaskAnswers) else name

    def suggest_commands(self, run: Path, step: int) -> list[list[str]]:
        """Returns commands to try after the run in directory `run` is complete, each as a list of words.

        They evaluate the model after `step` steps on its task, export it, and train on. Synthetic traces teach
        arithmetic among others, and are evaluated on that.
        """
        c = self.config
        is_synthetic = isinstance(c.data, Traces)
        evaluation = [[program_name(), "eval", "arithmetic", "--model", f"{run}@{step}"]] if is_synthetic else []
        if c.task is not None:
            too_long = getattr(c.data, "too_long", "error")
            evaluation = [] if self.evaluator is None else [suggest_evaluation(c, run, step, too_long)]
        return [
            *evaluation,
            [program_name(), "export", str(run), f"{run.name}-model"],
            [program_name(), "resume", str(run), "--steps", str(2 * self.config.steps)],
        ]

    def close(self) -> None:
        """Ends the engine and the scoring workers of evaluations, if there are any."""
        if self.evaluator is not None:
            self.evaluator.close()
