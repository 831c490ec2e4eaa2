"""The processes of a sweep: one child per run, which reports its progress through a pipe and ends with this process."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.errors import RunError, shorten_error
from cohort.logs.escape import escape_line
from cohort.sweep.directory import RunResult, SweepDirectory
from cohort.sweep.plan import PlannedRun
from cohort.system.disk import explain_disk_errors
from cohort.system.json_text import parse_json
from cohort.system.process import name_signal

Report = Mapping[str, Any]
"""What a run tells while it trains: the lines of `logs.jsonlines`, and one of the kind "error"."""

END_SECONDS = 10.0  # for which a child may take to end after it was told to end at once
_END_POLL_SECONDS = 0.05  # between two looks whether a process has ended
_TAIL_BYTES = 8192  # of a log, in which its last line is looked for
_MAX_ERROR = 300  # characters of an error in the table


class Child:
    """A run of a sweep in a process of its own. Its output is in its log file."""

    def __init__(self, directory: SweepDirectory, run: PlannedRun) -> None:
        self.run = run
        self._directory = directory
        self._log = directory.get_log_path(run)
        self._error = ""  # that it reported
        self._incoming = b""
        self.is_silent = False  # whether nothing more will come: the process has ended, or is about to
        self._reports, reports = os.pipe()
        os.set_blocking(self._reports, False)
        words = [sys.executable, "-m", "cohort.sweep.worker"]
        words += [str(directory.path), str(run.number), str(reports), str(os.getpid())]
        try:
            with explain_disk_errors(self._log), open(self._log, "ab") as log:
                self._log_begin = log.tell()
                self._process = subprocess.Popen(
                    words,
                    # The child reads it to its end, which comes when this process is gone.
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reports,),
                    cwd=_choose_folder(directory.plan.folder),
                    env=make_environment(),
                    # A session of its own: Ctrl-C in a terminal would otherwise reach the child twice.
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(reports)

    def fileno(self) -> int:
        """Returns the file descriptor of the reports. It is readable when there are some, and at the end."""
        return self._reports

    def read_reports(self) -> list[Report]:
        """Returns the reports that have come since the last call. Does not wait."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._reports, 1 << 16):
                self._incoming += chunk
            self.is_silent = True
        *lines, self._incoming = self._incoming.split(b"\n")
        reports = [report for line in lines if (report := _read_report(line))]
        for report in reports:
            if report.get("kind") == "error":
                self._error = str(report.get("text", ""))
        return reports

    def has_ended(self) -> bool:
        """Returns whether the process has ended."""
        return self._process.poll() is not None

    def ask_to_stop(self) -> None:
        """Asks the run to finish its step, save a checkpoint and end."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process at once, and waits for its end."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)

    def close(self) -> RunResult | None:
        """Closes the pipes of a process that has ended, and returns how the run ended; None = it is interrupted.

        The result of a run that failed is written here, any other by the run itself.
        """
        self.read_reports()
        os.close(self._reports)
        if self._process.stdin is not None:
            self._process.stdin.close()
        code = self._process.wait()
        # 130: it was asked to stop. SIGTERM: it was asked before it could listen.
        if code in (130, -signal.SIGTERM):
            return None
        result = self._directory.load_result(self.run) if code == 0 else None
        if result is None:
            result = RunResult(state="failed", why=self._describe_failure(code))
            self._directory.save_result(self.run, result)
        return result

    def _describe_failure(self, code: int) -> str:
        """Returns the last line of the run's error, or how its process ended, without paths of this machine."""
        text = self._error or (read_last_line(self._log, self._log_begin) if code > 0 else "")
        if not text:
            how = f"by {name_signal(-code)}" if code < 0 else f"with the exit code {code}"
            hint = " (the machine may have run out of memory)" if code == -signal.SIGKILL else ""
            text = f"its process ended {how}{hint}"
        for folder in (self._directory.path, Path(self._directory.plan.folder)):
            text = text.replace(f"{folder}/", "")
        return escape_line(text, _MAX_ERROR)


def wait_for_reports(children: list[Child], seconds: float) -> None:
    """Waits until one of the children reports something or ends, at most so many seconds."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            if not child.is_silent:
                selector.register(child, selectors.EVENT_READ)
        selector.select(seconds if selector.get_map() else _END_POLL_SECONDS)


def _choose_folder(folder: str) -> str | None:
    """Returns the working directory of the sweep's start, to which paths are relative; None if it is gone."""
    return folder if Path(folder).is_dir() else None


def make_environment() -> dict[str, str]:
    """Returns the environment of a child: that of this process, in which it finds this package and no other one."""
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # Without PYTHONSAFEPATH a file random.py in the working directory would hide Python's own module.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}


def _read_report(line: bytes) -> Report:
    """Returns a line of a child's reports; {} if it is damaged."""
    try:
        report = parse_json(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def read_last_line(log: Path, begin: int = 0) -> str:
    """Returns the last line of a log that is not empty, after the byte `begin`; "" if there is none."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin, end - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        raise RunError(f"the log {log} cannot be read: {shorten_error(error)}. Repair its permissions.") from error
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
