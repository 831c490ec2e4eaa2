"""What `cohort replay` refuses, and which steps it can replay. Replays of real runs are in tests/integration."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.algos.algorithm import build_algorithm
from cohort.cli import replay as command
from cohort.config.algos import DAPO
from cohort.config.schema import GRPO, LearnerConfig
from cohort.errors import ConfigError
from cohort.fates import Fate
from cohort.inspect.replay import MetricComparison, apply_settings, find_replayable_steps, reset_to_sampled
from cohort.run.directory import RunDirectory
from cohort.run.store.db import Store
from cohort.run.store.reader import Reader
from cohort.types import Group, Prompt, Sample
from tests.helpers.small_runs import small_run


@pytest.mark.parametrize(
    "flag",
    [
        *("--batch.prompts=6", "--task=countdown", "--task.train-size=9", "--model=other", "--steps=9", "--seed=1"),
        *("--sampling.temperature=0.5", "--reward.correct=2", "--replay.prompts=1", "--engine.slots=4"),
    ],
)
def test_a_setting_that_does_not_act_on_the_update_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        apply_settings(small_run(), [flag])
    assert str(refusal.value).startswith(f"{flag.partition('=')[0]} cannot be changed in a replay")


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--algo.kl.target=0.1", "from one step to the next"),
        ("--algo.kl.refresh=2", "from one step to the next"),
        ("--algo.entropy-target=0.1", "from one step to the next"),
        ("--learner.lora.rank=4", "from its beginning"),
    ],
)
def test_a_setting_that_needs_more_than_one_update_is_refused_by_name(flag: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        apply_settings(small_run(), [flag])
    assert str(refusal.value).startswith(flag.partition("=")[0] + " ")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--lr", "1"], r"unknown flag --lr\. Did you mean --optim\.lr\?"),
        (["--optim.lr", "high"], "--optim.lr must be a number"),
        (["--algo.clip-high=0.3"], "--algo.clip-high has no effect"),
        (["--algo", "grop"], 'Did you mean "grpo"'),
    ],
)
def test_settings_are_checked_as_those_of_a_run(flags: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        apply_settings(small_run(), flags)


def test_only_what_is_asked_for_is_changed() -> None:
    config = small_run(learner=LearnerConfig(epochs=2), reward={})
    found = apply_settings(config, ["--algo", "dapo", "--algo.clip-high", "0.5", "--optim.lr", "1e-5"])
    assert found == replace(config, algo=DAPO(clip_high=0.5), optim=replace(config.optim, lr=1e-5))
    assert apply_settings(config, []) == config


def test_the_command_needs_a_run_and_a_step() -> None:
    with pytest.raises(ConfigError, match="RUN is missing; write: cohort replay RUN"):
        command.run(["--step", "1"])
    with pytest.raises(ConfigError, match="--step is missing"):
        command.run(["runs/a", "--optim.lr", "1"])
    with pytest.raises(ConfigError, match='unexpected word "b"'):
        command.run(["a", "b", "--step", "1"])


def test_steps_that_can_be_replayed_have_their_rollouts_since_the_checkpoint_before(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, small_run(), "run")
    store = Store(directory.database)
    for step in range(1, 10):
        store.write_step(step, {"loss": 0.0})
    store.close()
    for step in (1, 2, 4, 6, 7, 8, 10):  # 10 is being written: its rows are not there yet
        (directory.rollouts / f"step-{step:06d}.safetensors").touch()
    for step in (4, 7):
        (directory.checkpoints / f"step-{step:06d}").mkdir()
    assert find_replayable_steps(directory) == {1: 0, 2: 0, 8: 7}
    (directory.rollouts / "step-000005.safetensors").touch()
    assert find_replayable_steps(directory) == {1: 0, 2: 0, 5: 4, 6: 4, 7: 4, 8: 7}


def group(*rewards: float, excluded: str = "", age: int = 0) -> Group:
    """Returns a group as it is stored after a step."""
    prompt = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[1], provenance=[0])
    samples = [
        Sample(
            tokens=[5],
            provenance=[1],
            sampler_logprobs=[-0.5],
            reward=r,
            old_logprobs=[-0.25],
            ref_logprobs=[-1.0],
            advantage=2.0,
            masked=Fate.TRUNCATED,
        )
        for r in rewards
    ]
    return Group(prompt=prompt, samples=samples, excluded=Fate(excluded), reused=age)


@pytest.mark.parametrize(
    ("algo", "stored", "excluded"),
    [
        (GRPO(), group(1, 1, excluded="constant reward"), ""),
        (GRPO(), group(1, 1, excluded="equal rewards"), ""),
        (GRPO(), group(1, excluded="too few scored samples"), ""),
        (GRPO(), group(1, 1, excluded="not accepted"), "not accepted"),
        (GRPO(dead="refill"), group(1, 1, excluded="constant reward"), "not accepted"),
        (GRPO(dead="refill"), group(1, 1, age=1), ""),
        (GRPO(dead="refill"), group(0, 1), ""),
    ],
)
def test_a_stored_group_becomes_what_sampling_and_scoring_gave(algo: GRPO, stored: Group, excluded: str) -> None:
    found = reset_to_sampled(stored, build_algorithm(algo, 8))
    plain = {"old_logprobs": None, "ref_logprobs": None, "advantage": 0.0, "masked": ""}
    assert found == replace(stored, excluded=excluded, samples=[replace(s, **plain) for s in stored.samples])
    assert stored.samples[0].advantage == 2.0  # the stored one stays


def test_metrics_are_the_same_to_the_last_bit_or_not_at_all() -> None:
    def row(stored: float | None, replayed: float | None) -> MetricComparison:
        return MetricComparison(name="loss", stored=stored, replayed=replayed)

    nan = float("nan")
    assert row(0.1, 0.1).is_same and row(nan, nan).is_same
    assert not row(0.1, math.nextafter(0.1, 1)).is_same and not row(nan, 0.1).is_same and not row(None, 0.1).is_same
    assert row(0.5, 0.75).difference == 0.25 and row(None, 0.75).difference is None


def test_reading_once_leaves_nothing_in_the_run_and_sees_what_a_writer_has_written(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    store = Store(path)
    store.write_step(1, {"loss": 0.5})
    with Reader(path, once=True) as reader:  # the step is in the log alone
        assert reader.read_series("loss") == {1: 0.5}
    store.close()
    with Reader(path, once=True) as reader:
        assert reader.read_series("loss") == {1: 0.5}
    assert [p.name for p in tmp_path.iterdir()] == ["run.db"]
