"""Reuse of rollouts: which groups are drawn, how old they are, and that a resume draws the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cohort.config.algo_sections import CorrectionConfig
from cohort.config.algos import GRPO
from cohort.config.kinds import RL
from cohort.config.load import change_config
from cohort.config.schema import ReplayConfig, SaveConfig
from cohort.errors import ConfigError
from cohort.fates import Fate
from cohort.loops.reuse import RolloutReuse
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.life import Run
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts, make_rollout_path, save_rollouts
from cohort.tasks.arithmetic import Arithmetic
from tests.helpers.decoders_and_groups import make_group, make_sample
from tests.helpers.pretend_run import PretendJob
from tests.helpers.small_runs import small_run

CORRECTED = GRPO(correction=CorrectionConfig(kind="truncate"))


def write_rollouts(folder, step: int, num: int = 4) -> None:
    """Writes the rollout file of `step`, counted from 0: `num` groups with a signal, a dead one, a reused one."""
    samples = lambda: [make_sample([5, 6], reward=r, old_logprobs=[-1.0, -1.0], advantage=1.0) for r in (0.0, 1.0)]  # noqa: E731
    groups = [make_group([3], samples(), id=f"{step}/{i}") for i in range(num)]
    groups += [make_group([3], samples(), id="dead"), make_group([3], samples(), id="old")]
    groups[-2].excluded, groups[-1].reused = Fate.CONSTANT_REWARD, 2
    save_rollouts(make_rollout_path(folder, step + 1), groups)


def test_groups_of_the_last_steps_are_drawn_without_logprobs_and_advantages(tmp_path):
    for step in range(5):
        write_rollouts(tmp_path, step)
    reuse = RolloutReuse(ReplayConfig(prompts=6, steps=2), 0, tmp_path)
    drawn = reuse.draw(5)
    assert len(drawn) == 6 and {g.prompt.id.split("/")[0] for g in drawn} == {"3", "4"}  # neither "dead" nor "old"
    assert all(g.reused == 5 - int(g.prompt.id.split("/")[0]) for g in drawn)
    assert {(s.old_logprobs, s.advantage) for g in drawn for s in g.samples} == {(None, 0.0)}
    assert len({g.prompt.id for g in drawn}) == 6
    assert RolloutReuse(ReplayConfig(prompts=99, steps=2), 0, tmp_path).draw(5)[8:] == []


def test_age_is_that_of_the_oldest_weights_that_sampled_a_token(tmp_path):
    """A sample that version 1 began and version 3 ended has the age of version 1."""
    old, new = (
        make_group(
            [3],
            [make_sample([5, 6], reward=r, advantage=r - 0.5, versions=spans) for r in (0.0, 1.0)],
            id=name,
        )
        for name, spans in (("old", [(0, 1), (1, 3)]), ("new", [(0, 3)]))
    )
    save_rollouts(make_rollout_path(tmp_path, 4), [old, new])
    for step in range(3):
        save_rollouts(make_rollout_path(tmp_path, step + 1), [])
    drawn = {steps: RolloutReuse(ReplayConfig(prompts=9, steps=steps), 0, tmp_path).draw(4) for steps in (1, 3)}
    assert [(g.prompt.id, g.reused) for g in drawn[1]] == [("new", 1)]
    assert sorted((g.prompt.id, g.reused) for g in drawn[3]) == [("new", 1), ("old", 3)]


def test_what_is_drawn_depends_on_seed_and_step_alone(tmp_path):
    for step in range(4):
        write_rollouts(tmp_path, step, num=8)
    one, other = (RolloutReuse(ReplayConfig(prompts=3), 7, tmp_path) for _ in range(2))
    one.draw(3)
    again = [g.prompt.id for g in one.draw(4)]
    assert again == [g.prompt.id for g in other.draw(4)]  # a resumed run has not drawn for step 3
    different = [[g.prompt.id for g in RolloutReuse(ReplayConfig(prompts=3), s, tmp_path).draw(4)] for s in range(5)]
    assert len({tuple(d) for d in different}) > 1


def test_nothing_is_drawn_in_the_first_step_or_without_replay(tmp_path):
    assert RolloutReuse(ReplayConfig(prompts=3), 0, tmp_path).draw(0) == []
    assert RolloutReuse(ReplayConfig(), 0, tmp_path).draw(9) == []


def test_dead_groups_that_a_kl_term_trains_are_not_drawn(tmp_path):
    """They are not excluded then, but have no advantage, so there is nothing to learn from them again."""
    dead = make_group([3], [make_sample([5], reward=1.0) for _ in range(2)], id="dead")
    live = make_group([3], [make_sample([5], reward=r, advantage=r - 0.5) for r in (0.0, 1.0)], id="live")
    save_rollouts(make_rollout_path(tmp_path, 1), [dead, live])
    assert [g.prompt.id for g in RolloutReuse(ReplayConfig(prompts=9), 0, tmp_path).draw(1)] == ["live"]


def test_rollouts_that_a_resume_would_reuse_are_kept(tmp_path):
    """Step 5 is recorded, and the newest checkpoint is that of step 3: a resume would reuse steps 2 and 3."""
    config = replace(
        small_run(steps=9), save=SaveConfig(rollouts=1), replay=ReplayConfig(prompts=1, steps=2), algo=CORRECTED
    )
    directory = RunDirectory.create(tmp_path, config)
    for step in range(1, 6):
        write_rollouts(directory.rollouts, step - 1)
    (directory.checkpoints / checkpoint.folder_name(3)).mkdir(parents=True)
    run = Run(directory, config, PretendJob(config))
    run.step = 5
    run._remove_old_rollouts()
    assert list_rollout_steps(directory.rollouts) == [2, 3, 4, 5]
    run = Run(directory, config, PretendJob(replace(config, replay=ReplayConfig())))
    run.step = 5
    run._remove_old_rollouts()
    assert list_rollout_steps(directory.rollouts) == [5]


def test_age_survives_the_file(tmp_path):
    write_rollouts(tmp_path, 0)
    assert [g.reused for g in load_rollouts(make_rollout_path(tmp_path, 1))] == [0, 0, 0, 0, 0, 2]


def test_replay_needs_a_correction():
    config = RL(task=Arithmetic(), replay=ReplayConfig(prompts=2))
    with pytest.raises(ConfigError, match="samples of older policies"):
        change_config(config)
    corrected = RL(
        task=Arithmetic(), replay=ReplayConfig(prompts=2), algo=GRPO(correction=CorrectionConfig(kind="truncate"))
    )
    assert change_config(corrected).replay.prompts == 2
    with pytest.raises(ConfigError, match=r"steps has no effect: replay\.prompts is 0"):
        change_config(RL(task=Arithmetic()), ["--replay.steps", "2"])
