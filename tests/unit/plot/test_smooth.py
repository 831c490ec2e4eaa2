"""Smoothing, with means worked out by hand."""

from __future__ import annotations

import math

import pytest

from cohort.plot.smooth import smooth_series


def test_the_window_is_centred_and_cut_at_the_ends():
    values = {1: 1.0, 2: 2.0, 3: 6.0, 4: 0.0, 5: 1.0}
    assert smooth_series(values, 3) == {1: 1.5, 2: 3.0, 3: 8 / 3, 4: 7 / 3, 5: 0.5}
    # An even window has its further step after the middle.
    assert smooth_series(values, 2) == {1: 1.5, 2: 4.0, 3: 3.0, 4: 0.5, 5: 1.0}
    assert smooth_series(values, 1) == values


def test_missing_and_unusable_values_do_not_count():
    assert smooth_series({1: 1.0, 2: math.nan, 3: 3.0, 9: math.inf}, 3) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert smooth_series({10: 4.0, 20: 8.0}, 3) == {10: 4.0, 20: 8.0}
    assert smooth_series({}, 5) == {}


def test_a_log_axis_has_geometric_means():
    assert smooth_series({1: 1.0, 2: 100.0, 3: 0.0}, 3, log=True) == pytest.approx({1: 10.0, 2: 10.0, 3: 100.0})


def test_a_turn_stays_where_it_is():
    """A trailing mean would put the lowest point later."""
    values = {step: abs(step - 50.0) for step in range(101)}
    smooth = smooth_series(values, 11)
    assert min(smooth, key=lambda step: smooth[step]) == 50
