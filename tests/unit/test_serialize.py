"""Serialisation of records: every value comes back equal, and damaged or hostile bytes are refused."""

from __future__ import annotations

import json
import math
import tracemalloc
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

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
    # `repr` tells 1 from 1.0 and True, and -0.0 from 0.0.
    assert again == tree and repr(again) == repr(tree)


def test_floats_keep_every_bit():
    values = [0.1, -0.0, 1e300, 5e-324, math.inf, -math.inf, float(np.float32(0.1))]
    assert repr(loads(dumps(values))) == repr(values)
    assert math.isnan(loads(dumps([math.nan, 1.0]))[0])
    # The floats are exact in float32, so they take 4 bytes each.
    assert len(dumps([float(np.float32(x)) for x in np.linspace(-9, 0, 5000)])) < 21_000


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
    """A dataclass that is not registered as a record."""

    x: int = 0


@pytest.mark.parametrize("value", [Stranger(), {1: 2}, object(), {2, 3}, lambda: 0, b"bytes"])
def test_a_value_of_an_unregistered_type_is_refused(value):
    with pytest.raises(SerialError):
        dumps([value])


def test_bytes_that_dumps_did_not_write_are_refused():
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


@pytest.mark.parametrize(
    "values",
    [
        [True, False],
        [True, 2],
        [1, 2.5],
        [1.0, 2],
        [True, 1.0],
        [2**63 - 1, -(2**63)],
        [2**63],
        [-(2**63) - 1, 0],
        [255, 0],
        [256],
        [-1],
        [2**31],
        [-(2**31) - 1],
        [1e39],
        [3.5e38, 1.0],
        [None, 1],
        ["1", 1],
    ],
)
def test_lists_of_numbers_keep_values_and_types(values):
    assert repr(loads(dumps(values))) == repr(values)


def test_members_of_whole_number_enums_become_their_numbers():
    again = loads(dumps([[Provenance.SAMPLED, 7], [Provenance.PROMPT, Provenance.TARGET]]))
    assert again == [[1, 7], [0, 4]] and {type(number) for numbers in again for number in numbers} == {int}


def nested(levels: int) -> list:
    """Returns an empty list inside lists, `levels` in all."""
    value: list = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_depth_has_one_limit_for_both_sides():
    assert loads(dumps(nested(100))) == nested(100)
    for levels in (101, 5000):
        with pytest.raises(SerialError, match="nested too deep"):
            dumps(nested(levels))


def test_a_whole_number_of_too_many_digits_is_refused_on_writing():
    with pytest.raises(SerialError, match="cannot be serialised"):
        dumps(10**5000)


def made(value: object, fields: object = None, **arrays: np.ndarray) -> bytes:
    """Returns bytes that `dumps` would never write. `value` is the JSON tree, or the whole header as bytes."""
    header = value if isinstance(value, bytes) else json.dumps({"format": 1, "fields": fields or {}, "value": value})
    text = header if isinstance(header, bytes) else header.encode()
    return save({**arrays, "json": np.frombuffer(zlib.compress(text, 9), dtype=np.uint8)})


