"""Elements of SVG as text. Every name and text is escaped, and numbers are rounded: equal data gives equal bytes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from cohort.logs.escape import escape_line
from cohort.logs.widths import cut_text, measure_width

MARK = 'id="cohort-plot"'
"""What the first line of every picture contains, so that one can be told from other SVG files."""

_NOT_XML = {"\ufffe": "\\ufffe", "\uffff": "\\uffff"}  # characters that XML forbids and `escape_line` keeps
_WIDTH = 0.56  # of an average character of a sans-serif font, in font sizes


def escape_xml(text: str, limit: int = 300) -> str:
    """Returns a text in one line that is safe in XML, as content or attribute; cut after `limit` characters.

    >>> escape_xml("</svg>\\x00&"), escape_xml('"')
    ('&lt;/svg&gt;\\\\x00&amp;', '&quot;')
    """
    line = escape_line(text, limit)
    return escape("".join(_NOT_XML.get(c, c) for c in line), quote=True)


def format_coordinate(value: float) -> str:
    """Returns a number of pixels with at most one decimal.

    >>> [format_coordinate(v) for v in (12.04, 3.0, -0.01)]
    ['12', '3', '0']
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def make_element(name: str, *content: str, **attributes: str | float | None) -> str:
    """Returns an element. Attributes that are None are left out; underscores in their names become dashes.

    `content` is text of elements, or text that was escaped already. Numbers are rounded to one decimal.

    >>> make_element("line", x1=0, stroke_width=0.75, stroke="#000")
    '<line x1="0" stroke-width="0.8" stroke="#000"/>'
    """
    shown = "".join(
        f' {key.replace("_", "-")}="{_escape_value(value) if isinstance(value, str) else format_coordinate(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{shown}>{''.join(content)}</{name}>" if content else f"<{name}{shown}/>"


def _escape_value(value: str) -> str:
    """Returns the value of an attribute, escaped and not cut: the data of a path is long."""
    return escape_xml(value, len(value))


def write_text(text: str, x: float, y: float, size: float, **attributes: str | float | None) -> str:
    """Returns a text whose baseline begins at (x, y), with a font of `size` pixels."""
    return make_element("text", escape_xml(text), x=x, y=y, font_size=size, **attributes)


def join_points(points: Iterable[tuple[float, float]]) -> str:
    """Returns points as the data of a path that joins them with straight lines."""
    return "M" + "L".join(f"{format_coordinate(x)} {format_coordinate(y)}" for x, y in points)


def estimate_width(text: str, size: float) -> float:
    """Returns about how many pixels a text takes in a sans-serif font of `size` pixels.

    Wide characters, such as Chinese ones, count double. Escaped characters count as they are written.
    """
    return measure_width(escape_line(text, 300)) * size * _WIDTH


def shorten_text(text: str, size: float, width: float) -> str:
    """Returns a text that fits into `width` pixels: its beginning and its end, with "…" between if it is too long.

    >>> shorten_text("2026-11-15-countdown-k3f9", 10, 90)
    '2026-11-…wn-k3f9'
    """
    return cut_text(escape_line(text, 300), int(width / (size * _WIDTH)), keep_end=True)
