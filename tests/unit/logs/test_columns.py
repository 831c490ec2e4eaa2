"""Rows of a column: wrapped text that grows piece by piece, also if it is hostile."""

from __future__ import annotations

import random
import unicodedata

from cohort.logs.columns import Column, wrap_paragraph
from cohort.logs.widths import measure_width


def test_words_are_wrapped_and_long_ones_are_cut():
    assert wrap_paragraph("the quick brown fox", 10) == ["the quick", "brown fox"]
    assert wrap_paragraph("ab cdefghijklmnop q", 6) == ["ab", "cdefgh", "ijklmn", "op q"]
    assert wrap_paragraph("漢字漢字漢字", 5) == ["漢字", "漢字", "漢字"]
    assert wrap_paragraph("    indented code here", 12) == ["    indented", "code here"]


def test_tags_are_not_split():
    assert wrap_paragraph("so <answer>(41+56)-38</answer>", 22) == ["so <answer>(41+56)-38", "</answer>"]
    # A tag at the beginning of a row that is wider than the row has no better place; a sign is no tag.
    assert wrap_paragraph("<a-very-long-tag>x", 8) == ["<a-very-", "long-tag", ">x"]
    assert wrap_paragraph("if x<10 then", 5) == ["if", "x<10", "then"]


def test_a_text_gives_the_same_rows_in_pieces_of_any_length():
    tags = "<answer>1</answer> a<b<c <<d/e</f> ab cd<tag>"
    text = f"One two three, four.\n\n  five {tags}  sixseveneightnineten\neleven e\u0301toile 漢字かな twelve " * 3
    whole = Column(12)
    whole.add(text)
    whole.end()
    rng = random.Random(0)
    for _ in range(20):
        column, place, seen = Column(12), 0, []
        while place < len(text):
            size = rng.randint(1, 7)
            column.add(text[place : place + size])
            place += size
            # Finished rows never change.
            assert column.rows[: len(seen)] == seen
            seen = list(column.rows)
        column.end()
        assert column.rows == whole.rows
    assert all(measure_width(row) <= 12 for row in whole.rows)


def test_hostile_text_stays_in_its_column():
    column = Column(20)
    column.add("\x1b[2J\r\x9b1m\u202e\u2028\x00 \ud800")
    for _ in range(100):
        column.add("\u0301" * 100)
    column.add("👨\u200d👩\u200d👧\ufe0f👍\U0001f3fd\U000e0041")
    column.add("漢" * 200)
    column.end("a note\nin one line")
    text = "".join(column.rows)
    assert all(measure_width(row) <= 20 for row in column.rows)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Cn") for c in text)
    assert text.count("\u0301") == 8 and "…" in text
    assert column.rows[-1] == "a note in one line"


def test_the_growing_row_is_shown_until_the_answer_ends():
    column = Column(20)
    column.add("first\nsec")
    assert column.rows == ["first"] and column.all_rows == ["first", "sec"]
    column.add("ond\n\n\n")
    column.end("(stopped)")
    assert column.rows == column.all_rows == ["first", "second", "(stopped)"]
