"""Values of settings: a value is a value, whatever it looks like, on the command line and from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.config.load import diff_configs, load_config
from cohort.config.values import WrongTypeError, convert_value, parse_texts


@given(st.lists(st.one_of(st.text(min_size=1), st.sampled_from(["--seed=7", "--", "-1", "--help", "=", "--a b"]))))
def test_any_text_from_python_stays_a_text(stop: list[str]) -> None:
    config = load_config("quickstart", given={"sampling.stop": tuple(stop), "model": "--steps=9"})
    changed = diff_configs(load_config("quickstart"), config)
    assert changed.pop("model")[1] == "--steps=9"
    assert config.sampling.stop == tuple(stop) and set(changed) <= {"sampling.stop"}


@pytest.mark.parametrize(
    ("args", "stop"),
    [
        (["--sampling.stop", "--"], ("--",)),
        (["--sampling.stop=--seed=7"], ("--seed=7",)),
        (["--sampling.stop", "a", "--", "-1"], ("a", "--", "-1")),
        (["--sampling.stop=--", "-x"], ("--", "-x")),
    ],
)
def test_values_that_look_like_flags_on_the_command_line(args: list[str], stop: tuple[str, ...]) -> None:
    config = load_config("quickstart", args)
    assert config.sampling.stop == stop and config.seed == load_config("quickstart").seed


def test_a_negative_number_is_a_value() -> None:
    assert load_config("quickstart", ["--reward.format", "-0.5"]).reward["format"] == -0.5
    assert load_config("quickstart", given={"reward.format": -0.5}).reward["format"] == -0.5


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (5, float, 5.0),
        ("5", int, 5),
        (numpy.int64(5), int, 5),
        (numpy.float32(0.5), float, 0.5),
        (Path("a/b"), str, "a/b"),
        ("x", tuple[str, ...], ("x",)),
        ([1, 2], tuple[int, int], (1, 2)),
        ((1, 2), list[int], [1, 2]),
        (None, int | None, None),
        ("None", int | None, None),
        (3, int | None, 3),
        ("TRUE", bool, True),
        (2, Literal[1, 2], 2),
    ],
)
def test_python_values_have_the_type_of_their_setting(value: Any, hint: Any, result: Any) -> None:
    converted = convert_value(value, hint)
    assert converted == result and type(converted) is type(result)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (5.0, int),
        (True, int),
        (1, bool),
        (None, int),
        ([1], int),
        ((1, 2, 3), tuple[int, int]),
        ("3", Literal["a"]),
        ({"a": 1}, str),
        (numpy.bool_(True), int),
        (1j, float),
    ],
)
def test_python_values_of_another_type_are_refused(value: Any, hint: Any) -> None:
    with pytest.raises(WrongTypeError):
        convert_value(value, hint)


@pytest.mark.parametrize("text", ["", "1e3", "0x10", "5.", "9" * 5000])
def test_texts_that_are_no_whole_numbers(text: str) -> None:
    with pytest.raises(WrongTypeError):
        parse_texts([text], int)
