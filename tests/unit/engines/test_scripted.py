"""The scripted engine obeys the protocol and its script."""

from __future__ import annotations

import random

import pytest

from cohort.engines.base import Request, sample
from cohort.engines.scripted import Script, ScriptedEngine
from cohort.errors import ConfigError
from cohort.types import Finish
from tests.helpers.engine_conformance import EngineConformance, request, spell


def babble(request: Request) -> Script:
    """Returns random tokens that depend on the key alone."""
    rng = random.Random(repr(request.key))
    return Script(tokens=[rng.randrange(50) for _ in range(request.start + 100)][request.start :])


class TestConformance(EngineConformance):
    def make(self, slots: int = 4) -> ScriptedEngine:
        return ScriptedEngine(babble, spell, slots=slots)

    def dying(self) -> ScriptedEngine:
        return ScriptedEngine(babble, spell, polls_before_death=2)


class TestLateConformance(EngineConformance):
    """With polls that mostly report nothing, as for an engine in another process."""

    def make(self, slots: int = 4) -> ScriptedEngine:
        return ScriptedEngine(babble, spell, slots=slots, silent_polls=3)

    def dying(self) -> ScriptedEngine:
        return ScriptedEngine(babble, spell, polls_before_death=5, silent_polls=3)


def test_answers_by_id_with_logprobs():
    engine = ScriptedEngine({"0/0": Script(tokens=[4, 5, 6, 9, 9], logprobs=[-0.1, -0.2, -0.3, -9, -9])}, spell)
    s = sample(engine, [request(stop_ids=(6,))])["0/0"]
    assert (s.tokens, s.sampler_logprobs, s.text, s.finish) == (
        [4, 5, 6],
        [-0.1, -0.2, -0.3],
        "4.5.",
        Finish.STOP,
    )


def test_script_that_runs_out_is_an_error():
    engine = ScriptedEngine({"0/0": Script(tokens=[4, 5])}, spell)
    with pytest.raises(ConfigError, match='"0/0" ends after 2 tokens'):
        sample(engine, [request()])
