"""Where a chat takes place: a terminal with columns that grow while models answer, or a pipe with plain text.

On a terminal, the rows that can still change are drawn again at every refresh, below those that are finished. A column
that is ahead of the others by more than the height of the terminal waits, because rows above it could not be changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cohort.chat.lines import LineInput, hide_typing, read_piped_line
from cohort.logs.columns import Column
from cohort.logs.console import make_console
from cohort.logs.printing import print_note, print_result
from cohort.logs.widths import cut_text, pad_text

SEPARATOR, ASCII_SEPARATOR = " │ ", " | "  # between columns; the second where the terminal has only ASCII
MIN_COLUMN = 30  # cells; narrower columns are hard to read, and answers are shown one after the other
MIN_WIDTH = 10  # cells that a column has at least, however narrow the terminal is
REFRESH_SECONDS = 1 / 30


class ColumnsView:
    """Answers in columns, or one after the other where columns would be narrow.

    `labels` are the names of the models, which stand above columns if `with_heading`. A single model has no heading.
    """

    def __init__(self, console: Console, labels: Sequence[str], with_heading: bool = True) -> None:
        self._console = console
        self._labels = labels
        self._separator = SEPARATOR if console.encoding.startswith("utf") else ASCII_SEPARATOR
        width = max(MIN_WIDTH, console.width)
        share = (width - len(SEPARATOR) * (len(labels) - 1)) // len(labels)
        is_wide = share >= MIN_COLUMN or len(labels) == 1
        self.columns = [Column(share if is_wide else width) for _ in labels]
        # Places of the models that are drawn side by side; the groups follow each other.
        self._blocks = [list(range(len(labels)))] if is_wide else [[n] for n in range(len(labels))]
        self._has_heading = len(labels) > 1 and (with_heading or not is_wide)
        self._num_printed = -1  # rows of the present block that are finished and printed; -1 = its heading is not
        self._refreshed = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def __enter__(self) -> ColumnsView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        for column in self.columns:
            if not column.has_ended:
                column.end()
        self._refresh()
        self._live.stop()

    def add(self, model: int, text: str) -> None:
        """Adds text to an answer, and draws it unless the last drawing was a moment ago."""
        self.columns[model].add(text)
        if text and time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self._refresh()

    def end(self, model: int, note: str = "") -> None:
        """Ends an answer, with a note below it."""
        self.columns[model].end(note)
        self._refresh()

    def _refresh(self) -> None:
        """Prints the rows that are finished, and draws those that can still change below them."""
        finished: list[Text] = []
        while self._blocks:
            columns = [self.columns[n] for n in self._blocks[0]]
            if self._num_printed < 0:
                finished += self._make_heading(self._blocks[0])
                self._num_printed = 0
            done = min((len(c.rows) for c in columns if not c.has_ended), default=max(len(c.rows) for c in columns))
            finished += [self._join_rows(columns, n) for n in range(self._num_printed, done)]
            self._num_printed = max(self._num_printed, done)
            if not all(c.has_ended for c in columns):
                break
            self._blocks.pop(0)
            self._num_printed = -1
        # Both are written to the terminal at once.
        with self._console:
            self._live.update(Group(*self._make_open_rows()), refresh=True)
            if finished:
                self._console.print(Text("\n").join(finished), no_wrap=True, overflow="crop")
        self._refreshed = time.monotonic()

    def _make_open_rows(self) -> list[Text]:
        """Returns the rows of the present block that can still change, as many as the terminal has room for."""
        if not self._blocks:
            return []
        columns = [self.columns[n] for n in self._blocks[0]]
        most = self._num_printed + max(1, self._console.height - 2)
        longest = max(len(c.all_rows) for c in columns)
        return [self._join_rows(columns, n) for n in range(self._num_printed, min(longest, most))]

    def _make_heading(self, block: Sequence[int]) -> list[Text]:
        """Returns the rows with the models' names above a block of columns; none for a single model."""
        if not self._has_heading:
            return []
        cells = [pad_text(cut_text(self._labels[n], width := self.columns[n].width), width) for n in block]
        # A blank row separates blocks that follow each other.
        gap = [Text("")] if block[0] > 0 else []
        return [*gap, Text(self._separator).join(Text(cell, style="bold") for cell in cells)]

    def _join_rows(self, columns: Sequence[Column], number: int) -> Text:
        """Returns row `number` of all columns as one line."""
        rows = [column.all_rows[number] if number < len(column.all_rows) else "" for column in columns]
        cells = [pad_text(row, column.width) for row, column in zip(rows[:-1], columns[:-1], strict=True)]
        line = Text(self._separator).join(Text(cell) for cell in [*cells, rows[-1]])
        line.no_wrap = True
        line.overflow = "crop"
        return line


