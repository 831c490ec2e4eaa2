"""Curves drawn with characters: braille, each a grid of 2 x 4 dots, so that 60 columns show 120 points, or blocks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row from the top, then column
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"  # where the terminal has no blocks
Range = tuple[float, float]
"""Lowest and highest value."""


def find_bounds(values: Sequence[float]) -> Range:
    """Returns (lowest, highest) of the finite values; (0, 1) if there are none.

    Equal bounds are widened by 0.5 on each side, and those of large numbers by more, so that a flat curve can be drawn.

    >>> find_bounds([0.25, 0.75]), find_bounds([1.0]), find_bounds([])
    ((0.25, 0.75), (0.5, 1.5), (0.0, 1.0))
    """
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if high > low:
        return low, high
    # Half of one is nothing beside a large number, and what is added to the largest one must not be infinite.
    width = max(0.5, abs(low) / 1e6)
    return max(low - width, -sys.float_info.max), min(high + width, sys.float_info.max)


def find_cell(value: float, scale: Range, num: int) -> int:
    """Returns the index of the cell that holds the value, if the range `scale` is divided into `num` equal cells.

    Indices count from 0. A value outside of the range gets the first or the last cell.

    >>> [find_cell(v, (0.0, 1.0), 4) for v in (0.0, 0.3, 1.0)]
    [0, 1, 3]
    """
    low, high = scale
    value = min(high, max(low, value))
    # Halved, because the difference of two large numbers may be infinite; but half of the smallest number is 0.
    part = 1 if high - low < float("inf") else 2
    share = (value / part - low / part) / (high / part - low / part)
    return min(num - 1, max(0, int(share * num)))


def draw_braille(points: Sequence[tuple[float, float]], width: int, height: int, x: Range, y: Range) -> list[str]:
    """Draws the curve through `points` with braille characters. Returns its `height` lines of text, top first.

    `points` are pairs (x, y), of which those in the same column of dots are averaged, and those that are not finite
    left out. A straight line joins each point with the next. `x` and `y` are the (lowest, highest) values of the axes.
    `width` and `height` are in characters.

    >>> draw_braille([(0, 0.0), (1, 1.0)], 1, 1, (0, 1), (0.0, 1.0))
    ['⡜']
    """
    rows, columns = height * 4, width * 2
    # Each cell collects the bits of its dots; the character is 0x2800 plus these bits.
    cells = [[0] * width for _ in range(height)]
    previous: tuple[int, int] | None = None
    for column, value in _average_columns(points, columns, x):
        row = rows - 1 - find_cell(value, y, rows)
        for c, r in _trace_line(previous or (column, row), (column, row)):
            cells[r // 4][c // 2] |= _DOTS[r % 4][c % 2]
        previous = (column, row)
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def draw_blocks(points: Sequence[tuple[float, float]], width: int, blocks: str = BLOCKS) -> str:
    """Draws the curve through `points` in one line of at most `width` characters, which are of `blocks`, lowest first.

    `points` are pairs (x, y) in the order of x. Each character is the mean of the points of one piece of the x axis,
    and the lowest and highest mean fill the height. There are no more pieces than points. Points that are not finite
    are left out; a piece without points is a space.

    >>> draw_blocks([(0, 0.0), (1, 0.4), (2, 1.0)], 8)
    '▁▄█'
    """
    # False for infinity and for NaN.
    finite = [(position, value) for position, value in points if abs(value) < float("inf")]
    if not finite:
        return ""
    num = min(width, len(finite))
    low, high = finite[0][0], finite[-1][0]
    means = dict(_average_columns(finite, num, (low, high) if high > low else (low, low + 1)))
    scale = find_bounds(list(means.values()))
    # Near the largest numbers their difference is not finite.
    if not scale[1] - scale[0] < float("inf"):
        return ""
    return "".join(blocks[find_cell(means[i], scale, len(blocks))] if i in means else " " for i in range(num))


def _average_columns(points: Sequence[tuple[float, float]], num: int, x: Range) -> list[tuple[int, float]]:
    """Returns (column, mean value) of each column that has a point, from left to right.

    The range `x` is divided into `num` columns. `points` are pairs (x, y); those whose y is not finite are left out.
    """
    sums: dict[int, tuple[float, int]] = {}
    for position, value in points:
        # False for infinity and for NaN: these points are left out, and the line goes on to the next point.
        if abs(value) < float("inf"):
            column = find_cell(position, x, num)
            total, count = sums.get(column, (0.0, 0))
            sums[column] = (total + value, count + 1)
    return [(column, total / count) for column, (total, count) in sorted(sums.items())]


def _trace_line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the dots (column, row) of a straight line without holes, ending with `end`.

    `start` itself is left out, unless it is also the end.
    """
    (c0, r0), (c1, r1) = start, end
    num = max(abs(c1 - c0), abs(r1 - r0), 1)
    return [(round(c0 + (c1 - c0) * i / num), round(r0 + (r1 - r0) * i / num)) for i in range(1, num + 1)]
