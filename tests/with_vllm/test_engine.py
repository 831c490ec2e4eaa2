"""vLLM as an engine: it keeps the protocol, and gives the native engine's tokens, log-probabilities and text."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from cohort.config.options import EvalOptions
from cohort.engines.base import Abilities, sample
from cohort.engines.pending import PendingOutput
from cohort.engines.vllm import VllmEngine
from cohort.errors import ConfigError, ModelError
from cohort.evaluation.standalone import ModelEvaluator
from cohort.tasks.arithmetic import Arithmetic
from cohort.text import TextStream, Tokenizer
from cohort.types import Finish, Key, Sample, Sampling
from tests.helpers.decoders_and_groups import naive_logprobs, plain_attention
from tests.helpers.engine_conformance import EngineConformance, iterate_events, poll_until_events, request, spell
from tests.with_vllm.questions import CONTEXT, TINY, decoder, make_native, make_requests


class Speller(Tokenizer):
    """The tokenizer of the model, except that every token has a visible text."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return spell(list(ids))


@cache
def start_engine(slots: int) -> VllmEngine:
    """Returns vLLM with this many slots, started once."""
    return VllmEngine(TINY, max_context=CONTEXT, slots=slots, dtype="float32", options={"enforce_eager": True})


def make(slots: int = 12, tokenizer: type[Tokenizer] = Tokenizer) -> VllmEngine:
    """Returns an idle engine. Starting one takes seconds, so tests share them."""
    engine = start_engine(slots)
    engine._closed = False  # one test closes it, which only aborts requests
    for id in list(engine._pending):
        engine.abort(id)
    engine._events, engine.version = [], 0
    engine.tokenizer = tokenizer.load(TINY)
    return engine


def assert_equal(ours: dict[str, Sample], theirs: dict[str, Sample]) -> None:
    """Checks that the samples are equal, log-probabilities within 0.001."""
    assert ours.keys() == theirs.keys()
    for id, a in ours.items():
        b = theirs[id]
        assert (a.tokens, a.text, a.finish, a.provenance) == (b.tokens, b.text, b.finish, b.provenance)
        assert a.sampler_logprobs == pytest.approx(b.sampler_logprobs, abs=1e-3)


class TestConformance(EngineConformance):
    abilities = Abilities(truncation=False)

    def make(self, slots: int = 4) -> VllmEngine:
        return make(slots, Speller)


def test_greedy_samples_are_the_native_engines():
    requests = make_requests()
    ours = sample(make(), requests)
    assert_equal(ours, sample(make_native(), requests))
    assert {s.finish for s in ours.values()} == {Finish.STOP}
    stop = set(requests[0].sampling.stop_ids)
    assert all(s.tokens[-1] in stop and "<|" not in s.text and s.text for s in ours.values())


def test_greedy_samples_cut_by_length_are_the_native_engines():
    requests = make_requests(max_tokens=5)
    ours = sample(make(), requests)
    assert_equal(ours, sample(make_native(), requests))
    assert Finish.LENGTH in {s.finish for s in ours.values()}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_at_the_sampling_temperature(temperature: float):
    requests = make_requests(temperature=temperature, max_tokens=20)
    for id, s in sample(make(), requests).items():
        expected = naive_logprobs(decoder(), requests[int(id)].tokens, s.tokens, temperature)
        assert s.sampler_logprobs == pytest.approx(expected.tolist(), abs=1e-3)
        assert s.kept_mass == []


