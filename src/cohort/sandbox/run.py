"""Runs programs that a model wrote: in a sandbox, under limits, from a process that may be large and have threads.

`run_program` runs a program with an input, `call_functions` loads one as a module and calls its functions. What the
program does is a result. What the sandbox cannot do is an exception: a program that was not run has no result.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cohort.errors import SandboxError
from cohort.sandbox.exchange import STOP_SECONDS, ProgramClient
from cohort.sandbox.records import MAX_SOURCE, Outcome, ProgramLimits, ProgramResult
from cohort.system.json_text import parse_json

Mode = Literal["auto", "none"]
_SOURCE_FOLDER = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path.append(sys.argv.pop(1)); from cohort.sandbox.spawner import main; main(sys.argv[1:])"
_HIDDEN_VARIABLES = ("COHORT_DATA", "COHORT_CACHE", "HOME")  # of folders that no program is to see
_DEFAULT_LIMITS = ProgramLimits()


@dataclass(slots=True)
class _State:
    """What this process has decided about programs."""

    mode: Mode = "auto"
    forbidden: str = ""  # why no program may run; "" = programs may run
    missing: str | None = None  # what `find_missing` found
    has_looked: bool = False  # whether it has looked
    spawner: _Spawner | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


class _Spawner:
    """The process that starts programs for this one, and the socket to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.requests, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the spawner)
        hidden = [str(_SOURCE_FOLDER / "cohort"), *filter(None, map(os.environ.get, _HIDDEN_VARIABLES))]
        command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _START, str(_SOURCE_FOLDER)]
        self.process = subprocess.Popen(
            [*command, str(theirs.fileno()), *hidden],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=(theirs.fileno(),),
            env={},
            cwd="/",
        )
        theirs.close()

    def is_usable(self) -> bool:
        """Returns whether it lives and was not inherited by a fork, which must not share its socket."""
        return self.owner == os.getpid() and self.process.poll() is None

    def end(self) -> str:
        """Ends the process, and with it all programs that it started. Returns what it had printed."""
        self.requests.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self._log.seek(0)
        printed = self._log.read(4000).decode(errors="replace").strip()
        self._log.close()
        return printed.rpartition("\n")[2]


_state = _State()


def set_mode(mode: Mode) -> None:
    """Chooses how programs run in this process: auto = in a sandbox, or not at all; none = with limits alone."""
    if mode not in ("auto", "none"):
        raise SandboxError(f'the sandbox has no mode "{mode}"; use auto or none')
    _state.mode = mode


def get_mode() -> Mode:
    """Returns what `set_mode` chose."""
    return _state.mode


def forbid(reason: str) -> None:
    """Makes every later run of a program in this process raise SandboxError with the reason: it holds secrets."""
    _state.forbidden = reason


def find_missing() -> str | None:
    """Returns in one line why no program can be run in a sandbox on this machine; None if one can.

    It tries: a short program runs in a sandbox. The answer is kept.
    """
    with _state.lock:
        if not _state.has_looked:
            _state.missing = _look_for_missing()
            _state.has_looked = True
        return _state.missing


def _look_for_missing() -> str | None:
    """Returns what `find_missing` does, found out anew."""
    if not hasattr(os, "uname") or os.uname().sysname != "Linux":
        return "programs can be isolated on Linux only"
    try:
        done = _run("print(7)", b"", b"", _DEFAULT_LIMITS, isolated=True, driver=False)
    except SandboxError as error:
        return f"this machine does not allow it ({error})"
    if done.outcome != "finished" or done.stdout != "7\n":
        return f"Python does not start in it ({done.explain() or done.stdout[:100]})"
    return None


def run_program(source: str, stdin: str = "", limits: ProgramLimits = _DEFAULT_LIMITS) -> ProgramResult:
    """Runs a program with a text as its input, and returns what it printed and how it ended.

    The program has the standard library, an empty home and /tmp, and no environment. Raises SandboxError if it could
    not be run, and ValueError if its source is longer than MAX_SOURCE.
    """
    _check_allowed()
    data = stdin.encode("utf-8", "surrogatepass")
    return _run(source, data, b"", limits, isolated=_state.mode == "auto", driver=False)


