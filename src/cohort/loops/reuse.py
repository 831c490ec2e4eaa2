"""Rollouts used again: groups of the last few steps join a batch, with the correction for the policy having moved on.

Which ones is a function of (seed, step), and they are read from the run's rollout files: a resumed run draws the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cohort.config.schema import ReplayConfig
from cohort.fates import Fate
from cohort.run.store.rollouts import load_rollouts, rollout_path
from cohort.tasks.draws import permutation
from cohort.types import Group, Sample


class Replay:
    """The last `config.steps` steps of a run, as its rollout files have them."""

    def __init__(self, config: ReplayConfig, seed: int, folder: Path) -> None:
        self.config, self._seed, self._folder = config, seed, folder
        self._kept: dict[int, list[Group]] = {}  # by step

    def draw(self, step: int) -> list[Group]:
        """`config.prompts` groups (or as many as there are) that had a signal, none older than `config.steps`."""
        if not self.config.prompts:
            return []
        recent = range(max(0, step - self.config.steps), step)
        self._kept = {s: self._kept[s] if s in self._kept else self._read(s) for s in recent}
        aged = [(step - min(s, _oldest_version(g, s)), g) for s in recent for g in self._kept[s]]
        found = [(age, group) for age, group in aged if age <= self.config.steps]
        order = permutation(len(found), self._seed, "replay", "train", step)[: self.config.prompts]
        return [_again(group, age) for age, group in (found[i] for i in order)]

    def _read(self, step: int) -> list[Group]:
        """Of the groups sampled in that step those that were trained on: files count completed steps."""
        groups = load_rollouts(rollout_path(self._folder, step + 1))
        return [g for g in groups if not g.reused and not g.excluded and any(s.advantage for s in g.samples)]


def _oldest_version(group: Group, otherwise: int) -> int:
    """Of the policies that drew its tokens: a step samples with the version of its own number, or with older ones."""
    return min((version for s in group.samples for _, version in s.versions), default=otherwise)


def _again(group: Group, age: int) -> Group:
    """As it was when it had been scored: what the learner and the algorithm say of it is of another policy now."""
    return replace(group, reused=age, samples=[scored(s) for s in group.samples])


def scored(sample: Sample) -> Sample:
    """Without what the learner and the algorithm add to it."""
    return replace(
        sample, old_logprobs=None, ref_logprobs=None, advantage=0.0, token_advantages=None, masked=Fate.TRAINED
    )
