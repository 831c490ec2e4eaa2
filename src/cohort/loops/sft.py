"""Supervised fine-tuning: the loop on one screen. The same batches and learner, target tokens instead of sampled ones.

    cohort train tiny_sft           one process
    cohort resume RUN               the same loop, from the last checkpoint

What a step trains on is a pure function of its number: there is nothing to remember but the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from cohort.algos.imitation import Imitation
from cohort.data.batch import Batch
from cohort.data.pack import make_batch
from cohort.learner.base import Learner
from cohort.loops.learning import pass_on
from cohort.run.job import StepRecord, Steps
from cohort.tasks.traces.encode import Example
from cohort.types import Finish, Group, Prompt, Provenance, Sample


def train(run: Steps, learner: Learner, batches: Callable[[int], Batch]) -> None:
    """Run every remaining step of `run`; `batches(step)` is what that step trains on."""
    loss = Imitation()
    for step in run.steps():
        update = learner.update(batches(step), loss)
        pass_on(update)
        run.end_step(step, StepRecord(metrics=step_metrics(update.metrics)))  # log, checkpoint


def step_metrics(update: Mapping[str, float]) -> dict[str, float]:
    """The learner's numbers, with the loss as a perplexity."""
    told = {"perplexity": math.exp(min(update["loss"], 700.0))} if "loss" in update else {}
    return {**update, **told}


def batch_of(examples: Iterable[Example], minibatches: int = 1) -> Batch:
    """Examples -> what one step trains on: plain arrays, which other processes can make ahead."""
    groups = [as_group(str(n), tokens, provenance) for n, (tokens, provenance) in enumerate(examples)]
    return make_batch(groups, minibatches, loss_on=Provenance.TARGET)


def as_group(id: str, tokens: Sequence[int], provenance: Sequence[int]) -> Group:
    """An example as a group of one: what precedes the first target is the prompt."""
    first = next((i for i, p in enumerate(provenance) if p == Provenance.TARGET), len(tokens))
    prompt = Prompt(
        task="sft",
        id=id,
        visit=0,
        row={},
        messages=[],
        tokens=list(tokens[:first]),
        provenance=list(provenance[:first]),
    )
    rest = len(tokens) - first
    sample = Sample(
        tokens=list(tokens[first:]),
        provenance=list(provenance[first:]),
        sampler_logprobs=[0.0] * rest,
        finish=Finish.STOP,
    )
    return Group(prompt=prompt, samples=[sample])
