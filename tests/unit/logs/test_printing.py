"""Nothing that a command prints acts on a terminal, whoever wrote it, and every terminal can show it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.text import Text

from cohort.cli.main import main
from cohort.cli.output import format_table
from cohort.errors import CohortError
from cohort.logs import printing
from cohort.logs.console import EscapingConsole
from tests.helpers.command_line import ENV
from tests.helpers.evaluations import evaluation

HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\rd\u202ee\udc9bf"
SHOWN = "a\\x1b]0;title\\x07b\\x9b2Jc\\rd\\u202ee\\udc9bf"


@pytest.fixture(autouse=True)
def same_hooks() -> Iterator[None]:
    """Restores what `prepare_output` sets for the whole process."""
    hook = sys.excepthook
    formatter = logging.lastResort.formatter if logging.lastResort else None
    yield
    sys.excepthook = hook
    if logging.lastResort:
        logging.lastResort.setFormatter(formatter)


def test_printed_text_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_result(f"x\n{HOSTILE}", end="")
    printing.print_note(HOSTILE)
    assert capsys.readouterr() == (f"x\n{SHOWN}", f"{SHOWN}\n")


def test_an_error_of_a_command_is_escaped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: list[str]) -> int:
        raise CohortError(HOSTILE)

    monkeypatch.setattr("cohort.cli.main._dispatch", fail)
    assert main([]) == 2
    assert capsys.readouterr().err == "cohort: a\\x1b]0;title\\x07b\\x9b2Jc d\\u202ee\\udc9bf\n"


def test_a_traceback_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    printing.prepare_output()
    try:
        raise KeyError(HOSTILE, Exception(HOSTILE)) from OSError(HOSTILE)
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)
    shown = capsys.readouterr().err
    assert f"OSError: {SHOWN}\n" in shown and "test_a_traceback_is_escaped" in shown
    assert not set("\x1b\x07\x9b\r\u202e") & set(shown)


def test_a_log_record_without_a_handler_is_one_escaped_line(capsys: pytest.CaptureFixture[str]) -> None:
    printing.prepare_output()
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.LogRecord("cohort", logging.WARNING, "", 0, "row %s\nfake", (HOSTILE,), None))
    assert capsys.readouterr().err == f"row {SHOWN}\\nfake\n"


def test_cells_of_a_table_are_one_line_each() -> None:
    assert format_table(["x", "y"], [["a\nb\x1b", "c"]]).splitlines() == ["x         y", "a\\nb\\x1b  c"]


def test_ids_of_rows_are_escaped_by_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for score in (0.0, 1.0):
        (tmp_path / f"{score}.json").write_text(json.dumps(evaluation({f"{HOSTILE}\nfake": [score]}).to_json()))
    assert main(["compare", str(tmp_path / "0.0.json"), str(tmp_path / "1.0.json")]) == 0
    assert f"  {SHOWN}\\nfake: " in capsys.readouterr().out


def test_a_console_writes_only_its_own_control_codes() -> None:
    file = io.StringIO()
    console = EscapingConsole(file=file, force_terminal=True, width=200, color_system="truecolor")
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(HOSTILE)
        console.print(Text(HOSTILE, style="bold link https://example.invalid"))
    written = file.getvalue()
    # Rich itself leaves out \x07 and \r.
    assert "\x1b[1ma\\x1b]0;titleb\\x9b2Jcd\\u202ee\\udc9bf\x1b[0m" in written, "shown with rich's own colours"
    assert "\x1b]" not in written and "\x9b" not in written and "\u202e" not in written


def run_shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line of bash in which COHORT stands for the command."""
    script = command.replace("COHORT", f"{sys.executable} -m cohort")
    env = {**ENV, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **environment}
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("COHORT --help >&-", 0),
        ("COHORT --help <&- >&- 2>&-", 0),
        ("COHORT oops >&- 2>&-", 2),
        ("COHORT oops 2>/dev/full", 2),
        ("COHORT models >&-", 0),
        ("COHORT oops 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", 2),
        ("COHORT train --help | true; exit ${PIPESTATUS[0]}", 0),
    ],
)
def test_streams_that_are_closed_are_no_traceback(command: str, code: int) -> None:
    done = run_shell(command)
    # A reader that has left before the first byte is written ends the command with 1.
    assert done.returncode in (code, 1 if "--help |" in command else code)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_closed_stream_does_not_give_its_number_to_a_file() -> None:
    program = (
        "import os; from cohort.logs.printing import prepare_output; prepare_output(); "
        "assert os.open('/', os.O_RDONLY) > 2; import sys; print('x', flush=True); print('y', file=sys.stderr)"
    )
    done = run_shell(f'{sys.executable} -c "{program}" <&- >&- 2>&-')
    assert done.returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_rows_stay_json_whatever_the_terminal_can_show(tmp_path: Path, encoding: str) -> None:
    text = "é∞\x1b\u202e\x7f"
    (tmp_path / "words.py").write_text(
        "from dataclasses import dataclass\n"
        "from cohort import task\n"
        "@task('words')\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Words:\n"
        "    parts = ('correct',)\n"
        "    def rows(self, split):\n"
        f"        return [{{'id': 'é', 'text': 'é'}}, {{'id': 'x', 'text': {text!a}}}]\n"
        "    def prompt(self, row):\n"
        "        return [{'role': 'user', 'content': row['text']}]\n"
        "    def score(self, row, answer):\n"
        "        return {'correct': 0.0}\n"
    )
    script = f"cd {tmp_path}; COHORT data words.py:words --out -"
    done = run_shell(script, PYTHONIOENCODING=encoding)
    assert done.stderr == "" and done.stdout.isascii()
    assert [json.loads(line)["row"]["text"] for line in done.stdout.splitlines()] == ["é", text]
    assert "é" in run_shell(script, PYTHONIOENCODING="utf-8").stdout


def test_text_that_the_encoding_lacks_is_escaped() -> None:
    done = run_shell("COHORT ∞", PYTHONIOENCODING="ascii", LC_ALL=os.environ.get("LC_ALL", "C.UTF-8"))
    assert done.returncode == 2 and 'unknown command "\\u221e"' in done.stderr
