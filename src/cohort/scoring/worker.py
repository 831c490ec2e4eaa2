"""The program of a scoring worker: it reads answers, runs the task's grader on each, and writes the outcomes.

The pool starts it as `python -m cohort.scoring.worker REQUESTS REPLIES PARENT`. The first two are inherited file
descriptors and not the standard streams, so that what the grader prints or reads cannot get into the protocol. PARENT
is the process id of the pool.
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

_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


class CapturedOutput(io.TextIOBase):
    """A text stream that stands in for stdout and stderr and keeps the first `limit` characters of what is printed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        """Keeps as much of the text as the limit allows. Returns the length of the whole text, as text streams do."""
        if self.size < self.limit:
            self.pieces.append(text[: self.limit - self.size])
            self.size += len(self.pieces[-1])
        return len(text)

    def clear(self) -> None:
        """Drops the text that was kept, so that `limit` characters can be kept again."""
        self.size = 0
        self.pieces.clear()

    @property
    def text(self) -> str:
        """The text that was kept since the last `clear`."""
        return "".join(self.pieces)

    def writable(self) -> bool:
        """Returns True: the stream can be written to."""
        return True


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies for any reason. Does nothing outside Linux.

    `parent` is the parent's process id: if that process is dead already, this one ends at once, with code 0. The end of
    the parent's thread that started this process counts too. Processes that this one forks later are killed when it
    dies. Raises OSError if the kernel refuses.
    """
    if sys.platform != "linux":
        # Elsewhere the worker ends when it next reads from the pipe of requests, which is then at its end.
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call above; then no signal will come.
    if os.getppid() != parent:
        os._exit(0)
    # Forked processes do not inherit the setting. Without it, those of the grader would outlive a kill.
    os.register_at_fork(after_in_child=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def set_limits(limits: Limits) -> None:
    """Limits memory and file size of this process and turns core dumps off. CPU time is limited per answer instead.

    The limit of memory is the address space in use now (outside Linux: 0) plus `limits.memory_mb`. The limit of file
    size is `limits.output_bytes`.
    """
    # Address space that the loaded task already uses is not counted. Outside Linux it is unknown and taken as 0.
    in_use = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
    _set_soft_limit(resource.RLIMIT_AS, in_use + (limits.memory_mb << 20))
    _set_soft_limit(resource.RLIMIT_FSIZE, limits.output_bytes)
    _set_soft_limit(resource.RLIMIT_CORE, 0)


def renew_cpu_limit(seconds: float) -> None:
    """Sets the CPU limit of this process to the time used so far plus `seconds`, rounded up, plus one second.

    Beyond it the kernel sends SIGXCPU.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_soft_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds) + 1)


def _set_soft_limit(which: int, value: int) -> None:
    """Sets the soft limit `which` (resource.RLIMIT_*) to `value`, or to the hard limit if that is lower.

    The hard limit stays as it was.
    """
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def seed_random(item: Item, answer: Answer) -> None:
    """Seeds the module `random`, if it is loaded, with the id of the item's row and the full text of `answer`.

    A grader that draws from that module then draws the same for the same answer, in any order of answers. `answer` may
    be an earlier one than the item's.
    """
    module = sys.modules.get("random")
    if module is not None:
        module.seed(f"{item.row.get('id')}\0{answer.full}".encode(errors="surrogatepass"))


def score_item(
    task: Task, episodes: Episodes, item: Item, before: Callable[[Answer], None], printed: CapturedOutput
) -> Reply:
    """Runs the task's grader, or the environment of an item with a `past`, and returns the result as a reply.

    Whatever the grader raises becomes a reply too: TaskError as `contract`, MemoryError as `memory`, all else as
    `failure`. `episodes` holds the environments of episodes under way and is updated. `before` is called with every
    answer before it is scored. `printed` holds what the grader prints, for the descriptions of errors.
    """
    # This is the only call of foreign code, and the only place that catches what it raises.
    try:
        if item.past is not None:
            return make_step_reply(task, item, episodes.step(item.row, item.past, item.answer, before))
        before(item.answer)
        outcome = grade(task, item.row, item.answer)
    except TaskError as error:
        return Reply(number=item.number, contract=_shorten(str(error)))
    except MemoryError as error:
        return Reply(number=item.number, memory=describe_error(error, printed.text))
    except BaseException as error:
        return Reply(number=item.number, failure=describe_error(error, printed.text))
    return Reply(number=item.number, parts=outcome.parts, reason=outcome.reason)


