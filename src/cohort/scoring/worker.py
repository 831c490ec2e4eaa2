"""A scoring worker: reads answers, runs the task's grader on each, writes what came of it.

Started by the pool as `python -m cohort.scoring.worker REQUESTS REPLIES PARENT`. The first two are inherited
file descriptors, so that nothing the grader prints or reads from its terminal can get into the protocol.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO

from cohort.errors import TaskError
from cohort.scoring.wire import MAX_FAILURE, Hello, Item, Limits, Ready, Reply
from cohort.tasks.base import MAX_REASON, Task, check_parts, grade
from cohort.tasks.environment import Environment, Episodes, SingleTurn, Step, ThinkAgain
from cohort.types import Answer

_PR_SET_PDEATHSIG = 1


class Printed(io.TextIOBase):
    """Takes what the grader prints and keeps no more than its limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        if self.size < self.limit:
            self.pieces.append(text[: self.limit - self.size])
            self.size += len(self.pieces[-1])
        return len(text)

    def clear(self) -> None:
        self.size = 0
        self.pieces.clear()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def writable(self) -> bool:
        return True


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however the parent dies."""
    if sys.platform != "linux":
        return  # elsewhere the end of the request pipe ends the worker, once it reads again
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
    # the setting is not inherited: what the grader forks must ask for itself, or would outlive a kill
    os.register_at_fork(after_in_child=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def set_limits(limits: Limits) -> None:
    """Memory, file size and core dumps; CPU time is renewed for each answer."""
    in_use = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
    _soft_limit(resource.RLIMIT_AS, in_use + (limits.memory_mb << 20))
    _soft_limit(resource.RLIMIT_FSIZE, limits.output_bytes)
    _soft_limit(resource.RLIMIT_CORE, 0)


def renew_cpu_limit(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds) + 1)


def _soft_limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def seed_random(item: Item, answer: Answer) -> None:
    """A grader that draws random numbers draws the same ones for the same row and answer, in any order."""
    module = sys.modules.get("random")
    if module is not None:
        module.seed(f"{item.row.get('id')}\0{answer.full}".encode(errors="surrogatepass"))


def score_item(task: Task, episodes: Episodes, item: Item, before: Callable[[Answer], None], printed: Printed) -> Reply:
    """The foreign call. Everything it can raise becomes a record; nothing is caught anywhere else."""
    try:
        if item.past is not None:
            return step_reply(task, item, episodes.step(item.row, item.past, item.answer, before))
        before(item.answer)
        outcome = grade(task, item.row, item.answer)
    except TaskError as error:
        return Reply(number=item.number, contract=_bounded(str(error)))
    except MemoryError as error:
        return Reply(number=item.number, memory=describe(error, printed.text))
    except BaseException as error:
        return Reply(number=item.number, failure=describe(error, printed.text))
    return Reply(number=item.number, parts=outcome.parts, reason=outcome.reason)


def step_reply(task: Task, item: Item, step: Step) -> Reply:
    """What an environment made of an answer, as it travels; raises TaskError for what breaks the contract."""
    where = f'task "{task.name}", row "{item.row.get("id", "?")}"'
    if step.done and step.parts is None:
        raise TaskError(f"{where}: the episode ended without a reward")
    if not step.done and not step.replies:
        raise TaskError(f"{where}: the episode goes on, but the environment said nothing")
    parts = None
    if step.parts is not None:
        parts = check_parts(task.name, str(item.row.get("id", "?")), task.parts, task.accuracy, step.parts)
    replies = [] if step.done else list(step.replies)
    reason = str(step.reason)[:MAX_REASON]
    return Reply(number=item.number, parts=parts, reason=reason, replies=replies, cost=float(step.cost))


def describe(error: BaseException, printed: str = "") -> str:
    """One line: what was raised, where, and the end of what the grader had printed."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    tail = f"; it had printed {printed[-200:]!r}" if printed else ""
    return _bounded(f"{type(error).__name__}: {error}{place}{tail}")


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_FAILURE else text[:MAX_FAILURE] + "..."


def serve(task: Task, hello: Hello, requests: BinaryIO, send: Callable[[bytes], None]) -> None:
    """Score until the requests end.

    Each reply leaves before the next answer begins, so that the pool knows which answer a worker died of.
    """
    me, monotonic = os.getpid(), time.monotonic  # a grader may put its own in their place
    printed = Printed(hello.limits.output_bytes)
    again = hello.again

    def environment() -> Environment:
        return SingleTurn(task) if again is None else ThinkAgain(SingleTurn(task), again)

    def begin(answer: Answer) -> None:
        """Every answer has its own time, also one of an episode that is played again."""
        renew_cpu_limit(task.work_seconds or hello.limits.seconds)
        signal.setitimer(signal.ITIMER_PROF, task.work_seconds)  # the same to the millisecond; 0 is no timer
        seed_random(item, answer)

    episodes = Episodes(environment)
    for request in requests:
        item = Item.decode(request)
        printed.clear()
        sys.stdout = sys.stderr = printed  # again, since a grader may have put its own there
        began = monotonic()
        reply = score_item(task, episodes, item, begin, printed)
        line = replace(reply, seconds=monotonic() - began).encode()
        if os.getpid() != me:  # the grader forked and let its child return: one answer, one reply
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(line)


def main(arguments: list[str]) -> None:
    requests_fd, replies_fd, parent = map(int, arguments)
    die_with_parent(parent)
    for fd in (requests_fd, replies_fd):
        os.set_inheritable(fd, False)
    requests = os.fdopen(requests_fd, "rb")
    hello = Hello.decode(requests.readline())
    sys.path += [entry for entry in hello.import_path if entry not in sys.path]

    def send(line: bytes) -> None:
        while line:
            line = line[os.write(replies_fd, line) :]

    printed = Printed(hello.limits.output_bytes)
    sys.stdout = sys.stderr = printed
    try:
        task = hello.task.load()
        for module in task.packages:  # now: no answer's time and memory are for this
            importlib.import_module(module)
    except BaseException as error:
        send(Reply(broken=describe(error, printed.text)).encode())
        return
    set_limits(hello.limits)
    send(Reply(ready=Ready(task.parts, task.accuracy, task.work_seconds)).encode())
    serve(task, hello, requests, send)


if __name__ == "__main__":
    main(sys.argv[1:])
