"""Lines that a user types, and their history."""

from __future__ import annotations

import builtins
import io

import pytest

from cohort.chat.lines import LineInput, hide_typing, read_piped_line
from cohort.errors import ConfigError


@pytest.fixture
def type_lines(monkeypatch, tmp_path):
    """Returns a function that prepares what `input` returns or raises."""
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))

    def prepare(*lines):
        left = list(lines)

        def read(prompt=""):
            line = left.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)

    return prepare


def test_a_backslash_continues_a_line(type_lines):
    type_lines("one\\", "two", EOFError(), KeyboardInterrupt())
    lines = LineInput()
    assert lines.read_line("> ") == "one\ntwo" and lines.read_line("> ") is None
    with pytest.raises(KeyboardInterrupt):
        lines.read_line("> ")


def test_a_backslash_continues_a_line_of_a_pipe(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\\\ntwo\r\n\nthree\\\n"))
    assert [read_piped_line() for _ in range(4)] == ["one\ntwo", "", "three", None]


def test_input_that_is_not_text_is_told(type_lines, monkeypatch):
    wrong = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    type_lines(wrong)
    with pytest.raises(ConfigError, match="write it again"):
        LineInput().read_line("> ")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read_piped_line()


def test_the_history_is_private_and_comes_back(type_lines, tmp_path):
    type_lines()
    readline = pytest.importorskip("readline")
    readline.clear_history()
    first = LineInput()
    readline.add_history("an old question")
    first.save_history()
    file = tmp_path / "cache" / "chat_history"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    readline.clear_history()
    second = LineInput()
    assert readline.get_history_item(1) == "an old question"
    second.save_history()
    assert file.stat().st_mode & 0o777 == 0o600
    readline.clear_history()


def test_a_cache_that_cannot_be_written_is_no_error(type_lines, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "file"))
    LineInput().save_history()
    assert (tmp_path / "file").read_text() == ""


def test_typing_is_left_alone_without_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with hide_typing():
        pass
