"""Tests of the protocol that every engine must pass. A test class of an engine inherits `EngineConformance`.

The engine under test may draw any tokens. So a test first looks at what is drawn, chooses stops that fit, and asks
again with the same key. Tests that need an ability which the engine declares it lacks are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest

from cohort.engines.base import POLL_TIMEOUT, Abilities, Engine, Event, Request, sample
from cohort.errors import CohortError, ConfigError, EngineError
from cohort.types import Finish, Key, Provenance, Sample, Sampling

PROMPTS = [[5, 9, 2, 11], [7, 7, 1], [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7]]


def spell(tokens: list[int]) -> str:
    """Returns a readable text in which every id shows: 3, 17 -> "3.17."."""
    return "".join(f"{t}." for t in tokens)


def request(prompt: int = 0, index: int = 0, max_tokens: int = 12, **changes: Any) -> Request:
    """Returns the request of sample `index` of a prompt. `changes` replace fields of the request or of its sampling."""
    sampling = {k: changes.pop(k) for k in list(changes) if k in Sampling.__dataclass_fields__}
    values: dict[str, Any] = {
        "id": f"{prompt}/{index}",
        "tokens": list(PROMPTS[prompt]),
        "sampling": Sampling(max_tokens=max_tokens, **sampling),
        "key": Key(seed=1, purpose="train", task="t", prompt_id=str(prompt), visit=0, sample=index),
        "messages": [{"role": "user", "content": f"prompt {prompt}"}],
    }
    return Request(**{**values, **changes})


def iterate_events(engine: Engine) -> Iterator[list[Event]]:
    """Yields the events of every poll that reported something, until the engine is idle."""
    while not engine.idle:
        if events := engine.poll(POLL_TIMEOUT):
            yield events


def poll_until_events(engine: Engine) -> list[Event]:
    """Returns the events of the first poll that reports something."""
    return next(iterate_events(engine))


def next_turn(before: Request, drawn: list[int], reply: list[int], max_tokens: int = 12, **changes: Any) -> Request:
    """Returns the request of the turn after `before`: its tokens, the `drawn` ones and a reply, under the same id."""
    tokens = [*before.tokens, *drawn, *reply]
    shared = before.shared if before.shared > 0 else len(before.tokens)
    values: dict[str, Any] = {"tokens": tokens, "shared": shared, "start": len(tokens) - shared, "continues": before.id}
    sampling = replace(before.sampling, max_tokens=max_tokens)
    return replace(before, **{**values, "sampling": sampling, **changes})


def converse(engine: Engine, first: Request, replies: list[list[int]], **changes: Any) -> list[Sample]:
    """Returns the turns of a conversation: the first request, and one more turn after each reply.

    Every turn has the fields `changes`. What is kept of the last one is forgotten.
    """
    asked, turns = replace(first, **changes), []
    for reply in [*replies, None]:
        turns.append(sample(engine, [asked])[asked.id])
        if reply is not None:
            asked = next_turn(asked, turns[-1].tokens, reply, **changes)
    engine.forget(first.id)
    return turns


Test = TypeVar("Test", bound=Callable[..., None])


def needs(ability: str) -> Callable[[Test], Test]:
    """Marks a test that is left out for engines without this ability. A test may have several such marks."""

    def mark(test: Test) -> Test:
        test.needs = (ability, *getattr(test, "needs", ()))  # type: ignore[attr-defined]
        return test

    return mark


class SameWeights:
    """Weights that the engine has already: it copies nothing."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __iter__(self):
        return iter(())