def call_functions(
    source: str, calls: Sequence[dict[str, Any]], limits: ProgramLimits = _DEFAULT_LIMITS
) -> ProgramResult:
    """Loads a program as a module, calls its functions one after the other, and returns their results.

    A call is {"function": name, "arguments": [...], "keywords": {...}}, its values as `driver.encode_value` writes
    them, or {"statement": text}, which is run in the module and has the result True if it raises nothing. The limits
    are for all calls together. A program that fails to load, or ends early, has fewer results. Raises as `run_program`.
    """
    _check_allowed()
    word = secrets.token_hex(16)
    request = json.dumps({"word": word, "calls": list(calls)}).encode() + b"\n"
    done = _run(source, b"", request, limits, isolated=_state.mode == "auto", driver=True)
    results: list[Any] = [None] * len(calls)
    for line in done.results:
        said, _, rest = line.partition(b" ")
        number, _, text = rest.partition(b" ")
        if said != word.encode() or not number.isdigit() or len(number) > 9 or int(number) >= len(calls):
            continue
        with suppress(ValueError):
            result = parse_json(text)
            # The first result of a call counts.
            if isinstance(result, dict) and results[int(number)] is None:
                results[int(number)] = result
    return dataclasses.replace(done, results=results)


def _check_allowed() -> None:
    """Raises SandboxError unless programs may run in this process, in its mode."""
    if _state.forbidden:
        raise SandboxError(f"no program of a model runs in this process: {_state.forbidden}")
    if _state.mode == "auto" and (missing := find_missing()):
        raise SandboxError(
            f"programs of a model need a sandbox: {missing}. Allow user namespaces, or accept the danger with "
            "--scoring.sandbox none: then programs can read and write what you can"
        )


def _run(
    source: str, stdin: bytes, later: bytes, limits: ProgramLimits, *, isolated: bool, driver: bool
) -> ProgramResult:
    """Runs one program. `later` is written to stdin after the first result. The `results` are lines as bytes."""
    text = source.encode("utf-8", "surrogatepass")
    if len(text) > MAX_SOURCE:
        raise ValueError(f"the program has {len(text)} bytes, more than {MAX_SOURCE}")
    request = {"isolated": isolated, "driver": driver, "limits": dataclasses.asdict(limits)}
    with _state.lock:
        spawner = _get_spawner()
        began = time.monotonic()
        client = ProgramClient(stdin, later, limits.output_bytes)
        try:
            client.control.settimeout(STOP_SECONDS)
            socket.send_fds(spawner.requests, [json.dumps(request).encode()], client.list_their_fds())
            client.close_their_ends()
            # Not through the spawner: what is in its memory would be in that of all later programs.
            client.control.sendall(struct.pack("!I", len(text)) + text)
            answer = client.wait(limits.wall_seconds)
        except (OSError, ValueError) as error:
            printed = spawner.end()
            _state.spawner = None
            raise SandboxError(f"the sandbox did not start: {printed or error}") from error
        except BaseException:
            # An interrupt: what is under way ends with its spawner.
            spawner.end()
            _state.spawner = None
            raise
        finally:
            client.close()
    if "error" in answer:
        raise SandboxError(f"the sandbox did not start: {answer['error']}")
    return _make_result(answer, client, limits, time.monotonic() - began)


def _get_spawner() -> _Spawner:
    """Returns the spawner of this process, which is started if there is none."""
    if _state.spawner is None or not _state.spawner.is_usable():
        if _state.spawner is not None:
            _state.spawner.end()
        _state.spawner = _Spawner()
    return _state.spawner


def _make_result(answer: dict[str, Any], client: ProgramClient, limits: ProgramLimits, seconds: float) -> ProgramResult:
    """Returns the result of a program from the answer of its supervisor and from what it wrote."""
    stdout, stderr, results = client.outputs
    code = answer.get("status")
    cpu = float(answer.get("cpu", 0.0))
    errors = stderr.decode("utf-8", "replace")
    outcome: Outcome = "finished"
    if client.is_over:
        outcome = "output"
    elif client.is_late or code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= limits.cpu_seconds):
        outcome = "time"
    elif code is None or code < 0:
        outcome = "killed"
    elif code > 0:
        outcome = "memory" if errors.rstrip().rpartition("\n")[2].startswith("MemoryError") else "raised"
    return ProgramResult(
        outcome=outcome,
        stdout=stdout.decode("utf-8", "replace"),
        stderr=errors,
        exit_code=code,
        seconds=seconds,
        cpu_seconds=cpu,
        results=results.split(b"\n") if results else [],
    )
