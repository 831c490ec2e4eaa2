"""Ctrl-C while a command imports its modules: it ends with the exit code 130 and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohort.cli.interrupt import exit_from_imports
from cohort.system.ending import is_importing
from tests.helpers.command_line import ENV, start

# A module that Ctrl-C reaches in the middle of its import, and that makes another error of it, as numpy does.
INTERRUPTED_MODULE = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError("cannot load module more than once per process") from None
"""
PROGRAM = """
import sys
from cohort.cli import main
main._dispatch = lambda args: print("printed before") or __import__("interrupted")
sys.exit(main.main([]))
"""


def test_ctrl_c_during_an_import_ends_the_command_at_once(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_MODULE)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "printed before\n", "")


def test_ctrl_c_outside_of_imports_is_a_keyboard_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), exit_from_imports():
        assert signal.getsignal(signal.SIGINT) is not before
        assert not is_importing(sys._getframe())
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exit_from_imports():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_the_start(tmp_path: Path) -> None:
    """Waits a little longer before each Ctrl-C: from the first imports to the first step."""
    for moment in range(30):
        process = start("train", "quickstart", "--steps", 1, at=tmp_path)
        time.sleep(0.2 + 0.1 * moment)  # the moment itself is what differs; nothing waits for an outcome
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        # After the last step began, the run finishes it: 0. Before Python handles signals, they end it: -SIGINT.
        assert process.returncode in (0, 130, -signal.SIGINT) and "Traceback" not in errors, (
            moment,
            process.returncode,
            errors,
        )
