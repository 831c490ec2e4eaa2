"""The program of a scoring worker: it reads answers, runs the task's grader on each, and writes the outcomes.

The pool starts it as `python -m cohort.scoring.worker REQUESTS REPLIES LIFELINE POOL`. The first three are inherited
file descriptors and not the standard streams, so that what the grader prints or reads cannot get into the protocol.
POOL is the process id of the pool. The process forks: the child is the worker, the parent its guard (`guard.py`).
"""

from __future__ import annotations

import asyncio
import importlib
import io
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from cohort import sandbox
from cohort.errors import CohortError, ServiceError, TaskError, UserCodeError
from cohort.scoring.concurrent import STACK_BYTES, ConcurrentServer
from cohort.scoring.wire import MAX_FAILURE, MAX_PRINTED, Hello, Item, Limits, Ready, Reply
from cohort.system.guard import start_guard
from cohort.system.kernel import limit_memory, measure_peak_memory, set_soft_limit
from cohort.system.secrets import Secrets
from cohort.tasks.base import MAX_REASON, Task
from cohort.tasks.calls import describe_columns
from cohort.tasks.conversation import ConversationEnvironment
from cohort.tasks.environment import Environment, Episodes, SingleTurn, Step, ThinkAgain
from cohort.tasks.grading import grade, grade_group
from cohort.tasks.parts import check_parts
from cohort.types import Answer, Finish, Outcome
from cohort.user_code import find_frame


class CapturedOutput(io.TextIOBase):
    """A text stream that stands in for stdout and stderr and keeps the first `limit` characters of what is printed.

    The values of `secrets` are removed from its `text`.
    """

    # Kept beyond the limit until secrets are removed: a value that the limit cuts in two would not be found.
    margin = 4096

    def __init__(self, limit: int, secrets: Secrets) -> None:
        self.limit = limit
        self.secrets = secrets
        self.size = 0
        self.num_lines = 0  # line breaks that were printed since the last `clear`, also those that were not kept
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        """Keeps as much of the text as the limit allows. Returns the length of the whole text, as text streams do."""
        self.num_lines += text.count("\n")
        if self.size < self.limit + self.margin:
            self.pieces.append(text[: self.limit + self.margin - self.size])
            self.size += len(self.pieces[-1])
        return len(text)

    def clear(self) -> None:
        """Drops the text that was kept, so that `limit` characters can be kept again."""
        self.size = 0
        self.num_lines = 0
        self.pieces.clear()

    @property
    def text(self) -> str:
        """The text that was kept since the last `clear`, without secrets."""
        return self.secrets.remove_from("".join(self.pieces))[: self.limit]

    def writable(self) -> bool:
        """Returns True: the stream can be written to."""
        return True


def set_limits(limits: Limits, guard_fd: int) -> None:
    """Limits memory and file size of this process and turns core dumps off. CPU time is limited per answer instead.

    The limit of memory is what is in use now plus `limits.memory_mb`. Where the kernel does not enforce it, the limit
    is written to `guard_fd`, as a number of bytes of resident memory, and the guard enforces it; nothing is written
    otherwise. The limit of file size is `limits.output_bytes`.
    """
    # What the loaded task already uses is not counted.
    more = limits.memory_mb << 20
    if not limit_memory(more):
        os.write(guard_fd, str(measure_peak_memory() + more).encode())
    set_soft_limit(resource.RLIMIT_FSIZE, limits.output_bytes)
    set_soft_limit(resource.RLIMIT_CORE, 0)


def renew_cpu_limit(seconds: float) -> None:
    """Sets the CPU limit of this process to the time used so far plus `seconds`, rounded up, plus one second.

    Beyond it the kernel sends SIGXCPU.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    set_soft_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds) + 1)


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

    Whatever the grader raises becomes a reply too. `episodes` holds the environments of episodes under way and is
    updated. `before` is called with every answer before it is scored. `printed` holds what the grader prints, for the
    descriptions of errors.
    """
    # This is the only call of foreign code, and the only place that catches what it raises.
    try:
        if item.past is not None:
            if item.closing:
                step = episodes.close(item.row, item.past, item.answer, Finish(item.closing), before)
            else:
                step = episodes.step(item.row, item.past, item.answer, before)
            return make_step_reply(task, item, step)
        before(item.answer)
        if item.siblings:
            return make_reply(item, grade_group(task, item.row, item.siblings))
        return make_reply(item, grade(task, item.row, item.answer))
    except BaseException as error:
        return make_reply(item, error, printed.text)