def test_greedy_and_random_requests_in_one_batch_keep_their_logprobs():
    cold, hot = make_requests(8), make_requests(8, temperature=1.3, max_tokens=20)
    hot = [replace(r, id=f"hot {r.id}") for r in hot]
    done = sample(make(16), [r for pair in zip(cold, hot, strict=True) for r in pair])
    assert_equal({r.id: done[r.id] for r in cold}, sample(make_native(), cold))
    for r in hot:
        expected = naive_logprobs(decoder(), r.tokens, done[r.id].tokens, 1.3)
        assert done[r.id].sampler_logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def test_truncated_sampling_has_no_logprobs():
    greedy = sample(make(), make_requests(4))
    for truncation in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        done = sample(make(), make_requests(4, temperature=1.0, **truncation))
        for id, s in done.items():
            assert s.tokens == greedy[id].tokens  # nothing but the best token is left
            assert s.sampler_logprobs == [0.0] * len(s.tokens) and s.kept_mass == []
        assert_equal(sample(make(), make_requests(4, **truncation)), greedy)  # which truncation cannot change


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 0), (1.8, 3)])
def test_draws_follow_the_model(temperature: float, top_k: int):
    """The first token of 1200 samples of one prompt, against its probabilities."""
    num, first = 1200, make_requests(1, temperature=temperature, top_k=top_k, max_tokens=1)[0]
    requests = [replace(first, id=str(i), key=replace(first.key, sample=i)) for i in range(num)]
    drawn = Counter(s.tokens[0] for s in sample(make(64), requests).values())
    tokens = torch.tensor(first.tokens)
    logits = decoder().logits(decoder()(tokens, torch.arange(len(tokens)), plain_attention())[-1:])[0] / temperature
    kept = logits if not top_k else logits.where(logits >= logits.topk(top_k).values[-1], float("-inf"))
    for token, p in enumerate(kept.softmax(-1).tolist()):
        assert abs(drawn[token] - num * p) <= 5 * (num * p * (1 - p)) ** 0.5 + 1


def test_seed_comes_from_the_key():
    def drawn(**key) -> str:
        values = {"seed": 5, "purpose": "eval", "task": "t", "prompt_id": "0", "visit": 0, "sample": 0, **key}
        first = make_requests(1, temperature=1.5, max_tokens=30)[0]
        return sample(make(), [replace(first, key=Key(**values))])["0"].text

    plain = drawn()
    assert plain == drawn()
    others = [
        drawn(seed=6),
        drawn(purpose="train"),
        drawn(task="u"),
        drawn(prompt_id="1"),
        drawn(visit=1),
        drawn(sample=1),
    ]
    assert plain not in others and len(set(others)) == 6


def test_stop_strings_end_a_sample_where_the_native_engine_ends_it():
    free = sample(make_native(), make_requests())
    text = free["0"].text
    for stops in [(text[5:8],), (text[-3:],), ("never", text[9:10]), (text[4:9], text[6:8]), (text[6:8], text[4:9])]:
        requests = make_requests(stop_strings=stops)
        ours = sample(make(), requests)
        assert_equal(ours, sample(make_native(), requests))
        assert ours["0"].finish == Finish.STOP and len(ours["0"].text) < len(text)
        assert not any(stop in s.text for s in ours.values() for stop in stops)


def test_events_add_up_with_stop_strings():
    requests = make_requests(6, stop_strings=("</think>", "=7"))
    engine = make(3)
    for r in requests:
        engine.submit(r)
    told: dict[str, list[int]] = {r.id: [] for r in requests}
    done: dict[str, Sample] = {}
    for events in iterate_events(engine):
        for e in events:
            told[e.id] += e.tokens
            assert len(e.tokens) == len(e.logprobs)
            if e.sample is not None:
                done[e.id] = e.sample
    assert {id: s.tokens for id, s in done.items()} == told
    assert not engine._engine.has_unfinished_requests()  # what a stop string ended was ended in vLLM too


