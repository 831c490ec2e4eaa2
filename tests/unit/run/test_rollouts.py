"""Rollout files: groups are read as they were written, and damaged files are refused with an error that names them."""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from cohort.config.schema import ReplayConfig
from cohort.errors import RunError
from cohort.fates import Fate
from cohort.loops.reuse import RolloutReuse
from cohort.run.store.rollouts import (
    list_rollout_steps,
    load_rollouts,
    make_rollout_path,
    remove_rollouts,
    save_rollouts,
)
from cohort.serialize import dumps
from cohort.types import Finish, Group, Prompt, Provenance, Sample
from tests.helpers.pretend_run import pretend_groups

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
    n = draw(st.integers(0, 5))
    prompt = Prompt(
        task=draw(text),
        id=draw(text),
        visit=draw(st.integers(0, 9)),
        row=draw(st.dictionaries(text, json_values, max_size=3)),
        messages=[{"role": "user", "content": draw(text)}],
        tokens=draw(st.lists(tokens, min_size=n, max_size=n)),
        provenance=draw(st.lists(st.sampled_from([0, 3]), min_size=n, max_size=n)),
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
    """At most 14 bytes per token: 4 for the id, 1 for the provenance, 8 for two log-probabilities."""
    n = 10_000
    logprobs = np.random.default_rng(0).normal(size=n).astype(np.float32).tolist()
    one = Sample(
        tokens=[70_000] * n, provenance=[1] * n, sampler_logprobs=logprobs, old_logprobs=logprobs, text="a " * n
    )
    groups = pretend_groups(0, num_groups=1, group_size=1)
    groups[0].samples = [one]
    assert save_rollouts(tmp_path / "a", groups) < 14 * n
    one.old_logprobs = [x + 1e-12 for x in logprobs]
    assert save_rollouts(tmp_path / "a", groups) > 17 * n  # doubles are kept exactly, although they take more space
    assert load_rollouts(tmp_path / "a") == groups


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_damaged_file_is_named(tmp_path, keep):
    path = tmp_path / "step-000001.safetensors"
    save_rollouts(path, pretend_groups(0))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RunError, match=r"step-000001.safetensors is damaged"):
        load_rollouts(path)


def test_a_changed_number_is_damage(tmp_path):
    path = tmp_path / "step-000001.safetensors"
    groups = pretend_groups(0)
    save_rollouts(path, groups)
    logprob = np.float32(groups[0].samples[0].sampler_logprobs[0])
    data = path.read_bytes()
    assert data.count(logprob.tobytes()) == 1
    path.write_bytes(data.replace(logprob.tobytes(), (logprob + np.float32(0.5)).tobytes()))
    with pytest.raises(RunError, match=r"step-000001.safetensors is damaged.*have changed since.*Restore it"):
        load_rollouts(path)
    reuse = RolloutReuse(ReplayConfig(prompts=1, steps=1), 0, tmp_path)
    with pytest.raises(RunError, match=r"needs the file. .*checkpoints of step 1 and later away.*`cohort resume"):
        reuse.draw(1)


def test_a_missing_file_says_why(tmp_path):
    with pytest.raises(RunError, match="its rollouts were removed"):
        load_rollouts(make_rollout_path(tmp_path, 3))