FOUR = np.zeros(4, np.float32)
# Name of the damage -> (bytes, fragment of the error message).
DAMAGED = {
    "deep text": (made(b"[" * 100_000), "nested too deep"),
    "deep value": (made(json.loads('["l",' * 150 + "1" + "]" * 150)), "nested too deep"),
    "a list as dict": (made(["d", []]), "marked as a dict"),
    "nothing as dict": (made(["d"]), "marked as a dict"),
    "bare dict": (made({"x": 1}), "no mark"),
    "empty entry": (made([]), "no mark"),
    "unknown mark": (made(["?", 1]), "no mark"),
    "record as enum": (made(["e", "Sample", 1]), "not an enum"),
    "enum as record": (made(["r", "Fate", ""], {"Fate": ["value"]}), "does not have the fields"),
    "no such member": (made(["e", "Fate", "x"]), "not a valid Fate"),
    "no fields": (made(["r", "Sample"]), "does not have the fields"),
    "fields of nothing": (made(["r", "Sample", 1], {"Sample": None}), "which fields"),
    "too few values": (made(["r", "Group", 1], {"Group": ["prompt", "samples"]}), "does not have the fields"),
    "unknown field": (made(["r", "Group", 1], {"Group": ["x"]}), "makes no sense"),
    "negative shape": (made(["a", "float32", 0, [-1, -4]], float32=FOUR), "shape"),
    "huge shape": (made(["a", "float32", 0, [10**9, 10**9]], float32=FOUR), "shorter"),
    "huge empty shape": (made(["a", "float32", 0, [0, 10**18, 10**18]], float32=FOUR), "makes no sense"),
    "its own text": (made(["a", "json", 0, [1]]), "does not hold"),
    "no such store": (made(["n", 3, 0, 1]), "does not hold"),
    "no such type": (made(["n", 99, 0, 1]), "unknown type"),
    "before the store": (made(["n", 3, -2, 1], float32=FOUR), "an invalid place"),
    "negative length": (made(["n", 3, 4, -1], float32=FOUR), "an invalid place"),
    "past the store": (made(["n", 3, 2, 3], float32=FOUR), "shorter"),
    "a place twice": (made(["l", ["n", 3, 0, 3], ["n", 3, 1, 3]], float32=FOUR), "more than once"),
    "list and array": (made(["l", ["n", 3, 0, 4], ["a", "float32", 0, [1]]], float32=FOUR), "more than once"),
    "format as text": (made(b'{"format": "x", "fields": {}, "value": 1}'), "format"),
    "format below one": (made(b'{"format": -5, "fields": {}, "value": 1}'), "format"),
    "later format": (made(b'{"format": 2, "fields": {}, "value": 1}'), "the format is 2"),
    "no value": (made(b'{"format": 1, "fields": {}}'), "incomplete"),
    "header is a list": (made(b"[]"), "incomplete"),
    "header is no JSON": (made(b"{"), "damaged"),
    "header is no text": (made(b"\xff\xff"), "damaged"),
    "too many digits": (made(b'{"format": 1, "fields": {}, "value": ' + b"9" * 5000 + b"}"), "makes no sense"),
    "no header": (save({"float32": FOUR}), "lacks its JSON header"),
    "cut text": (save({"json": np.frombuffer(zlib.compress(b"x" * 99)[:-5], dtype=np.uint8)}), "cut off"),
    "no packed text": (save({"json": np.zeros(9, np.uint8)}), "damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bytes_are_refused_with_the_reason(name):
    data, message = DAMAGED[name]
    with pytest.raises(SerialError, match=message):
        loads(data)


@given(st.binary(min_size=1, max_size=3), st.integers(0, 10**6))
def test_overwritten_bytes_are_refused(noise, place):
    data = dumps([sample(), {"x": [1, 2.5]}])
    place %= len(data)
    changed = data[:place] + noise + data[place + len(noise) :]
    if changed != data:
        with pytest.raises(SerialError, match=r"."):
            loads(changed)


def test_a_flip_of_any_bit_is_refused():
    data = dumps([1.5, 2.5, "x"])
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(SerialError, match=r"."):
            loads(bytes(changed))


def test_bytes_of_earlier_versions_have_no_checksum():
    assert loads(made(["l", ["n", 3, 0, 4]], float32=FOUR)) == [list(map(float, FOUR))]


def peak_of_refusing(data: bytes, message: str) -> int:
    """Returns the most bytes that Python allocated while `loads` refused `data`."""
    tracemalloc.start()
    try:
        with pytest.raises(SerialError, match=message):
            loads(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_small_bytes_take_little_memory():
    """Text that inflates a thousandfold, and many references to the same numbers."""
    bomb = made(b'{"format":1,"fields":{},"value":"' + b"a" * 2**27 + b'"}')
    assert peak_of_refusing(bomb, "inflates to more than") < 2**26
    num = 100_000
    repeated = made(["l", *[["n", 0, 0, num]] * 400], uint8=np.zeros(num, np.uint8))
    assert peak_of_refusing(repeated, "more than once") < 2**24


def test_text_that_deflates_too_well_is_still_written_so_that_it_can_be_read():
    text = "a" * 2**25
    assert loads(dumps(text)) == text
    # A text within the limit is still compressed.
    assert len(dumps(text[: 2**23])) < 2**15
