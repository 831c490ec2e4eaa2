"""The guard of a scoring worker: the worker's parent, which outlives it and ends everything that the worker started.

The pool starts a process that forks: the child becomes the worker, and the parent is its guard. Foreign code runs in
the worker and may start programs, which may leave the worker's process group (setsid) or lose their parent. On Linux
they all stay descendants of the guard. The guard ends them, and itself, when the pool says so, when the pool's process
is gone for any reason, and when the worker has ended.

Outside Linux the guard ends the worker's process group and, of the processes that left it, those whose parents are
still there. A process that left the group and lost its parent lives on. On every system a guard that is killed itself,
together with the pool, ends nothing but (on Linux) its worker.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from cohort.system.kernel import adopt_orphans, die_with_parent, list_children, measure_memory, set_soft_limit

# How often the guard looks whether the pool's process lives and how much memory the worker has. It learns of most ends
# at once, by pipes and signals. This is for the pool's forks, which may hold the pipe open when the pool is gone.
WATCH_SECONDS = 0.5
END_SECONDS = 5.0  # for which the guard kills processes that keep starting others


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """What a guard watches, and how it learns of ends."""

    pool: int  # process id
    worker: int  # process id
    lifeline: int  # file descriptor: readable or at its end when all is to end
    memory: int  # file descriptor: the worker writes how many bytes it may use, or closes it
    child_signals: int  # file descriptor: readable when a child has ended
    adopts: bool  # whether orphans become children of the guard


def start_guard(pool: int, lifeline: int, worker_fds: tuple[int, ...]) -> int:
    """Forks this process and returns in the child, which becomes the worker. The parent guards it and never returns.

    `pool` is the process id of the pool, `lifeline` a file descriptor that is readable or at its end when all is to
    end, `worker_fds` are those that only the worker is to have. Returns a file descriptor: if the kernel does not limit
    the worker's memory, the worker writes there how many bytes of memory it may use, and the guard then kills it when
    it has more. The guard ends as the worker did: with its exit code, or by the same signal.
    """
    # The guard may end itself by a signal that would leave a core file.
    set_soft_limit(resource.RLIMIT_CORE, 0)
    child_signals, wakeup = os.pipe()
    os.set_blocking(child_signals, False)
    os.set_blocking(wakeup, False)
    memory, worker_memory = os.pipe()
    # A handler, because ignored signals wake nothing.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    adopts = adopt_orphans()
    own_pid = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (lifeline, child_signals, wakeup, memory):
            os.close(fd)
        # A session of its own, so that the guard can kill the worker's process group.
        os.setsid()
        die_with_parent(own_pid)
        return worker_memory
    for fd in (*worker_fds, worker_memory):
        os.close(fd)
    guard = Guard(
        pool=pool, worker=worker, lifeline=lifeline, memory=memory, child_signals=child_signals, adopts=adopts
    )
    code = _watch(guard)
    _end_worker(guard, has_ended=code is not None)
    _exit_like(code or 0)


def _watch(guard: Guard) -> int | None:
    """Waits until the worker has ended, and returns its exit code (below 0: minus the signal that ended it).

    Returns None as soon as the worker is to be ended: because the pool said so or is gone. A worker with too much
    memory is killed here, and then has ended by SIGABRT; a line on stderr says why.
    """
    limit: int | None = None
    next_look = 0.0
    poll = select.poll()
    for fd in (guard.lifeline, guard.child_signals, guard.memory):
        poll.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(WATCH_SECONDS * 1000)]
        if guard.child_signals in ready:
            os.read(guard.child_signals, 4096)
            if (code := _reap_children(guard.worker)) is not None:
                return code
        if guard.memory in ready:
            written = os.read(guard.memory, 64)
            limit = int(written) if written.isdigit() else None
            poll.unregister(guard.memory)
        # The parent of this process changes when the pool's process ends.
        if guard.lifeline in ready or os.getppid() != guard.pool:
            return None
        # By the clock and not in every round: `ps`, where it is asked, is a child too, whose end begins a round.
        if limit is None or time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + WATCH_SECONDS
        if measure_memory(guard.worker) > limit:
            # The pool keeps what its workers write there, and puts it into its message.
            os.write(2, f"it used more than {limit >> 20} MiB of memory, which is more than it may".encode())
            os.kill(guard.worker, signal.SIGKILL)
            os.waitpid(guard.worker, 0)
            return -signal.SIGABRT


def _reap_children(worker: int) -> int | None:
    """Reaps every child that has ended, orphans too. Returns the exit code of the worker; None if it has not ended."""
    found: int | None = None
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            if child == worker:
                found = os.waitstatus_to_exitcode(status)
    return found


def _end_worker(guard: Guard, has_ended: bool) -> None:
    """Kills the worker, unless it `has_ended`, and every process that it started, as far as they can be found."""
    strays: list[int] = []
    if not guard.adopts and not has_ended:
        # Nothing brings orphans here, so all descendants are listed while their parents live.
        with suppress(ProcessLookupError):
            os.kill(guard.worker, signal.SIGSTOP)
        strays = _list_descendants(guard.worker)
    # The group keeps its number while it has members. If it has none, this may in theory hit a group that was just
    # made: numbers are given out in turn, so it does not.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(guard.worker, signal.SIGKILL)
    for stray in strays:
        _kill(stray)
    # When a process dies, its children become children of the guard: they are found in the next round.
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and (killed := [pid for pid in list_children(os.getpid()) if _kill(pid)]):
        for pid in killed:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _kill(pid: int) -> bool:
    """Sends SIGKILL to a process. Returns False if it is gone or belongs to another user."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _list_descendants(pid: int) -> list[int]:
    """Returns the process ids of the children of a process, of their children, and so on."""
    found: list[int] = []
    rest = [pid]
    while rest:
        children = list_children(rest.pop())
        found += children
        rest += children
    return found


def _exit_like(code: int) -> NoReturn:
    """Ends this process as another one ended: with its exit code or, for a code below 0, by that signal."""
    if code < 0:
        # SIGKILL has no handler that could be reset.
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # Not sys.exit: this process has the worker's program on its stack.
    os._exit(code if code >= 0 else 1)