def make_reply(item: Item, result: Outcome | Sequence[Outcome] | BaseException, printed: str = "") -> Reply:
    """Returns the reply for an item: its outcome, those of a group, or what the grader raised.

    TaskError becomes `contract`, MemoryError `memory`, all else `failure`. `printed` is what the grader had printed.
    """
    number = item.number
    if isinstance(result, TaskError):
        return Reply(number=number, contract=str(result))
    if isinstance(result, MemoryError):
        return Reply(number=number, memory=describe_error(result, printed))
    if isinstance(result, BaseException):
        more = explain_missing_key(result, item) if isinstance(result, KeyError) else ""
        lasting = isinstance(result, ServiceError) and result.lasting
        return Reply(number=number, failure=describe_error(result, printed, more), lasting=lasting)
    if isinstance(result, Outcome):
        return Reply(number=number, parts=result.parts, reason=result.reason)
    return Reply(number=number, group=[[outcome.parts, outcome.reason] for outcome in result])


def explain_missing_key(error: KeyError, item: Item) -> str:
    """Returns the end of a message about a KeyError: how a grader gets a variable, or else the row's columns.

    A variable that this process was not given, and a column that the row does not have, are frequent mistakes.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # Python's own modules may be frozen, and then have no file.
    is_variable = bool(frames) and frames[-1].filename in (os.__file__, "<frozen os>")
    if is_variable and error.args and isinstance(error.args[0], str):
        return f"; graders have no variables of your environment but those you name: --scoring.env {error.args[0]}"
    return f"; the row's {describe_columns(item.row)}"


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
        row_id = str(item.row.get("id", "?"))
        parts = check_parts(task.name, row_id, task.parts, task.accuracy, step.parts, task.optional_parts)
    return Reply(
        number=item.number,
        parts=parts,
        reason=str(step.reason),
        replies=[] if step.done else [_make_plain(message) for message in step.replies],
        cost=float(step.cost),
        earned=float(step.earned),
        calls=step.calls,
        ending=step.ending,
    )


def _make_plain(message: Any) -> Any:
    """Returns a reply with its role, content and name alone, and with half characters replaced, which have no tokens.

    Anything but a dict of texts is returned as text, which the pool refuses.
    """
    if not isinstance(message, dict):
        return str(message)[:MAX_REASON]
    kept = {key: message[key] for key in ("role", "name", "content") if key in message}
    if not all(isinstance(value, str) for value in kept.values()):
        return str(message)[:MAX_REASON]
    return {key: value.encode("utf-8", "replace").decode("utf-8") for key, value in kept.items()}


def describe_error(error: BaseException, printed: str = "", more: str = "") -> str:
    """Returns a text: what was raised, in which file and line if known, and the end of `printed`, the grader's output.

    `more` stands before that output. The error's own text may have line breaks, which stay.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # The grader's own line tells its author more than the line of a library that it calls.
    frame = find_frame(error) or (frames[-1] if frames else None)
    place = f" ({os.path.basename(frame.filename)}, line {frame.lineno})" if frame else ""
    tail = more + (f"; it had printed {printed[-200:]!r}" if printed else "")
    if isinstance(error, UserCodeError):
        # It names the exception and the place already.
        return f"{' '.join(str(error).split())}{tail}"
    return f"{type(error).__name__}: {error}{place}{tail}"


def shorten_reply(reply: Reply, secrets: Secrets) -> Reply:
    """Returns a reply without the values of secret variables, and with texts cut to what the pool keeps of them.

    The order matters: of a value that is cut in two, the rest would not be found.
    """
    return replace(
        reply,
        reason=secrets.remove_from(reply.reason)[:MAX_REASON],
        printed=secrets.remove_from(reply.printed)[:MAX_PRINTED],
        broken=_shorten(secrets.remove_from(reply.broken)),
        failure=_shorten(secrets.remove_from(reply.failure)),
        memory=_shorten(secrets.remove_from(reply.memory)),
        contract=_shorten(secrets.remove_from(reply.contract)),
        replies=secrets.remove_from_value(reply.replies),
        group=[[parts, secrets.remove_from(reason)[:MAX_REASON]] for parts, reason in reply.group],
    )


def _shorten(text: str) -> str:
    """Returns the text unchanged, or its first 1000 characters (MAX_FAILURE) and "..." if it is longer."""
    return text if len(text) <= MAX_FAILURE else text[:MAX_FAILURE] + "..."


