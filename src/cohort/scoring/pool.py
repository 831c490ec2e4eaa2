"""Scoring in killable worker processes.

Two kinds of trouble are kept apart. What the answer causes is the grader's verdict: wrong, with a reason.
What befalls the grader (it raised, hung, ran out of memory, its process died) is a failure: the answer is
tried once more on a worker started afterwards, then reported as `Outcome(failure=...)`, which is not a score.

Where a task says that its work depends on the answer (`work_seconds`), too much work is what the answer causes: if it
uses up that CPU time once, or runs out of time or memory in both tries, the outcome is the score of an empty answer,
with the reason, and is counted.

An answer may belong to an episode with several (`Past`). Its environment lives in the worker that stepped it last; any
other plays it again from its key and the answers so far. So a death costs the episode that was being stepped its first
try, and the others in that worker nothing.

A worker is handed as many answers as it scores in a short while, by its own clock. One that is busy with answers that
were dropped, while others wait, is replaced; what it had not begun goes to another with a clean record.
"""

from __future__ import annotations

import math
import os
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType

from cohort.errors import TaskError
from cohort.scoring.process import Worker
from cohort.scoring.wire import Hello, Item, Limits, Reply, check_step
from cohort.tasks.base import OVER_LIMIT, Task, check_packages, check_parts, plain_answer
from cohort.tasks.environment import AgainRules, Past
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Outcome, Row

WINDOW = 64  # answers a worker has at hand at most, so that it need not wait for the next poll
FEWEST = 2  # the one that it scores and the next
AHEAD = 0.1  # seconds of work that it has at hand: what is begun, or lies with one worker, helps nobody else
PATIENCE = 0.25  # seconds a worker may hold up others with answers nobody wants; to start another takes about as long
START_SECONDS = 60.0
TICK = 0.05  # how soon a death without a closed pipe (a forked child holds it open) is noticed
BUSY = 6.0  # wall clock that a work limit's CPU time may take: a busy machine is not the answer's fault
MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Trouble:
    """What befell the grader of an answer."""

    reason: str
    exhausted: bool = False  # it ran out of time or memory
    over_limit: bool = False  # it used up its CPU time: no other try, and no quieter machine, would need less


def default_workers(task: Task) -> int:
    """How many workers pay: one keeps up with a quick grader; one a processor for work that depends on the answer."""
    if not task.work_seconds:
        return 1
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, processors - 1))  # one is for whoever samples and trains


def window(seconds: float | None) -> int:
    """How many answers a worker is handed where one takes so long; None = not known yet.

    >>> [window(seconds) for seconds in (None, 0.0, 0.001, 0.01, 0.05, 5.0)]
    [2, 64, 64, 10, 2, 2]
    """
    if seconds is None:
        return FEWEST
    return WINDOW if seconds * WINDOW <= AHEAD else max(FEWEST, round(AHEAD / seconds))


