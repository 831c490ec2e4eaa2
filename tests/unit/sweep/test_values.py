"""Values of swept settings: where texts are split, what quotes and brackets do, and what ranges draw."""

from __future__ import annotations

import math
import random

import pytest

from cohort.errors import ConfigError
from cohort.sweep.values import Span, read_span, read_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", [["1e-4"], ["3e-4"]]),
        ("-1,2", [["-1"], ["2"]]),
        ("[a,b],[c]", [["a", "b"], ["c"]]),
        ("[a,b]", [["a", "b"]]),
        ("[],[a]", [[], ["a"]]),
        ('"a,b",c', [["a,b"], ["c"]]),
        ("'a,b'", [["a,b"]]),
        ('["x,y",z],w', [["x,y", "z"], ["w"]]),
        ("don't,it's", [["don't"], ["it's"]]),
        ("f(1],2", [["f(1]"], ["2"]]),
        ("Think first, then answer.", [["Think first, then answer."]]),
        ("", [[""]]),
    ],
)
def test_a_text_is_split_at_commas_outside_of_quotes_and_brackets(text: str, values: list[list[str]]) -> None:
    assert read_values("--x", [text]) == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1e-4,", "1e-3"], "space beside the comma"),
        (["1,,2"], "empty value"),
        (["1,"], "empty value"),
        (["[a,b"], "lacks a closing ]"),
        (['"a,b'], 'lacks a closing "'),
        (["1e-3..1e-5"], "empty range"),
        (["log:0..1"], "above 0"),
    ],
)
def test_a_wrong_text_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_values("--x", words)


def test_words_without_commas_are_one_value() -> None:
    assert read_values("--learner.lora.targets", ["q_proj", "v_proj"]) == [["q_proj", "v_proj"]]


def test_a_range_is_logarithmic_where_its_numbers_are_positive_and_not_whole() -> None:
    assert read_span("--x", "1e-5..1e-3") == Span(low=1e-5, high=1e-3, scale="log", is_whole=False)
    assert read_span("--x", "lin:1e-5..1e-3") == Span(low=1e-5, high=1e-3, scale="lin", is_whole=False)
    assert read_span("--x", "0.0..0.5") == Span(low=0, high=0.5, scale="lin", is_whole=False)
    assert read_span("--x", "4..32") == Span(low=4, high=32, scale="lin", is_whole=True)
    assert read_span("--x", "log:4..32") == Span(low=4, high=32, scale="log", is_whole=True)
    assert read_span("--x", "a..b") is None and read_span("--x", "../file") is None


def test_drawn_numbers_fill_their_range_evenly() -> None:
    rng = random.Random(0)
    drawn = [float(Span(low=1e-5, high=1e-3, scale="log", is_whole=False).draw_value(rng)[0]) for _ in range(2000)]
    assert min(drawn) >= 1e-5 and max(drawn) <= 1e-3
    # Half of the numbers lie below the geometric mean, 1e-4; of an even range it would be a tenth.
    assert sum(number < 1e-4 for number in drawn) == pytest.approx(1000, abs=100)
    whole = [int(Span(low=1, high=4, scale="lin", is_whole=True).draw_value(rng)[0]) for _ in range(4000)]
    assert all(whole.count(n) == pytest.approx(1000, abs=120) for n in (1, 2, 3, 4))
    assert math.isclose(min(whole), 1) and max(whole) == 4
