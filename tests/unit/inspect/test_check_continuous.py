"""The checks of a reward without an accuracy: nothing fails because a reward is no 0 or 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cohort.inspect.check.continuous import check_continuous
from cohort.tasks.base import make_plain_answer


def judge(**rewards: list[float]) -> dict[str, tuple[str, str]]:
    """Returns status and text of each finding by its name. `rewards` has those of answers by their kind."""
    kinds: dict[str, Any] = {
        kind: [SimpleNamespace(answer=make_plain_answer(kind), reward=reward) for reward in row]
        for kind, row in rewards.items()
    }
    return {finding.name: (finding.status, finding.text) for finding in check_continuous(kinds)}


def test_a_sound_reward_passes_whatever_its_scale():
    found = judge(empty=[3.0, 3.0], whitespace=[3.0], skeleton=[3.5], echo=[5.0], gold=[90.0, 100.0])
    assert {status for status, _ in found.values()} == {"ok"}, found
    assert "an empty answer earns at most 3" in found["reward/empty"][1]
    assert "earn 95 on average" in found["reward/gold"][1]


def test_an_empty_answer_that_earns_the_most_is_a_warning():
    found = judge(empty=[0.0, -1.0], echo=[-0.5])
    assert found["reward/empty"][0] == "warn" and "may learn to say nothing" in found["reward/empty"][1]


def test_own_answers_that_earn_no_more_than_worthless_ones_are_a_warning():
    found = judge(empty=[1.0], skeleton=[2.0], echo=[2.5], gold=[1.0, 1.0])
    warned = {name for name, (status, _) in found.items() if status == "warn"}
    assert warned == {"reward/gold", "reward/cheapest", "reward/echo"}


def test_a_constant_reward_and_missing_own_answers_are_warnings():
    found = judge(empty=[0.5], echo=[0.5])
    assert found["reward/varies"][0] == found["reward/gold"][0] == "warn"
    assert "reward/cheapest" not in found


def test_samples_of_the_model_that_earn_other_rewards_count():
    found = judge(empty=[0.5], echo=[0.5], sample=[0.2, 0.9])
    assert found["reward/varies"][0] == found["reward/empty"][0] == "ok"
