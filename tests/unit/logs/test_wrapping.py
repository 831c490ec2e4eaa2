"""Prose on a terminal is broken between words; tables, JSON, commands and long words stay whole."""

from __future__ import annotations

import io

import pytest

from cohort.logs import printing
from cohort.logs.wrapping import wrap_text

SENTENCE = "The folder in which the run directory is made, and where other commands look for it by name."


class FakeTerminal(io.StringIO):
    """A stream that says that it is a terminal, without a size of its own."""

    def isatty(self) -> bool:
        return True


def test_words_stay_whole() -> None:
    text = wrap_text(f"cohort: {SENTENCE}", 40)
    assert max(map(len, text.split("\n"))) <= 40
    assert text.replace("\n", " ") == f"cohort: {SENTENCE}"


def test_a_text_behind_a_gap_goes_on_below_itself() -> None:
    first, second, *_ = wrap_text(f"  --out DIR   {SENTENCE}", 50).split("\n")
    assert first.startswith("  --out DIR   The folder") and second.startswith(" " * 14 + "directory is made")


def test_lines_that_were_filled_by_hand_become_one_paragraph() -> None:
    filled = "word " * 23 + "last."
    text = f"  --name NAME  {filled[:104]}\n               {filled[105:]}\n  --other      {'x ' * 50}"
    rows = wrap_text(text, 80).split("\n")
    # Without the joining, there would be a third row for the rest.
    assert rows[1].endswith("word word last.") and rows[2].startswith("  --other")


def test_prose_with_two_spaces_in_it_is_no_table() -> None:
    rows = wrap_text(f"{SENTENCE}  {SENTENCE}", 60).split("\n")
    assert max(map(len, rows)) <= 60 and len(rows) == 4


@pytest.mark.parametrize(
    "line",
    [
        '{"a": "' + SENTENCE + '"}',
        ' [{"a": "' + SENTENCE + '"}]',
        "  cohort eval arithmetic --model runs/first@2 --max-tokens 24 --task.train-size 24",
        "next /usr/bin/cohort eval arithmetic --model runs/first@2 --max-tokens 24 --task.train-size 24",
        "/a/path/that/is/longer/than/the/terminal/" + "x" * 60,
        "name" + " " * 50 + "0.25  0.75  0.125  many more cells",
    ],
)
def test_what_must_not_be_broken(line: str) -> None:
    assert wrap_text(line, 60) == line


def test_a_pipe_gets_one_line_and_a_terminal_several(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, terminal = io.StringIO(), FakeTerminal()
    monkeypatch.setattr("sys.stderr", pipe)
    printing.print_note(SENTENCE)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "50")
    printing.print_note(SENTENCE)
    assert pipe.getvalue() == SENTENCE + "\n"
    assert terminal.getvalue().count("\n") == 2 and terminal.getvalue().replace("\n", " ") == SENTENCE + " "
    # A terminal that does not know its size has 80 columns.
    monkeypatch.setenv("COLUMNS", "")
    assert printing.find_terminal_width(terminal) == 80 and printing.find_terminal_width(pipe) is None


def test_a_piece_of_a_line_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    printing.print_result(SENTENCE, end="")
    assert terminal.getvalue() == SENTENCE
