"""A scoring pool for graders that ask an outside service: many answers at once, and patience with faults.

Each worker process scores up to its share of `concurrency` answers at once (`concurrent.py`). What goes wrong here is
taken for a fault of the service, never for a wrong answer: an exception, or no score within the limit. The answer is
tried again after a pause, which grows with every try. After the last try its outcome is a failure.

A worker that dies while several answers are under way says nothing about which of them it was. Each of them is then
tried alone; those whose turn it is when a worker dies again have failed a try.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import os
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cohort.errors import TaskError
from cohort.scoring.base import Pool
from cohort.scoring.pool import START_SECONDS, TICK_SECONDS, kill_workers, name_outcomes
from cohort.scoring.printed import PrintedLines
from cohort.scoring.process import Worker
from cohort.scoring.wire import Hello, Item, Limits, Reply, read_outcomes
from cohort.system.clock import add_count
from cohort.tasks.base import Task, check_packages
from cohort.tasks.environment import Past
from cohort.tasks.grading import scores_groups
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Outcome, Row

FIRST_PAUSE = 0.5  # seconds before the second try; each later pause is twice as long
LONGEST_PAUSE = 30.0
# Seconds beyond an answer's limit after which a worker that has not replied is taken for hung.
GRACE_SECONDS = 5.0
# A worker with more threads than this that cannot be stopped gets no more answers, and is replaced when it has none.
MAX_STUCK = 16
MAX_FAILED_STARTS = 3


def choose_pause(number: int, key: str) -> float:
    """Returns the seconds before try number `number` (2 or more) of an answer: 0.5, 1, 2 and so on, at most 30.

    They vary by up to a quarter, by a hash of `key`, so that answers that failed together do not return together.

    >>> [round(choose_pause(n, "a"), 2) for n in (2, 3, 4, 20)]
    [0.42, 0.84, 1.51, 32.65]
    """
    plain = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(number - 2, 30))
    digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=4).digest()
    return plain * (0.75 + 0.5 * int.from_bytes(digest) / 2**32)


@dataclass(slots=True)
class _Order:
    """One item that the pool has to score, with its history."""

    id: str
    item: Item
    tries: int = 0  # that have failed
    is_alone: bool = False  # whether nothing else may be under way in its worker
    sent: float = 0.0  # when it was handed to a worker
    failure: str = ""  # of the last try


class ServicePool(Pool):
    """Worker processes that each score many answers at once, for a task that asks an outside service."""

    def __init__(
        self,
        task: Task | TaskRef,
        workers: int = 1,
        concurrency: int = 64,
        limits: Limits | None = None,
        retries: int = 3,
        env: tuple[str, ...] = (),
        sandbox: str = "auto",
    ) -> None:
        if not isinstance(task, TaskRef):
            check_packages(task)
        self.scores_groups = scores_groups(task)
        self.task = task if isinstance(task, TaskRef) else TaskRef.from_task(task)
        self.limits = limits or Limits(seconds=60.0)
        self.retries = retries
        self.num_restarts = 0  # workers that were replaced
        self.num_retries = 0  # tries that failed and were not the last
        self._share = max(1, math.ceil(concurrency / workers))  # answers under way per worker
        self._hello = Hello(
            task=self.task,
            limits=self.limits,
            import_path=[entry or os.getcwd() for entry in sys.path],
            concurrency=self._share,
            env=env,
            sandbox=sandbox,
        )
        self._orders: dict[int, _Order] = {}  # by number: neither finished nor dropped
        self._numbers: dict[str, int] = {}  # the same by id
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()  # to be tried alone
        self._paused: list[tuple[float, int]] = []  # a heap: when each is to be tried again
        self._done: list[tuple[str, Outcome]] = []
        self._errors: deque[TaskError] = deque()
        self._printed = PrintedLines(self.task.name)
        self._next_number = 0
        self._next_serial = 0
        self._failed_starts = 0
        self._workers: list[Worker] = []
        self._stuck: dict[int, int] = {}  # threads that cannot be stopped, by the serial of their worker
        self._finalizer = weakref.finalize(self, kill_workers, self._workers, os.getpid())
        for _ in range(workers):
            self._workers.append(self._start_worker())

    # ---- the interface

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        """Queues an answer to a row for scoring. See `Pool.submit`. Episodes of several turns are not taken here."""
        assert past is None, "episodes are scored by a ScoringPool"
        self._queue(id, Item(number=self._next_number, row=row, answer=answer))

    def submit_group(self, id: str, row: Row, answers: Sequence[Answer]) -> None:
        """Queues all answers of a group, to be scored together. `poll` returns the outcome of number i as "ID/i"."""
        self._queue(id, Item(number=self._next_number, row=row, answer=answers[0], siblings=tuple(answers)))

    def _queue(self, id: str, item: Item) -> None:
        """Queues an item. Raises ValueError if the pool is closed, or if the id is in use."""
        if not self._finalizer.alive:
            raise ValueError("the scoring pool is closed; make a new one")
        if id in self._numbers:
            raise ValueError(f'an answer with the id "{id}" is being scored already; use another id')
        self._next_number += 1
        self._orders[item.number] = _Order(id, item)
        self._numbers[id] = item.number
        self._waiting.append(item.number)

    @property
    def num_pending(self) -> int:
        """The number of submitted answers and groups whose outcome `poll` still has to return."""
        return len(self._orders) + len(self._done)

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """Runs the pool, and returns the outcomes that have finished. See `Pool.poll`."""
        deadline = time.monotonic() + timeout
        while True:
            self._advance(0.0 if self._done else min(TICK_SECONDS, max(0.0, deadline - time.monotonic())))
            if self._errors:
                raise self._errors.popleft()
            if self._done or not self._orders or time.monotonic() >= deadline:
                done, self._done = self._done, []
                return done

    def drop(self, id: str) -> None:
        """Forgets the answer or group with this id. What a worker still does for it goes on and is not used."""
        self._done = [(other, outcome) for other, outcome in self._done if id not in (other, other.rpartition("/")[0])]
        number = self._numbers.pop(id, None)
        if number is not None:
            del self._orders[number]

    def close(self) -> None:
        """Kills the worker processes and forgets what is not finished. See `Pool.close`."""
        self._finalizer()
        self._orders.clear()
        self._numbers.clear()

    # ---- the work

    def _advance(self, wait: float) -> None:
        """Runs one round: hands out items, waits up to `wait` seconds, reads replies, and replaces workers."""
        now = time.monotonic()
        while self._paused and self._paused[0][0] <= now:
            number = heapq.heappop(self._paused)[1]
            if number in self._orders:
                (self._suspects if self._orders[number].is_alone else self._waiting).append(number)
        for worker in self._workers:
            self._hand_out_items(worker)
        if wait and self._orders:
            poll = select.poll()
            for worker in self._workers:
                worker.register_with(poll)
            poll.poll(wait * 1000)
        for index, worker in enumerate(self._workers):
            worker.flush()
            # Asked before reading: everything that a dead worker wrote is then in the pipe.
            is_dead = worker.has_died()
            for reply in worker.read_replies():
                self._handle_reply(worker, reply)
            reason = worker.garbled or self._find_lateness(worker)
            if is_dead or reason:
                self._replace_worker(index, worker, reason)
            elif not worker.items and self._stuck.get(worker.serial, 0) > MAX_STUCK:
                worker.kill()
                self.num_restarts += 1
                self._workers[index] = self._start_worker()

    def _start_worker(self) -> Worker:
        """Starts a worker process and returns it; the caller puts it into `_workers`."""
        self._next_serial += 1
        return Worker(self._hello, self._next_serial)

    def _hand_out_items(self, worker: Worker) -> None:
        """Sends items to a worker until it has its share. A suspect is sent alone, to a worker that has nothing."""
        if self._stuck.get(worker.serial, 0) > MAX_STUCK:
            return
        while self._suspects and self._suspects[0] not in self._orders:
            self._suspects.popleft()
        if self._suspects:
            # Workers finish what they have; then each takes one suspect.
            if not worker.items:
                self._send(worker, self._suspects.popleft())
            worker.flush()
            return
        is_reserved = any(self._orders[i.number].is_alone for i in worker.items if i.number in self._orders)
        while self._waiting and len(worker.items) < self._share and not is_reserved:
            number = self._waiting.popleft()
            if number in self._orders:
                self._send(worker, number)
        worker.flush()

    def _send(self, worker: Worker, number: int) -> None:
        """Sends an item to a worker."""
        order = self._orders[number]
        order.sent = time.monotonic()
        worker.send(order.item)

    def _handle_reply(self, worker: Worker, reply: Reply) -> None:
        """Finishes the item that a reply is about, or lets it wait for another try."""
        if reply.ready or reply.broken:
            worker.ready = reply.ready
            self._failed_starts = 0
            # Importing the task took time that is not the answers'.
            for waiting in worker.items:
                if waiting.number in self._orders:
                    self._orders[waiting.number].sent = time.monotonic()
            if reply.broken:
                self._errors.append(TaskError(f'task "{self.task.name}" cannot be loaded for scoring: {reply.broken}'))
            return
        found = [item for item in worker.items if item.number == reply.number]
        if worker.ready is None or not found:
            worker.garbled = "the grader's process sent a reply to another answer than those it was given"
            return
        [item] = found
        worker.items.remove(item)
        self._stuck[worker.serial] = reply.num_stuck
        if reply.printed:
            self._printed.add(reply.printed, reply.num_lines)
        order = self._orders.get(reply.number)
        if order is None:
            # It was dropped.
            return
        if reply.failure or reply.memory:
            memory = reply.memory and reply.memory + self.limits.advise_on_memory()
            self._retry_or_fail(order, f"scoring failed: {reply.failure or memory}", reply.lasting)
            return
        try:
            if reply.contract:
                raise TaskError(reply.contract)
            self._finish(order, read_outcomes(self.task.name, item, worker.ready, reply))
            self.last_failure = ""
        except TaskError as error:
            self._forget(order)
            self._errors.append(error)

    def _find_lateness(self, worker: Worker) -> str:
        """Returns why a living worker must be replaced; "" if it need not be.

        A worker keeps the limits of its answers itself, unless code in it blocks its event loop.
        """
        now = time.monotonic()
        if worker.ready is None:
            is_late = now - worker.last_active > START_SECONDS
            return f"the scoring worker did not start within {START_SECONDS:g} s" if is_late else ""
        late = [
            limit
            for item in worker.items
            if (order := self._orders.get(item.number)) is not None
            and now - order.sent > (limit := self.limits.seconds * item.num_answers + GRACE_SECONDS)
        ]
        if not late:
            return ""
        return (
            f"the grader's process did not answer within {late[0]:g} s: a coroutine must not block, as time.sleep and "
            "requests do; await instead, or write a plain function"
        )

    def _replace_worker(self, index: int, worker: Worker, reason: str) -> None:
        """Kills a worker and starts another. `reason` = why; "" = it is dead, and the way it ended is the reason.

        If it had one answer under way, that has failed a try. If it had several, each is tried again alone.
        """
        end = worker.kill()
        reason = reason or f"the grader's process {end.how}"
        self.num_restarts += 1
        orders = [self._orders[i.number] for i in worker.items if i.number in self._orders]
        self._workers[index] = self._start_worker()
        if worker.ready is None:
            for order in reversed(orders):
                (self._suspects if order.is_alone else self._waiting).appendleft(order.item.number)
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._errors.append(
                    TaskError(
                        f'task "{self.task.name}": the scoring worker does not start ({reason}); '
                        "check that its file can be imported in a process of its own"
                    )
                )
            return
        for order in orders:
            # Dropped answers count too: one of them may have been the cause.
            if len(worker.items) == 1:
                self._retry_or_fail(order, reason)
            else:
                order.is_alone = True
                self._suspects.append(order.item.number)

    def _retry_or_fail(self, order: _Order, reason: str, lasting: bool = False) -> None:
        """Lets an item wait for another try, or finishes it as failed after the last one.

        `lasting` = another try cannot help.
        """
        order.tries += 1
        order.failure = self.last_failure = reason
        if order.tries <= self.retries and not lasting:
            self.num_retries += 1
            add_count("scoring/retries")
            pause = choose_pause(order.tries + 1, f"{order.item.row_id}/{order.id}")
            heapq.heappush(self._paused, (time.monotonic() + pause, order.item.number))
            return
        tried = "" if order.tries == 1 else f" (tried {order.tries} times)"
        outcomes = [Outcome(failure=f"{reason}{tried}")] * max(1, len(order.item.siblings))
        self.num_failures += len(outcomes)
        self._finish(order, outcomes)

    def _finish(self, order: _Order, outcomes: list[Outcome]) -> None:
        """Finishes an item: `poll` will return its outcomes."""
        self._forget(order)
        self._done += name_outcomes(order.id, order.item, outcomes)

    def _forget(self, order: _Order) -> None:
        """Removes an item. Its number stays in the queues, which skip it."""
        del self._orders[order.item.number]
        del self._numbers[order.id]
