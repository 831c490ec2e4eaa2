"""Conversations and the KV that an engine keeps for them: further turns compute only what is new, and none is left."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.config.schema import ThinkAgain
from cohort.engines.base import Request
from cohort.engines.native.engine import NativeEngine
from cohort.engines.scripted import Script, ScriptedEngine
from cohort.rollout.episode import LaterTurns
from cohort.rollout.producer import Producer
from cohort.tasks.environment import AgainRules
from cohort.types import Group, Outcome, Provenance, Sampling
from tests.helpers.decoders_and_groups import small_decoder
from tests.helpers.engine_conformance import spell
from tests.helpers.small_runs import LocalScorer, built_job, run_steps, small_run
from tests.unit.rollout.test_producer import ORDERS, SlowScorer
from tests.unit.rollout.test_rollout import STOP, producer, prompt

FIVE_TURNS = AgainRules(attempts=4, below=10.0, cost=0.0, words=("once more", "and again"), coefficients={})
LATER_TURNS = LaterTurns(max_tokens=9, encode_replies=lambda r: [STOP, *range(40, 40 + len(r[0]["content"]))])
# So many tokens stop a turn that conversations of one to five turns result: a turn that is cut off is the last.
SAMPLING = Sampling(max_tokens=14, stop_ids=tuple(range(0, 61, 4)))


def grade(row: Any, answer: Any) -> Outcome:
    """Rewards depend on the prompt and the answer, so that groups differ."""
    return Outcome(parts={"correct": float((row["n"] + answer.num_tokens) % 2)})


def make(engine: Any, order: str = "rounds", seed: int = 0, **changes: Any) -> Producer:
    scorer = SlowScorer(grade, seed, again=FIVE_TURNS)
    values = {"later_turns": LATER_TURNS, "sampling": SAMPLING, "group_size": 3, **changes}
    return producer(engine=engine, scorer=scorer, order=order, **values)


def make_engine(slots: int = 64) -> NativeEngine:
    return NativeEngine(small_decoder(), spell, slots=slots, max_context=200)


def count_new_tokens(groups: list[Group]) -> int:
    """Returns how many tokens an engine must compute before it draws: each prompt once, then the new ones per turn.

    New are the environment's tokens, and the last one of the turn before, from which nothing was drawn.
    """
    num = sum(len(g.prompt.tokens) for g in groups)
    for sample in (s for g in groups for s in g.samples):
        num += sample.provenance.count(Provenance.ENVIRONMENT) + sample.num_turns - 1
    return num


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slots", [8, 64])
def test_a_further_turn_computes_only_what_is_new(order: str, slots: int):
    engine = make_engine(slots)
    groups = make(engine, order).roll_out([prompt(n) for n in range(6)])
    turns = [s.num_turns for g in groups for s in g.samples]
    assert max(turns) == 5 and min(turns) < 5
    assert engine.work.num_prompt_tokens == count_new_tokens(groups)
    assert not engine.kept and engine.arena.kv.numel() == 0 and not engine.prefixes.by_tokens


def test_how_quick_graders_are_changes_no_bit_in_rounds():
    """Few slots and little room for KV, so that what is kept decides what is computed together."""
    results = []
    for seed in range(4):
        engine = NativeEngine(small_decoder(), spell, slots=3, max_context=90)
        groups = make(engine, seed=seed).roll_out([prompt(n) for n in range(6)])
        results.append(([g.samples for g in groups], engine.work.num_prompt_tokens, engine.work.num_steps))
        assert engine.work.num_prompt_tokens > count_new_tokens(groups), "everything had room"
    assert all(r == results[0] for r in results)


class WatchedEngine(ScriptedEngine):
    """Answers every turn with a stop token, and records what it is asked to keep and to forget."""

    def __init__(self, order: str = "rounds") -> None:
        super().__init__(lambda request: Script(tokens=[7, STOP]), spell, slots=3, window=1)
        self.order = order
        self.requests: list[Request] = []
        self.kept: set[str] = set()

    def submit(self, request: Request) -> None:
        assert request.continues == "" or request.continues in self.kept
        self.kept -= {request.continues}
        assert request.id not in self.kept
        self.kept |= {request.id} if request.keep else set()
        self.requests.append(request)
        super().submit(request)

    def abort(self, id: str):
        self.kept.discard(id)
        return super().abort(id)

    def forget(self, id: str) -> None:
        assert self.order == "continuous" or self.idle, "in rounds this depends on how quick the graders are"
        assert id not in self.drafts
        self.kept.discard(id)


@pytest.mark.parametrize("order", ORDERS)
def test_every_turn_continues_the_one_before_and_all_are_forgotten(order: str):
    engine = WatchedEngine(order)
    made = make(engine, order, sampling=Sampling(max_tokens=5, stop_ids=(STOP,)))
    groups = made.roll_out([prompt(n) for n in range(4)])
    assert all(r.keep for r in engine.requests) and not engine.kept
    assert [r.continues == r.id for r in engine.requests] == [r.start > 0 for r in engine.requests]
    assert len(engine.requests) == sum(s.num_turns for g in groups for s in g.samples) > 4 * 3


@pytest.mark.parametrize("seed", range(3))
def test_what_is_put_back_is_forgotten(seed: int):
    engine = WatchedEngine("continuous")
    made = make(engine, "continuous", seed, sampling=Sampling(max_tokens=5, stop_ids=(STOP,)))
    put_back = 0
    for _ in range(5):
        made.close_groups(made.collect(3, lambda group: group.prompt.row["n"] % 2 == 0))
        assert not engine.kept and engine.idle
        put_back += len(made.ledger.open)
    assert put_back > 0, "nothing was begun ahead"


def test_single_turns_keep_nothing():
    engine = WatchedEngine()
    engine.forget = None  # type: ignore[method-assign,assignment]
    producer(engine=engine, scorer=LocalScorer(grade)).roll_out([prompt(n) for n in range(3)])
    assert not any(r.keep or r.continues for r in engine.requests)


def test_steps_with_think_again_compute_only_what_is_new():
    """The real loop: weights change between the steps, and the learner finds all memory free."""
    again = ThinkAgain(attempts=2, below=10.0, max_tokens=12)
    with built_job(small_run(turns=again)) as job:
        before = 0
        for step in range(2):
            [(groups, _)] = run_steps(job, 1, first=step)
            assert max(s.num_turns for g in groups for s in g.samples) > 1
            assert job.engine.work.num_prompt_tokens - before == count_new_tokens(groups)
            before = job.engine.work.num_prompt_tokens
            assert not job.engine.kept and job.engine.arena.kv.numel() == 0
