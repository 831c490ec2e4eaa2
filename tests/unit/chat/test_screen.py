"""What a chat shows: columns that grow, and plain text."""

from __future__ import annotations

import io

import pytest

from cohort.chat.screen import ColumnsView, PlainView, Screen
from cohort.logs.console import EscapingConsole
from tests.helpers.terminal import ScreenModel


def make_view(labels, width=80, height=24, with_heading=True):
    """Returns a view of columns, and a function that returns the screen as drawn so far."""
    file = io.StringIO()
    console = EscapingConsole(
        file=file, force_terminal=True, force_interactive=True, width=width, height=height, color_system="standard"
    )

    def draw():
        screen = ScreenModel(width, height)
        screen.feed(file.getvalue().replace("\n", "\r\n"))
        return screen

    return ColumnsView(console, labels, with_heading), draw


def test_text_is_on_the_screen_as_soon_as_it_comes():
    view, draw = make_view(["left", "right"])
    with view:
        view.add(0, "Hel")
        lines = draw().text.splitlines()
        assert lines == [f"left{' ' * 35}│ right", f"Hel{' ' * 36}│"]
        view.add(1, "there")
        view.end(1)
        view.add(0, "lo")
        view.end(0, "(stopped)")
    assert [line.split("│") for line in draw().text.splitlines()][1:] == [
        [f"Hello{' ' * 34}", " there"],
        [f"(stopped){' ' * 30}", ""],
    ]


def test_a_column_that_is_far_ahead_waits_for_the_other():
    view, draw = make_view(["fast", "slow"], height=10)
    with view:
        for number in range(50):
            view.add(0, f"fast {number}\n")
        view.end(0)
        assert "fast 6" in draw().text and "fast 20" not in draw().text
        for number in range(50):
            view.add(1, f"slow {number}\n")
        view.end(1)
    screen = draw()
    rows = [line.split() for line in screen.text.splitlines()][1:]
    assert rows == [["fast", str(n), "│", "slow", str(n)] for n in range(50)]
    # Rows that have left a screen of this height are never written again.
    assert screen.highest < 10 and not screen.num_wraps


@pytest.mark.parametrize("width", [20, 50, 79])
def test_narrow_screens_show_one_answer_after_the_other(width):
    view, draw = make_view(["first", "second", "third"], width=width)
    with view:
        view.add(2, "three")
        view.add(1, "two")
        assert "two" not in draw().text
        view.add(0, "one")
        for model in (2, 0, 1):
            view.end(model)
    assert draw().text.split() == ["first", "one", "second", "two", "third", "three"]


def test_verdicts_stand_below_the_answers_without_a_heading():
    view, draw = make_view(["a", "b"], with_heading=False)
    with view:
        view.add(0, "RIGHT")
        view.add(1, "WRONG\nmisses the target")
    assert [line.split("│")[-1].strip() for line in draw().text.splitlines()] == ["WRONG", "misses the target"]


def test_one_model_has_the_whole_width_and_no_heading():
    view, draw = make_view(["alone"])
    with view:
        view.add(0, "word " * 20)
        view.end(0)
    assert draw().text.splitlines() == [" ".join(["word"] * 16), " ".join(["word"] * 4)]


def test_an_error_closes_the_view():
    view, draw = make_view(["a", "b"])
    with pytest.raises(ValueError, match="oops"), view:
        view.add(0, "partial")
        raise ValueError("oops")
    assert "partial" in draw().text


def test_plain_answers_follow_each_other(capsys):
    with PlainView(["a", "b"]) as view:
        view.add(1, "second\x1b[2J")
        assert capsys.readouterr().out == "[a]\n"
        view.add(0, "fir")
        view.add(0, "st")
        assert capsys.readouterr().out == "first"
        view.end(1, "(stopped)")
        view.end(0)
    done = capsys.readouterr()
    assert (done.out, done.err) == ("\n[b]\nsecond\\x1b[2J\n", "b: (stopped)\n")


def test_a_pipe_is_read_line_by_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\r\ntwo\n\nlast"))
    screen = Screen(is_interactive=False)
    assert [screen.read_line() for _ in range(5)] == ["one", "two", "", "last", None]
    screen.show_note("a note")
    screen.show_gap()
    screen.show_verdicts(["m"], ["RIGHT"])
    done = capsys.readouterr()
    assert (done.out, done.err) == ("RIGHT\n", "a note\n")
