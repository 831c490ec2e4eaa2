"""The producer: both orders of work, waiting, engines that die, and the ledger that survives a kill."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from cohort.config.schema import NativeEngine
from cohort.engines.base import Request
from cohort.engines.scripted import Script, ScriptedEngine
from cohort.errors import EngineError
from cohort.fates import Fate
from cohort.loops.stats import compute_times
from cohort.rollout import producer as module
from cohort.rollout.ledger import Status
from cohort.rollout.producer import Producer
from cohort.rollout.refills import MAX_REFILLS, RejectionRate
from cohort.system import clock
from cohort.types import Group, Outcome, Prompt
from tests.helpers.engine_conformance import spell
from tests.helpers.small_runs import LocalScorer, built_job, make_producer, small_run
from tests.unit.rollout.test_episode import AGAIN, LATER_TURNS, grade, make_talking_producer, says
from tests.unit.rollout.test_rollout import Stream, engine, producer, prompt

ORDERS = ("rounds", "continuous")


class SlowScorer(LocalScorer):
    """A scorer whose answers take a random number of polls: some are much faster than others."""

    def __init__(self, grade: Any, seed: int, again: Any = None) -> None:
        super().__init__(grade, again=again)
        self.rng = random.Random(seed)
        self.pace: dict[str, int] = {}

    def submit(self, id, row, answer, past=None) -> None:
        super().submit(id, row, answer, past)
        self.pace[id] = self.rng.choice((0, 1, 7, 30))

    def poll(self, timeout: float = 0.0):
        done = [(id, outcome) for id, outcome in self._held if not self.pace[id]]
        self._held = [(id, outcome) for id, outcome in self._held if self.pace[id]]
        self.pace = {id: max(0, left - 1) for id, left in self.pace.items()}
        return done


class FindingStream(Stream):
    """A prompt stream that can return an earlier prompt again, by id and visit."""

    def find_prompt(self, id: str, visit: int) -> Prompt:
        found = prompt(int(id[1:]))
        assert found.visit == visit
        return found


def accept_every_third(group: Group) -> bool:
    return group.prompt.row["n"] % 3 == 0


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_PAUSE", 0.0)


# ---- orders


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("late", [0, 2])
def test_both_orders_use_the_same_prompts_and_accept_the_same_groups(seed: int, late: int):
    expected = producer().collect(4, accept_every_third)
    for order in ORDERS:
        made = producer(
            scorer=SlowScorer(producer().scorer.grade, seed), engine=engine(slots=3, silent_polls=late), order=order
        )
        assert made.collect(4, accept_every_third) == expected
        made.close_groups(expected)
        assert made.stream.cursor - len(made.ledger.open) == 10
        assert order == "continuous" or made.stream.cursor == 10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [2, 3, 5])
def test_step_after_step_both_orders_train_on_the_same_prompts(seed: int, share: int):
    """Prompts begun ahead and given up come first in the next step: none is lost, repeated or out of order."""
    accept = lambda group: group.prompt.row["n"] % share == 0  # noqa: E731
    rounds, continuous = (
        producer(
            scorer=SlowScorer(producer().scorer.grade, seed),
            stream=FindingStream(),
            engine=engine(slots=5),
            order=order,
        )
        for order in ORDERS
    )
    ahead = 0
    for _ in range(6):
        expected, found = rounds.collect(4, accept), continuous.collect(4, accept)
        assert found == expected
        rounds.close_groups(expected)
        continuous.close_groups(found)
        assert rounds.state()["open"] == []
        assert set(continuous.ledger.open.values()) <= {Status.WAITING}
        assert continuous.stream.cursor - len(continuous.ledger.open) == rounds.stream.cursor
        assert continuous.engine.idle and not continuous.scorer._held
        ahead += len(continuous.ledger.open)
    assert ahead > 0, "nothing was begun ahead"


def test_prompts_are_begun_ahead_by_the_share_that_was_rejected():
    made = producer(order="continuous")
    begun: list[int] = []
    whole = made._open_groups
    made._open_groups = lambda prompts, is_own: (begun.append(len(prompts)), whole(prompts, is_own))[1]
    for step in range(4):
        begun.clear()
        made.close_groups(made.collect(4, lambda group: group.prompt.row["n"] % 2 == 0))
        assert begun[0] == 4 if step == 0 else begun[0] > 4
    rate = RejectionRate()
    assert rate.estimate_replacements(8) == 0
    for n in range(16):
        rate.record(rejected=n % 2 == 0)
    assert rate.estimate_replacements(9) == 5  # 8 rejected of 16 + 8: a accept_every_third, so 9 * (1/3 + 1/9 + ...)


@pytest.mark.parametrize("order", ORDERS)
def test_both_orders_stop_after_the_same_number_of_refills(order: str):
    made = producer(scorer=SlowScorer(producer().scorer.grade, 0), order=order)
    groups = made.collect(3, lambda group: False)
    made.close_groups(groups)
    assert made.stream.cursor - len(made.ledger.open) == 3 * MAX_REFILLS == len(groups)
    assert {g.excluded for g in groups} == {Fate.NOT_ACCEPTED}


@pytest.mark.parametrize("seed", range(5))
def test_further_turns_are_the_same_in_both_orders(seed: int):
    prompts = [prompt(n) for n in range(6)]
    expected = make_talking_producer(group_size=3).roll_out(prompts)
    assert any(s.num_turns > 1 for g in expected for s in g.samples)
    for order in ORDERS:
        made = producer(
            scorer=SlowScorer(grade, seed, again=AGAIN),
            answers=says,
            later_turns=LATER_TURNS,
            group_size=3,
            order=order,
        )
        assert made.roll_out(prompts) == expected


def test_in_continuous_order_a_slow_grader_delays_only_its_own_sample():
    """Prompt 0 is scored last of all; rejected groups are replaced and conversations go on meanwhile."""
    asked: list[str] = []

    class Stubborn(LocalScorer):
        def poll(self, timeout: float = 0.0):
            first, self._held = self._held, []
            slow = [held for held in first if held[0].startswith("0/")]
            if len(slow) == len(first) and len(asked) >= 8:
                return slow
            self._held = slow
            return [held for held in first if held not in slow]

    def record_request(request: Request) -> Script:
        asked.append(request.id)
        return says(request)

    made = producer(
        scorer=Stubborn(grade, again=AGAIN),
        answers=record_request,
        later_turns=LATER_TURNS,
        group_size=1,
        order="continuous",
    )
    groups = made.collect(3, lambda group: group.prompt.row["n"] in (0, 3, 5))
    assert [g.prompt.row["n"] for g in groups if not g.excluded] == [0, 3, 5]
    assert asked[-1] == "0/0" and asked.index("5/0") < len(asked) - 1


# ---- waiting


def test_an_engine_that_is_late_is_waited_for(caplog: pytest.LogCaptureFixture):
    expected = producer().roll_out([prompt(0), prompt(1)])
    assert producer(engine=engine(silent_polls=20), late=3).roll_out([prompt(0), prompt(1)]) == expected
    assert not caplog.records


@pytest.mark.parametrize("order", ORDERS)
def test_an_engine_that_dies_raises_an_error_of_one_line(order: str):
    with pytest.raises(EngineError, match="died with") as error:
        producer(engine=engine(polls_before_death=2, window=1), order=order).collect(3, accept_every_third)
    assert "\n" not in str(error.value)


def test_long_silence_says_what_is_waited_for_and_again_after_each_doubling(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(module.time, "monotonic", tick)
    producer(engine=engine(silent_polls=300), group_size=1).roll_out([prompt(0)])
    waits = [int(r.getMessage().split("for ")[1].split(" s")[0]) for r in caplog.records]
    assert waits[:4] == [30, 60, 120, 240]
    assert "waiting for the engine (1 requests) and the graders (0 answers)" in caplog.records[0].getMessage()


# ---- the ledger


def test_a_prompt_is_waiting_running_scored_and_closed():
    made = producer(stream=FindingStream(), order="rounds")
    seen: list[dict[Any, Status]] = []

    def accept(group: Group) -> bool:
        seen.append(dict(made.ledger.open))
        return accept_every_third(group)

    groups = made.collect(3, accept)
    assert Status.RUNNING in seen[0].values() and Status.SCORED in seen[0].values()
    assert set(made.ledger.open.values()) == {Status.SCORED}
    groups[0].excluded = Fate.CONSTANT_REWARD
    made.close_groups(groups)
    assert made.state() == {"cursor": made.stream.cursor, "open": []}
    assert made.ledger.closed == {Fate.TRAINED: 2, Fate.NOT_ACCEPTED: len(groups) - 3, Fate.CONSTANT_REWARD: 1}


def test_prompts_of_an_evaluation_are_not_in_the_ledger():
    made = producer()
    for _, _ in made.start([prompt(0), prompt(1)]):
        assert made.state()["open"] == []


class Killed(Exception):
    pass


class MortalEngine(ScriptedEngine):
    """An engine whose process is killed: after `calls` calls every call raises Killed."""

    def __init__(self, calls: int) -> None:
        super().__init__(says_n, spell, slots=3, window=2)
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise Killed

    def submit(self, request: Request) -> None:
        self._count()
        super().submit(request)

    def poll(self, timeout: float = 0.0):
        self._count()
        return super().poll(timeout)


def says_n(request: Request) -> Script:
    """The engine's script: a few tokens that depend on prompt and sample, then the stop token."""
    n = request.tokens[0]
    return Script(tokens=[n, request.key.sample + 100, *[5] * (n % 4), 2])