class EngineConformance:
    """Base class of engine tests. A subclass defines `make(slots) -> Engine`, with `spell` as decode.

    If the engine lacks an ability, the subclass sets `abilities`. If the engine can die while this process lives, the
    subclass defines `dying() -> Engine`, an engine that takes a request and then dies. `weights(engine)` may be
    overridden.
    """

    abilities: ClassVar[Abilities] = Abilities()
    dying: Callable[..., Engine] | None = None

    def __init_subclass__(cls) -> None:
        if cls.dying is None:
            cls.test_a_dead_engine_raises_engine_error = None  # type: ignore[assignment,method-assign]
        for name in dir(cls):
            needed = getattr(getattr(cls, name), "needs", ())
            if not all(getattr(cls.abilities, ability) for ability in needed):
                # A test that is not collected cannot be mistaken for one that passed.
                setattr(cls, name, None)

    def make(self, slots: int = 4) -> Engine:
        """Returns a new engine with this many slots."""
        raise NotImplementedError

    def weights(self, engine: Engine) -> Any:
        """Returns weights that `engine.load` takes and that change nothing."""
        return SameWeights(getattr(engine, "decoder", None))

    def draw(self, prompt: int = 0, index: int = 0, max_tokens: int = 12) -> list[int]:
        """Returns the tokens that a new engine draws for this request."""
        return sample(self.make(), [request(prompt, index, max_tokens)])[f"{prompt}/{index}"].tokens

    def test_abilities_are_the_declared_ones(self):
        assert self.make().abilities == self.abilities

    def test_idle_engine_reports_nothing(self):
        engine = self.make()
        assert engine.idle and engine.poll() == []
        engine.submit(request())
        assert not engine.idle
        ended = [e.id for events in iterate_events(engine) for e in events if e.sample is not None]
        assert ended == ["0/0"] and engine.idle and engine.poll() == []

    def test_aborted_requests_leave_it_idle(self):
        engine = self.make(slots=1)
        for index in range(3):
            engine.submit(request(0, index, max_tokens=50))
        engine.poll()
        for index in range(3):
            assert not engine.idle
            engine.abort(f"0/{index}")
        assert engine.idle and engine.poll() == []

    def test_close_gives_up_what_is_under_way_and_takes_nothing_more(self):
        engine = self.make()
        engine.submit(request(max_tokens=50))
        engine.poll()
        for _ in range(2):
            engine.close()
            assert engine.idle
        with pytest.raises(EngineError, match="closed"):
            engine.submit(request(1, 0))

    def test_a_dead_engine_raises_engine_error(self):
        assert self.dying is not None
        engine = self.dying()
        with pytest.raises(EngineError) as error:
            sample(engine, [request(max_tokens=50), request(1, 0, max_tokens=50)])
        assert "\n" not in str(error.value)

    def test_more_requests_than_slots_all_end_once(self):
        requests = [request(p, i, max_tokens=5 + i) for p in range(3) for i in range(4)]
        engine = self.make(slots=3)
        for r in requests:
            engine.submit(r)
        ended: list[str] = []
        for events in iterate_events(engine):
            ended += [e.id for e in events if e.sample is not None]
        assert sorted(ended) == sorted(r.id for r in requests)

    @needs("token_ids")
    def test_lists_agree_in_length_and_provenance(self):
        s = sample(self.make(), [request(max_tokens=9)])["0/0"]
        assert len(s.tokens) == len(s.sampler_logprobs) == 9
        assert s.provenance == [Provenance.SAMPLED] * 9
        assert s.finish == Finish.LENGTH and s.kept_mass == []
        assert s.text == spell(s.tokens)
        assert all(p <= 0 for p in s.sampler_logprobs)

    def test_events_add_up_to_the_sample(self):
        engine = self.make(slots=2)
        for i in range(4):
            engine.submit(request(0, i, max_tokens=11 + i))
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        samples = {}
        for events in iterate_events(engine):
            for e in events:
                tokens.setdefault(e.id, []).extend(e.tokens)
                logprobs.setdefault(e.id, []).extend(e.logprobs)
                if e.sample is not None:
                    samples[e.id] = e.sample
        assert {k: s.tokens for k, s in samples.items()} == tokens
        assert {k: s.sampler_logprobs for k, s in samples.items()} == logprobs

    def test_same_key_same_sample_whatever_else_runs(self):
        requests = [request(p, i) for p in range(3) for i in range(4)]
        a = sample(self.make(slots=3), requests)
        b = sample(self.make(slots=12), requests[::-1])
        assert {k: (s.tokens, s.text) for k, s in a.items()} == {k: (s.tokens, s.text) for k, s in b.items()}
        assert len({s.text for s in a.values()}) > 1

    @needs("token_ids")
    def test_stop_id_is_in_the_tokens_but_not_in_the_text(self):
        plain = self.draw()
        end = plain.index(plain[6])  # the same token may have been drawn earlier
        s = sample(self.make(), [request(stop_ids=(plain[6],))])["0/0"]
        assert s.tokens == plain[: end + 1]
        assert s.finish == Finish.STOP
        assert s.text == spell(plain[:end])

    @needs("token_ids")
    def test_stop_string_trims_text_only(self):
        plain = self.draw()
        stop = f"{plain[4]}.{plain[5]}"  # completed by token 5, not by its dot alone
        at = spell(plain).index(stop)
        end = next(n for n in range(1, 13) if stop in spell(plain[:n]))
        s = sample(self.make(), [request(stop_strings=("never", stop))])["0/0"]
        assert s.tokens == plain[:end]
        assert len(s.sampler_logprobs) == len(s.provenance) == end
        assert s.finish == Finish.STOP
        assert s.text == spell(plain)[:at]

    @needs("token_ids")
    def test_stop_on_the_last_allowed_token_is_a_stop(self):
        plain = self.draw()
        end = plain.index(plain[6])
        s = sample(self.make(), [request(max_tokens=end + 1, stop_ids=(plain[6],))])["0/0"]
        assert s.finish == Finish.STOP and s.tokens == plain[: end + 1]

    def test_max_tokens_one(self):
        s = sample(self.make(), [request(max_tokens=1)])["0/0"]
        assert s.tokens == self.draw()[:1] and s.finish == Finish.LENGTH

    @needs("token_ids")
    @needs("streams")
    def test_abort_returns_the_partial_sample(self):
        plain = self.draw(max_tokens=60)
        engine = self.make()
        engine.submit(request(0, 0, max_tokens=60))
        engine.submit(request(0, 1, max_tokens=20))
        reported = [t for e in poll_until_events(engine) if e.id == "0/0" for t in e.tokens]
        s = engine.abort("0/0")
        assert s.finish == Finish.ABORT
        assert 0 < len(s.tokens) < 60
        assert s.tokens == reported == plain[: len(s.tokens)]
        assert s.text == spell(s.tokens)
        rest = []
        for events in iterate_events(engine):
            rest += events
        assert {e.id for e in rest} == {"0/1"}
        assert [e.sample.tokens for e in rest if e.sample] == [self.draw(0, 1, 20)]

    def test_abort_of_a_waiting_request_is_empty(self):
        engine = self.make(slots=1)
        engine.submit(request(0, 0, max_tokens=50))
        engine.submit(request(0, 1))
        s = engine.abort("0/1")
        assert s.tokens == [] and s.finish == Finish.ABORT and s.text == ""
        ids = set()
        for events in iterate_events(engine):
            ids |= {e.id for e in events}
        assert ids == {"0/0"}

    def test_abort_of_an_unknown_request_is_an_error(self):
        engine = self.make()
        sample(engine, [request()])
        for id in ("0/0", "other"):
            with pytest.raises(CohortError, match=id):
                engine.abort(id)

    @needs("token_ids")
    def test_aborted_id_may_be_used_again(self):
        engine = self.make()
        engine.submit(request(max_tokens=50))
        engine.poll()
        engine.abort("0/0")
        assert sample(engine, [request()])["0/0"].tokens == self.draw()

    @needs("live_weights")
    @needs("streams")
    def test_versions_of_a_sample_under_way(self):
        engine = self.make()
        engine.load(self.weights(engine), version=3)
        engine.submit(request(max_tokens=60))
        first = sum(len(e.tokens) for e in poll_until_events(engine))
        engine.load(self.weights(engine), version=4)
        engine.submit(request(1, 0, max_tokens=5))
        samples = {}
        for events in iterate_events(engine):
            samples.update({e.id: e.sample for e in events if e.sample is not None})
        [(_, old), (begin, new)] = samples["0/0"].versions
        assert (old, new) == (3, 4) and first <= begin < 60  # an engine may have drawn more than it has reported
        assert samples["1/0"].versions == [(0, 4)]
        assert samples["0/0"].tokens == self.draw(max_tokens=60)  # the weights are the same ones

    # ---- conversations whose KV may be kept

    def test_keeping_and_forgetting_leave_it_idle(self):
        engine = self.make()
        ended = sample(engine, [request(keep=True), request(1, 0, keep=True)])
        assert set(ended) == {"0/0", "1/0"} and engine.idle and engine.poll() == []
        for id in ("0/0", "0/0", "never seen", ""):
            engine.forget(id)
            assert engine.idle and engine.poll() == []
        engine.close()
        engine.forget("1/0")

    @needs("token_ids")
    def test_turns_are_the_same_whether_kv_is_kept_or_not(self):
        first, replies = request(max_tokens=6), [[3, 4, 1], [8]]
        plain = [
            sample(self.make(), [asked])["0/0"].tokens
            for asked in self.list_turns(converse(self.make(), first, replies), first, replies)
        ]
        assert len({tuple(tokens) for tokens in plain}) > 1
        for changes in ({"keep": True}, {"keep": False}, {"keep": True, "continues": "never seen"}):
            assert [t.tokens for t in converse(self.make(), first, replies, **changes)] == plain

    def list_turns(self, turns: list[Sample], first: Request, replies: list[list[int]]) -> list[Request]:
        """Returns the requests of a conversation as an engine gets them that has seen no earlier turn."""
        requests = [first]
        for turn, reply in zip(turns, replies, strict=False):
            requests.append(replace(next_turn(requests[-1], turn.tokens, reply), continues=""))
        return requests

    @needs("token_ids")
    def test_a_kept_request_may_be_forgotten_or_never_continued(self):
        engine = self.make()
        first = request(max_tokens=6, keep=True)
        drawn = sample(engine, [first, request(1, 0, keep=True)])["0/0"].tokens
        second = next_turn(first, drawn, [3, 4])
        expected = sample(self.make(), [replace(second, continues="")])["0/0"].tokens
        engine.forget("0/0")
        assert sample(engine, [second])["0/0"].tokens == expected
        assert sample(engine, [replace(second, id="other", continues="0/0")])["other"].tokens == expected

    @needs("token_ids")
    @pytest.mark.parametrize(
        "tokens",
        [
            [5, 9, 2, 11],  # the prompt alone
            [5, 9, 2],  # less than the prompt
            [5, 9, 2, 11, 60, 60, 60],  # the prompt, and another answer than the one that was drawn
            [7, 7, 1, 3],  # another conversation
        ],
    )
    def test_tokens_that_are_no_continuation_are_computed_anew(self, tokens: list[int]):
        engine = self.make()
        sample(engine, [request(max_tokens=6, keep=True)])
        asked = request(tokens=tokens, continues="0/0", start=6)
        expected = sample(self.make(), [replace(asked, continues="")])["0/0"].tokens
        assert sample(engine, [asked])["0/0"].tokens == expected

    @needs("token_ids")
    def test_an_id_that_is_submitted_again_may_be_another_request(self):
        engine = self.make()
        sample(engine, [request(max_tokens=6, keep=True)])
        assert sample(engine, [request(1, 0, id="0/0", keep=True)])["0/0"].tokens == self.draw(1)
        second = next_turn(request(max_tokens=6), self.draw(max_tokens=6), [3])
        assert sample(engine, [second])["0/0"].tokens == sample(self.make(), [second])["0/0"].tokens

    @needs("token_ids")
    @needs("streams")
    def test_abort_of_a_request_that_continues_another(self):
        engine = self.make(slots=1)
        first = request(max_tokens=6, keep=True)
        drawn = sample(engine, [first])["0/0"].tokens
        second = next_turn(first, drawn, [3, 4], max_tokens=50)
        for polls in (0, 1):
            engine.submit(second)
            for _ in range(polls):
                poll_until_events(engine)
            expected = sample(self.make(), [second])["0/0"].tokens
            cut = engine.abort("0/0")
            assert cut.finish == Finish.ABORT and cut.tokens == expected[: len(cut.tokens)] and engine.idle
            # Nothing is kept of it now, and the conversation can still be continued.
        assert sample(engine, [second])["0/0"].tokens == expected

    @needs("live_weights")
    def test_a_load_between_turns_begins_a_version(self):
        engine = self.make()
        first = request(max_tokens=6, keep=True)
        drawn = sample(engine, [first])["0/0"].tokens
        second = next_turn(first, drawn, [3, 4])
        engine.load(self.weights(engine), version=5)
        one = sample(engine, [second])["0/0"]
        assert one.versions == [(0, 5)] and one.tokens == sample(self.make(), [second])["0/0"].tokens

    def test_weights_are_taken_or_refused(self):
        engine = self.make()
        if self.abilities.live_weights:
            engine.load(self.weights(engine), version=1)
        else:
            with pytest.raises(ConfigError, match="weights"):
                engine.load(self.weights(engine), version=1)
        assert engine.poll() == []

    def test_duplicate_id_is_refused(self):
        engine = self.make()
        engine.submit(request())
        with pytest.raises(ConfigError, match="0/0"):
            engine.submit(request(index=0))

    @pytest.mark.parametrize(
        ("changes", "number"),
        [
            ({"max_tokens": 0}, "max_tokens = 0"),
            ({"temperature": -0.5}, "-0.5"),
            ({"temperature": float("nan")}, "nan"),
            ({"temperature": float("inf")}, "inf"),
            ({"top_p": 0.0}, "top_p = 0.0"),
            ({"top_p": 1.5}, "top_p = 1.5"),
            ({"top_k": -1}, "top_k = -1"),
            ({"min_p": 1.5}, "min_p = 1.5"),
            ({"stop_strings": ("",)}, "empty stop string"),
            ({"start": -1}, "start = -1"),
        ],
    )
    def test_impossible_sampling_settings_are_refused(self, changes: dict[str, Any], number: str):
        self.check_refused(changes, [number])

    @needs("token_ids")
    @pytest.mark.parametrize(
        ("changes", "numbers"),
        [
            ({"tokens": []}, ["empty prompt"]),
            ({"max_tokens": 100_000}, ["4 prompt tokens", "100000", "100004"]),
            ({"shared": 9}, ["shared = 9", "and 4, the number of its prompt tokens"]),
            ({"tokens": [1, -4]}, ["-4"]),
            ({"tokens": [1, 99_999_999]}, ["99999999"]),
        ],
    )
    def test_prompt_that_cannot_be_served_is_refused(self, changes: dict[str, Any], numbers: list[str]):
        self.check_refused(changes, numbers)

    def check_refused(self, changes: dict[str, Any], numbers: list[str]) -> None:
        """Checks that a request with these changes is refused with a message that has the id and these texts."""
        engine = self.make()
        with pytest.raises(ConfigError) as error:
            engine.submit(request(**changes))
        for number in ["0/0", *numbers]:
            assert number in str(error.value)
        assert engine.poll() == []
