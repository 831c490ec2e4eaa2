"""A session with one server: the requests under way, from the moment that it is found until it is given up.

All calls are made from one event loop, in a thread of its own, so that hundreds of requests wait at the same time. The
functions that other threads call say so.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cohort.engines.base import Request
from cohort.engines.draft import Draft
from cohort.engines.fleet.base import ReplicaLost
from cohort.engines.fleet.calls import RefusedCall, ServerCalls
from cohort.engines.fleet.dialect import Dialect, Question, explain_refusal
from cohort.engines.native.random import derive_random_stream
from cohort.errors import CohortError, ConfigError, EngineError
from cohort.types import Finish, Sample

BEAT_SECONDS = 2.0  # between two signs of life that a server is asked for
MAX_MISSED_BEATS = 3  # in a row, of a server that cannot be reached
LOOK_SECONDS = 0.2  # between two looks whether a server is there, at its start
READY_SECONDS = 5.0  # for one reply to that: vLLM accepts connections before it can answer
NOTICE_SECONDS = 10.0  # after which a user is told what is waited for
REPEAT_ABORT_SECONDS = 0.5  # an order to stop may reach a server before the request does
# A request may need this many seconds per token besides the patience: fewer tokens per second count as none.
SECONDS_PER_TOKEN = 1.0
MAX_EMPTY_PARTS = 20  # in a row, of a request that a server breaks off without a token

T = TypeVar("T")
Report = Callable[[str, Sample | CohortError], None]
"""Called with the id of a request and its sample, or the error that ended it; from the session's thread."""


@dataclass(eq=False, kw_only=True, slots=True)
class Work:
    """A request under way."""

    request: Request
    task: asyncio.Task[Sample]
    server_id: str  # "" = the server has not been asked yet
    is_aborted: bool = False


