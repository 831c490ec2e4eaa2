"""What became of a step's groups and samples: nothing leaves the update without being counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cohort.types import Finish, Group


def account(groups: Sequence[Group]) -> dict[str, float]:
    """Counts by fate, after `Algorithm.advantages`. `groups/in_loss` is the size of the signal.

    >>> from cohort.types import Prompt, Sample
    >>> prompt = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[1], provenance=[0])
    >>> empty = Sample(tokens=[], provenance=[], sampler_logprobs=[], reward=0.0)
    >>> group = Group(prompt=prompt, samples=[empty], excluded="constant reward")
    >>> for name, count in account([group]).items():
    ...     print(name, count)
    groups 1.0
    groups/constant_reward 1.0
    groups/in_loss 0.0
    samples 1.0
    samples/empty 1.0
    """
    counts: Counter[str] = Counter({"groups/in_loss": 0})
    for group in groups:
        counts["groups"] += 1
        counts[f"groups/{_slug(group.excluded) or 'in_loss'}"] += 1
        for sample in group.samples:
            counts["samples"] += 1
            if sample.masked:
                counts[f"samples/masked_{_slug(sample.masked)}"] += 1
            if sample.finish == Finish.LENGTH:
                counts["samples/length"] += 1
            if not sample.num_sampled:
                counts["samples/empty"] += 1
    return {name: float(counts[name]) for name in sorted(counts)}


def _slug(reason: str) -> str:
    return reason.replace(" ", "_")