def make_mortal_producer(calls: int, order: str, state: dict[str, Any] | None) -> Producer:
    made = producer(engine=MortalEngine(calls), stream=FindingStream(), order=order, scorer=SlowScorer(parity, calls))
    if state is not None:
        made.load_state(state)
    return made


def parity(row, answer) -> Outcome:
    return Outcome(parts={"correct": float(row["n"] % 2)})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("calls", [*range(0, 40, 3), 55, 80, 133])
def test_killed_anywhere_no_prompt_is_lost_or_repeated(order: str, calls: int):
    """The process is killed after `calls` calls of the engine. Only the saved state of the producer survives."""
    trained: list[str] = []
    state: dict[str, Any] | None = None
    left, steps = calls, 0
    while steps < 4:
        made = make_mortal_producer(left, order, state)
        try:
            while steps < 4:
                groups = made.collect(3, accept_every_third)
                made.close_groups(groups)
                trained += [g.prompt.id for g in groups]
                steps += 1
        except Killed:
            left = 10**9
        state = json.loads(json.dumps(made.state()))
    whole = make_mortal_producer(10**9, "rounds", None)
    expected = [g.prompt.id for _ in range(4) for g in whole.collect(3, accept_every_third)]
    assert trained == expected and len(set(trained)) == len(trained)
    assert state["cursor"] - len(state["open"]) == whole.stream.cursor
    assert order == "continuous" or not state["open"]


