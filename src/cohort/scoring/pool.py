"""The scoring pool: it scores answers in worker processes that can be killed.

Wrong answers and failing graders are kept apart. A wrong answer is the grader's verdict: low parts with a reason. If
the grader raises, hangs, runs out of memory or its process dies, that is a failure. The answer is then tried once more,
on a worker that is started afterwards. A second failure is reported as `Outcome(failure=...)`, which is not a score.

A task with `work_seconds` says that the work of its grader depends on the answer. There, too much work makes the answer
wrong: if the grader uses up that CPU time once, or runs out of time or memory in both tries, the outcome is the score
of an empty answer, with the reason. Such outcomes are counted (`num_over_limit`).

An answer may belong to an episode with several answers (`Past`). Its environment lives in the worker that stepped it
last. Any other worker can replay the episode from its key and the answers so far. When a worker dies, only the episode
that was being stepped loses its first try; the other episodes in that worker lose nothing.

The answers of a group may be scored together (`submit_group`): then they are one item, which has one try and one limit.

A worker has as many answers queued as it scores in a short time, by its own clock. A worker that scores an answer that
was dropped, while others wait, is replaced; the answers that it had not begun go to another worker and count as not
tried.
"""

from __future__ import annotations

import math
import os
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cohort.errors import TaskError
from cohort.scoring.base import Pool
from cohort.scoring.homes import EpisodeHomes
from cohort.scoring.printed import PrintedLines
from cohort.scoring.process import Worker
from cohort.scoring.wire import WALL_PER_CPU_SECOND, Hello, Item, Limits, Reply, read_outcomes
from cohort.system.clock import add_count
from cohort.tasks.base import OVER_LIMIT, Task, check_packages, make_plain_answer
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.environment import AgainRules, Past
from cohort.tasks.grading import scores_groups
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Outcome, Row

