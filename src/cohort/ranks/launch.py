"""Starts the ranks of one machine as processes, and watches over them (`cohort train RECIPE --ranks N`).

Every rank runs the same command without `--ranks`. The ranks find each other by a file, so no port is needed, and speak
over loopback only. A signal to this process goes to all ranks once, so that Ctrl-C lets the step finish. If one rank
fails, the others end too. torch's elastic launcher, for several machines, does not do this: it ends ranks a fixed time
after a signal, in the middle of a step, and reports in a page of text.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cohort.errors import RankError
from cohort.ranks.environment import RENDEZVOUS
from cohort.system.process import name_signal

# Seconds that the other ranks get to end by themselves after one has failed.
GRACE_SECONDS = 15.0
_TICK_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch_ranks(args: Sequence[str], num_ranks: int, program: Sequence[str] = ("-m", "cohort")) -> int:
    """Runs `cohort ARGS` as `num_ranks` ranks. Returns 0, or the exit code of the first that failed, when all ended.

    `program` are other words for Python than those that run Cohort. Raises RankError, with the rank and how it ended,
    if a rank was killed; one that failed has said why itself.
    """
    ranks: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory(prefix="cohort-ranks-") as folder, _forward_signals(ranks, num_ranks) as resend:
        try:
            for rank in range(num_ranks):
                env = _make_environment(rank, num_ranks, Path(folder) / "rendezvous")
                # A session of its own: a Ctrl-C of the terminal comes from here, once.
                ranks.append(subprocess.Popen([sys.executable, *program, *args], env=env, start_new_session=True))
            resend()
            first_failed = _wait(ranks)
        finally:
            _kill(ranks)
    if first_failed is None:
        return 0
    code = ranks[first_failed].returncode
    if code < 0:
        raise RankError(
            f"rank {first_failed} of {num_ranks} was ended by {name_signal(-code)}, so all ranks have ended. If "
            "memory ran out, use fewer ranks or a smaller batch. Go on with cohort resume RUN --ranks N."
        )
    return code


def remove_flag(args: Sequence[str], name: str) -> list[str]:
    """Returns the words of a command line without a flag and its value.

    >>> remove_flag(["train", "x", "--ranks", "2", "--steps=3"], "ranks"), remove_flag(["--ranks=2", "y"], "ranks")
    (['train', 'x', '--steps=3'], ['y'])
    """
    kept: list[str] = []
    is_value = False
    for word in args:
        if not is_value and word != f"--{name}" and not word.startswith(f"--{name}="):
            kept.append(word)
        is_value = word == f"--{name}"
    return kept


def _make_environment(rank: int, num_ranks: int, rendezvous: Path) -> dict[str, str]:
    """Returns the environment of a rank, in the names that torch's launchers use."""
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        RENDEZVOUS: str(rendezvous),
    }
    # Other machines cannot connect to ranks that listen on loopback.
    for _, interface in socket.if_nameindex():
        if interface in ("lo", "lo0"):
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return env


def _wait(ranks: Sequence[subprocess.Popen[Any]]) -> int | None:
    """Waits until all ranks have ended. Returns the first that failed, or None. After a failure it waits GRACE_SECONDS.

    Of ranks that are found to have failed at the same time, one that was killed comes first: the others lost it.
    """
    first_failed: int | None = None
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if failed and first_failed is None:
            first_failed = min(failed, key=lambda number: ranks[number].returncode)
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(_TICK_SECONDS)
    failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
    return first_failed if first_failed is not None or not failed else failed[0]


def _kill(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    """Kills the ranks that have not ended, and waits for them."""
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()


@contextmanager
def _forward_signals(ranks: Sequence[subprocess.Popen[Any]], num_ranks: int) -> Iterator[Callable[[], None]]:
    """Context in which signals that stop a program go to all ranks, once each.

    `ranks` are those that have been started, of `num_ranks`. Yields a function that the caller must call when all have
    been: it sends signals that came before.
    """
    early: list[int] = []

    def forward(number: int, frame: Any) -> None:
        """Sends the signal to every rank that has not ended, or keeps it until all have been started."""
        if len(ranks) < num_ranks:
            early.append(number)
            return
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def resend() -> None:
        """Sends the signals that came before all ranks were started."""
        while early:
            forward(early.pop(0), None)

    # A signal that is ignored stays ignored, as SIGHUP under nohup; but not Ctrl-C, which shells ignore for jobs.
    heard = [n for n in _SIGNALS if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    former = {number: signal.signal(number, forward) for number in heard}
    try:
        yield resend
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
