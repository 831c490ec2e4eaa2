"""An engine and slow tools on a clock that only they move: in continuous order no ready turn waits for an idle engine.

Time passes while the engine decodes (one tick per poll) and while somebody waits for a tool. At every tick the clock
asks whether the engine is idle while a conversation could have its next turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from cohort.engines.scripted import Script, ScriptedEngine
from cohort.rollout import producer as producer_module
from cohort.rollout.episode import LaterTurns
from cohort.types import Outcome, Sampling
from tests.helpers.engine_conformance import spell
from tests.unit.rollout.test_rollout import STOP, producer, prompt

TICK = 0.01  # seconds of one window of decoding
TOOL_SECONDS = 0.3
NUM_EPISODES, NUM_TURNS = 64, 5


@dataclass
class Clock:
    """Virtual time, and for how long of it the engine was idle although a turn was ready."""

    now: float = 0.0
    idle_while_ready: float = 0.0
    ready: set[str] = field(default_factory=set)  # conversations whose tool is done and that have a turn left
    engine: Any = None
    scorer: Any = None

    def advance(self, seconds: float) -> None:
        """Lets time pass in small steps, because tools end in between."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            # The time just before a tool ends still counts as waiting.
            step = min(TICK, end - self.now)
            if self.engine.idle and self.ready:
                self.idle_while_ready += step
            self.now += step
            self.scorer.finish_tools()


class ClockedEngine(ScriptedEngine):
    """Answers every turn with two tokens. A poll takes one tick if there is anything to decode."""

    def __init__(self, clock: Clock, slots: int) -> None:
        super().__init__(lambda request: Script(tokens=[7, STOP]), spell, slots=slots, window=1)
        self.clock = clock

    def submit(self, request: Any) -> None:
        self.clock.ready.discard(request.id)
        super().submit(request)

    def poll(self, timeout: float = 0.0) -> Any:
        self.clock.advance(TICK)
        return super().poll(timeout)


class ClockedTools:
    """A scorer whose tools take TOOL_SECONDS, `workers` at a time, and whose episodes have NUM_TURNS turns."""

    scores_groups = False

    def __init__(self, clock: Clock, workers: int) -> None:
        self.clock, self.workers = clock, workers
        self.queue: list[str] = []
        self.running: dict[str, float] = {}  # when each will be done
        self.done: list[str] = []
        self.turns: dict[str, int] = {}

    def submit(self, id: str, row: Any, answer: Any, past: Any = None, closing: str = "") -> None:
        self.turns[id] = self.turns.get(id, 0) + 1
        self.queue.append(id)
        self._start()

    def _start(self) -> None:
        while self.queue and len(self.running) < self.workers:
            self.running[self.queue.pop(0)] = self.clock.now + TOOL_SECONDS

    def finish_tools(self) -> None:
        """Ends the tools whose time is up."""
        for id in [id for id, end in self.running.items() if end <= self.clock.now + 1e-9]:
            del self.running[id]
            self.done.append(id)
            if self.turns[id] < NUM_TURNS:
                self.clock.ready.add(id)
        self._start()

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        if not self.done and timeout and self.running:
            self.clock.advance(min(timeout, min(self.running.values()) - self.clock.now))
        done, self.done = self.done, []
        return [(id, self._make_outcome(id)) for id in done]

    def _make_outcome(self, id: str) -> Outcome:
        if self.turns[id] == NUM_TURNS:
            return Outcome(parts={"correct": 1.0})
        return Outcome(replies=[{"role": "tool", "content": "more"}])

    def drop(self, id: str) -> None:
        raise AssertionError("nothing is dropped")


def play(order: str, workers: int, monkeypatch: pytest.MonkeyPatch, slots: int = 256) -> Clock:
    """Plays all conversations and returns the clock at their end."""
    clock = Clock()
    clock.engine, clock.scorer = ClockedEngine(clock, slots), ClockedTools(clock, workers)
    monkeypatch.setattr(producer_module.time, "sleep", clock.advance)
    made = producer(
        engine=clock.engine,
        scorer=clock.scorer,
        order=order,
        group_size=1,
        sampling=Sampling(max_tokens=4, stop_ids=(STOP,)),
        later_turns=LaterTurns(max_tokens=4, encode_replies=lambda replies: [STOP, 40]),
    )
    groups = made.roll_out([prompt(n) for n in range(NUM_EPISODES)])
    assert [s.num_turns for g in groups for s in g.samples] == [NUM_TURNS] * NUM_EPISODES
    return clock


@pytest.mark.parametrize("workers", [1, 7, 64])
@pytest.mark.parametrize("slots", [8, 256])
def test_no_turn_waits_for_an_idle_engine(workers: int, slots: int, monkeypatch: pytest.MonkeyPatch):
    clock = play("continuous", workers, monkeypatch, slots)
    assert clock.idle_while_ready == 0.0
    # The tools alone need so long.
    assert clock.now >= NUM_EPISODES * NUM_TURNS * TOOL_SECONDS / workers - 1e-6


def test_rounds_wait_and_take_longer(monkeypatch: pytest.MonkeyPatch):
    """The same watch finds the waiting that rounds have by design, so that it can see one."""
    rounds, continuous = (play(order, 7, monkeypatch) for order in ("rounds", "continuous"))
    assert rounds.idle_while_ready > 10 * TOOL_SECONDS
    assert continuous.now < rounds.now
