"""Native engines in processes of their own: they keep the protocol, and give what an engine in this process gives."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cohort.engines.base import Abilities, Engine, Request, sample
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.native import check_gpus, choose_devices, show_devices
from cohort.engines.fleet.process import ProcessReplica
from cohort.engines.native.engine import NativeEngine
from cohort.engines.sync import Canary, WeightSync
from cohort.errors import ConfigError, EngineError, ModelError
from cohort.learner.base import LiveWeights
from cohort.models.decoder import Decoder
from cohort.models.shards import TensorSpec
from cohort.system.kernel import list_children
from tests.helpers.decoders_and_groups import naive_logprobs, small_decoder
from tests.helpers.engine_conformance import EngineConformance, request, spell
from tests.helpers.fleets import (
    CONTEXT,
    find_process,
    load_decoder,
    make_fleet,
    run_kill_campaign,
    shared_folder,
    write_folder,
)

FLEETS: dict[int, Fleet] = {}


def start_fleet(slots: int) -> Fleet:
    """Returns a fleet of one process with this many slots. It is started once, and again after it was closed."""
    if slots not in FLEETS or FLEETS[slots]._closed:
        FLEETS[slots] = make_fleet(shared_folder(), slots=slots)
    return FLEETS[slots]


@pytest.fixture(autouse=True, scope="module")
def end_fleets() -> Iterator[None]:
    yield
    for fleet in FLEETS.values():
        fleet.close()
    FLEETS.clear()


class TestConformance(EngineConformance):
    abilities = Abilities(streams=False)

    def make(self, slots: int = 4) -> Fleet:
        fleet = start_fleet(slots)
        for id in list(fleet._list_ids()):
            fleet.abort(id)
        fleet.poll()
        fleet.load(self.weights(fleet), 0)
        return fleet

    def weights(self, engine: Engine) -> LiveWeights:
        return LiveWeights(load_decoder(shared_folder()))

    def dying(self) -> Fleet:
        fleet = make_fleet(shared_folder(), restarts=0)
        os.kill(find_process(fleet), signal.SIGKILL)
        return fleet


def make_here(dtype: torch.dtype = torch.float32, slots: int = 4) -> NativeEngine:
    return NativeEngine(load_decoder(shared_folder(), dtype), spell, slots, CONTEXT)


def make_requests(num: int = 12, **changes: int) -> list[Request]:
    return [request(n % 3, n // 3, max_tokens=10 + 3 * n, **changes) for n in range(num)]


def test_samples_equal_those_of_an_engine_here_bit_for_bit():
    requests = make_requests()
    assert sample(start_fleet(4), requests) == sample(make_here(), requests)


def test_two_replicas_draw_the_same_tokens_in_float64():
    requests = make_requests()
    fleet = make_fleet(shared_folder(), replicas=2, dtype="float64")
    try:
        ours, theirs = sample(fleet, requests), sample(make_here(torch.float64), requests)
    finally:
        fleet.close()
    assert ours.keys() == theirs.keys()
    for id, s in ours.items():
        assert s.tokens == theirs[id].tokens
        assert s.sampler_logprobs == pytest.approx(theirs[id].sampler_logprobs, abs=1e-10)


def test_new_weights_are_used_and_proved(tmp_path: Path):
    learner = small_decoder(seed=5)
    fleet = start_fleet(4)
    canary = Canary(
        engine=fleet, compute=lambda t: compute(learner, t), vocab_size=learner.config.vocab_size, dtype="float32"
    )
    canary.tolerance = 1e-5
    sync = WeightSync(get_weights=lambda: LiveWeights(learner), engine=fleet, canary=canary)
    sync.specs = learner.weight_specs()
    sync.send(3)
    assert sync.metrics["sync/gap"] < 1e-5 and fleet.late_proof is not None
    for id, s in sample(fleet, make_requests(3)).items():
        prompt = next(r for r in make_requests(3) if r.id == id).tokens
        assert s.versions == [(0, 3)]
        assert s.sampler_logprobs == pytest.approx(naive_logprobs(learner, prompt, s.tokens).tolist(), abs=1e-4)
    assert stat.S_IMODE(fleet.transfer.path.stat().st_mode) == 0o700


def compute(decoder: Decoder, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        found: list[float] = naive_logprobs(decoder, tokens[:1], tokens[1:]).tolist()
    return found


def test_a_load_under_way_begins_a_version_with_right_logprobs_on_both_sides(tmp_path: Path):
    """A deep narrow model is slow enough that the load finds the sample under way."""
    shape = {"num_layers": 24, "max_positions": 512}
    old, new = (small_decoder(seed=seed, std=0.15, **shape) for seed in (1, 2))
    fleet = make_fleet(write_folder(tmp_path / "model", seed=1, std=0.15, **shape))
    try:
        for _ in range(5):
            fleet.submit(request(max_tokens=120))
            fleet.poll(0.3)
            fleet.load(LiveWeights(new), 7)
            done = sample(fleet, [])["0/0"]
            if len(done.versions) == 2:
                break
            # The machine was so slow or quick that the load came before the first token or after the last one.
            fleet.load(LiveWeights(old), 0)
    finally:
        fleet.close()
    [(_, first), (begin, second)] = done.versions
    assert (first, second) == (0, 7) and 0 < begin < 120
    for decoder, part in ((old, slice(begin)), (new, slice(begin, None))):
        expected = naive_logprobs(decoder, request().tokens, done.tokens).tolist()
        assert done.sampler_logprobs[part] == pytest.approx(expected[part], abs=1e-3)


class Missing:
    """Weights of another model: one tensor has another shape."""

    module = None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in self}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in small_decoder().named_weights():
            yield name, tensor[:1] if name.endswith("gate_proj.weight") else tensor


def test_weights_that_do_not_fit_are_an_error_of_the_model_and_cause_no_restart(tmp_path: Path):
    fleet = make_fleet(shared_folder())
    try:
        with pytest.raises(ModelError, match="shape"):
            fleet.load(Missing(), 1)
        assert fleet.num_restarts == 0
    finally:
        fleet.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_a_process_that_dies_or_hangs_is_started_again(how: signal.Signals, caplog: pytest.LogCaptureFixture):
    expected = sample(make_here(), make_requests())
    fleet = make_fleet(shared_folder(), replicas=2, patience=15.0)
    try:
        first = find_process(fleet)
        for r in make_requests():
            fleet.submit(r)
        fleet.poll()
        # Only replicas that hang wait for the limit.
        for post in fleet._posts:
            assert isinstance(post.replica, ProcessReplica)
            post.replica.patience = 1.5 if how == signal.SIGSTOP else 60.0
        os.kill(first, how)
        done = sample(fleet, [])
        for post in fleet._posts:
            post.replica.patience = 60.0  # type: ignore[attr-defined]
        fleet._wait_for_starters()
        assert {id: s.tokens for id, s in done.items()} == {id: s.tokens for id, s in expected.items()}
        assert find_process(fleet) != first and fleet.num_restarts >= 1
        if how == signal.SIGSTOP:
            assert "has said nothing for" in caplog.text
            # Guard and process are gone, though the process could not run.
            assert first not in list_children(os.getpid())
    finally:
        fleet.close()
    assert not fleet.transfer.version >= 0


@pytest.mark.slow
def test_no_request_is_lost_or_doubled_by_kills_at_random_moments(tmp_path: Path):
    done = run_kill_campaign(write_folder(tmp_path / "model", num_layers=12), num_kills=25, seed=0)
    assert done.kills == 25 and done.restarts >= 25 and done.kills_while_sampling >= 5
    assert (done.lost, done.doubled, done.wrong, done.unequal_versions) == (0, 0, 0, 0)


def test_closing_leaves_no_process_and_no_folder():
    fleet = make_fleet(shared_folder())
    pid = find_process(fleet)
    fleet.load(LiveWeights(load_decoder(shared_folder())), 1)
    path = fleet.transfer.path
    fleet.close()
    assert not path.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_model_that_cannot_be_loaded_is_said_as_it_is(tmp_path: Path):
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors") as error:
        make_fleet(folder)
    assert "\n" not in str(error.value)


def test_a_process_that_fails_at_its_start_is_named_with_what_it_printed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(
        EngineError, match=r"engine process 1 of 1 \(cpu\) did not start: it exited with code 1; it had"
    ):
        make_fleet(shared_folder())


DEVICES = [
    (("cuda:x",), 1, "cpu", 'engine.devices has "cuda:x"'),
    (("gpu",), 1, "cpu", "write cpu, or cuda:N"),
    (("cpu",), 2, "cpu", "names 1 devices, but engines need 4 on this machine: 2"),
    ((), 1, "cuda", "--engine.devices cuda:1 cuda:2"),
]


@pytest.mark.parametrize(("given", "num", "device", "words"), DEVICES)
def test_impossible_devices_are_refused(given: tuple[str, ...], num: int, device: str, words: str):
    with pytest.raises(ConfigError) as error:
        choose_devices(given, num, device, rank=1, num_ranks=2)
    assert words in str(error.value)


def test_devices_are_divided_among_ranks(monkeypatch: pytest.MonkeyPatch):
    given = tuple(f"cuda:{n}" for n in range(4))
    assert choose_devices(given, 2, "cuda", rank=1, num_ranks=2) == ["cuda:2", "cuda:3"]
    assert choose_devices((), 2, "cpu", rank=1, num_ranks=2) == ["cpu", "cpu"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert show_devices(["cuda:3"]) == {"CUDA_VISIBLE_DEVICES": "3"} and show_devices(["cpu"]) == {}
    assert show_devices(["cuda:3", "cuda:1"]) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert show_devices(["cuda:1"]) == {"CUDA_VISIBLE_DEVICES": "6"}
    with pytest.raises(ConfigError, match="shows 2 GPUs"):
        show_devices(["cuda:2"])


def test_gpus_that_are_not_there_are_refused():
    check_gpus(["cpu", "cuda:0", "cuda:1"], 2)
    with pytest.raises(ConfigError, match="names cuda:2, but torch sees 2 GPUs"):
        check_gpus(["cuda:0", "cuda:2"], 2)
