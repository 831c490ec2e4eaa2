"""The loop of supervised fine-tuning, on one screen.

    cohort train tiny_sft           starts it, in one process
    cohort resume RUN               continues it from the newest checkpoint

What it is: the batches and the learner of reinforcement learning, with target tokens of examples in place of sampled
tokens. What a step trains on is a pure function of its number, so a checkpoint need not store a position in the data.

What it is not: there is no sampling, no scoring and no evaluation. `run` logs and saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from cohort.algos.imitation import Imitation
from cohort.data.batch import Batch
from cohort.data.pack import make_batch
from cohort.examples.encode import make_example_group
from cohort.learner.base import Learner
from cohort.loops.learning import store_update
from cohort.run.job import StepRecord, TrainingRun
from cohort.tasks.traces.encode import Example
from cohort.types import Group, Provenance


def train(
    run: TrainingRun,
    learner: Learner,
    batches: Callable[[int], Batch],
    examples: Callable[[int], list[Group]] = lambda step: [],
    collect: Callable[[list[Group]], list[Group]] = lambda groups: groups,
) -> None:
    """Trains for every remaining step of `run`. `batches(step)` returns the batch of a step, counted from 0.

    `examples(step)` returns the groups that the batch was made of, which the run records; none = it records none.
    `collect(groups)` brings those of all ranks to the first, which records them.
    """
    loss = Imitation()
    for step in run.steps():
        update = learner.update(batches(step), loss)
        groups = examples(step)
        store_update(groups, update)
        # Logs, and saves a checkpoint when one is due.
        run.end_step(step, StepRecord(metrics=add_perplexity(update.metrics), groups=collect(groups) or None))


def add_perplexity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns a copy of the learner's metrics, with `perplexity` = exp(`loss`) added if there is a loss.

    A loss above 700 counts as 700, because exp would overflow.
    """
    # exp overflows a double above 709.
    perplexity = {"perplexity": math.exp(min(metrics["loss"], 700.0))} if "loss" in metrics else {}
    return {**metrics, **perplexity}


def make_sft_batch(examples: Iterable[Example], minibatches: int = 1) -> Batch:
    """Returns the batch of one step: each example as a group with one sample, divided into `minibatches`.

    An example is (tokens, provenance); only its TARGET tokens are in the loss. The batch holds plain arrays only, so
    that other processes can make it ahead of time.
    """
    groups = [make_example_group(str(n), tokens, provenance) for n, (tokens, provenance) in enumerate(examples)]
    return make_batch(groups, minibatches, loss_on=Provenance.TARGET)
