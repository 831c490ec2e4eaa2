"""Rollout files: what goes in comes out, and damage is said to be damage."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cohort.errors import RunError
from cohort.fates import Fate
from cohort.store.rollouts import load_rollouts, remove_rollouts, rollout_path, rollout_steps, save_rollouts
from cohort.types import Finish, Group, Prompt, Provenance, Sample
from tests.pretend_run import pretend_groups

text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates and control characters too
floats = st.floats(allow_nan=False, width=32)
doubles = st.floats(allow_nan=False)
tokens = st.integers(0, 2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | doubles | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def sample(draw, logprobs) -> Sample:
    n = draw(st.integers(0, 6))
    of_length = st.lists(logprobs, min_size=n, max_size=n)
    return Sample(
        tokens=draw(st.lists(tokens, min_size=n, max_size=n)),
        provenance=draw(st.lists(st.sampled_from(list(map(int, Provenance))), min_size=n, max_size=n)),
        sampler_logprobs=draw(of_length),
        kept_mass=draw(st.just([]) | of_length),
        versions=draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3)),
        finish=draw(st.sampled_from(Finish)),
        text=draw(text),
        parts=draw(st.dictionaries(text, doubles, max_size=2)),
        reward=draw(st.none() | doubles),
        reason=draw(text),
        failure=draw(text),
        old_logprobs=draw(st.none() | of_length),
        ref_logprobs=draw(st.none() | of_length),
        advantage=draw(doubles),
        masked=draw(st.sampled_from(Fate)),
    )


@st.composite
def group(draw, logprobs) -> Group:
    prompt = Prompt(
        task=draw(text),
        id=draw(text),
        visit=draw(st.integers(0, 9)),
        row=draw(st.dictionaries(text, json_values, max_size=3)),
        messages=[{"role": "user", "content": draw(text)}],
        tokens=draw(st.lists(tokens, max_size=5)),
        provenance=draw(st.lists(st.sampled_from([0, 3]), max_size=5)),
        forced_text=draw(text),
    )
    return Group(
        prompt=prompt, samples=draw(st.lists(sample(logprobs), max_size=3)), excluded=draw(st.sampled_from(Fate))
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(groups=st.lists(group(floats), max_size=3) | st.lists(group(doubles), max_size=3))
def test_exact_round_trip(tmp_path_factory, groups):
    path = tmp_path_factory.getbasetemp() / "rollouts.safetensors"
    assert save_rollouts(path, groups) == path.stat().st_size
    loaded = load_rollouts(path)
    assert loaded == groups
    assert repr(loaded) == repr(groups)  # tells 0.0 from -0.0, tuples from lists and Finish from str


def test_not_a_number_survives(tmp_path):
    groups = pretend_groups(0)
    groups[0].samples[0].sampler_logprobs[0] = float("nan")
    save_rollouts(tmp_path / "a", groups)
    [read, *_] = load_rollouts(tmp_path / "a")
    assert math.isnan(read.samples[0].sampler_logprobs[0])
    assert read.samples[0].sampler_logprobs[1:] == groups[0].samples[0].sampler_logprobs[1:]
    assert read.samples[1] == groups[0].samples[1]


def test_float32_numbers_take_four_bytes_and_tokens_too(tmp_path):
    """14 bytes a token at most: id 4, provenance 1, two logprobs 8."""
    n = 10_000
    logprobs = np.random.default_rng(0).normal(size=n).astype(np.float32).tolist()
    one = Sample(
        tokens=[70_000] * n, provenance=[1] * n, sampler_logprobs=logprobs, old_logprobs=logprobs, text="a " * n
    )
    groups = pretend_groups(0, num_groups=1, group_size=1)
    groups[0].samples = [one]
    assert save_rollouts(tmp_path / "a", groups) < 14 * n
    one.old_logprobs = [x + 1e-12 for x in logprobs]
    assert save_rollouts(tmp_path / "a", groups) > 17 * n  # exactness before size
    assert load_rollouts(tmp_path / "a") == groups


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_damaged_file_is_named(tmp_path, keep):
    path = tmp_path / "step-000001.safetensors"
    save_rollouts(path, pretend_groups(0))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RunError, match=r"step-000001.safetensors is damaged"):
        load_rollouts(path)


def test_a_missing_file_says_why(tmp_path):
    with pytest.raises(RunError, match="were not kept"):
        load_rollouts(rollout_path(tmp_path, 3))


def test_removing(tmp_path):
    for step in range(1, 6):
        save_rollouts(rollout_path(tmp_path, step), [])
    (tmp_path / "other.txt").write_text("")
    remove_rollouts(tmp_path, lambda step: step > 3)
    assert rollout_steps(tmp_path) == [4, 5]
    assert (tmp_path / "other.txt").exists()


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """/dev/full is the kernel's own full disk."""
    path = tmp_path / "a"
    save_rollouts(path, pretend_groups(0))
    aside = tmp_path / f".a.{os.getpid()}.tmp"
    aside.symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write .*a: the disk is full: free some space"):
        save_rollouts(path, pretend_groups(1))
    assert load_rollouts(path) == pretend_groups(0)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
