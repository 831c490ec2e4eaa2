"""Training with vLLM in this process: rewards and gap, wrong loads, and loads while requests are under way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.config.engines import VllmEngine
from cohort.engines import vllm
from cohort.engines.base import sample
from cohort.errors import EngineError
from cohort.types import Sample
from tests.helpers.engine_conformance import iterate_events
from tests.with_vllm.questions import TINY, make_requests
from tests.with_vllm.training import (
    STEPS,
    WRONG_LOADS,
    Fault,
    GivenWeights,
    Trained,
    check_logprobs,
    check_rewards_and_gap,
    check_wrong_loads,
    copy_tensors,
    train_with,
)


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    with train_with(VllmEngine()) as trained:
        assert isinstance(trained.job.engine, vllm.VllmEngine)
        yield trained


def test_reward_rises_as_with_the_native_engine_and_the_gap_is_reported(trained: Trained):
    check_rewards_and_gap(trained)


# ---- wrong loads


@dataclass(frozen=True)
class TamperedWeights:
    """Weights of which `fault` changes some on their way into vLLM, after names and shapes were checked."""

    weights: Any
    fault: Fault
    module: Any = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            changed = self.fault(name, tensor)
            if changed is not None:
                yield name, changed


def send_wrongly(trained: Trained, fault: Fault) -> None:
    """Sends the learner's weights to vLLM, which has those of ten steps ago, with a fault on the way."""
    trained.load(trained.old, 0)
    load = trained.job.engine.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained.job.engine, "load", lambda weights, v: load(TamperedWeights(weights, fault), v))
        trained.job.sync.send(STEPS)


@pytest.mark.parametrize("kind", WRONG_LOADS)
def test_a_wrong_load_of_any_single_tensor_is_caught(trained: Trained, kind: str):
    check_wrong_loads(trained, kind, lambda fault: send_wrongly(trained, fault))


def test_a_right_load_after_wrong_ones_is_accepted(trained: Trained):
    send_wrongly(trained, lambda name, tensor: tensor)
    assert trained.job.engine.version == STEPS


# ---- loads while requests are under way


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_reload_in_flight_shows_two_versions_with_the_logprobs_of_each(trained: Trained, temperature: float):
    engine = trained.job.engine
    trained.load(trained.old, 0)
    # More requests than one prompt per slot: siblings share their first tokens.
    requests = make_requests(8, temperature=temperature, max_tokens=60, stop_ids=())
    for request in requests:
        engine.submit(request)
    done: dict[str, Sample] = {}
    for num, events in enumerate(iterate_events(engine)):
        done.update({e.id: e.sample for e in events if e.sample is not None})
        if num == 20:
            trained.load(trained.new, 1)
    assert {tuple(v for _, v in s.versions) for s in done.values()} == {(0, 1)}
    assert all(0 < s.versions[1][0] < 60 == len(s.tokens) for s in done.values())
    check_logprobs(trained, requests, done)


def test_a_proof_in_flight_disturbs_no_request(trained: Trained):
    """The proof runs vLLM's steps, so tokens are drawn meanwhile: they belong to the new version."""
    engine, sync = trained.job.engine, trained.job.sync
    trained.load(trained.old, 0)
    requests = make_requests(4, temperature=1.0, max_tokens=50, stop_ids=())
    for request in requests:
        engine.submit(request)
    done: dict[str, Sample] = {}
    for num, events in enumerate(iterate_events(engine)):
        done.update({e.id: e.sample for e in events if e.sample is not None})
        if num == 10:
            sync.send(version=STEPS + 1)
    assert {tuple(v for _, v in s.versions) for s in done.values()} == {(0, STEPS + 1)}
    check_logprobs(trained, requests, done)


def test_cached_prefixes_end_with_their_version(trained: Trained, monkeypatch: pytest.MonkeyPatch):
    engine = trained.job.engine
    assert isinstance(engine, vllm.VllmEngine)
    cached: list[int] = []
    read = engine._read_output
    monkeypatch.setattr(
        engine, "_read_output", lambda output: (cached.append(output.num_cached_tokens), read(output))[1]
    )
    # Longer than vLLM's block of 128 tokens, or nothing would be cached.
    [first] = make_requests(1, temperature=1.0, max_tokens=6, stop_ids=())
    first = replace(first, tokens=random.Random(0).choices(range(3, 500), k=300))
    for version, uses_cache in ((2, False), (2, True), (3, False), (3, True), (4, False)):
        if not uses_cache:
            trained.load(trained.new if version % 2 else trained.old, version)
        cached.clear()
        done = sample(engine, [first])
        assert cached == [256 if uses_cache else 0] * 6
        assert done["0"].versions == [(0, version)]
        check_logprobs(trained, [first], done)


def test_vllm_leaves_the_threads_of_the_process_as_they_are(trained: Trained):
    before = torch.get_num_threads()
    for num in (before + 1, before):
        torch.set_num_threads(num)
        assert torch.get_num_threads() == num


def test_vllm_takes_up_its_work_after_sleep(trained: Trained, monkeypatch: pytest.MonkeyPatch):
    """On a CPU no memory is freed, but vLLM checks the order of the calls, and does nothing until it is awake."""
    engine = trained.job.engine
    assert isinstance(engine, vllm.VllmEngine) and not engine._can_sleep
    trained.load(trained.old, 0)
    requests = make_requests(4, temperature=1.0, max_tokens=20, stop_ids=())
    before = sample(engine, requests)
    monkeypatch.setattr(engine, "_can_sleep", True)
    for version in (1, 2):
        trained.job.sync.free_memory()
        assert engine._engine.is_sleeping()
        trained.load(trained.new if version % 2 else trained.old, version)
        assert not engine._engine.is_sleeping()
        done = sample(engine, requests)
        assert {tuple(s.versions) for s in done.values()} == {((0, version),)}
        check_logprobs(trained, requests, done)
    assert {id: s.tokens for id, s in done.items()} == {id: s.tokens for id, s in before.items()}


def test_stored_numbers_are_compared_where_vllm_keeps_them(trained: Trained, monkeypatch: pytest.MonkeyPatch):
    """On a CPU vLLM packs its matrices. Without that it stores them as on a GPU: joined, in bfloat16, the head tied."""
    from vllm.model_executor.layers import utils

    def compute_plainly(layer: Any, **options: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", compute_plainly)
    engine = vllm.VllmEngine(TINY, max_context=200, slots=4, dtype="bfloat16")
    old, new = (
        {name: tensor.bfloat16() for name, tensor in copy_tensors(d).items()} for d in (trained.old, trained.new)
    )
    engine.load(GivenWeights(old), 0)
    assert engine._stores_numbers
    engine.load(GivenWeights(new), 1)
    for lost in new:
        engine.load(GivenWeights(old), 0)
        if torch.equal(old[lost], new[lost]):
            continue
        with pytest.raises(EngineError, match="stores other numbers"):
            lose_on_the_way(engine, lost, GivenWeights(new))


def lose_on_the_way(engine: vllm.VllmEngine, lost: str, weights: GivenWeights) -> None:
    """Loads weights of which one tensor is read but does not reach vLLM's model."""
    real = engine._engine.collective_rpc

    def losing_rpc(method: Any, kwargs: dict[str, Any] | None = None) -> Any:
        if method != "reload_weights":
            return real(method)
        assert kwargs is not None
        arriving = ((name, tensor) for name, tensor in kwargs["weights_iterator"] if name != lost)
        return real(method, kwargs={"weights_iterator": arriving})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._engine, "collective_rpc", losing_rpc)
        engine.load(weights, 1)