class Bytes(Tokenizer):
    """Three tokens for the bytes of "é!" in UTF-8, and one that has no text."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        spelled = {0: b"\xc3", 1: b"\xa9", 2: b"!", 3: b"", 4: b"!\xc3"}
        return b"".join(spelled[i] for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("stop", "drawn", "kept", "text"),
    [
        ("é", [2, 0, 1, 2], [2, 0, 1], "!"),  # completed by its second byte
        ("!", [3, 3, 4, 1, 2], [3, 3, 4], ""),  # completed by a token that also begins the next character
        ("é!", [0, 1, 3, 2, 2], [0, 1, 3, 2], ""),
    ],
)
def test_stop_string_amid_bytes(stop: str, drawn: list[int], kept: list[int], text: str):
    """Noticed late or not, the sample ends with the token that completed it, and no later token was reported."""
    tokenizer = Bytes.load(TINY)
    reader = PendingOutput(request=request(stop_strings=(stop,), max_tokens=50), text_stream=TextStream(tokenizer))
    for token in drawn:
        told = reader.num_complete
        if reader.add_tokens([token], [-1.0]):
            break
    else:
        raise AssertionError("the stop string was not noticed")
    found = reader.make_draft(tokenizer).to_sample(tokenizer.decode)
    assert (found.tokens, found.text, found.finish) == (kept, text, Finish.STOP)
    assert told < len(kept) and len(found.sampler_logprobs) == len(kept)


def test_many_requests_end_once_each():
    requests = make_requests(300, max_tokens=12)
    engine = make(12)
    expected = sample(make_native(), requests)
    ended: list[str] = []
    for r in requests:
        engine.submit(r)
    for events in iterate_events(engine):
        for e in events:
            if e.sample is not None:
                ended.append(e.id)
                assert e.sample.tokens == expected[e.id].tokens
    assert sorted(ended, key=int) == [r.id for r in requests]
    assert ended.index("250") > ended.index("0")  # they came as they ended, not all at the end


def test_abort_frees_the_place_of_a_request():
    engine = make(1)
    first, second = make_requests(2)
    engine.submit(replace(first, id="long", sampling=Sampling(max_tokens=150)))
    engine.submit(second)
    [event] = poll_until_events(engine)
    partial = engine.abort("long")
    assert event.id == "long" and partial.tokens == event.tokens and partial.finish == Finish.ABORT
    rest: dict[str, Sample] = {}
    for events in iterate_events(engine):
        rest.update({e.id: e.sample for e in events if e.sample is not None})
    assert_equal(rest, sample(make_native(), [second]))


def test_temperature_that_vllm_would_replace_is_refused():
    with pytest.raises(
        ConfigError, match=r"temperature = 0.001, but vLLM has no temperature between 0 and 0.01; use 0"
    ):
        make().submit(request(temperature=0.001))


def test_no_usage_statistics_and_no_network(hosts: list[str]):
    from vllm.usage.usage_lib import is_usage_stats_enabled

    sample(make(), [request()])
    assert not is_usage_stats_enabled()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert hosts == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"folder": TINY / "missing"}, ModelError, "missing is no folder"),
        ({"folder": TINY.parent}, ModelError, "no usable tokenizer.json"),
        ({"slots": 0}, ConfigError, "slots = 0"),
        ({"memory": 1.5}, ConfigError, "memory = 1.5"),
        ({"max_context": 100_000}, ModelError, "100000"),
        ({"dtype": "float12"}, ModelError, "float12"),
        (
            {"options": {"enforce_eagre": True}},
            ConfigError,
            'enforce_eagre; correct or remove it. Did you mean "enforce_eager"?',
        ),
        ({"options": {"max_num_seqs": 3}}, ConfigError, "max_num_seqs cannot be set: the engine sets it to 4"),
        ({"options": {"trust_remote_code": True}}, ConfigError, "trust_remote_code cannot be set"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(changes: dict, error: type[Exception], words: str):
    values = {"folder": TINY, "slots": 4, "max_context": CONTEXT, "dtype": "float32", **changes}
    with pytest.raises(error) as caught:
        VllmEngine(values.pop("folder"), **values)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'cohort\[vllm\]'"):
        VllmEngine(TINY, max_context=CONTEXT, slots=1)


def test_an_evaluation_that_names_it_has_the_native_engines_answers(tmp_path: Path):
    found = {}
    for name in ("native", "vllm"):
        options = EvalOptions(engine=name, limit=12, temperature=0.0, max_tokens=48, slots=8, device="cpu")
        evaluator = ModelEvaluator("tiny", options)
        with closing(evaluator):
            found[name] = evaluator.run(evaluator.prepare(Arithmetic(test_size=20)), tmp_path).evaluation
    assert found["vllm"].setting.engine == "vllm" and found["vllm"].accuracy > 0
    assert found["vllm"].items == found["native"].items