def test_removing(tmp_path):
    for step in range(1, 6):
        save_rollouts(make_rollout_path(tmp_path, step), [])
    (tmp_path / "other.txt").write_text("")
    remove_rollouts(tmp_path, lambda step: step > 3)
    assert list_rollout_steps(tmp_path) == [4, 5]
    assert (tmp_path / "other.txt").exists()


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """/dev/full is the kernel's own full disk."""
    path = tmp_path / "a"
    save_rollouts(path, pretend_groups(0))
    aside = tmp_path / f".a.{os.getpid()}.tmp"
    aside.symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write .*a: the disk is full .*Free some space"):
        save_rollouts(path, pretend_groups(1))
    assert load_rollouts(path) == pretend_groups(0)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_value_that_cannot_be_written_is_named_and_leaves_no_file(tmp_path):
    groups = pretend_groups(0)
    groups[0].prompt.row = {"x": object()}
    with pytest.raises(
        RunError, match=r"step-000001.safetensors, because the task made a value .* a object cannot be serialised"
    ):
        save_rollouts(make_rollout_path(tmp_path, 1), groups)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ("group", "prompt", "x"),
        ("group", "samples", "y"),
        ("group", "samples", ["y"]),
        ("group", "excluded", ""),
        ("group", "reused", True),
        ("prompt", "id", 5),
        ("prompt", "messages", ["hello"]),
        ("prompt", "provenance", [0]),
        ("prompt", "tokens", [1, 2, "3"]),
        ("sample", "tokens", [1.0, 2.0, 3.0]),
        ("sample", "tokens", [1, 2]),
        ("sample", "provenance", [1, 1, 9]),
        ("sample", "provenance", [True, True, True]),
        ("sample", "sampler_logprobs", []),
        ("sample", "sampler_logprobs", None),
        ("sample", "kept_mass", [1.0]),
        ("sample", "old_logprobs", [0.0]),
        ("sample", "token_advantages", [0.0] * 4),
        ("sample", "versions", [[0, 1]]),
        ("sample", "finish", "stop"),
        ("sample", "masked", None),
        ("sample", "parts", {"correct": "1"}),
        ("sample", "reward", "1"),
        ("sample", "turn_rewards", [1.0, "2"]),
        ("sample", "text", None),
    ],
)
def test_a_wrong_value_in_a_field_is_damage(tmp_path, record, field, value):
    [group] = pretend_groups(0, num_groups=1, group_size=1)
    three = {"tokens": [1, 2, 3], "provenance": [1, 1, 1], "sampler_logprobs": [0.0, 0.0, 0.0], "old_logprobs": None}
    group.samples = [replace(group.samples[0], **three)]
    path = make_rollout_path(tmp_path, 1)
    path.write_bytes(dumps([group]))
    assert load_rollouts(path) == [group]
    setattr({"group": group, "prompt": group.prompt, "sample": group.samples[0]}[record], field, value)
    path.write_bytes(dumps([group]))
    with pytest.raises(RunError, match=r"step-000001.safetensors is damaged"):
        load_rollouts(path)


@pytest.mark.parametrize("value", [None, 5, "groups", {"groups": []}, [1, 2], [["x"]]])
def test_what_holds_no_groups_is_refused(tmp_path, value):
    (tmp_path / "a").write_bytes(dumps(value))
    with pytest.raises(RunError, match=r"a is damaged, not a rollout file or .*: it (contains|does not contain)"):
        load_rollouts(tmp_path / "a")


def make_format_1_file(text: bytes) -> bytes:
    """Returns a rollout file of format 1 with this JSON text."""
    return save(
        {
            "prompt_tokens": np.array([5, 6], dtype=np.int32),
            "prompt_provenance": np.array([0, 3], dtype=np.uint8),
            "tokens": np.array([7], dtype=np.int32),
            "provenance": np.array([1], dtype=np.uint8),
            "sampler_logprobs": np.array([-0.5], dtype=np.float32),
            "text": np.frombuffer(zlib.compress(text, 9), dtype=np.uint8),
        }
    )


SAMPLE_1 = {
    **{"num": [1, 1, 1, -1, -1, -1], "versions": [[0, 2]], "finish": "length", "text": "b", "parts": {"correct": 1.0}},
    **{"reward": 1.0, "reason": "", "failure": "", "advantage": 0.5, "masked": ""},
}
GROUP_1 = {
    **{"num_tokens": [2, 2], "task": "t", "id": "0", "visit": 1, "row": {}, "messages": [], "forced_text": "a"},
    **{"excluded": "no gain", "age": 2, "samples": [SAMPLE_1]},
}


def test_files_of_format_1_are_read(tmp_path):
    (tmp_path / "a").write_bytes(make_format_1_file(json.dumps({"groups": [GROUP_1]}).encode()))
    prompt = Prompt(
        task="t", id="0", visit=1, row={}, messages=[], tokens=[5, 6], provenance=[0, 3], forced_text="a"
    )  # fmt: skip
    one = Sample(
        tokens=[7], provenance=[1], sampler_logprobs=[-0.5], versions=[(0, 2)], finish=Finish.LENGTH, text="b",
        parts={"correct": 1.0}, reward=1.0, advantage=0.5,
    )  # fmt: skip
    assert load_rollouts(tmp_path / "a") == [Group(prompt=prompt, samples=[one], excluded=Fate.NO_GAIN, reused=2)]


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"groups": 5}',
        b'{"groups": [5]}',
        b'{"groups": [{}]}',
        b"[" * 100_000,
        b'{"groups": "' + b"a" * 2**25 + b'"}',
        json.dumps({"groups": [{**GROUP_1, "num_tokens": [2, -1]}]}).encode(),
        json.dumps({"groups": [{**GROUP_1, "samples": [{**SAMPLE_1, "reward": "1"}]}]}).encode(),
    ],
    ids=["list", "number", "entry", "empty", "deep", "bomb", "negative", "type"],
)
def test_damage_in_format_1_is_named(tmp_path, text):
    (tmp_path / "a").write_bytes(make_format_1_file(text))
    with pytest.raises(RunError, match=r"a is damaged.* not a rollout file.*: .*[a-z]"):
        load_rollouts(tmp_path / "a")