def test_a_state_with_open_prompts_begins_with_them_in_their_order():
    made = producer(stream=FindingStream(), engine=engine(polls_before_death=1))
    with pytest.raises(EngineError):
        made.collect(4, accept_every_third)
    state = json.loads(json.dumps(made.state()))
    assert state == {"cursor": 4, "open": [[f"p{n}", n % 3] for n in range(4)]}
    again = producer(stream=FindingStream())
    again.load_state(state)
    assert again.collect(4, accept_every_third) == producer().collect(4, accept_every_third)
    assert again.stream.cursor == 10


def test_a_producer_that_was_left_in_the_middle_is_not_used_again():
    made = producer(engine=engine(polls_before_death=1))
    with pytest.raises(EngineError, match="died"):
        made.roll_out([prompt(0)])
    with pytest.raises(EngineError, match="Make a new producer"):
        made.roll_out([prompt(0)])


@pytest.mark.parametrize("weights", ["shared", "packed"])
def test_after_a_step_the_engine_holds_no_memory_although_requests_were_given_up(weights: str):
    """The learner needs the memory then, and an idle engine is not polled again."""
    with built_job(small_run(engine=NativeEngine(slots=24, weights=weights))) as parts:
        right = LocalScorer(lambda row, answer: Outcome(parts={"correct": 1.0}))
        made = make_producer(parts, 4, scorer=right, order="continuous")
        for n in range(40):
            made._rejection_rate.record(rejected=n % 2 == 0)
        made.close_groups(made.collect(6, lambda group: True))
        assert made.ledger.open, "nothing was begun ahead"
        assert made.engine.idle and made.engine.arena.kv.numel() == 0
        assert made.engine.packed is None or not made.engine.packed.products


# ---- groups that are scored together


