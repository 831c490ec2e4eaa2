"""Curves drawn with characters: every finite number can be drawn."""

from __future__ import annotations

import math
import sys

import pytest

from cohort.logs.curve import draw_braille, find_bounds, find_cell

LARGEST = sys.float_info.max


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e17, -1e17, 1e300, LARGEST, -LARGEST, 5e-324])
def test_a_flat_curve_of_any_value_can_be_drawn(value: float) -> None:
    low, high = find_bounds([value, value])
    assert low <= value <= high and low < high and math.isfinite(low) and math.isfinite(high)
    assert 0 <= find_cell(value, (low, high), 8) < 8
    lines = draw_braille([(0.0, value), (1.0, value)], 4, 2, (0.0, 1.0), (low, high))
    assert len(lines) == 2 and any(line.strip("\u2800 ") for line in lines)


def test_the_whole_range_of_numbers_has_cells() -> None:
    scale = find_bounds([-LARGEST, 0.0, LARGEST, math.inf, math.nan])
    assert scale == (-LARGEST, LARGEST)
    assert [find_cell(v, scale, 4) for v in (-LARGEST, 0.0, LARGEST)] == [0, 2, 3]
