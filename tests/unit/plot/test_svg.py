"""Elements of SVG: everything is escaped and rounded."""

from __future__ import annotations

from xml.etree import ElementTree

from cohort.plot.svg import escape_xml, estimate_width, join_points, make_element, shorten_text, write_text

HOSTILE = "</text><script>alert(1)</script>\x00\x1b[2J\ufffe\ud800\u202e\"'&]]>\n"


def test_hostile_text_stays_text():
    element = ElementTree.fromstring(write_text(HOSTILE, 1, 2, 10, id=HOSTILE))
    assert element.tag == "text" and len(element) == 0
    assert element.text is not None and element.text.startswith("</text><script>alert(1)</script>\\x00\\x1b[2J\\ufffe")
    assert element.get("id") == element.text


def test_attributes_are_not_cut_and_none_is_left_out():
    path = join_points((float(i), 1.0) for i in range(500))
    assert f'd="{path}"' in make_element("path", d=path, dash=None)
    assert "dash" not in make_element("path", dash=None)
    assert path.startswith("M0 1L1 1L2 1")


def test_long_texts_keep_both_ends():
    short = shorten_text("a" * 50 + "b" * 50, 10, 100)
    assert short.startswith("aaa") and short.endswith("bbb") and "…" in short
    assert 80 < estimate_width(short, 10) <= 100
    assert shorten_text("short", 10, 100) == "short"
    assert estimate_width("漢字", 10) == 2 * estimate_width("ab", 10)


def test_texts_are_cut():
    assert len(escape_xml("x" * 10_000)) < 400
