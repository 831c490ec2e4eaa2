"""The producer turns prompts into scored groups: it drives an engine, and submits each finished turn for scoring.

The result does not depend on which sample finishes first: groups come in the order of their prompts, samples in that of
their index. There are two orders of work. In *rounds*, later turns and replacements of rejected groups wait until
everything under way is scored. So it is always the same samples that share a batch in the engine, which decides the
last bits of a log-probability. In *continuous* order later turns and replacements begin at once, so that a slow grader
delays only its own sample.

Several ranks work on the same list of prompts: number n of a call belongs to rank n modulo the number of ranks. Every
rank knows the whole list, and after each round all know which groups were accepted. So all decide alike what is needed
next, and what is trained on does not depend on the number of ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cohort.engines.base import POLL_TIMEOUT, Engine, Event
from cohort.errors import EngineError, TrainingStopped
from cohort.fates import Fate
from cohort.rollout.episode import AfterTurn, Episode, EpisodeSettings
from cohort.rollout.ledger import Ledger, Status
from cohort.rollout.refills import RejectionRate, count_needed_prompts
from cohort.scoring.base import Pool
from cohort.system.clock import add_seconds, stage
from cohort.tasks.environment import Past
from cohort.tasks.stream import TaskStream
from cohort.types import Answer, Finish, Group, Outcome, Prompt, Row, Sample
from cohort.world import ONE_PROCESS, World

log = logging.getLogger(__name__)

# The share of a step's samples that may fail to be scored before the run stops.
MAX_FAILED_SHARE = 0.05
# Seconds to wait for the engine while answers are being scored, whose outcomes must not wait long.
SHORT_WAIT = 0.02
# Seconds to sleep after a poll without news, because an engine may return before its timeout.
POLL_PAUSE = 0.001
# Seconds without news after which the log says what the producer waits for.
QUIET_SECONDS = 30.0

Order = Literal["rounds", "continuous"]
SamplePlace = tuple[int, int]
"""(number of the prompt in this call, index of the sample in its group)"""


class Scorer(Protocol):
    """The part of a scoring pool that a producer uses."""

    @property
    def scores_groups(self) -> bool:
        """Whether the answers of a group must be submitted together."""

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        """Queues an answer for scoring; `poll` returns its outcome later. `past` has earlier answers of the episode.

        `closing` is the limit that ends an episode whose newest answer was scored already; "" = the answer is new.
        """

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """Returns (id, outcome) of newly scored answers, each once. Waits up to `timeout` seconds for the first."""

    def submit_group(self, id: str, row: Row, answers: Sequence[Answer]) -> None:
        """Queues all answers of a group, to be scored together; `poll` returns the outcome of number i as "ID/i"."""

    def drop(self, id: str) -> None:
        """Gives up the answer or group with this id: `poll` will not return its outcome."""


@dataclass(kw_only=True, slots=True)
class _OpenGroup:
    """A group that is being sampled or scored."""

    prompt: Prompt
    episodes: list[Episode]  # one per sample
    missing: int  # episodes that have not ended
    num_unanswered: int  # episodes that have no answer yet, where groups are scored together


class Producer:
    """Turns prompts into scored groups. Only one `start` or `collect` can be under way at a time."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        stream: TaskStream,
        settings: EpisodeSettings,
        order: Order = "rounds",
        world: World = ONE_PROCESS,
    ) -> None:
        self.engine = engine
        self.scorer = scorer
        self.stream = stream
        self.settings = settings
        self.order = order
        self.world = world
        self.ledger = Ledger()
        # Prompts to take before the stream's next: from a loaded state, or begun ahead and not needed.
        self._reopened: list[Prompt] = []
        # A call numbers its prompts, those of all ranks, from 0. The id of a turn is "number/index", with the index of
        # the sample.
        self._prompts: list[Prompt] = []
        self._collected: list[Prompt] = []  # whose groups the last `collect` returned, on all ranks
        self._num_begun = 0
        self._groups: dict[int, _OpenGroup] = {}  # by the number of their prompt
        self._ready: list[SamplePlace] = []  # to be submitted to the engine
        self._sampling: set[str] = set()  # ids that the engine works on
        self._scoring: set[str] = set()  # ids that are being scored
        self._ended: list[SamplePlace] = []  # episodes that have ended, whose KV the engine still keeps
        self._silence = SilenceMonitor()
        self._rejection_rate = RejectionRate()

    # ---- the interface for loops and evaluations

    @stage("rollout")
    def collect(self, num: int, accept: Callable[[Group], bool]) -> list[Group]:
        """Samples and scores prompts until `num` groups are accepted. Returns these and the rejected groups.

        They are in the order of their prompts. Each of several ranks returns its own; `num` counts those of all. A
        group for which `accept(group)` is false is marked as excluded and replaced by a group of the next prompt; after
        MAX_REFILLS rounds there may be fewer than `num` accepted ones. In continuous order prompts are begun ahead;
        those not needed are put back, and the next call samples them from the beginning. Raises TrainingStopped if more
        than MAX_FAILED_SHARE of the samples cannot be scored.
        """
        self._begin_call()
        groups: dict[int, Group] = {}  # the complete ones of this rank, by the number of their prompt
        verdicts: list[bool | None] = []  # per prompt of all ranks, in order; None = its group is not complete
        while self._begin_needed_prompts(verdicts, num):
            new: dict[int, bool] = {}
            for number, group in self._run_episodes():
                groups[number] = group
                new[number] = bool(accept(group))
                # One process knows all verdicts, and need not wait for other groups to replace this one.
                if self.world.size == 1:
                    self._record_verdicts(verdicts, new)
                    new = {}
                    if self.order == "continuous" and not self._begin_needed_prompts(verdicts, num):
                        break
            with self.world.phase("rollout"):
                for part in self.world.gather([list(item) for item in new.items()]):
                    self._record_verdicts(verdicts, dict(part))
        needed = count_needed_prompts(verdicts, num)
        if isinstance(self.scorer, Pool):
            # What a service said is kept before it is used.
            self.scorer.share_outcomes(self.world)
        self._put_back_prompts(needed)
        self._collected = self._prompts[:needed]
        collected = [groups[number] for number in range(needed) if number in groups]
        for number, group in groups.items():
            if number < needed and not verdicts[number]:
                group.excluded = Fate.NOT_ACCEPTED
        stop_if_scoring_is_broken(collected, self.world)
        return collected

    def _record_verdicts(self, verdicts: list[bool | None], new: Mapping[int, bool]) -> None:
        """Enters new verdicts, by the number of the prompt, in the list of all, and in the rate of rejections."""
        for number, accepted in new.items():
            verdicts[number] = accepted
            self._rejection_rate.record(rejected=not accepted)

    def _is_own(self, number: int) -> bool:
        """Returns whether this rank samples the prompt with this number of a call of `collect`."""
        return number % self.world.size == self.world.rank

    def _begin_needed_prompts(self, verdicts: list[bool | None], num: int) -> bool:
        """Begins the prompts that `num` accepted groups are known to need. Returns False once all of them are scored.

        In continuous order it also begins the replacements that will probably be needed. Appends None to `verdicts`
        (see `count_needed_prompts`) for each new prompt. To begin means to open a group: `_run_episodes` submits it.
        """
        needed = count_needed_prompts(verdicts, num)
        missing = needed - sum(verdict is not None for verdict in verdicts[:needed])
        ahead = self._rejection_rate.estimate_replacements(missing) if self.order == "continuous" else 0
        if missing and needed + ahead > len(verdicts):
            prompts = self._take_prompts(needed + ahead - len(verdicts))
            verdicts += [None] * len(prompts)
            self._open_groups(prompts, self._is_own)
        return missing > 0

    def close_groups(self, groups: Sequence[Group]) -> None:
        """Marks the prompts of these groups, trained and excluded, as finished, so that a checkpoint leaves them out.

        Reused groups are ignored. So are the groups of other ranks: all that `collect` returned there are finished too.
        """
        # Reused groups were finished in the step that sampled them.
        self.ledger.close(group for group in groups if not group.reused)
        if self.world.size > 1:
            self.ledger.remove(self._collected)

    def start(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Group]]:
        """Samples and scores one group per prompt. Yields (index in `prompts`, group) as each group is complete.

        Work begins when the first item is asked for. All items must be taken before the producer can be used again. The
        prompts are not entered in the ledger.
        """
        self._begin_call()
        self._open_groups(prompts)
        yield from self._run_episodes()

    def roll_out(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Samples and scores one group per prompt, and returns the groups in the order of the prompts."""
        groups = dict(self.start(prompts))
        return [groups[number] for number in range(len(prompts))]

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores: "cursor", the position in the prompt stream, and "open", the open prompts.

        "open" is a list of [id, visit] in the order in which prompts were taken. That is enough to continue without
        losing or repeating a prompt.
        """
        return {"cursor": self.stream.cursor, "open": [list(entry) for entry in self.ledger.open]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned. Open prompts are sampled first, again with the same random numbers.

        Replaces the ledger, whose counts of finished prompts begin again at 0. Raises TaskError if the row of an open
        prompt is gone.
        """
        self.stream.seek(state["cursor"])
        self.ledger = Ledger()
        self._reopened = [self.stream.find_prompt(id, visit) for id, visit in state.get("open", [])]
        for prompt in self._reopened:
            self.ledger.add(prompt)

    # ---- from prompts to groups

    def _begin_call(self) -> None:
        """Prepares a new call of `start` or `collect`: prompts are numbered from 0 again.

        Raises EngineError if groups of an earlier call are not complete.
        """
        if self._groups:
            raise EngineError(
                f"The producer still has {len(self._groups)} groups of an earlier call that failed or was interrupted. "
                "Make a new producer: use cohort resume RUN, or repeat the cohort eval command."
            )
        self._num_begun = 0
        self._prompts = []
        # The time between two calls is not spent waiting for the engine or the graders.
        self._silence = SilenceMonitor()

    def _take_prompts(self, num: int) -> list[Prompt]:
        """Returns the next `num` prompts: first those that were put back or restored, then new ones of the stream.

        Enters the new ones in the ledger as open.
        """
        again, self._reopened = self._reopened[:num], self._reopened[num:]
        missing = num - len(again)
        first = self._num_begun + len(again)
        fresh: list[Prompt] = []
        if missing and self.world.size == 1:
            fresh = self.stream.next_prompts(missing)
        elif missing:
            fresh = self.stream.next_prompts(missing, lambda i: self._is_own(first + i))
        for prompt in fresh:
            self.ledger.add(prompt)
        return again + fresh

    def _put_back_prompts(self, first: int) -> None:
        """Gives up the prompts from number `first` of this call on. The next call begins with them, from scratch.

        Aborts what the engine and the scorer still do for them. Groups of theirs that are already complete are not
        used.
        """
        late = range(first, self._num_begun)
        for number in late:
            group = self._groups.pop(number, None)
            for index in range(self.settings.group_size if group is not None else 0):
                id = f"{number}/{index}"
                if id in self._sampling:
                    self.engine.abort(id)
                elif id in self._scoring and not self.scorer.scores_groups:
                    self.scorer.drop(id)
                self._ended.append((number, index))
            if self.scorer.scores_groups:
                self.scorer.drop(str(number))
            self.ledger.advance(self._prompts[number], Status.WAITING)
        ids = {f"{number}/{index}" for number in late for index in range(self.settings.group_size)}
        self._sampling -= ids
        self._scoring -= ids
        self._ready = [place for place in self._ready if place[0] < first]
        self._reopened = self._prompts[first:] + self._reopened
        self._forget_ended()

    def _open_groups(self, prompts: Sequence[Prompt], is_own: Callable[[int], bool] = lambda number: True) -> None:
        """Creates one open group per prompt, and marks its first turns as ready to be submitted to the engine.

        Prompts for whose number `is_own(number)` is false belong to other ranks, and are only numbered.
        """
        size = self.settings.group_size
        self._prompts += prompts
        for prompt in prompts:
            number = self._num_begun
            self._num_begun += 1
            if not is_own(number):
                continue
            # A prompt that was put back may have belonged to another rank.
            if not prompt.tokens:
                prompt = self.stream.find_prompt(prompt.id, prompt.visit)
            self._groups[number] = _OpenGroup(
                prompt=prompt,
                episodes=[Episode(prompt=prompt, index=i, settings=self.settings) for i in range(size)],
                missing=size,
                num_unanswered=size,
            )
            self._ready += [(number, i) for i in range(size)]

    def _run_episodes(self) -> Iterator[tuple[int, Group]]:
        """Samples and scores all open groups. Yields (number of the prompt in this call, group) as each is complete.

        The caller may open further groups while it iterates.
        """
        while self._ready or self._sampling or self._scoring:
            # Rounds wait until everything under way is scored.
            if self._ready and (self.order == "continuous" or not (self._sampling or self._scoring)):
                self._submit_ready()
            for id, outcome in self._poll_outcomes():
                number, index = map(int, id.split("/"))
                group = self._groups[number]
                episode = group.episodes[index]
                move = episode.settle(outcome)
                if move is AfterTurn.NEXT_TURN:
                    self._ready.append((number, index))
                    continue
                if move is AfterTurn.CLOSE:
                    self._scoring.add(id)
                    past = episode.make_past()
                    self.scorer.submit(id, group.prompt.row, episode.answers[-1], past, closing=str(Finish.TOTAL))
                    continue
                self._ended.append((number, index))
                group.missing -= 1
                if not group.missing:
                    # Frees the episodes: a long evaluation must not keep all of them.
                    del self._groups[number]
                    self.ledger.advance(group.prompt, Status.SCORED)
                    samples = [e.sample for e in group.episodes]
                    yield number, Group(prompt=group.prompt, samples=samples)
            if self.order == "continuous":
                self._forget_ended()
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Lets the engine drop the KV that it keeps of episodes which have ended.

        In rounds this happens only between rounds, and in the order of prompts and samples: what the engine keeps while
        it samples must not depend on how quick the graders are.
        """
        # The engine keeps nothing of episodes with one turn.
        if self.settings.later_turns is not None:
            for number, index in sorted(self._ended):
                self.engine.forget(f"{number}/{index}")
        self._ended = []

    def _submit_ready(self) -> None:
        """Submits all turns that are ready to the engine, in the order of prompts and samples."""
        self._forget_ended()
        for number, index in sorted(self._ready):
            id = f"{number}/{index}"
            group = self._groups[number]
            self.engine.submit(group.episodes[index].make_request(id))
            self._sampling.add(id)
            self.ledger.advance(group.prompt, Status.RUNNING)
        self._ready = []

    # ---- waiting

    def _poll_outcomes(self) -> list[tuple[str, Outcome]]:
        """Returns (id, outcome) of the turns that were scored since the last call; [] if there are none after a moment.

        Passes turns that the engine has finished on to the scorer. Raises EngineError if the engine lost requests.
        """
        events: list[Event] = []
        busy = not self.engine.idle
        if busy:
            events = self.engine.poll(SHORT_WAIT if self._scoring else POLL_TIMEOUT)
        elif self._sampling:
            raise EngineError(
                f"The {self.engine.name} engine is idle, but {len(self._sampling)} of its requests have not ended. "
                "This is a bug in the engine: report it. Use cohort resume RUN, or repeat the cohort eval command."
            )
        for event in events:
            if event.sample is not None:
                self._submit_for_scoring(event.id, event.sample)
        scored: list[tuple[str, Outcome]] = []
        if self._scoring:
            begin = time.perf_counter()
            scored = self.scorer.poll(0.0 if busy else POLL_TIMEOUT)
            if not busy:
                add_seconds({"scoring/wait": time.perf_counter() - begin})
            self._scoring -= {id for id, _ in scored}
        # An engine may return from `poll` before its timeout, so this keeps the loop from spinning.
        if busy and not events and not scored:
            time.sleep(POLL_PAUSE)
        failure = getattr(self.scorer, "last_failure", "")
        self._silence.record_poll(bool(events or scored), len(self._sampling), len(self._scoring), failure)
        return scored

    def _submit_for_scoring(self, id: str, turn: Sample) -> None:
        """Adds a turn that the engine has finished to its episode, and submits its answer to the scorer under `id`."""
        number, index = map(int, id.split("/"))
        group = self._groups[number]
        episode = group.episodes[index]
        answer = episode.add_turn(turn)
        self._sampling.discard(id)
        self._scoring.add(id)
        if not self.scorer.scores_groups:
            self.scorer.submit(id, group.prompt.row, answer, episode.make_past())
            return
        group.num_unanswered -= 1
        if not group.num_unanswered:
            self.scorer.submit_group(str(number), group.prompt.row, [e.answers[-1] for e in group.episodes])


class SilenceMonitor:
    """Warns in the log if nothing happens for QUIET_SECONDS, then again after twice that time, and so on."""

    def __init__(self) -> None:
        self.since = time.monotonic()  # when something last happened
        self.patience = QUIET_SECONDS  # seconds of silence before the next warning

    def record_poll(self, has_news: bool, num_requests: int, num_answers: int, failure: str = "") -> None:
        """Restarts the time of silence if the poll had news. Otherwise logs a warning if the silence lasts too long.

        `num_requests` are under way in the engine, `num_answers` are being scored. `failure` is why the last
        try of scoring failed; "" = it did not.
        """
        now = time.monotonic()
        if has_news:
            self.since = now
            self.patience = QUIET_SECONDS
        elif now - self.since >= self.patience:
            log.warning(
                "nothing has happened for %.0f s: waiting for the engine (%d requests) and the graders (%d answers)%s",
                now - self.since,
                num_requests,
                num_answers,
                f"; the last failure: {' '.join(failure.split())[:300]}" if failure else "",
            )
            self.patience *= 2


def stop_if_scoring_is_broken(groups: Sequence[Group], world: World = ONE_PROCESS) -> None:
    """Raises TrainingStopped if more than MAX_FAILED_SHARE of the samples of all ranks could not be scored.

    `groups` are those of this rank. A failure is not a reward of 0. Few failures are counted and shown; after many, no
    metric can be trusted.
    """
    own = {
        "failures": [s.failure for g in groups for s in g.samples if s.failure],
        "samples": sum(len(g.samples) for g in groups),
    }
    parts = world.gather(own)
    failures = [failure for part in parts for failure in part["failures"]]
    stop_if_many_failed(failures, sum(part["samples"] for part in parts), "resume the run")


def stop_if_many_failed(failures: Sequence[str], num_samples: int, then: str) -> None:
    """Raises TrainingStopped if more than MAX_FAILED_SHARE of `num_samples` samples could not be scored.

    `failures` has one reason per failed sample. `then` says in the message what to do after the grader is repaired.
    """
    if len(failures) > MAX_FAILED_SHARE * num_samples:
        raise TrainingStopped(
            f"{failures[0]} ({len(failures)} of {num_samples} samples could not be scored, and at most "
            f"{MAX_FAILED_SHARE:.0%} may fail; this is the first reason). Repair that, then {then}."
        )