def serve(task: Task, hello: Hello, requests: BinaryIO, send: Callable[[Reply], None]) -> None:
    """Scores the items that come through `requests`, one per line, one after the other, until `requests` ends.

    `send` writes a reply to the pool. Each reply is sent before the next item is begun, so that the pool knows at which
    item a worker died. Limits the CPU time of each answer, and replaces `sys.stdout` and `sys.stderr`.
    """
    # Kept before the grader runs: it may replace the function that tells the time.
    worker_pid, monotonic = os.getpid(), time.monotonic
    printed = CapturedOutput(hello.limits.output_bytes, Secrets(hello.env))
    again = hello.again

    def make_environment() -> Environment:
        """Returns a new environment for an episode of the task."""
        if hello.conversation is not None:
            return ConversationEnvironment(task, hello.conversation)
        return SingleTurn(task) if again is None else ThinkAgain(SingleTurn(task), again)

    def prepare_answer(answer: Answer) -> None:
        """Renews the CPU time and seeds `random` for an answer, also for an earlier one of a replayed episode."""
        # The answers of a group have the time of all of them.
        scale = max(1, len(item.siblings))
        renew_cpu_limit(scale * (task.work_seconds or hello.limits.seconds))
        # The limit above counts whole seconds; this timer ends the work to the millisecond. 0 means no timer.
        signal.setitimer(signal.ITIMER_PROF, scale * task.work_seconds)
        seed_random(item, answer)

    episodes = Episodes(make_environment)
    for request in requests:
        item = Item.decode(request)
        printed.clear()
        # Set for every item, because a grader may have replaced them.
        sys.stdout = sys.stderr = printed
        began = monotonic()
        reply = score_item(task, episodes, item, prepare_answer, printed)
        reply = replace(reply, seconds=monotonic() - began)
        if printed.pieces:
            reply = replace(reply, printed=printed.text, num_lines=printed.num_lines)
        # If the grader forked and its child returned to here, the child must not send a second reply.
        if os.getpid() != worker_pid:
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(reply)


def serve_concurrently(task: Task, hello: Hello, requests: BinaryIO, send: Callable[[Reply], None]) -> None:
    """Scores the items that come through `requests` at once, until `requests` ends. Replies come in any order.

    What graders print is sent with the next reply, since it is not known which of them printed it.
    """
    printed = CapturedOutput(hello.limits.output_bytes, Secrets(hello.env))
    sys.stdout = sys.stderr = printed
    threading.stack_size(STACK_BYTES)

    def send_with_printed(reply: Reply) -> None:
        """Sends a reply, with what was printed since the last one."""
        if printed.pieces:
            reply = replace(reply, printed=printed.text, num_lines=printed.num_lines)
            printed.clear()
        send(reply)

    asyncio.run(ConcurrentServer(task, hello, send_with_printed, make_reply).run(requests))


def confine_programs(hello: Hello) -> None:
    """Says in this worker how programs of the model are confined. A worker that holds keys never runs any."""
    if hello.env:
        sandbox.forbid(f"this worker was given {', '.join(hello.env)} (--scoring.env), which programs must not see")
    if hello.sandbox == "none":
        sandbox.set_mode("none")


def main(arguments: list[str]) -> None:
    """Runs a scoring worker: reads the hello, loads its task, replies "ready", and scores items until requests end.

    If the task cannot be loaded, it replies "broken" and returns. `arguments` are the file descriptors of requests and
    replies, that of the guard's lifeline, and the process id of the pool.
    """
    requests_fd, replies_fd, lifeline, pool = map(int, arguments)
    # From here on this is a child of the process that the pool started.
    guard_fd = start_guard(pool, lifeline, worker_fds=(requests_fd, replies_fd))
    for fd in (requests_fd, replies_fd):
        os.set_inheritable(fd, False)
    requests = os.fdopen(requests_fd, "rb")
    hello = Hello.decode(requests.readline())
    sys.path += [entry for entry in hello.import_path if entry not in sys.path]
    secrets = Secrets(hello.env)
    confine_programs(hello)

    def send(reply: Reply) -> None:
        """Writes a whole reply to the pool; one write may take only a part of it."""
        line = shorten_reply(reply, secrets).encode()
        while line:
            line = line[os.write(replies_fd, line) :]

    printed = CapturedOutput(hello.limits.output_bytes, Secrets(hello.env))
    sys.stdout = sys.stderr = printed
    try:
        task = hello.task.load()
        # Imported before the limits are set, so that imports use up no answer's time and memory.
        for module in task.packages:
            importlib.import_module(module)
    except BaseException as error:
        # Errors of Cohort end with their own advice.
        advice = "" if isinstance(error, CohortError) else "; correct its file"
        send(Reply(broken=describe_error(error, printed.text) + advice))
        return
    set_limits(hello.limits, guard_fd)
    os.close(guard_fd)
    send(Reply(ready=Ready(task.parts, task.accuracy, task.work_seconds, task.optional_parts)))
    (serve_concurrently if hello.concurrency else serve)(task, hello, requests, send)


if __name__ == "__main__":
    main(sys.argv[1:])
