"""A server program that Cohort starts, which ends with this process, killed by SIGKILL too.

`python -m cohort.engines.fleet.program LIFELINE PROCESS COMMAND...` is its guard (`system/guard.py`): it forks, the
child becomes the command, and the parent ends it, and every process that it started, when this process is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cohort.system.guard import END_SECONDS, start_guard
from cohort.system.process import describe_exit

# Variables by which a server would take itself for a rank of the training, or take part of it for its own.
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "COHORT_RENDEZVOUS"),
)
QUOTED_LINES = 3  # of what a server has printed, in a message about its end


@dataclass(kw_only=True, slots=True)
class ServerProgram:
    """A running server program and its guard."""

    guard: subprocess.Popen[bytes]
    lifeline: int  # file descriptor: the guard ends the program when something comes through it
    printed: IO[bytes]  # the file with what the program prints

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> ServerProgram:
        """Starts a command, whose program is a whole path, with variables besides those of this process.

        What it prints goes to a file, which is removed at the end unless the program fails.
        """
        lifeline, own_lifeline = os.pipe()
        printed = tempfile.NamedTemporaryFile(prefix="cohort-server-", suffix=".log", delete=False)  # noqa: SIM115
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        # The guard imports this very package, with this interpreter; the command has another one, perhaps.
        own = str(Path(__file__).resolve().parents[3])
        guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "cohort.engines.fleet.program", str(lifeline), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(lifeline,),
            # Ctrl-C on a terminal reaches all processes of the session: this program decides what ends.
            start_new_session=True,
            cwd=tempfile.gettempdir(),
            env={
                **inherited,
                **environment,
                "PYTHONPATH": _join_paths(own, environment, os.environ),
                # What -P does, for the command too: older interpreters ignore it.
                "PYTHONSAFEPATH": "1",
            },
        )
        os.close(lifeline)
        return cls(guard=guard, lifeline=own_lifeline, printed=printed)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Returns whether the program is gone, or is within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self.guard.wait(seconds)
        return self.guard.poll() is not None

    def describe_end(self) -> str:
        """Returns how a program that is gone ended, with the last that it printed and the file that has all of it."""
        how = describe_exit(self.guard.wait())
        text = Path(self.printed.name).read_text(errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()][-QUOTED_LINES:]
        last = f" It had printed: {' / '.join(line[-200:] for line in lines)}." if lines else ""
        return f"{how}; all that it printed is in {self.printed.name}.{last}".rstrip(".")

    def end(self, keep_printed: bool = False) -> None:
        """Ends the program, however it is, and waits for that. Removes what it has printed unless told otherwise."""
        # A guard that is dead does not read it.
        with suppress(BrokenPipeError):
            os.write(self.lifeline, b"!")
        try:
            self.guard.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            # It was stopped by a signal. The program ends when its guard does.
            self.guard.kill()
            self.guard.wait()
        os.close(self.lifeline)
        self.printed.close()
        if not keep_printed:
            Path(self.printed.name).unlink(missing_ok=True)


def _join_paths(first: str, *environments: Mapping[str, str]) -> str:
    """Returns the PYTHONPATH that has a folder, and those of several sets of variables."""
    return os.pathsep.join([first, *(paths for part in environments if (paths := part.get("PYTHONPATH")))])


def main(arguments: list[str]) -> None:
    """Runs a command under a guard. `arguments` are a descriptor, the id of the process that uses it, and the command.

    The variable PYTHONPATH of the command is that which this process was given, without Cohort's own folder.
    """
    lifeline, program, *command = arguments
    # From here on this is a child of the process that the program started.
    os.close(start_guard(int(program), int(lifeline), worker_fds=()))
    own = str(Path(__file__).resolve().parents[3])
    paths = [path for path in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", own)]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
