"""Supervised fine-tuning: the same packs and the same learner, target tokens instead of sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cohort.algos.imitation import Imitation
from cohort.data.batch import Batch
from cohort.data.pack import make_batch
from cohort.learner.base import Learner
from cohort.types import Finish, Group, Prompt, Provenance, Sample

Example = tuple[list[int], list[int]]
"""(tokens, provenance): TARGET tokens are imitated, the others are only seen."""


def sft(learner: Learner, batches: Iterable[Batch], report: Callable[[int, dict[str, float]], None]) -> None:
    """One update per batch until they are used up."""
    loss = Imitation()
    for step, batch in enumerate(batches):
        report(step, learner.update(batch, loss).metrics)


def batch_of(examples: Iterable[Example]) -> Batch:
    """Examples -> one optimizer step: plain arrays, which other processes can make ahead."""
    groups = [as_group(str(n), tokens, provenance) for n, (tokens, provenance) in enumerate(examples)]
    return make_batch(groups, loss_on=Provenance.TARGET)


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
