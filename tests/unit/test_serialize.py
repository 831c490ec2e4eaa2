"""The one serialisation: what goes in comes out, and nothing else can."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort import serialize
from cohort.fates import Fate
from cohort.serialize import SerialError, dumps, loads
from cohort.types import Finish, Group, Key, Prompt, Provenance, Sample, SampleId

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(
    scalars | st.lists(st.integers(-(2**40), 2**40)) | st.lists(st.floats(allow_nan=False)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
def test_plain_trees_survive_with_their_types(tree):
    again = loads(dumps(tree))
    assert again == tree and repr(again) == repr(tree)  # repr: 1 is not 1.0 or True, and -0.0 is not 0.0


def test_floats_keep_every_bit():
    values = [0.1, -0.0, 1e300, 5e-324, math.inf, -math.inf, float(np.float32(0.1))]
    assert repr(loads(dumps(values))) == repr(values)
    assert math.isnan(loads(dumps([math.nan, 1.0]))[0])
    assert len(dumps([float(np.float32(x)) for x in np.linspace(-9, 0, 5000)])) < 21_000  # float32 where it is exact


def sample() -> Sample:
    return Sample(
        tokens=[5, 70_000, 2],
        provenance=[Provenance.SAMPLED, Provenance.ENVIRONMENT, Provenance.SAMPLED],
        sampler_logprobs=[-0.1, 0.0, -2.5],
        versions=[(0, 3), (2, 4)],
        finish=Finish.LENGTH,
        parts={"correct": 1.0},
        reward=None,
        old_logprobs=[-0.1, 0.0, -2.0],
        masked=Fate.TRUNCATED,
    )


def test_records_come_back_as_records():
    prompt = Prompt(
        task="t", id="é\n", visit=2, row={"nums": [3, 5], "x": [1, 2.5]}, messages=[{"role": "user", "content": "?"}],
        tokens=[1], provenance=[Provenance.PROMPT],
    )  # fmt: skip
    group = Group(prompt=prompt, samples=[sample(), sample()], excluded=Fate.NO_GAIN, reused=3)
    value = {
        "groups": [group],
        "ids": group.ids(),
        "key": Key(seed=1, purpose="p", task="t", prompt_id="q", visit=0, sample=1),
    }
    again = loads(dumps(value))
    assert again == value
    assert type(again["ids"][0]) is SampleId and type(again["groups"][0].excluded) is Fate
    assert type(again["groups"][0].samples[0].versions[0]) is tuple


def test_arrays_keep_shape_type_and_bytes():
    given = {"a": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2], "b": np.float64([0.1])}
    again = loads(dumps(given))
    for name, array in given.items():
        assert again[name].dtype == array.dtype and np.array_equal(again[name], array)


@dataclass
class Stranger:
    x: int = 0


@pytest.mark.parametrize("value", [Stranger(), {1: 2}, object(), {2, 3}, lambda: 0, b"bytes"])
def test_what_is_not_registered_cannot_travel(value):
    with pytest.raises(SerialError):
        dumps([value])


def test_bytes_of_something_else_are_refused():
    data = dumps([sample()])
    for bad in (b"", b"junk", data[:-4], data[:40]):
        with pytest.raises(SerialError):
            loads(bad)


def test_a_name_that_is_no_record_is_refused(monkeypatch):
    monkeypatch.setitem(serialize._records, "Stranger", Stranger)
    data = dumps(Stranger())
    monkeypatch.delitem(serialize._records, "Stranger")
    with pytest.raises(SerialError, match='no record "Stranger"'):
        loads(data)


def test_a_field_that_was_added_since_takes_its_default(monkeypatch):
    @dataclass
    class Grown:
        y: int
        x: int = 0
        z: str = "new"

    monkeypatch.setitem(serialize._records, "Stranger", Stranger)
    monkeypatch.setattr(Stranger, "y", 7, raising=False)
    monkeypatch.setattr(serialize, "field_names", lambda cls: ["x", "y"])
    data = dumps(Stranger(5))
    monkeypatch.setitem(serialize._records, "Stranger", Grown)
    assert loads(data) == Grown(y=7, x=5, z="new")
