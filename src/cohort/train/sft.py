"""Supervised fine-tuning: the same packs and the same learner, target tokens instead of sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from cohort.algos.imitation import Imitation
from cohort.data.pack import pack
from cohort.learner.base import Learner
from cohort.types import Finish, Group, Prompt, Provenance, Sample

Example = tuple[list[int], list[int]]
"""(tokens, provenance): TARGET tokens are imitated, the others are only seen."""


def sft(
    learner: Learner,
    examples: Iterable[Example],
    *,
    batch_size: int,
    token_budget: int,
    report: Callable[[int, dict[str, float]], None],
) -> None:
    """One update per `batch_size` examples until they are used up; a last partial batch is trained too."""
    loss = Imitation()
    for step, batch in enumerate(_batches(examples, batch_size)):
        groups = [as_group(tokens, provenance) for tokens, provenance in batch]
        report(step, learner.update(pack(groups, token_budget, loss_on=Provenance.TARGET), loss))


def as_group(tokens: Sequence[int], provenance: Sequence[int]) -> Group:
    """An example as a group of one: what precedes the first target is the prompt."""
    first = next(i for i, p in enumerate(provenance) if p == Provenance.TARGET)
    prompt = Prompt(
        task="", id="", visit=0, row={}, messages=[], tokens=list(tokens[:first]), provenance=list(provenance[:first])
    )
    rest = len(tokens) - first
    sample = Sample(
        tokens=list(tokens[first:]),
        provenance=list(provenance[first:]),
        sampler_logprobs=[0.0] * rest,
        finish=Finish.STOP,
    )
    return Group(prompt=prompt, samples=[sample])


def _batches(examples: Iterable[Example], size: int) -> Iterator[list[Example]]:
    rest = iter(examples)
    while batch := list(islice(rest, size)):
        yield batch
