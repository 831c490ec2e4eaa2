"""`python -m tests.helpers.two_signals`: a program that hides what is typed, and gets two signals that end it."""

from __future__ import annotations

import os
import signal

from cohort.chat.lines import hide_typing
from cohort.system.ending import EndSignals


def main() -> None:
    """Is ended by the second signal, while the first one is held."""
    with EndSignals() as ends, hide_typing(), ends.hold():
        print("\x1b[?25l", end="", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        print("too late", flush=True)


if __name__ == "__main__":
    main()
