"""The job of supervised fine-tuning: where its examples come from, and how it is saved and described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cohort.config.document import get_variant_name
from cohort.config.kinds import SFT
from cohort.data.batch import Batch
from cohort.jobs.base import TrainingJob
from cohort.loops import sft
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint
from cohort.run.life import Run
from cohort.run.machine import program_name
from cohort.run.store.records import Curve, RunDescription
from cohort.system.clock import stage
from cohort.tasks.traces import mixture
from cohort.tasks.traces.encode import Example
from cohort.text import Tokenizer


def make_example_source(config: SFT, tokenizer: Tokenizer) -> Callable[[int], list[Example]]:
    """Reads the data of a config, and returns a function from a step, counted from 0, to the examples of that step.

    The same step always has the same examples.
    """
    rows = mixture.load_trace_rows(config.data.rows)
    return lambda step: mixture.make_examples(rows, tokenizer, config.seed, step, config.batch.examples, config.data)


@dataclass(kw_only=True)
class SFTJob(TrainingJob):
    """A run of supervised fine-tuning: the model, its learner and the examples."""

    config: SFT
    # From a step, counted from 0, to what it trains on.
    examples: Callable[[int], list[Example]]

    # Such runs have no evaluation of their own.
    evaluate: ClassVar[None] = None

    def run_loop(self, run: Run) -> None:
        """Trains for every remaining step of `run`."""
        sft.train(run, self.learner, self.make_batch)

    @stage("examples")
    def make_batch(self, step: int) -> Batch:
        """Returns the batch of examples that a step, counted from 0, trains on."""
        return sft.make_sft_batch(self.examples(step), self.config.learner.minibatches)

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
            source=get_variant_name("data", self.config.data),
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
        )

    def suggest_commands(self, run: Path, step: int) -> list[list[str]]:
        """Returns commands to try after the run in directory `run` is complete, each as a list of words.

        They evaluate the model after `step` steps on the task "arithmetic", export it, and train on.
        """
        model = run / "checkpoints" / checkpoint.folder_name(step) / "model"
        return [
            [program_name(), "eval", "arithmetic", "--model", str(model)],
            [program_name(), "export", str(run), f"{run.name}-model"],
            [program_name(), "resume", str(run), "--steps", str(2 * self.config.steps)],
        ]
