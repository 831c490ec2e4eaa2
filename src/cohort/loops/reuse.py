"""Reuse of rollouts: groups of the last few steps join the batch of a step (config section `replay`).

Older weights sampled these groups; an algorithm's `correction` setting accounts for the difference. Which groups are
reused depends on (seed, step) only, and they are read from the run's rollout files. So a resumed run reuses the same
groups as one that was never stopped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cohort.config.schema import ReplayConfig
from cohort.fates import Fate
from cohort.run.store.rollouts import load_rollouts, make_rollout_path
from cohort.tasks.draws import make_permutation
from cohort.types import Group, Sample


class RolloutReuse:
    """Draws groups from the rollout files of the last `config.steps` steps.

    `folder` holds these files; None = another rank has them, and this one draws nothing.
    """

    def __init__(self, config: ReplayConfig, seed: int, folder: Path | None) -> None:
        self.config = config
        self._seed = seed
        self._folder = folder
        # The groups of recent steps, so that each rollout file is read once. Steps count from 0.
        self._groups_by_step: dict[int, list[Group]] = {}

    def draw(self, step: int) -> list[Group]:
        """Returns up to `config.prompts` groups of earlier steps to train on again in `step`, counted from 0.

        They are drawn at random, by (seed, step), from the groups that were trained on before and were sampled by
        weights at most `config.steps` steps old. They are copies without advantages, masks and the learner's
        log-probabilities, with their age in `reused`. Raises RunError if a rollout file is missing or damaged.
        """
        if not self.config.prompts or self._folder is None:
            return []
        recent = range(max(0, step - self.config.steps), step)
        # Reads the steps that are new in this range, and forgets those that have left it.
        self._groups_by_step = {
            s: self._groups_by_step[s] if s in self._groups_by_step else self._read_trained_groups(s) for s in recent
        }
        # A group is as old as the oldest weights that sampled any of its tokens, which may be older than its step.
        aged = [(step - min(s, _find_oldest_version(g, s)), g) for s in recent for g in self._groups_by_step[s]]
        candidates = [(age, group) for age, group in aged if age <= self.config.steps]
        order = make_permutation(len(candidates), self._seed, "replay", "train", step)[: self.config.prompts]
        return [_reset_group(group, age) for age, group in (candidates[i] for i in order)]

    def _read_trained_groups(self, step: int) -> list[Group]:
        """Returns the groups that were both sampled and trained on in `step`, counted from 0, from its rollout file.

        Groups that were reused, excluded, or whose advantages are all 0, are left out.
        """
        assert self._folder is not None
        # Files count completed steps, so step 0 wrote file 1.
        number = step + 1
        advice = (
            f"The run reuses the rollouts of this step (replay.prompts), so it needs the file. Restore it from a copy; "
            f"or move all checkpoints of step {number} and later away, then continue with `cohort resume "
            f"{self._folder.parent}`, which does step {number} again."
        )
        groups = load_rollouts(make_rollout_path(self._folder, number), advice)
        return [g for g in groups if not g.reused and not g.excluded and any(s.advantage for s in g.samples)]


def _find_oldest_version(group: Group, default: int) -> int:
    """Returns the oldest version of the weights that sampled a token of the group; `default` if none is recorded."""
    return min((version for s in group.samples for _, version in s.versions), default=default)


def _reset_group(group: Group, age: int) -> Group:
    """Returns a copy of the group without advantages, masks and the learner's log-probabilities, marked as reused.

    Those were computed for weights that have changed since. `age` is stored as `reused`: how many steps old the oldest
    weights are that sampled the group.
    """
    return replace(group, reused=age, samples=[reset_sample(s) for s in group.samples])


def reset_sample(sample: Sample) -> Sample:
    """Returns a copy of the sample as it was after scoring: without what the learner and the algorithm stored.

    That is advantages, mask and the learner's log-probabilities. Tokens, sampler log-probabilities, reward and text
    stay.
    """
    return replace(
        sample, old_logprobs=None, ref_logprobs=None, advantage=0.0, token_advantages=None, masked=Fate.TRAINED
    )
