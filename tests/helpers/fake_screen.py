"""A screen for tests of a chat: its lines are prepared, and it keeps what is shown."""

from __future__ import annotations

import contextlib


class FakeScreen:
    """A screen with prepared lines. It keeps what is shown."""

    def __init__(self, lines=(), is_interactive=True):
        self.lines, self.is_interactive = list(lines), is_interactive
        self.notes, self.answers = [], []

    def read_line(self):
        line = self.lines.pop(0) if self.lines else None
        if isinstance(line, BaseException):
            raise line
        return line

    def hide_typing(self):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def open_answers(self, labels):
        self.answers.append(dict.fromkeys(labels, ""))
        yield FakeView(self.answers[-1], labels)

    def show_verdicts(self, labels, texts):
        self.notes += texts

    def show_note(self, text, style=""):
        self.notes.append(text)

    def show_gap(self):
        pass


class FakeView:
    """A view that keeps the texts of all answers by the label of their model, with notes in brackets."""

    def __init__(self, texts, labels):
        self.texts, self.labels = texts, labels

    def add(self, model, text):
        self.texts[self.labels[model]] += text

    def end(self, model, note=""):
        self.texts[self.labels[model]] += f"[{note}]" if note else ""
