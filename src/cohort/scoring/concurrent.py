"""Scores many answers at once in one worker process, for graders that wait for an outside service.

A grader that is a coroutine (`async def score`) runs in the worker's event loop, any other one in a thread of its own.
What is over its time is given up: a coroutine is cancelled, a thread goes on and is counted as stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, BinaryIO

from cohort.scoring.wire import Hello, Item, Reply
from cohort.tasks.base import Task
from cohort.tasks.grading import grade, grade_async, grade_group, grade_group_async, has_async_grader

# Threads wait for a service, and 64 of them would otherwise use half of the worker's memory for their stacks.
STACK_BYTES = 1 << 20


class ConcurrentServer:
    """The event loop of a worker: it reads items, scores them at once, and replies as each is finished."""

    def __init__(
        self, task: Task, hello: Hello, send: Callable[[Reply], None], make_reply: Callable[[Item, Any], Reply]
    ) -> None:
        self.task = task
        self.seconds = hello.limits.seconds
        self.send = send
        # Returns the reply for an item, from its outcome, the outcomes of a group, or what was raised.
        self.make_reply = make_reply
        self.pid = os.getpid()
        self.num_stuck = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, requests: BinaryIO) -> None:
        """Scores the items of `requests`, one per line, until it ends and the last one is scored."""
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()

        def read() -> None:
            """Passes the lines on to the event loop, and None after the last."""
            for line in requests:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            # The loop may have ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lines.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        while (line := await lines.get()) is not None:
            # Kept in a set: the loop itself holds tasks only weakly.
            task = asyncio.create_task(self._score(Item.decode(line)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)

    async def _score(self, item: Item) -> None:
        """Scores an item within its time and sends the reply."""
        began = time.monotonic()
        # The answers of a group have the time of all of them.
        seconds = self.seconds * item.num_answers
        result: Any
        try:
            async with asyncio.timeout(seconds) as limit:
                result = await self._grade(item)
        except BaseException as error:
            result = error
            # A grader may raise a TimeoutError of its own, and cannot cancel this task.
            if isinstance(error, TimeoutError) and limit.expired():
                # What was cancelled may say why it took so long, such as a judge that was asked again and again.
                notes = "".join(f"; {note}" for note in getattr(error.__cause__, "__notes__", ()))
                result = TimeoutError(f"no score within {seconds:g} s (--scoring.seconds){notes}")
        reply = replace(self.make_reply(item, result), seconds=time.monotonic() - began, num_stuck=self.num_stuck)
        # If the grader forked and its child returned to here, the child must not send a second reply.
        if os.getpid() != self.pid:
            os._exit(0)
        self.send(reply)

    async def _grade(self, item: Item) -> Any:
        """Returns the outcome of an item, or a list of outcomes for a group."""
        task: Any = self.task
        if has_async_grader(task):
            if item.siblings:
                return await grade_group_async(task, item.row, item.siblings)
            return await grade_async(task, item.row, item.answer)
        if item.siblings:
            return await self._run_in_thread(lambda: grade_group(task, item.row, item.siblings))
        return await self._run_in_thread(lambda: grade(task, item.row, item.answer))

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        """Returns what the function returns in a thread of its own. A thread that is given up counts as stuck."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        is_given_up = False

        def settle(result: Any, error: BaseException | None) -> None:
            """Hands the result of the thread to what waits for it."""
            if is_given_up:
                self.num_stuck -= 1
            elif not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        def work() -> None:
            """Calls the function, in the thread."""
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:
                # A future takes no StopIteration.
                error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            is_given_up = True
            self.num_stuck += 1
            raise