def make_step_reply(task: Task, item: Item, step: Step) -> Reply:
    """Returns the reply for an item that tells the step of its environment. `replies` of a last step are left out.

    Raises TaskError for a step that is not valid: a last one without parts, another one without replies, or parts that
    the task does not declare.
    """
    where = f'task "{task.name}", row "{item.row.get("id", "?")}"'
    if step.done and step.parts is None:
        raise TaskError(
            f"{where}: the environment ended the episode without a reward; its method `step` must return "
            "parts with done=True"
        )
    if not step.done and not step.replies:
        raise TaskError(
            f"{where}: the environment returned a step with done=False and without replies; its method `step` must "
            "return replies, or done=True"
        )
    parts = None
    if step.parts is not None:
        parts = check_parts(task.name, str(item.row.get("id", "?")), task.parts, task.accuracy, step.parts)
    replies = [] if step.done else list(step.replies)
    reason = str(step.reason)[:MAX_REASON]
    return Reply(number=item.number, parts=parts, reason=reason, replies=replies, cost=float(step.cost))


def describe_error(error: BaseException, printed: str = "") -> str:
    """Returns a text: what was raised, in which file and line if known, and the end of `printed`, the grader's output.

    It is cut after 1000 characters. The error's own text may have line breaks, which stay.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    tail = f"; it had printed {printed[-200:]!r}" if printed else ""
    return _shorten(f"{type(error).__name__}: {error}{place}{tail}")


def _shorten(text: str) -> str:
    """Returns the text unchanged, or its first 1000 characters (MAX_FAILURE) and "..." if it is longer."""
    return text if len(text) <= MAX_FAILURE else text[:MAX_FAILURE] + "..."


def serve(task: Task, hello: Hello, requests: BinaryIO, send: Callable[[bytes], None]) -> None:
    """Scores the items that come through `requests`, one per line, one after the other, until `requests` ends.

    `send` writes a reply to the pool. Each reply is sent before the next item is begun, so that the pool knows at which
    item a worker died. Limits the CPU time of each answer, and replaces `sys.stdout` and `sys.stderr`.
    """
    # Kept before the grader runs: it may replace the function that tells the time.
    worker_pid, monotonic = os.getpid(), time.monotonic
    printed = CapturedOutput(hello.limits.output_bytes)
    again = hello.again

    def make_environment() -> Environment:
        """Returns a new environment for an episode of the task."""
        return SingleTurn(task) if again is None else ThinkAgain(SingleTurn(task), again)

    def prepare_answer(answer: Answer) -> None:
        """Renews the CPU time and seeds `random` for an answer, also for an earlier one of a replayed episode."""
        renew_cpu_limit(task.work_seconds or hello.limits.seconds)
        # The limit above counts whole seconds; this timer ends the work to the millisecond. 0 means no timer.
        signal.setitimer(signal.ITIMER_PROF, task.work_seconds)
        seed_random(item, answer)

    episodes = Episodes(make_environment)
    for request in requests:
        item = Item.decode(request)
        printed.clear()
        # Set for every item, because a grader may have replaced them.
        sys.stdout = sys.stderr = printed
        began = monotonic()
        reply = score_item(task, episodes, item, prepare_answer, printed)
        line = replace(reply, seconds=monotonic() - began).encode()
        # If the grader forked and its child returned to here, the child must not send a second reply.
        if os.getpid() != worker_pid:
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(line)


def main(arguments: list[str]) -> None:
    """Runs a scoring worker: reads the hello, loads its task, replies "ready", and scores items until requests end.

    If the task cannot be loaded, it replies "broken" and returns. `arguments` are the file descriptors of requests and
    replies, and the process id of the parent.
    """
    requests_fd, replies_fd, parent = map(int, arguments)
    die_with_parent(parent)
    for fd in (requests_fd, replies_fd):
        os.set_inheritable(fd, False)
    requests = os.fdopen(requests_fd, "rb")
    hello = Hello.decode(requests.readline())
    sys.path += [entry for entry in hello.import_path if entry not in sys.path]

    def send(line: bytes) -> None:
        """Writes a whole line to the pool; one write may take only a part of it."""
        while line:
            line = line[os.write(replies_fd, line) :]

    printed = CapturedOutput(hello.limits.output_bytes)
    sys.stdout = sys.stderr = printed
    try:
        task = hello.task.load()
        # Imported before the limits are set, so that imports use up no answer's time and memory.
        for module in task.packages:
            importlib.import_module(module)
    except BaseException as error:
        send(Reply(broken=describe_error(error, printed.text)).encode())
        return
    set_limits(hello.limits)
    send(Reply(ready=Ready(task.parts, task.accuracy, task.work_seconds)).encode())
    serve(task, hello, requests, send)


if __name__ == "__main__":
    main(sys.argv[1:])