class PlainView:
    """Answers as plain text, one after the other. Of several models, the one that is shown streams and others wait."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._waiting = ["" for _ in labels]
        self._notes: list[str | None] = [None for _ in labels]  # None = the answer has not ended
        self._shown = -1  # place of the model that is shown

    def __enter__(self) -> PlainView:
        self._begin_next()
        return self

    def __exit__(self, *_: object) -> None:
        while self._shown < len(self._labels):
            self.end(self._shown)

    def add(self, model: int, text: str) -> None:
        """Prints text of the model that is shown; keeps that of others until their turn."""
        self._waiting[model] += text
        self._flush()

    def end(self, model: int, note: str = "") -> None:
        """Ends an answer. A note goes to standard error."""
        self._notes[model] = note
        self._flush()

    def _begin_next(self) -> None:
        """Begins to show the next model."""
        self._shown += 1
        if self._shown < len(self._labels) > 1:
            print_result(f"[{self._labels[self._shown]}]")

    def _flush(self) -> None:
        """Prints what waits, as far as it is the turn of its model."""
        while self._shown < len(self._labels):
            if text := self._waiting[self._shown]:
                print_result(text, end="")
                self._waiting[self._shown] = ""
            note = self._notes[self._shown]
            if note is None:
                return
            print_result("")
            if note:
                print_note(f"{self._labels[self._shown]}: {note}" if len(self._labels) > 1 else note)
            self._begin_next()


AnswersView = ColumnsView | PlainView
"""What shows the answers of all models to one question while they grow."""


class Screen:
    """Where the user's lines come from, and where a chat shows everything.

    `is_interactive` = a user sits at a terminal. Otherwise lines are read from a pipe or file, and standard output has
    the answers alone: all else goes to standard error. `plain` = a terminal is used without columns and control codes.
    """

    def __init__(self, is_interactive: bool, plain: bool = False) -> None:
        self.is_interactive = is_interactive
        self._console = make_console()
        self._is_plain = plain or not is_interactive or self._console.is_dumb_terminal
        self._input = LineInput() if is_interactive else None

    def read_line(self) -> str | None:
        """Returns the user's next line; None at the end of the input, or after Ctrl-D.

        Raises KeyboardInterrupt after Ctrl-C, and ConfigError for input that is not text.
        """
        return read_piped_line() if self._input is None else self._input.read_line("> ")

    def hide_typing(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which what the user types is not drawn between answers, but kept for the next line."""
        return hide_typing() if self.is_interactive else contextlib.nullcontext()

    @contextlib.contextmanager
    def open_answers(self, labels: Sequence[str], with_heading: bool = True) -> Iterator[AnswersView]:
        """Shows answers while they grow, in columns. Without a heading, the answers belong to those above them."""
        if self._is_plain:
            with PlainView(labels) as plain:
                yield plain
            return
        with ColumnsView(self._console, labels, with_heading) as view:
            yield view

    def show_verdicts(self, labels: Sequence[str], texts: Sequence[str]) -> None:
        """Shows one text per model below its answer."""
        with self.open_answers(labels, with_heading=False) as view:
            for model, text in enumerate(texts):
                view.add(model, text)
                view.end(model)

    def show_note(self, text: str, style: str = "dim") -> None:
        """Shows what the chat itself has to tell, or with another style what the models are asked."""
        if self._is_plain:
            print_note(text)
        else:
            self._console.print(Text(text, style=style))

    def show_gap(self) -> None:
        """Leaves a blank line on a terminal, between answers and the user's next line."""
        if self.is_interactive:
            print_result("")

    def close(self) -> None:
        """Stores the lines that the user wrote, for the next chat."""
        if self._input is not None:
            self._input.save_history()
