"""Commands in the output use a program name that the user's shell finds."""

from __future__ import annotations

import sys

import pytest

from cohort.run import machine


@pytest.mark.parametrize(
    ("started", "found", "typed"),
    [
        (".venv/bin/cohort", None, ".venv/bin/cohort"),
        (".venv/bin/cohort", "/usr/bin/cohort", "cohort"),
        ("src/cohort/__main__.py", None, "cohort"),
    ],
)
def test_the_program_is_named_as_it_can_be_typed(monkeypatch, started, found, typed):
    monkeypatch.setattr(sys, "argv", [started, "train"])
    monkeypatch.setattr(machine.shutil, "which", lambda name: found)
    assert machine.program_name() == typed
