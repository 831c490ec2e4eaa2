"""Scales and ticks, with numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from cohort.plot.scale import format_ticks, is_drawable, list_multiples, make_linear_scale, make_log_scale


def test_a_linear_axis_has_round_ticks_inside_its_range():
    scale = make_linear_scale([0.33, 0.99])
    assert scale.labels == ("0", "0.2", "0.4", "0.6", "0.8", "1.0")
    # From 0.33 to 0.99 the lowest is a third of the highest, so the axis begins at 0.
    assert scale.ticks == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0) and scale.low < 0 < 0.99 < scale.high


def test_an_axis_far_from_zero_does_not_begin_there():
    scale = make_linear_scale([100.0, 104.0])
    assert scale.ticks == (100.0, 101.0, 102.0, 103.0, 104.0) and scale.labels[0] == "100"
    assert make_linear_scale([-8.0, -1.0]).ticks == (-8.0, -6.0, -4.0, -2.0, 0.0)


def test_places_lie_between_the_ends():
    scale = make_linear_scale([0.0, 10.0], pad=False)
    assert (scale.place(0.0), scale.place(5.0), scale.place(10.0)) == (0.0, 0.5, 1.0)
    log = make_log_scale([1.0, 100.0])
    assert log.place(10.0) == pytest.approx(0.5)
    assert 0 < log.place(1.0) < log.place(100.0) < 1


def test_steps_have_whole_ticks():
    assert make_linear_scale([0, 2], 6, pad=False, whole=True).ticks == (0.0, 1.0, 2.0)
    assert make_linear_scale([0, 30], 6, pad=False, whole=True).ticks == (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)


@pytest.mark.parametrize(("values", "low", "high"), [([], 0.0, 1.0), ([0.0], 0.0, 1.0), ([2.0, 2.0], 1.0, 3.0)])
def test_equal_values_get_a_range(values, low, high):
    scale = make_linear_scale(values, pad=False)
    assert (scale.low, scale.high) == (low, high)
    assert len(scale.ticks) >= 2


def test_a_log_axis_has_powers_of_ten_or_less():
    assert make_log_scale([1e-6, 1e-3]).labels == ("1e-6", "1e-5", "0.0001", "0.001")
    assert make_log_scale([0.001, 1000.0]).labels == ("0.001", "0.1", "10", "1000")
    assert make_log_scale([0.05, 1.2]).labels == ("0.05", "0.1", "0.2", "0.5", "1")
    # Less than a factor of two: ticks as on a linear axis.
    assert make_log_scale([3.1, 3.4]).ticks == (3.0, 3.2, 3.4)
    assert len(make_log_scale([1e-90, 1e90]).ticks) <= 6


def test_labels_tell_ticks_apart():
    assert format_ticks([0.0, 0.5, 1.0], 0.5) == ["0", "0.5", "1.0"]
    assert format_ticks([0.0, 5000.0, 10_000.0, 15_000.0], 5000) == ["0", "5k", "10k", "15k"]
    assert format_ticks([4e-7, 6e-7, 8e-7, 1e-6], 2e-7) == ["4e-7", "6e-7", "8e-7", "10e-7"]
    assert format_ticks([4.5e-7, 5e-7, 5.5e-7], 5e-8) == ["4.5e-7", "5.0e-7", "5.5e-7"]
    assert format_ticks([1_000_000.0, 1_000_001.0], 1.0) == ["1000000", "1000001"]
    assert format_ticks([2e6, 3e6], 1e6) == ["2M", "3M"]


def test_any_values_give_few_distinct_ticks():
    rng = random.Random(0)
    for _ in range(2000):
        values = [rng.choice([-1, 1]) * 10 ** rng.uniform(-99, 99) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.3:
            values = [values[0] * (1 + rng.uniform(-1e-8, 1e-8)) for _ in range(3)]
        for scale in (make_linear_scale(values), make_log_scale([abs(v) for v in values])):
            assert 1 <= len(scale.ticks) <= 8
            assert len(set(scale.labels)) == len(scale.labels), (values, scale)
            assert all(-1e-6 <= scale.place(tick) <= 1 + 1e-6 for tick in scale.ticks)
            shown = values if not scale.is_log else [abs(v) for v in values]
            assert all(-1e-6 <= scale.place(v) <= 1 + 1e-6 for v in shown)


def test_what_can_be_drawn():
    assert not any(is_drawable(v) for v in (math.nan, math.inf, -math.inf, 1e101))
    assert is_drawable(0.0) and is_drawable(-3.0)
    assert not is_drawable(0.0, log=True) and not is_drawable(-1.0, log=True) and is_drawable(1e-9, log=True)


def test_multiples_are_rounded():
    assert list_multiples(0.0, 0.7, 0.1) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert list_multiples(-5e-7, 5e-7, 5e-7) == [-5e-7, 0.0, 5e-7]
