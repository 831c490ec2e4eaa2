"""The program of an engine process.

It is started as `python -m cohort.engines.fleet.worker CONNECTION LIFELINE PROGRAM`: two inherited file descriptors,
and the process id of the program that uses the engine. The process forks: the child samples, and the parent is its
guard, which ends it when the program is gone (`system/guard.py`).
"""

from __future__ import annotations

import os
import socket
import sys

from cohort.system.guard import start_guard


def main(arguments: list[str]) -> None:
    """Runs an engine process. `arguments` are the descriptors of connection and lifeline, and a process id."""
    connection_fd, lifeline, program = map(int, arguments)
    # From here on this is a child of the process that the program started.
    os.close(start_guard(program, lifeline, worker_fds=(connection_fd,)))
    os.set_inheritable(connection_fd, False)
    # torch is imported after the fork: a fork of its threads would not work.
    from cohort.engines.fleet.served import EngineServer

    EngineServer(socket.socket(fileno=connection_fd)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