class GroupScorer(LocalScorer):
    """A scorer that is given whole groups: each answer's part is its rank among the lengths of its group."""

    scores_groups = True

    def __init__(self, late: int = 0) -> None:
        super().__init__(None, late)
        self.groups: list[tuple[str, list[str]]] = []
        self.dropped: list[str] = []

    def submit(self, id, row, answer, past=None, closing="") -> None:
        raise AssertionError("a single answer")

    def submit_group(self, id, row, answers) -> None:
        texts = [a.text for a in answers]
        self.groups.append((id, texts))
        lengths = sorted({a.num_tokens for a in answers})
        for index, a in enumerate(answers):
            outcome = Outcome(parts={"correct": float(lengths.index(a.num_tokens))}, reason=f"of {len(answers)}")
            self._held.append((f"{id}/{index}", outcome))

    def drop(self, id) -> None:
        self.dropped.append(id)
        self._held = [held for held in self._held if held[0].partition("/")[0] != id]


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("at_once", [1, 3, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_the_answers_of_a_group_are_submitted_together_once(order: str, at_once: int, late: int) -> None:
    scorer = GroupScorer(late)
    made = producer(scorer=scorer, order=order, group_size=4, engine=engine(slots=at_once))
    groups = made.roll_out([prompt(n) for n in range(6)])
    assert len(scorer.groups) == 6 and all(len(texts) == 4 for _, texts in scorer.groups)
    assert {tuple(texts) for _, texts in scorer.groups} == {tuple(s.text for s in g.samples) for g in groups}
    for group in groups:
        lengths = sorted({len(s.tokens) for s in group.samples})
        assert [s.parts["correct"] for s in group.samples] == [
            float(lengths.index(len(s.tokens))) for s in group.samples
        ]
        assert {s.reason for s in group.samples} == {"of 4"}


def test_relative_scores_are_the_same_in_both_orders() -> None:
    found = [
        producer(scorer=GroupScorer(), order=order, group_size=3).roll_out([prompt(n) for n in range(5)])
        for order in ORDERS
    ]
    assert [[s.parts for s in g.samples] for g in found[0]] == [[s.parts for s in g.samples] for g in found[1]]
    assert len({s.parts["correct"] for g in found[0] for s in g.samples}) > 1


@pytest.mark.parametrize("seed", range(4))
def test_in_continuous_order_groups_that_are_given_up_are_dropped_whole(seed: int) -> None:
    rng = random.Random(seed)

    class Slow(GroupScorer):
        def poll(self, timeout: float = 0.0):
            """Returns whole groups, in any order, some of them late."""
            chosen = {id for id in {held[0].partition("/")[0] for held in self._held} if rng.random() < 0.3}
            done = [held for held in self._held if held[0].partition("/")[0] in chosen]
            self._held = [held for held in self._held if held[0].partition("/")[0] not in chosen]
            return done

    rounds = producer(scorer=GroupScorer(), stream=FindingStream(), engine=engine(slots=5))
    scorer = Slow()
    made = producer(scorer=scorer, stream=FindingStream(), engine=engine(slots=5), order="continuous")
    for _ in range(6):
        expected, found = rounds.collect(4, accept_every_third), made.collect(4, accept_every_third)
        assert found == expected
        rounds.close_groups(expected)
        made.close_groups(found)
        assert made.engine.idle and not scorer._held
    assert scorer.dropped and all("/" not in id for id in scorer.dropped)


def test_a_long_silence_names_the_last_failure_of_scoring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    monitor = module.SilenceMonitor()
    monitor.record_poll(False, 0, 3, "scoring failed:\nConnectionError: busy")
    monitor.patience = 0.0
    monitor.record_poll(False, 0, 3)
    told = [record.getMessage() for record in caplog.records]
    assert told[0].endswith("the graders (3 answers); the last failure: scoring failed: ConnectionError: busy")
    assert told[1].endswith("the graders (3 answers)")


def test_the_wait_for_scores_beside_an_idle_engine_is_measured() -> None:
    class WaitingScorer(SlowScorer):
        def poll(self, timeout: float = 0.0):
            time.sleep(min(timeout, 0.01))
            return super().poll(timeout)

    made = producer(scorer=WaitingScorer(producer().scorer.grade, 0))
    clock.read_and_reset()
    made.roll_out([prompt(n) for n in range(4)])
    waited = clock.read_and_reset()["scoring/wait"]
    assert 0.01 < waited < 30
    assert compute_times({}, 1.0, {"rollout": 2.0, "scoring/wait": waited}) == {
        "time/stage/rollout": 2.0,
        "time/scoring/wait": waited,
        "time/step": 1.0,
    }
