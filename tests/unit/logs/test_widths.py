"""Texts of one width, and curves of one line."""

from __future__ import annotations

import math

import pytest

from cohort.logs.curve import ASCII_BLOCKS, draw_blocks
from cohort.logs.widths import cut_text, measure_width, pad_text


@pytest.mark.parametrize(
    "text", ["", "plain", "表表表表表", "e\u0301e\u0301e\u0301e\u0301", "a表b表c", "🙂🙂🙂", "a\u200db\u200dc"]
)
@pytest.mark.parametrize("keep_end", [False, True])
def test_a_cut_text_fits_and_a_padded_one_fills(text: str, keep_end: bool) -> None:
    for width in range(8):
        cut = cut_text(text, width, keep_end=keep_end)
        assert measure_width(cut) <= width
        assert measure_width(pad_text(cut, width)) == width
        if measure_width(text) <= width:
            assert cut == text


def test_what_is_cut_keeps_its_beginning_and_its_end() -> None:
    assert cut_text("2026-11-16-quickstart-k3f9", 15, keep_end=True) == "2026-11…rt-k3f9"
    assert cut_text("2026-11-16-quickstart-k3f9", 15) == "2026-11-16-qui…"
    assert cut_text("表表表", 5) == "表表…" and cut_text("表表表", 4) == "表…"


def test_a_curve_has_one_character_per_piece() -> None:
    rising = [(step, step / 99) for step in range(100)]
    assert draw_blocks(rising, 8) == "▁▂▃▄▅▆▇█"
    assert draw_blocks(rising, 8, ASCII_BLOCKS) == ASCII_BLOCKS
    assert draw_blocks(rising[:3], 8) == "▁▅█"
    # The mean of a piece counts: 0 and 1 in turn are a flat line.
    assert draw_blocks([(step, step % 2) for step in range(64)], 8) == "▅" * 8


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([math.nan, math.inf], ""),
        ([1.0], "▅"),
        ([1e308, -1e308], ""),
        ([0.0, math.nan, 1.0], "▁█"),
        ([5e-324, 0.0], "█▁"),
    ],
)
def test_odd_values_draw_something_or_nothing(values: list[float], expected: str) -> None:
    assert draw_blocks(list(enumerate(values)), 8) == expected