class Session:
    """The requests under way at one server. `slots` of them are sent at the same time; the others wait here.

    `patience` is the limit in seconds of everything that is waited for. `decode` turns tokens into text.
    """

    def __init__(
        self,
        dialect: Dialect,
        calls: ServerCalls,
        slots: int,
        patience: float,
        decode: Callable[[list[int]], str],
        report: Report,
    ) -> None:
        self.dialect = dialect
        self.calls = calls
        self.patience = patience
        self.decode = decode
        self.report = report
        self.fault = ""  # why the server counts as lost; "" = it is well
        self.last_heard = time.monotonic()
        self.num_drawn = 0
        self._version = 0
        # Unlike any other run's: weights that another program has loaded are noticed.
        self._label_prefix = f"cohort-{secrets.token_hex(4)}-"
        self._own_labels = {"default": 0}  # versions by label; servers call the weights of their start "default"
        self._works: dict[str, Work] = {}
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(slots)
        self._may_ask = asyncio.Event()  # not set while weights are loaded
        self._may_ask.set()
        self._thread = threading.Thread(target=self._run_loop, name="cohort-session", daemon=True)
        self._thread.start()

    # ---- for other threads

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of the session and returns its result. Raises ReplicaLost if the session ends meanwhile."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except (FutureCancelled, asyncio.CancelledError):
            raise ReplicaLost("was ended") from None
        except RefusedCall as refused:
            raise EngineError(f"the server {self.calls.address} refuses a call: {refused}") from refused
        except BaseException:
            # Ctrl-C, for example: the result is of no use any more.
            future.cancel()
            raise

    def begin(self, requests: list[Request]) -> None:
        """Begins to work on requests, in this order. Each is reported once."""

        async def begin_all() -> None:
            for request in requests:
                task = asyncio.get_running_loop().create_task(self._sample(request))
                self._works[request.id] = Work(request=request, task=task, server_id="")
                task.add_done_callback(lambda task, id=request.id: self._finish(id, task))  # type: ignore[misc]

        self.run(begin_all())

    def close(self) -> None:
        """Gives up everything that is under way: servers stop working on a request when its connection closes."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(self.patience)

    def _run_loop(self) -> None:
        """Runs the event loop until `close`. Connections stay open meanwhile."""
        asyncio.set_event_loop(self._loop)
        with self.calls.keep_open():
            self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _cancel_all(self) -> None:
        """Cancels all tasks, and stops the event loop when they have ended."""
        self._works = {}
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())

    # ---- for the event loop: the server

    async def wait_until_ready(self, find_end: Callable[[], str], notify: Callable[[str, float], object]) -> None:
        """Waits until the server has loaded its model. Raises ReplicaLost if that takes too long.

        `find_end` returns why the server will never be ready; "" = it may be. `notify` is called now and then if it is
        slow, with what is the matter and the seconds that it will be waited for.
        """
        begin = time.monotonic()
        next_notice = NOTICE_SECONDS
        while True:
            words = find_end()
            if words:
                raise ReplicaLost(words)
            try:
                if await self.dialect.is_healthy(self.calls, min(READY_SECONDS, self.patience)):
                    return
                words = "is loading its model"
            except ReplicaLost as lost:
                words = str(lost)
            except RefusedCall as refused:
                raise explain_refusal(self.calls, refused, f"is it {self.dialect.title}'s server?") from refused
            waited = time.monotonic() - begin
            if waited > self.patience:
                raise ReplicaLost(f"was not ready after {self.patience:.0f} s (--engine.patience): it {words}")
            if waited > next_notice:
                next_notice *= 2
                notify(words, self.patience - waited)
            await asyncio.sleep(LOOK_SECONDS)

    def watch(self) -> None:
        """Begins to ask the server for signs of life, until the session ends."""
        self.last_heard = time.monotonic()
        self.run(self._begin_to_watch())

    async def _begin_to_watch(self) -> None:
        """Starts the task that asks for signs of life."""
        # The loop keeps only weak references to its tasks.
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Asks for a sign of life again and again. Sets `fault` when there is none."""
        missed = 0
        while not self.fault:
            await asyncio.sleep(BEAT_SECONDS)
            begin = time.monotonic()
            try:
                await self.dialect.beat(self.calls, self.patience)
            except (ReplicaLost, RefusedCall) as lost:
                missed += 1
                # One that was waited for as long as patience allows is not asked again.
                if missed == MAX_MISSED_BEATS or time.monotonic() - begin >= self.patience:
                    self.fault = str(lost)
            else:
                missed = 0
                self.last_heard = time.monotonic()

    async def load(self, load: Callable[[str], Awaitable[str]], version: int) -> int:
        """Loads weights by a call of the dialect, and returns the version of those that the server reports then.

        `load` is given the label of the weights, and returns the one that the server reports. Requests under way go on
        with the new weights. Raises EngineError if the server does not take them, or reports others.
        """
        label = f"{self._label_prefix}{version}"
        self._own_labels[label] = version
        self._may_ask.clear()
        try:
            found = await load(label)
            self._version = version
        finally:
            self._may_ask.set()
        return self._read_label(found)

    async def compute_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probability of every token after the first, at temperature 1."""
        return await self.dialect.compute_logprobs(self.calls, tokens, self._label, self.patience)

    @property
    def _label(self) -> str:
        """The label of the current weights."""
        return f"{self._label_prefix}{self._version}"

    def _read_label(self, label: str) -> int:
        """Returns the version of weights by their label. Raises EngineError for weights that others have loaded."""
        if label not in self._own_labels:
            raise EngineError(
                f'the server {self.calls.address} has weights with the label "{label}", which this run has not given '
                "it. A server can be used by one run at a time. Continue: cohort resume RUN."
            )
        return self._own_labels[label]

    # ---- for the event loop: requests

    async def _sample(self, request: Request) -> Sample:
        """Returns the sample of a request. It is asked for in parts if weights are loaded meanwhile."""
        draft = Draft(request=request)
        most = request.sampling.max_tokens
        limit = self.patience + SECONDS_PER_TOKEN * most
        num_empty = 0
        async with self._places:
            work = self._works[request.id]
            while draft.finish is None:
                await self._may_ask.wait()
                if work.is_aborted:
                    draft.finish = Finish.ABORT
                    break
                num = len(draft.tokens)
                # All of one length: SGLang compares the beginnings of ids.
                work.server_id = secrets.token_hex(16)
                question = Question(
                    id=work.server_id,
                    tokens=[*request.tokens, *draft.tokens],
                    max_tokens=most - num,
                    sampling=request.sampling,
                    seed=(derive_random_stream(request.key) + request.start + num) % 2**31,
                    label=self._label,
                )
                part = await self.dialect.continue_tokens(self.calls, question, limit)
                for start, label in part.labels:
                    _add_version(draft, num + start, self._read_label(label))
                draft.add_all_tokens(part.tokens, part.logprobs, self.decode)
                self.num_drawn += len(part.tokens)
                num_empty = 0 if part.tokens else num_empty + 1
                if num_empty == MAX_EMPTY_PARTS or (num_empty and part.finish == "length"):
                    raise EngineError(
                        f"the server {self.calls.address} ends requests after {num} of {most} tokens "
                        f'("{part.finish}"): is its context shorter than that of this run?'
                    )
        draft.versions = draft.versions or [(0, self._version)]
        return draft.to_sample(self.decode)

    def _finish(self, id: str, task: asyncio.Task[Sample]) -> None:
        """Reports how a request ended, unless it was given up or stopped."""
        work = self._works.get(id)
        if work is None or work.task is not task:
            return
        if work.is_aborted:
            # `abort` has the result.
            return
        del self._works[id]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.report(id, task.result())
        elif isinstance(error, RefusedCall):
            self.report(id, ConfigError(f'the server {self.calls.address} refuses request "{id}": {error}'))
        elif isinstance(error, CohortError):
            self.report(id, error)
        else:
            # A bug: the request must not be waited for without end.
            self.report(id, EngineError(f"a request failed: {type(error).__name__}: {error}. This is a bug in Cohort."))

    async def abort(self, id: str) -> Sample | None:
        """Stops a request and returns its sample so far. None = it has ended and was reported."""
        work = self._works.get(id)
        if work is None:
            return None
        work.is_aborted = True
        try:
            while not work.task.done():
                if work.server_id:
                    await self.dialect.abort(self.calls, work.server_id, self.patience)
                else:
                    # It waits for a place: no server knows of it.
                    work.task.cancel()
                await asyncio.wait([work.task], timeout=REPEAT_ABORT_SECONDS)
        finally:
            self._works.pop(id, None)
        if work.task.cancelled():
            return Sample(tokens=[], provenance=[], sampler_logprobs=[], finish=Finish.ABORT)
        return replace(work.task.result(), finish=Finish.ABORT)


def _add_version(draft: Draft, start: int, version: int) -> None:
    """Records in a draft that its tokens from index `start` on come from weights of `version`."""
    if not draft.versions or draft.versions[-1][1] != version:
        draft.versions.append((start, version))
