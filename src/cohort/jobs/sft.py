"""Supervised fine-tuning as a job: its examples, its checkpoints, what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cohort.config.document import variant_name
from cohort.config.kinds import SFT
from cohort.data.batch import Batch
from cohort.jobs.state import Trained
from cohort.loops import sft
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint
from cohort.run.life import Run
from cohort.run.machine import program
from cohort.run.store.records import About, Curve
from cohort.system.clock import stage
from cohort.tasks.traces import mixture
from cohort.tasks.traces.encode import Example
from cohort.text import Tokenizer


def examples_of(config: SFT, tokenizer: Tokenizer) -> Callable[[int], list[Example]]:
    """A function from a step, counted from 0, to its examples: the same ones whenever it is asked."""
    rows = mixture.load(config.data.rows)
    return lambda step: mixture.examples(rows, tokenizer, config.seed, step, config.batch.examples, config.data)


@dataclass(kw_only=True)
class SFTParts(Trained):
    """Everything a run of supervised fine-tuning is made of; the job that it does."""

    config: SFT
    examples: Callable[[int], list[Example]]

    evaluate: ClassVar[None] = None

    def work(self, run: Run) -> None:
        sft.train(run, self.learner, self.batch)

    @stage("examples")
    def batch(self, step: int) -> Batch:
        """What a step trains on."""
        return sft.batch_of(self.examples(step), self.config.learner.minibatches)

    def checkpoint(self, step: int) -> Checkpoint:
        return self.learner_checkpoint(step, cursor=step)

    def restore(self, state: Checkpoint) -> None:
        self.restore_learner(state)

    def about(self) -> About:
        return About(
            source=variant_name("data", self.config.data),
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

    def next_commands(self, run: Path, step: int) -> list[list[str]]:
        model = run / "checkpoints" / checkpoint.name(step) / "model"
        return [
            [program(), "eval", "arithmetic", "--model", str(model)],
            [program(), "export", str(run), f"{run.name}-model"],
            [program(), "resume", str(run), "--steps", str(2 * self.config.steps)],
        ]
