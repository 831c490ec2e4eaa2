"""Prompts into scored groups: drives an engine and hands each turn to the graders as it ends.

What comes back does not depend on who finished first: groups keep the order of their prompts, samples their index. In
*rounds* what is sampled together does not depend on it either, and with it the last bits of a log-probability: further
turns and replacements of rejected groups wait until everything under way is scored. In *continuous* order they go on
at once, so that a slow grader delays nobody else.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cohort.engines.base import WAIT, Engine, Event
from cohort.errors import EngineError, TrainingStopped
from cohort.fates import Fate
from cohort.rollout.episode import Drawing, Episode
from cohort.rollout.ledger import Ledger, Status
from cohort.system.clock import stage
from cohort.tasks.environment import Past
from cohort.tasks.stream import TaskStream
from cohort.types import Answer, Group, Outcome, Prompt, Row, Sample

log = logging.getLogger(__name__)

MAX_REFILLS = 10  # rounds of replacements before a step goes on with fewer groups
MOST_REJECTED = 0.9  # the largest share of rejected groups that prompts are begun ahead for
MEMORY = 256  # groups over which that share is remembered
DOUBT = 8  # accepted groups that are taken to have come before: a few rejections are no share yet
MAX_FAILED = 0.05  # share of a step's samples that may fail to be scored
SHORT = 0.02  # seconds to wait for the engine while the graders have work, too
PAUSE = 0.001  # seconds between two looks at an engine that has nothing to say and does not wait
QUIET = 30.0  # seconds without any news before a line says what is waited for

Order = Literal["rounds", "continuous"]
Place = tuple[int, int]
"""(number of the prompt, index of the sample)"""


class Scorer(Protocol):
    """The part of a scoring pool that a producer needs."""

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None) -> None: ...

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]: ...

    def drop(self, id: str) -> None: ...


def num_needed(verdicts: Sequence[bool | None], num: int) -> int:
    """How many prompts a step needs that wants `num` accepted groups: as many as it would take in rounds.

    `verdicts` says of the prompts in their order whether their group was accepted. One that is not known (None) counts
    as accepted, so this is the least that is needed. It is exact once the verdicts of all these prompts are known.

    >>> num_needed([], 3), num_needed([True, False, None], 3), num_needed([True, False, True, False], 3)
    (3, 4, 5)
    """
    total, missing = 0, num
    for _ in range(MAX_REFILLS):
        this_round = verdicts[total : total + missing]
        total += missing
        missing = sum(verdict is False for verdict in this_round)
        if not missing:
            break
    return total


class RejectionRate:
    """The share of groups that were rejected lately. It decides what is begun ahead, never what is trained."""

    def __init__(self) -> None:
        self._rejected: deque[bool] = deque(maxlen=MEMORY)

    def count(self, rejected: bool) -> None:
        self._rejected.append(rejected)

    def likely(self, num: int) -> int:
        """How many more prompts `num` open groups are likely to need: each rejected one needs another, and so on."""
        rate = min(MOST_REJECTED, sum(self._rejected) / (len(self._rejected) + DOUBT))
        return math.ceil(num * rate / (1.0 - rate))


@dataclass(kw_only=True, slots=True)
class _Open:
    """A group that is being made."""

    prompt: Prompt
    episodes: list[Episode]
    missing: int  # episodes that have not ended


class Producer:
    """Turns prompts into scored groups. One caller at a time: a new `start` or `collect` begins when the last ended."""

    def __init__(
        self, engine: Engine, scorer: Scorer, stream: TaskStream, drawing: Drawing, order: Order = "rounds"
    ) -> None:
        self.engine, self.scorer, self.stream = engine, scorer, stream
        self.drawing, self.order = drawing, order
        self.ledger = Ledger()
        self._reopened: list[Prompt] = []  # open when the state was saved: they come before the stream's next
        self._groups: dict[int, _Open] = {}  # by the number of their prompt
        self._ready: list[Place] = []  # to be submitted to the engine
        self._sampling: set[str] = set()  # with the engine
        self._grading: set[str] = set()  # with the graders
        self._taken: list[Prompt] = []  # of the call under way, by number
        self._count = 0  # of groups begun
        self._quiet = Quiet()
        self._rate = RejectionRate()

    # ---- what others call

    @stage("rollout")
    def collect(self, num: int, accept: Callable[[Group], bool]) -> list[Group]:
        """`num` accepted groups and, marked as excluded, those that were not accepted, in the order of their prompts.

        A rejected group is replaced by the next prompt. Both orders use the same prompts: see `num_needed`. In
        continuous order prompts that are likely to be needed are begun ahead. Those that are not needed after all come
        first in the next step.
        """
        self._begin()
        groups: dict[int, Group] = {}  # complete, by the number of their prompt
        verdicts: list[bool | None] = []  # of the prompts in their order; None = not complete
        while self._top_up(verdicts, num):
            for number, group in self._run():
                groups[number] = group
                verdicts[number] = bool(accept(group))
                self._rate.count(rejected=not verdicts[number])
                if self.order == "continuous" and not self._top_up(verdicts, num):
                    break
        needed = num_needed(verdicts, num)
        self._put_back(needed)
        found = [groups[number] for number in range(needed)]
        for group, accepted in zip(found, verdicts, strict=False):
            if not accepted:
                group.excluded = Fate.NOT_ACCEPTED
        stop_if_scoring_is_broken(found)
        return found

    def _top_up(self, verdicts: list[bool | None], num: int) -> bool:
        """Begin the prompts that are needed, and in continuous order those that may be; False when all are scored."""
        needed = num_needed(verdicts, num)
        missing = needed - sum(verdict is not None for verdict in verdicts[:needed])
        ahead = self._rate.likely(missing) if self.order == "continuous" else 0
        if missing and needed + ahead > len(verdicts):
            prompts = self._next(needed + ahead - len(verdicts))
            verdicts += [None] * len(prompts)
            self._open(prompts)
        return missing > 0

    def settle(self, groups: Sequence[Group]) -> None:
        """These groups were trained or excluded: a saved state need not bring them back."""
        self.ledger.close(group for group in groups if not group.reused)

    def start(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Group]]:
        """One group per prompt as they are complete, each with the place of its prompt. Nothing is replaced."""
        self._begin()
        self._open(prompts)
        yield from self._run()

    def roll(self, prompts: Sequence[Prompt]) -> list[Group]:
        """One group per prompt, in their order."""
        groups = dict(self.start(prompts))
        return [groups[number] for number in range(len(prompts))]

    def state(self) -> dict[str, Any]:
        """Enough to go on without losing or repeating a prompt: the stream's cursor and the prompts still open."""
        return {"cursor": self.stream.cursor, "open": [list(entry) for entry in self.ledger.open]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become a saved state. What was open is sampled again first, by the same keys, in the same order."""
        self.stream.cursor = state["cursor"]
        self.ledger = Ledger()
        self._reopened = [self.stream.find(id, visit) for id, visit in state.get("open", [])]
        for prompt in self._reopened:
            self.ledger.add(prompt)

    # ---- prompts in, groups out

    def _begin(self) -> None:
        if self._groups:
            raise EngineError("what was begun before has not ended; make a new producer.")
        self._count, self._taken = 0, []
        self._quiet = Quiet()  # the time between two calls is not the engine's or the graders'

    def _next(self, num: int) -> list[Prompt]:
        """The next prompts: those of a loaded state first, then the stream's."""
        again, self._reopened = self._reopened[:num], self._reopened[num:]
        fresh = self.stream.next(num - len(again)) if num > len(again) else []
        for prompt in fresh:
            self.ledger.add(prompt)
        return again + fresh

    def _put_back(self, first: int) -> None:
        """Give up the prompts from number `first` on: they come before all others the next time."""
        late = range(first, self._count)
        for number in late:
            group = self._groups.pop(number, None)
            for index in range(self.drawing.group_size if group is not None else 0):
                id = f"{number}/{index}"
                if id in self._sampling:
                    self.engine.abort(id)
                elif id in self._grading:
                    self.scorer.drop(id)
            self.ledger.advance(self._taken[number], Status.WAITING)
        ids = {f"{number}/{index}" for number in late for index in range(self.drawing.group_size)}
        self._sampling -= ids
        self._grading -= ids
        self._ready = [place for place in self._ready if place[0] < first]
        self._reopened = self._taken[first:] + self._reopened

    def _open(self, prompts: Sequence[Prompt]) -> None:
        """Begin a group per prompt."""
        size = self.drawing.group_size
        self._taken += prompts
        for prompt in prompts:
            number = self._count
            self._count += 1
            self._groups[number] = _Open(
                prompt=prompt,
                episodes=[Episode(prompt=prompt, index=i, drawing=self.drawing) for i in range(size)],
                missing=size,
            )
            self._ready += [(number, i) for i in range(size)]

    def _run(self) -> Iterator[tuple[int, Group]]:
        """Sample and score what is open until it is done: (number of the prompt, group) as they are."""
        while self._ready or self._sampling or self._grading:
            if self._ready and (self.order == "continuous" or not (self._sampling or self._grading)):
                self._submit()
            for id, outcome in self._news():
                number, index = map(int, id.split("/"))
                group = self._groups[number]
                episode = group.episodes[index]
                episode.add_outcome(outcome)
                if not outcome.failure and episode.go_on(outcome.replies):
                    self._ready.append((number, index))
                    continue
                group.missing -= 1
                if not group.missing:  # nobody needs its episodes any more: a long evaluation must not keep them all
                    del self._groups[number]
                    self.ledger.advance(group.prompt, Status.SCORED)
                    samples = [e.sample for e in group.episodes]
                    yield number, Group(prompt=group.prompt, samples=samples)

    def _submit(self) -> None:
        """Everything that is ready, in the order of the prompts and their samples."""
        for number, index in sorted(self._ready):
            id, group = f"{number}/{index}", self._groups[number]
            self.engine.submit(group.episodes[index].request(id))
            self._sampling.add(id)
            self.ledger.advance(group.prompt, Status.RUNNING)
        self._ready = []

    # ---- waiting

    def _news(self) -> list[tuple[str, Outcome]]:
        """The turns that were scored since; waits a moment for the engine or the graders where there is none."""
        events: list[Event] = []
        busy = not self.engine.idle
        if busy:
            events = self.engine.poll(SHORT if self._grading else WAIT)
        elif self._sampling:
            raise EngineError(
                f"the {self.engine.name} engine is idle and has not ended every request: "
                f"{len(self._sampling)} are lost."
            )
        for event in events:
            if event.sample is not None:
                self._grade(event.id, event.sample)
        scored: list[tuple[str, Outcome]] = []
        if self._grading:
            scored = self.scorer.poll(0.0 if busy else WAIT)
            self._grading -= {id for id, _ in scored}
        if busy and not events and not scored:
            time.sleep(PAUSE)  # an engine need not wait as long as it may
        self._quiet.heard(bool(events or scored), len(self._sampling), len(self._grading))
        return scored

    def _grade(self, id: str, turn: Sample) -> None:
        """Hand a finished turn to the graders."""
        number, index = map(int, id.split("/"))
        group = self._groups[number]
        episode = group.episodes[index]
        answer = episode.add_turn(turn)
        self._sampling.discard(id)
        self._grading.add(id)
        self.scorer.submit(id, group.prompt.row, answer, episode.past())


class Quiet:
    """Says in the log what is waited for when nothing has happened for QUIET seconds, and again after each doubling."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.patience = QUIET

    def heard(self, anything: bool, num_requests: int, num_answers: int) -> None:
        """Called at every look: whether there was news, and what is under way."""
        now = time.monotonic()
        if anything:
            self.since, self.patience = now, QUIET
        elif now - self.since >= self.patience:
            log.warning(
                "nothing has happened for %.0f s: waiting for the engine (%d requests) and the graders (%d answers)",
                now - self.since,
                num_requests,
                num_answers,
            )
            self.patience *= 2


def stop_if_scoring_is_broken(groups: Sequence[Group]) -> None:
    """Errors are not zeros: a few failures are counted and shown, many mean that no number can be trusted."""
    failed = [s.failure for g in groups for s in g.samples if s.failure]
    stop_if_many_failed(failed, sum(len(g.samples) for g in groups), "resume the run")


def stop_if_many_failed(failed: Sequence[str], of: int, then: str) -> None:
    """Raise where too many of so many samples failed; `failed` says why, `then` what to do after mending it."""
    if len(failed) > MAX_FAILED * of:
        raise TrainingStopped(
            f"{len(failed)} of {of} samples could not be scored, more than {MAX_FAILED:.0%}; "
            f"the first: {failed[0]}. Mend the grader, then {then}"
        )