MAX_QUEUE = 64  # most answers that a worker has queued, so that it need not wait for the next poll
MIN_QUEUE = 2  # the answer that it scores and the next one
# Seconds of work that a worker has queued. A longer queue would keep answers from workers that are idle.
QUEUE_SECONDS = 0.1
# Seconds that a worker may score a dropped answer while others wait. Starting another worker takes about as long.
WASTED_SECONDS = 0.25
START_SECONDS = 60.0  # time in which a worker must have loaded its task
# How soon the death of a worker is noticed whose pipe stays open because a child that it forked holds it.
TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong with the grader of an answer."""

    reason: str
    exhausted: bool = False  # whether it ran out of time or memory
    over_limit: bool = False  # whether it used up its CPU time: another try or a quieter machine would need as much
    is_death: bool = False  # whether the process died or had to be killed


def choose_queue_length(seconds: float | None) -> int:
    """Returns how many answers a worker should have queued, the one it is scoring included: 0.1 s of work, 2 to 64.

    `seconds` is the time that scoring one answer takes; None = not known yet, which gives 2.

    >>> [choose_queue_length(seconds) for seconds in (None, 0.0, 0.001, 0.01, 0.05, 5.0)]
    [2, 64, 64, 10, 2, 2]
    """
    if seconds is None:
        return MIN_QUEUE
    return MAX_QUEUE if seconds * MAX_QUEUE <= QUEUE_SECONDS else max(MIN_QUEUE, round(QUEUE_SECONDS / seconds))


class ScoringPool(Pool):
    """Worker processes that score the answers to one task, each one answer at a time.

    The results do not depend on the number of workers.
    """

    def __init__(
        self,
        task: Task | TaskRef,
        workers: int = 1,
        limits: Limits | None = None,
        again: AgainRules | None = None,
        conversation: ConversationRules | None = None,
        env: tuple[str, ...] = (),
        sandbox: str = "auto",
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; a scoring pool needs at least 1")
        if not isinstance(task, TaskRef):
            check_packages(task)
        self.task = task if isinstance(task, TaskRef) else TaskRef.from_task(task)
        self.limits = limits or Limits()
        # When an episode gets another attempt, and the rules of tools and environments; None = it is one answer.
        self.again, self.conversation = again, conversation
        self.scores_groups = scores_groups(task) and conversation is again is None
        self.num_restarts = 0  # workers that were replaced
        # Items that are neither finished nor dropped: their numbers with the caller's ids, and the other way round.
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._waiting: deque[Item] = deque()  # not handed to a worker yet
        self._retries: deque[tuple[int, Item]] = deque()  # to be tried again by a worker of at least this serial
        # Items that are in their second try, by number: whether the first one was too much work.
        self._was_too_much: dict[int, bool] = {}
        self._emptied: set[int] = set()  # items that were too much work: an empty answer is scored instead of theirs
        self._work_seconds = 0.0  # the task's `work_seconds`, once a worker has reported it
        self._typical_seconds: float | None = None  # moving average of the time per answer, by the workers' clocks
        self._done: list[tuple[str, Outcome]] = []  # outcomes that `poll` has not returned yet
        self._errors: deque[TaskError] = deque()  # errors that `poll` has not raised yet
        self._printed = PrintedLines(self.task.name)
        self._next_number = 0
        self._next_serial = 0
        self._failed_starts = 0
        import_path = [entry or os.getcwd() for entry in sys.path]
        self._hello = Hello(
            task=self.task,
            limits=self.limits,
            import_path=import_path,
            again=again,
            conversation=conversation,
            env=env,
            sandbox=sandbox,
        )
        self._homes = EpisodeHomes()
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, kill_workers, self._workers, os.getpid())
        for _ in range(workers):
            self._workers.append(self._start_worker())

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        """Queues an answer to a row for scoring. Calls of `poll` send it to a worker and return its outcome with `id`.

        See `Pool.submit`.
        """
        self._queue(id, Item(number=self._next_number, row=row, answer=answer, past=past, closing=closing))

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
        self._ids[item.number] = id
        self._numbers[id] = item.number
        self._waiting.append(item)

    @property
    def num_pending(self) -> int:
        """The number of submitted answers whose outcome `poll` still has to return.

        Dropped answers do not count, nor do those whose TaskError `poll` has raised or will raise.
        """
        return len(self._ids) + len(self._done)

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """Runs the pool, and returns the (id, outcome) pairs that have finished and were not returned before.

        Waits up to `timeout` seconds for the first one, if any answer is under way; returns [] if none finished.
        An answer whose grader failed has an outcome with `failure`. Raises TaskError if the task cannot be loaded, if
        workers do not start, or if a grader returned something that is not a score; finished outcomes then stay for
        the next call.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._advance(0.0 if self._done else min(TICK_SECONDS, max(0.0, deadline - time.monotonic())))
            if self._errors:
                raise self._errors.popleft()
            if self._done or not self._ids or time.monotonic() >= deadline:
                done, self._done = self._done, []
                return done

    def drop(self, id: str) -> None:
        """Forgets the answer with this id: `poll` will not return its outcome, and the id may be used again.

        Unknown ids are ignored. If other answers wait, later calls of `poll` kill and replace a worker that goes on
        scoring the dropped one for more than 0.25 s.
        """
        # The outcomes of a group have ids that begin with that of the group.
        self._done = [(other, outcome) for other, outcome in self._done if id not in (other, other.rpartition("/")[0])]
        number = self._numbers.pop(id, None)
        if number is not None:
            # The item stays in its queue; `_is_wanted` skips it there.
            del self._ids[number]
            for worker in self._workers:
                self._update_wasted_since(worker)

    def close(self) -> None:
        """Kills the worker processes and forgets the answers that are not finished. `submit` then raises ValueError.

        Outcomes that are finished can still be polled. A second call does nothing.
        """
        self._finalizer()
        self._ids.clear()
        self._numbers.clear()
        self._waiting.clear()
        self._retries.clear()

    def _advance(self, wait: float) -> None:
        """Runs one round: hands out items, waits, reads replies, and replaces workers that are dead or in trouble.

        It waits until a worker writes, for at most `wait` seconds, and only if an answer is under way.
        """
        for index, worker in enumerate(self._workers):
            self._hand_out_items(index, worker)
        if wait and self._ids:
            poll = select.poll()
            for worker in self._workers:
                worker.register_with(poll)
            poll.poll(wait * 1000)
        for index, worker in enumerate(self._workers):
            worker.flush()
            # Asked before reading: everything that a dead worker wrote is then in the pipe.
            dead = worker.has_died()
            for reply in worker.read_replies():
                self._handle_reply(worker, reply)
            self._update_wasted_since(worker)
            trouble = self._find_trouble(worker)
            if dead or trouble:
                self._replace_worker(index, worker, None if dead else trouble)

    def _start_worker(self) -> Worker:
        """Starts a worker process and returns it; the caller puts it into `_workers`.

        Its serial is one higher than that of the worker started before.
        """
        self._next_serial += 1
        return Worker(self._hello, self._next_serial)

    def _is_wanted(self, item: Item) -> bool:
        """Returns whether an item was not dropped. Removes the notes about a dropped one; the queues stay unchanged."""
        if item.number not in self._ids:
            self._forget(item)
            return False
        return True

    def _update_wasted_since(self, worker: Worker) -> None:
        """Sets `worker.wasted_since` to None unless the worker is scoring a dropped answer.

        If it is, the time (`time.monotonic`) at which this was first noticed is set, or kept.
        """
        if worker.ready is None or not worker.items or worker.items[0].number in self._ids:
            worker.wasted_since = None
        elif worker.wasted_since is None:
            worker.wasted_since = time.monotonic()

    def _hand_out_items(self, index: int, worker: Worker) -> None:
        """Sends items to worker number `index`, those to retry first, until its queue is full or no item waits.

        A worker that is scoring a dropped answer gets none. An item to retry may need a worker that was started after
        its first try. If no worker is that new, this one gets nothing while it has items; once it has none, it is
        replaced here, and the new worker gets the items. Dropped items at the front of the queues are removed.
        """
        # Dropped items at the front are removed first: no worker is to be started for them, and none is to be replaced
        # because they seem to wait.
        while self._retries and not self._is_wanted(self._retries[0][1]):
            self._retries.popleft()
        while self._waiting and not self._is_wanted(self._waiting[0]):
            self._waiting.popleft()
        newest = max(w.serial for w in self._workers)
        if self._retries and self._retries[0][0] > newest:
            # The worker finishes the items that it has. It gets no more and is replaced when it has none.
            if worker.items:
                return
            worker.kill()
            self.num_restarts += 1
            worker = self._workers[index] = self._start_worker()
        # A worker that scores a dropped answer may soon be replaced and gets nothing.
        share = max(MIN_QUEUE, math.ceil(len(self._waiting) / len(self._workers)))  # an episode stays with its worker
        window = min(share, choose_queue_length(self._typical_seconds)) if worker.wasted_since is None else 0
        living = {other.serial for other in self._workers}
        while len(worker.items) < window:
            if self._retries and self._retries[0][0] <= worker.serial:
                item = self._retries.popleft()[1]
            elif (chosen := self._homes.pop_item(self._waiting, worker.serial, living)) is not None:
                item = chosen
            else:
                break
            if self._is_wanted(item):
                worker.send(item)
        worker.flush()

    def _handle_reply(self, worker: Worker, reply: Reply) -> None:
        """Finishes the item that a reply is about; after the first failure of its grader, the item is retried instead.

        A result that is no valid score makes `poll` raise TaskError, and so does a reply that the task cannot be
        loaded. A reply that it is loaded sets `worker.ready`. A reply about another item than the worker's first marks
        the worker as garbled.
        """
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
            worker.garbled = "the grader's process sent a reply to another answer than the one it was given"
            return
        item = worker.items.popleft()
        if reply.printed:
            self._printed.add(reply.printed, reply.num_lines)
        # A moving average over about the last four answers. Foreign code may have made the number nonsense.
        if 0 <= reply.seconds < math.inf:
            typical = reply.seconds if self._typical_seconds is None else self._typical_seconds
            self._typical_seconds = typical + (reply.seconds - typical) / 4
        if reply.failure or reply.memory:
            raised = f"the grader raised {reply.failure or reply.memory + self.limits.advise_on_memory()}"
            self._retry_or_fail(item, Trouble(raised, exhausted=bool(reply.memory)))
        elif reply.contract:
            self._finish_refused(item, TaskError(reply.contract))
        else:
            ready = worker.ready
            # The worker checked all this already, but foreign code in it may have written the reply itself.
            try:
                outcomes = read_outcomes(self.task.name, item, ready, reply)
            except TaskError as error:
                self._finish_refused(item, error)
            else:
                self._finish_scored(item, outcomes)
                # An episode that goes on has its environment in this worker.
                self._homes.note(item, worker.serial if reply.replies else None)

    def _find_trouble(self, worker: Worker) -> Trouble | None:
        """Returns why a living worker must be replaced; None if it need not be. Changes nothing.

        Reasons are bad replies, a start or a grader that takes too long (by wall-clock time, longer for a replayed
        episode), and work on a dropped answer while others wait.
        """
        silent = time.monotonic() - worker.last_active
        if worker.garbled:
            return Trouble(worker.garbled)
        if worker.ready is None:
            late = Trouble(f"the scoring worker did not start within {START_SECONDS:g} s")
            return late if silent > START_SECONDS else None
        seconds = max(self.limits.seconds, WALL_PER_CPU_SECOND * self._work_seconds)
        if worker.items:
            # A worker that replays an episode has the time for each of its answers.
            seconds *= worker.items[0].num_answers
        if worker.items and silent > seconds:
            advice = self.limits.advise_on_time(self._work_seconds)
            return Trouble(f"the grader took longer than {seconds:g} s{advice}", exhausted=True)
        if worker.wasted_since is not None and time.monotonic() - worker.wasted_since > WASTED_SECONDS:
            # While no other item waits, the dropped answer is in the way of nothing.
            held_up = (item for item in worker.items if item.number in self._ids)
            if self._waiting or self._retries or next(held_up, None):
                return Trouble("the answer that it was scoring was dropped")
        return None

    def _replace_worker(self, index: int, worker: Worker, trouble: Trouble | None) -> None:
        """Kills worker number `index`, starts another in its place, and retries or fails the item that it was scoring.

        Its other items go back to the front of the queues, except dropped ones. `trouble` says why the worker is
        replaced; None = it is dead, and the way in which it ended is the reason. From the third failed start in a row
        on, `poll` raises TaskError.
        """
        end = worker.kill()
        how = end.how + (self.limits.advise_on_time(self._work_seconds) if end.over_limit else "")
        trouble = trouble or Trouble(f"the grader's process {how}", end.exhausted, over_limit=end.over_limit)
        self.num_restarts += 1
        first = worker.items.popleft() if worker.items and worker.ready else None
        # Only the first item was begun. The others go back to the front of the queues, in their order, and their try
        # does not count.
        while worker.items:
            item = worker.items.pop()
            if not self._is_wanted(item):
                continue
            if item.number in self._was_too_much:
                self._retries.appendleft((self._next_serial + 1, item))
            else:
                self._waiting.appendleft(item)
        if worker.ready is None:
            # One failed start may be an accident; three in a row are reported.
            self._failed_starts += 1
            if self._failed_starts >= 3:
                message = (
                    f'task "{self.task.name}": the scoring worker does not start ({trouble.reason}); '
                    "check that its file can be imported in a process of its own"
                )
                self._errors.append(TaskError(message))
        self._workers[index] = self._start_worker()
        if first is not None:
            self._retry_or_fail(first, replace(trouble, is_death=True), self._next_serial)

    def _retry_or_fail(self, item: Item, trouble: Trouble, serial: int | None = None) -> None:
        """Queues an item whose grader had trouble for a second try, or finishes it as failed after the second one.

        The second try is on a worker whose serial is at least `serial`; None = on one that is not started yet. If the
        task has `work_seconds`, an answer that used up its CPU time, or ran out of time or memory in both tries, is
        not failed but replaced by an empty one, which any worker may score, once. A dropped item is only forgotten.
        """
        if item.number not in self._ids:
            # It was dropped, so there is no need for another try.
            self._forget(item)
            return
        too_much = trouble.exhausted and self._work_seconds > 0
        proven = too_much and (trouble.over_limit or self._was_too_much.get(item.number, False))
        if proven and item.number not in self._emptied and not item.siblings:
            self._was_too_much[item.number] = True
            self._emptied.add(item.number)
            empty = make_plain_answer("")
            if item.past is not None:
                # Whether the episode continues depends on how the answer ended, so the empty one keeps that. Its
                # conversation is the same but for the answer.
                talk = item.answer.conversation[:-1]
                talk = [*talk, {"role": "assistant", "content": ""}] if talk else []
                empty = replace(empty, finish=item.answer.finish, conversation=talk)
            self._retries.append((0, replace(item, answer=empty)))
        elif item.number not in self._was_too_much:
            self._was_too_much[item.number] = too_much
            self.last_failure = trouble.reason
            add_count("scoring/retries")
            self._retries.append((self._next_serial + 1 if serial is None else serial, item))
        else:
            outcomes = [Outcome(failure=trouble.reason, crashed=trouble.is_death)] * max(1, len(item.siblings))
            self.num_failures += len(outcomes)
            self._finish(item, outcomes)

    def _finish_scored(self, item: Item, outcomes: list[Outcome]) -> None:
        """Finishes an item with the outcomes of its grader, which `poll` then returns, unless the item was dropped.

        If an empty answer was scored instead, because the real one was too much work, that is counted and replaces the
        outcome's reason. In an episode the outcome then also has the empty answer, as `stand_in`.
        """
        if item.number in self._emptied and item.number in self._ids:
            self.num_over_limit += 1
            outcome = replace(outcomes[0], reason=f"{OVER_LIMIT} of {self._work_seconds:g} s")
            if item.past is not None:
                # The environment was given the empty answer, so a replay of the episode must use it too.
                outcome = replace(outcome, stand_in=item.answer)
            outcomes = [outcome]
        self._finish(item, outcomes)

    def _finish_refused(self, item: Item, error: TaskError) -> None:
        """Finishes an item without an outcome, since its grader gave no valid score: `poll` will raise `error`.

        If the item was dropped, `poll` does not raise it.
        """
        if self._forget(item) is not None:
            self._errors.append(error)

    def _finish(self, item: Item, outcomes: list[Outcome]) -> None:
        """Finishes an item: `poll` will return its outcomes, unless the item was dropped."""
        if (id := self._forget(item)) is not None:
            self._done += name_outcomes(id, item, outcomes)

    def _forget(self, item: Item) -> str | None:
        """Removes all notes about an item and returns the id that the caller gave it; None if the item was dropped.

        The id may then be used again. Queues stay unchanged.
        """
        self._was_too_much.pop(item.number, None)
        self._emptied.discard(item.number)
        id = self._ids.pop(item.number, None)
        if id is not None:
            del self._numbers[id]
        return id


def name_outcomes(id: str, item: Item, outcomes: list[Outcome]) -> list[tuple[str, Outcome]]:
    """Returns the outcomes of an item as `poll` does: with its id or, for a group, with "ID/i" for answer number i."""
    if not item.siblings:
        return [(id, outcomes[0])]
    return [(f"{id}/{index}", outcome) for index, outcome in enumerate(outcomes)]


def kill_workers(workers: list[Worker], owner: int) -> None:
    """Kills all workers and empties the list.

    Does nothing in a process other than `owner`, the process id of their parent.
    """
    # A fork of the owner has the list too. It must not kill workers that the owner still uses.
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.kill()
    workers.clear()