class ScoringPool:
    """Scores answers to one task's rows in worker processes. Same results for any number of workers.

    Driven like an engine: `submit`, then `poll`; or `score` a whole list. Not for several threads at once.
    """

    def __init__(
        self,
        task: Task | TaskRef,
        workers: int = 1,
        limits: Limits | None = None,
        again: AgainRules | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; a scoring pool needs at least 1")
        if not isinstance(task, TaskRef):
            check_packages(task)
        self.task = task if isinstance(task, TaskRef) else TaskRef.of(task)
        self.limits = limits or Limits()
        self.again = again  # how episodes go on
        self.num_failures = 0  # outcomes that were failures
        self.num_over_limit = 0  # answers that were wrong because they were too much work
        self.num_restarts = 0  # workers replaced
        self._ids: dict[int, str] = {}  # item number -> the caller's id, of what is wanted and not finished
        self._known: dict[str, int] = {}  # the same the other way round
        self._waiting: deque[Item] = deque()
        self._again: deque[tuple[int, Item]] = deque()  # to be retried, by a worker of at least this serial
        self._retried: dict[int, bool] = {}  # item number -> whether its first trouble was too much work
        self._emptied: set[int] = set()  # items found to be too much work: an empty answer stands in for theirs
        self._work_seconds = 0.0  # the task's, once a worker has said it
        self._typical: float | None = None  # seconds that an answer took lately, by the workers' own clocks
        self._done: list[tuple[str, Outcome]] = []
        self._errors: deque[TaskError] = deque()
        self._next_number = 0
        self._next_serial = 0
        self._failed_starts = 0
        import_path = [entry or os.getcwd() for entry in sys.path]
        self._hello = Hello(task=self.task, limits=self.limits, import_path=import_path, again=again)
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())
        for _ in range(workers):
            self._workers.append(self._start())

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None) -> None:
        """Queue an answer; its outcome comes from `poll` under this id. With a `past` it is an episode's next."""
        if not self._finalizer.alive:
            raise ValueError("the scoring pool is closed")
        if id in self._known:
            raise ValueError(f'"{id}" is being scored already')
        item = Item(number=self._next_number, row=row, answer=answer, past=past)
        self._next_number += 1
        self._ids[item.number] = id
        self._known[id] = item.number
        self._waiting.append(item)

    @property
    def num_pending(self) -> int:
        """Answers submitted and not yet returned by `poll`."""
        return len(self._ids) + len(self._done)

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """What has been scored. Waits up to `timeout` seconds for the first, if anything is under way.

        Raises TaskError if the task cannot be loaded or its grader returned something that is no score.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._advance(0.0 if self._done else min(TICK, max(0.0, deadline - time.monotonic())))
            if self._errors:
                raise self._errors.popleft()
            if self._done or not self._ids or time.monotonic() >= deadline:
                done, self._done = self._done, []
                return done

    def drop(self, id: str) -> None:
        """Nobody wants this outcome any more: it is not reported, and the id may be used again.

        A worker that is at it already is not in the way for long: see `_trouble`.
        """
        self._done = [(other, outcome) for other, outcome in self._done if other != id]
        number = self._known.pop(id, None)
        if number is not None:
            del self._ids[number]  # where it waits it is passed over
            for worker in self._workers:
                self._look(worker)

    def score(self, items: Iterable[tuple[Row, Answer]]) -> list[Outcome]:
        """Score all and return the outcomes in the order given. An error closes the pool."""
        if self.num_pending:
            raise ValueError(f"{self.num_pending} submitted answers are pending; poll them first")
        count = 0
        for row, answer in items:
            self.submit(str(count), row, answer)
            count += 1
        outcomes: dict[str, Outcome] = {}
        try:
            while len(outcomes) < count:
                outcomes.update(self.poll(timeout=1.0))
        except TaskError:
            self.close()
            raise
        return [outcomes[str(i)] for i in range(count)]

    def close(self) -> None:
        """End the workers. What was pending is dropped."""
        self._finalizer()
        self._ids.clear()
        self._known.clear()
        self._waiting.clear()
        self._again.clear()

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The rest is one turn of the wheel: hand out, wait, read, bury.

    def _advance(self, wait: float) -> None:
        for index, worker in enumerate(self._workers):
            self._feed(index, worker)
        if wait and self._ids:
            poll = select.poll()
            for worker in self._workers:
                worker.watch(poll)
            poll.poll(wait * 1000)
        for index, worker in enumerate(self._workers):
            worker.flush()
            dead = worker.died()  # before reading: what a dead worker wrote last is then all there
            for reply in worker.read():
                self._take(worker, reply)
            self._look(worker)
            trouble = self._trouble(worker)
            if dead or trouble:
                self._bury(index, worker, None if dead else trouble)

    def _start(self) -> Worker:
        self._next_serial += 1
        return Worker(self._hello, self._next_serial)

    def _wanted(self, item: Item) -> bool:
        """Whether it was not dropped; what was is forgotten."""
        if item.number not in self._ids:
            self._forget(item)
            return False
        return True

    def _look(self, worker: Worker) -> None:
        """Note since when a worker has been at answers that were dropped."""
        if worker.ready is None or not worker.items or worker.items[0].number in self._ids:
            worker.wasted_since = None
        elif worker.wasted_since is None:
            worker.wasted_since = time.monotonic()

    def _feed(self, index: int, worker: Worker) -> None:
        # what was dropped must neither cost a worker nor seem to wait for one
        while self._again and not self._wanted(self._again[0][1]):
            self._again.popleft()
        while self._waiting and not self._wanted(self._waiting[0]):
            self._waiting.popleft()
        newest = max(w.serial for w in self._workers)
        if self._again and self._again[0][0] > newest:
            if worker.items:
                return  # let it finish what it has, then replace it
            worker.kill()
            self.num_restarts += 1
            worker = self._workers[index] = self._start()
        most = window(self._typical) if worker.wasted_since is None else 0
        while len(worker.items) < most:
            if self._again and self._again[0][0] <= worker.serial:
                item = self._again.popleft()[1]
            elif self._waiting:
                item = self._waiting.popleft()
            else:
                break
            if self._wanted(item):
                worker.send(item)
        worker.flush()

    def _take(self, worker: Worker, reply: Reply) -> None:
        if reply.ready or reply.broken:
            worker.ready = reply.ready
            self._failed_starts = 0
            if reply.ready:
                self._work_seconds = reply.ready.work_seconds
            else:
                message = f'task "{self.task.name}" cannot be loaded for scoring: {reply.broken}'
                self._errors.append(TaskError(message))
            return
        if worker.ready is None or not worker.items or worker.items[0].number != reply.number:
            worker.garbled = "it answered what was not asked"
            return
        item = worker.items.popleft()
        if 0 <= reply.seconds < math.inf:
            typical = reply.seconds if self._typical is None else self._typical
            self._typical = typical + (reply.seconds - typical) / 4
        if reply.failure or reply.memory:
            raised = f"the grader raised {reply.failure or reply.memory}"
            self._fail(item, Trouble(raised, exhausted=bool(reply.memory)))
        elif reply.contract:
            self._refuse(item, TaskError(reply.contract))
        else:
            row_id, ready = str(item.row.get("id", "?")), worker.ready
            try:
                parts: dict[str, float] = {}
                if reply.parts is not None or not reply.replies:
                    parts = check_parts(self.task.name, row_id, ready.parts, ready.accuracy, reply.parts)
                check_step(self.task.name, row_id, reply)
            except TaskError as error:
                self._refuse(item, error)
            else:
                outcome = Outcome(parts=parts, reason=reply.reason, replies=reply.replies, cost=reply.cost)
                self._score(item, outcome)

    def _trouble(self, worker: Worker) -> Trouble | None:
        idle = time.monotonic() - worker.since
        if worker.garbled:
            return Trouble(worker.garbled)
        if worker.ready is None:
            late = Trouble(f"it did not start within {START_SECONDS:g} s")
            return late if idle > START_SECONDS else None
        seconds = max(self.limits.seconds, BUSY * self._work_seconds)
        if worker.items:  # a worker that plays an episode again has time for each of its answers
            seconds *= worker.items[0].num_answers
        if worker.items and idle > seconds:
            return Trouble(f"it took longer than {seconds:g} s", exhausted=True)
        if worker.wasted_since is not None and time.monotonic() - worker.wasted_since > PATIENCE:
            held_up = (item for item in worker.items if item.number in self._ids)
            if self._waiting or self._again or next(held_up, None):  # else it costs nobody anything
                return Trouble("nobody wants its answer any more")
        return None

    def _bury(self, index: int, worker: Worker, trouble: Trouble | None) -> None:
        """Replace a worker that is in trouble, or (None) dead."""
        end = worker.kill()
        trouble = trouble or Trouble(f"the grader's process {end.how}", end.exhausted, over_limit=end.over_limit)
        self.num_restarts += 1
        first = worker.items.popleft() if worker.items and worker.ready else None
        # only the first was begun; the others go back to the front, in their order, with a clean record
        while worker.items:
            item = worker.items.pop()
            if not self._wanted(item):
                continue
            if item.number in self._retried:
                self._again.appendleft((self._next_serial + 1, item))
            else:
                self._waiting.appendleft(item)
        if worker.ready is None:
            self._failed_starts += 1
            if self._failed_starts >= 3:
                message = f'task "{self.task.name}": the scoring worker does not start: {trouble.reason}'
                self._errors.append(TaskError(message))
        self._workers[index] = self._start()
        if first is not None:
            self._fail(first, trouble, self._next_serial)

    def _fail(self, item: Item, trouble: Trouble, serial: int | None = None) -> None:
        """A first failure is tried again, on a worker not yet started unless `serial` is fresh already.

        What is over its CPU limit, or too much work then too, gives way to an empty answer, which any worker may score.
        """
        if item.number not in self._ids:  # dropped: nobody would hear of another try
            self._forget(item)
            return
        too_much = trouble.exhausted and self._work_seconds > 0
        proven = too_much and (trouble.over_limit or self._retried.get(item.number, False))
        if proven and item.number not in self._emptied:
            self._retried[item.number] = True
            self._emptied.add(item.number)
            empty = plain_answer("")
            if item.past is not None:  # whether the episode goes on depends on how the answer ended
                empty = replace(empty, finish=item.answer.finish)
            self._again.append((0, replace(item, answer=empty)))
        elif item.number not in self._retried:
            self._retried[item.number] = too_much
            self._again.append((self._next_serial + 1 if serial is None else serial, item))
        else:
            self.num_failures += 1
            self._finish(item, Outcome(failure=trouble.reason))

    def _score(self, item: Item, outcome: Outcome) -> None:
        if item.number in self._emptied:
            self.num_over_limit += 1
            outcome = replace(outcome, reason=f"{OVER_LIMIT} of {self._work_seconds:g} s")
            if item.past is not None:
                outcome = replace(outcome, stand_in=item.answer)
        self._finish(item, outcome)

    def _refuse(self, item: Item, error: TaskError) -> None:
        if self._forget(item) is not None:
            self._errors.append(error)

    def _finish(self, item: Item, outcome: Outcome) -> None:
        if (id := self._forget(item)) is not None:
            self._done.append((id, outcome))

    def _forget(self, item: Item) -> str | None:
        """The id of an item that is finished; None = it was dropped while a worker had it."""
        self._retried.pop(item.number, None)
        self._emptied.discard(item.number)
        id = self._ids.pop(item.number, None)
        if id is not None:
            del self._known[id]
        return id


def _kill_all(workers: list[Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner has no say over its workers
        return
    for worker in workers:
        worker.kill()
    workers.clear()
