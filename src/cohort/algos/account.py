"""Counts of what became of a step's groups and samples. Everything that leaves the update is counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cohort.types import Group


def count_fates(groups: Sequence[Group]) -> dict[str, float]:
    """Returns how many groups and samples there are and what became of them, by metric name, sorted.

    Call after `Algorithm.advantages`. `groups/in_loss` counts the groups that train and is always present; every other
    count that would be 0 is left out. Samples of excluded groups count too. A sample may be in several counts: masked,
    cut at the limit of tokens (`samples/length`), without sampled tokens (`samples/empty`).

    >>> from cohort.types import Prompt, Sample
    >>> prompt = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[1], provenance=[0])
    >>> empty = Sample(tokens=[], provenance=[], sampler_logprobs=[], reward=0.0)
    >>> group = Group(prompt=prompt, samples=[empty], excluded="constant reward")
    >>> for name, count in count_fates([group]).items():
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
        # Fate.TRAINED is the empty string: such a group is in the loss.
        counts[f"groups/{_to_metric_name(group.excluded) or 'in_loss'}"] += 1
        for sample in group.samples:
            counts["samples"] += 1
            if sample.masked:
                counts[f"samples/masked_{_to_metric_name(sample.masked)}"] += 1
            if sample.is_truncated:
                counts["samples/length"] += 1
            if not sample.num_sampled:
                counts["samples/empty"] += 1
    return {name: float(counts[name]) for name in sorted(counts)}


def _to_metric_name(fate: str) -> str:
    """Returns a fate's text with underscores in place of spaces, such as "constant_reward"."""
    return fate.replace(" ", "_")
