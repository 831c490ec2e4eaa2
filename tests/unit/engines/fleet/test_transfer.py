"""Weights through memory that learner and engine share. Mapped files stand in for a GPU's memory; all else is real."""

from __future__ import annotations

import os
import queue
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.config.engines import NativeEngine as NativeSettings
from cohort.engines.base import ComparableEngine, Request, sample
from cohort.engines.fleet import gpu_memory, native, process, servers
from cohort.engines.fleet.base import LoadedWeights, MemoryHandle, OfferedWeights, TensorPlace
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.folder import WeightFolder
from cohort.engines.fleet.in_vllm.cohort_worker import view_tensor
from cohort.engines.fleet.incoming import IncomingWeights
from cohort.engines.fleet.served import EngineServer
from cohort.engines.fleet.transfer import MemoryTransfer, choose_transfer, find_difference
from cohort.engines.fleet.vllm_server import EXTENSION
from cohort.engines.fleet.wire import EngineCall
from cohort.engines.native.engine import NativeEngine
from cohort.engines.sync import Canary, WeightSync
from cohort.errors import EngineError, ModelError
from cohort.learner.base import LiveWeights
from cohort.models.decoder import Decoder
from cohort.serialize import dumps, loads
from tests.helpers import mapped_memory
from tests.helpers.command_line import ROOT
from tests.helpers.decoders_and_groups import naive_logprobs, small_decoder
from tests.helpers.engine_conformance import request, spell
from tests.helpers.engine_servers.worker import pretend_vllm
from tests.helpers.fleets import CONTEXT, find_process, load_decoder, make_fleet, shared_folder
from tests.helpers.served_fleets import make_fleet_of, serve
from tests.helpers.small_runs import built_job, run_steps, small_run

# The largest tensor of the small model has 7,808 bytes, and all together have 60 thousand.
PORTION = 10_000


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that is mapped takes the place of a GPU's, here and in engine processes. None may be left."""
    monkeypatch.setattr(gpu_memory, "offer_memory", mapped_memory.offer_memory)
    monkeypatch.setattr(gpu_memory, "open_memory", mapped_memory.open_memory)
    monkeypatch.setattr(process, "PROGRAM", "tests.helpers.mapped_worker")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    mapped_memory.SIZES.clear()
    yield
    mapped_memory.HOOKS.clear()
    assert not mapped_memory.OPEN


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    """Returns a function that makes a fleet of engine processes, whose weights pass through memory."""
    made: list[Fleet] = []

    def make(portion_bytes: int = PORTION, **settings: Any) -> Fleet:
        folder = WeightFolder()
        transfer = MemoryTransfer(torch.device("cpu"), folder, portion_bytes)
        monkeypatch.setattr(native, "choose_transfer", lambda *_: transfer)
        made.append(make_fleet(shared_folder(), **settings))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()
        assert fleet.transfer.version == -1


def get_folder(fleet: Fleet) -> WeightFolder:
    assert isinstance(fleet.transfer, MemoryTransfer)
    return fleet.transfer.folder


def sample_here(decoder: Decoder, requests: list[Request], version: int) -> Any:
    engine = NativeEngine(decoder, spell, 4, CONTEXT)
    engine.version = version
    return sample(engine, requests)


def make_requests() -> list[Request]:
    return [request(n % 2, n // 2, max_tokens=10 + n) for n in range(4)]


# ---- loads


def test_engines_sample_from_weights_that_came_through_memory_and_no_file_is_written(make: Callable[..., Fleet]):
    fleet = make(replicas=2)
    for version, seed in ((1, 5), (2, 6)):
        learner = small_decoder(seed=seed)
        fleet.load(LiveWeights(learner), version)
        ours = sample(fleet, make_requests())
        theirs = sample_here(learner, make_requests(), version)
        assert {id: (s.tokens, s.versions) for id, s in ours.items()} == {
            id: (s.tokens, [(0, version)]) for id, s in theirs.items()
        }
    assert len(mapped_memory.SIZES) == 4 and fleet.num_restarts == 0 and get_folder(fleet).version == -1


def test_one_process_gives_the_bits_of_an_engine_here(make: Callable[..., Fleet]):
    learner = small_decoder(seed=5)
    fleet = make()
    fleet.load(LiveWeights(learner), 3)
    assert sample(fleet, make_requests()) == sample_here(learner, make_requests(), 3)


def test_ten_loads_leave_no_memory_and_need_no_more_than_a_portion(make: Callable[..., Fleet]):
    fleet = make()
    learner = small_decoder(seed=5)
    pid = find_process(fleet)
    for version in range(10):
        with torch.no_grad():
            learner.embed.add_(0.1)
        fleet.load(LiveWeights(learner), version)
        assert not mapped_memory.OPEN
    assert mapped_memory.SIZES == [PORTION] * 10
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "/tmp/tmp" not in maps.replace(str(shared_folder()), "")


class TakingReplica:
    """Copies what it is offered into tensors of its own, and remembers what was in the memory at one time."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ends: list[int] = []

    def load_offered(self, offered: OfferedWeights, version: int) -> LoadedWeights:
        memory = gpu_memory.open_memory(offered.handle)
        for portion in offered.portions:
            assert memory.tensor is not None
            views = [view_tensor(memory.tensor, p.dtype, p.shape, p.offset) for p in portion]
            self.tensors |= {p.name: view.clone() for p, view in zip(portion, views, strict=True)}
            self.ends.append(max(p.offset + v.nbytes for p, v in zip(portion, views, strict=True)))
        return LoadedWeights(version=version)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("portion_bytes", [1, PORTION, 1 << 20])
def test_memory_is_bounded_by_a_portion_or_the_largest_tensor(dtype: torch.dtype, portion_bytes: int):
    learner = small_decoder(dtype)
    transfer = MemoryTransfer(torch.device("cpu"), WeightFolder(), portion_bytes)
    transfer.offer(LiveWeights(learner), 1)
    replica = TakingReplica()
    transfer.load_into(replica)  # type: ignore[arg-type]
    expected = dict(learner.named_weights())
    assert replica.tensors.keys() == expected.keys()
    assert all(torch.equal(replica.tensors[name], tensor) for name, tensor in expected.items())
    bound = max(portion_bytes, *(tensor.nbytes for tensor in expected.values()))
    assert [bound] == mapped_memory.SIZES and max(replica.ends) <= bound
    assert (len(replica.ends) == 1) == (portion_bytes == 1 << 20)


def test_steps_of_a_run_are_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch):
    runs = []
    for place in ("here", "process"):
        transfer = MemoryTransfer(torch.device("cpu"), WeightFolder())
        monkeypatch.setattr(native, "choose_transfer", lambda *_, made=transfer: made)
        with built_job(small_run(engine=NativeSettings(place=place))) as job:  # type: ignore[arg-type]
            runs.append([groups for groups, _ in run_steps(job, 2)])
            assert transfer.folder.version == -1 and transfer.version == (2 if place == "process" else -1)
    assert runs[0] == runs[1]


# ---- wrong loads


def spoil(tensor: Tensor, number: int) -> None:
    """Changes one bit of the second portion."""
    if number == 1:
        tensor[20] ^= 1


def test_a_bit_that_changes_on_the_way_stops_the_run(make: Callable[..., Fleet]):
    fleet = make()
    mapped_memory.HOOKS.append(spoil)
    with pytest.raises(EngineError, match=r"version 4 .* did not arrive whole in engine process 1 .*: 1 tensors have"):
        fleet.load(LiveWeights(small_decoder(seed=5)), 4)
    assert fleet.num_restarts == 0


@pytest.mark.parametrize("what", ["tensor", "portion"])
def test_a_load_that_breaks_off_is_noticed(make: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, what: str):
    fill = MemoryTransfer._fill

    def fill_partly(transfer: MemoryTransfer, *given: Any) -> Iterator[list[TensorPlace]]:
        portions = list(fill(transfer, *given)) if what == "portion" else fill(transfer, *given)
        for n, portion in enumerate(portions):
            if what == "tensor":
                yield portion[1:] if n == 1 else portion
            elif n:
                yield portion

    monkeypatch.setattr(MemoryTransfer, "_fill", fill_partly)
    fleet = make()
    with pytest.raises(ModelError, match="lack"):
        fleet.load(LiveWeights(small_decoder(seed=5)), 4)
    assert fleet.num_restarts == 0


def test_weights_of_another_model_are_refused_before_the_first_is_copied():
    decoder = load_decoder(shared_folder())
    before = decoder.embed.clone()
    other = small_decoder(num_layers=3)
    tensors = [TensorPlace(name=n, dtype="float32", shape=list(t.shape)) for n, t in other.named_weights()]
    with pytest.raises(ModelError, match=r"model\.layers\.2"):
        IncomingWeights(MemoryHandle(gpu="none", data="", num_bytes=1), tensors, decoder)
    assert torch.equal(decoder.embed, before)


class Inbox:
    """Has the end of the connection for whoever waits, and nothing for others."""

    def get(self, block: bool) -> None:
        if not block:
            raise queue.Empty


@pytest.mark.parametrize("loads", [True, False])
def test_an_engine_with_some_of_the_new_weights_makes_no_step(loads: bool):
    ours, theirs = socket.socketpair()
    server = EngineServer(ours)
    server.engine = SimpleNamespace(idle=False)  # type: ignore[assignment]
    server.inbox = Inbox()  # type: ignore[assignment]
    server.incoming = object() if loads else None  # type: ignore[assignment]
    # True = it goes on to the next step of its engine.
    assert server._handle_messages() == (not loads)
    ours.close()
    theirs.close()


# ---- lost engines


def kill_at(fleet: Fleet, at: int, tensor: Tensor, number: int) -> None:
    if number == at:
        mapped_memory.HOOKS.clear()
        os.kill(find_process(fleet), signal.SIGKILL)


def test_a_process_that_dies_in_a_load_has_the_weights_when_it_is_back(make: Callable[..., Fleet]):
    learner = small_decoder(seed=5)
    fleet = make()
    mapped_memory.HOOKS.append(partial(kill_at, fleet, 2))
    fleet.load(LiveWeights(learner), 7)
    assert fleet.num_restarts == 1 and get_folder(fleet).version == 7
    assert sample(fleet, make_requests()) == sample_here(learner, make_requests(), 7)
    path = get_folder(fleet).path
    fleet.load(LiveWeights(learner), 8)
    assert fleet.num_restarts == 1 and not path.exists(), "the files are only for replicas that are lost"


def test_a_process_that_dies_later_gets_the_current_weights_and_is_proved(make: Callable[..., Fleet]):
    learner = small_decoder(seed=5)
    fleet = make()
    fleet.load(LiveWeights(learner), 7)
    proved: list[float] = []

    def prove(part: ComparableEngine) -> None:
        # The learner is at work again by now.
        with torch.no_grad():
            learner.embed.zero_()
        proved.append(part.compute_logprobs([1, 2])[0][0])

    fleet.late_proof = prove
    [[expected]] = fleet.compute_logprobs([1, 2])
    theirs = sample_here(learner, make_requests(), 7)
    os.kill(find_process(fleet), signal.SIGKILL)
    assert sample(fleet, make_requests()) == theirs
    assert proved == [expected] and fleet.num_restarts == 1


def test_a_learner_that_has_moved_on_is_noticed(make: Callable[..., Fleet]):
    learner = small_decoder(seed=5)
    fleet = make()
    fleet.load(LiveWeights(learner), 7)
    with torch.no_grad():
        learner.embed.add_(1)
    os.kill(find_process(fleet), signal.SIGKILL)
    with pytest.raises(EngineError, match=r"version 7 .* again, and the learner has others by now: 1 tensors"):
        sample(fleet, make_requests())


def test_a_process_that_is_lost_before_the_first_load_needs_nothing(make: Callable[..., Fleet]):
    fleet = make()
    os.kill(find_process(fleet), signal.SIGKILL)
    assert sample(fleet, make_requests()) == sample_here(load_decoder(shared_folder()), make_requests(), 0)
    assert get_folder(fleet).version == -1


def test_memory_that_cannot_be_opened_is_one_line_with_the_remedy(make: Callable[..., Fleet]):
    fleet = make()
    replica = fleet._posts[0].replica
    handle = MemoryHandle(gpu="another GPU", data="", num_bytes=8)
    tensors = [TensorPlace(name=n, dtype="float32", shape=list(t.shape)) for n, t in small_decoder().named_weights()]
    with pytest.raises(EngineError, match=r"another GPU.*--engine\.transfer files"):
        replica.load_offered(OfferedWeights(handle=handle, tensors=tensors, portions=iter([])), 1)


# ---- a server of vLLM


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Fleet, Any]]]:
    """Returns a function that makes a fleet of one stand-in for vLLM's server, whose workers have Cohort's methods."""
    with ExitStack() as opened:

        def make() -> tuple[Fleet, Any]:
            pretend_vllm(monkeypatch)
            transfer = MemoryTransfer(torch.device("cpu"), WeightFolder(), PORTION)
            monkeypatch.setattr(servers, "choose_transfer", lambda *_: transfer)
            flags = ("--worker-extension-cls", EXTENSION)
            address, stand_in = opened.enter_context(serve("vllm", shared_folder(), *flags))
            fleet = make_fleet_of("vllm", shared_folder(), address)
            opened.callback(fleet.close)
            return fleet, stand_in

        yield make


def test_vllm_loads_weights_from_memory(make_server: Callable[[], tuple[Fleet, Any]]):
    fleet, stand_in = make_server()
    for version, seed in ((1, 5), (2, 6)):
        learner = small_decoder(seed=seed)
        fleet.load(LiveWeights(learner), version)
        for id, s in sample(fleet, make_requests()).items():
            prompt = next(r for r in make_requests() if r.id == id).tokens
            assert s.versions == [(0, version)]
            assert s.sampler_logprobs == pytest.approx(naive_logprobs(learner, prompt, s.tokens).tolist(), abs=1e-4)
    calls = stand_in.worker.calls
    assert calls[0] == "begin" and calls[-1] == "finish" and calls.count("load") > 2 * 2
    assert len(mapped_memory.SIZES) == 2 and get_folder(fleet).version == -1


def test_a_load_that_vllm_refuses_stops_the_run_with_the_remedy(
    make_server: Callable[[], tuple[Fleet, Any]], monkeypatch: pytest.MonkeyPatch
):
    fleet, stand_in = make_server()

    def refuse(weights: object) -> None:
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(stand_in.worker, "load_weights", refuse)
    with pytest.raises(EngineError, match=r"invalid argument.*--engine\.transfer files"):
        fleet.load(LiveWeights(small_decoder(seed=5)), 1)


def test_a_load_into_vllm_that_lacks_a_tensor_is_caught_by_the_canary(
    make_server: Callable[[], tuple[Fleet, Any]], monkeypatch: pytest.MonkeyPatch
):
    """vLLM says nothing of a tensor that does not come, and its server computes no checksums."""
    fleet, _ = make_server()
    learner = load_decoder(shared_folder())

    def compute(tokens: list[int]) -> list[float]:
        found: list[float] = naive_logprobs(learner, tokens[:1], tokens[1:]).tolist()
        return found

    canary = Canary(engine=fleet, compute=compute, vocab_size=learner.config.vocab_size, dtype="float32")
    sync = WeightSync(get_weights=lambda: LiveWeights(learner), engine=fleet, canary=canary)
    sync.start()
    for name, tensor in small_decoder(seed=6).named_weights():
        dict(learner.named_weights())[name].copy_(tensor)
    fill = MemoryTransfer._fill
    monkeypatch.setattr(MemoryTransfer, "_fill", lambda *given: (portion[1:] for portion in fill(*given)))
    with pytest.raises(EngineError, match="version 1 of the weights did not arrive whole in the vllm engine"):
        sync.send(1)


# ---- the choice


@pytest.mark.parametrize(
    ("wish", "devices", "learner", "is_divided", "passes"),
    [
        ("auto", ["cuda:0"], "cuda:0", False, True),
        ("auto", ["cuda:1", "cuda:1"], "cuda:1", False, True),
        ("files", ["cuda:0"], "cuda:0", False, False),
        ("auto", ["cuda:1"], "cuda:0", False, False),
        ("auto", ["cuda:0", "cuda:1"], "cuda:0", False, False),
        ("auto", ["cuda:0"], "cuda:0", True, False),
        ("auto", ["cpu"], "cpu", False, False),
        ("auto", ["cuda:0"], "cpu", False, False),
        ("auto", [], "cuda:0", False, False),
    ],
)
def test_memory_is_used_where_all_engines_are_on_the_learners_gpu(
    wish: Any, devices: list[str], learner: str, is_divided: bool, passes: bool
):
    folder = WeightFolder()
    chosen = choose_transfer(wish, folder, devices, learner, is_divided)
    assert isinstance(chosen, MemoryTransfer) == passes and (chosen is folder) != passes


def test_a_change_on_the_way_is_named():
    good = {"a": 1, "b": 2, "c": 3}
    assert find_difference(good, dict(good)) == ""
    assert find_difference(good, good | {"b": 7}) == "1 tensors have other numbers, b among them"
    assert find_difference(good, {"a": 1, "b": 2}) == "it lacks 1 tensors, c among them"
    assert find_difference(good, good | {"odd": 3}) == "it has also 1 tensors, odd among them"


def test_a_handle_travels_as_plain_values():
    place = TensorPlace(name="x", dtype="bfloat16", shape=[2, 3], offset=256)
    call = EngineCall(number=1, what="open", memory=MemoryHandle(gpu="g", data="AAAA", num_bytes=9), tensors=[place])
    assert loads(dumps(call)) == call


# ---- memory of a GPU that is divided


def test_an_engine_that_is_not_alone_on_its_gpu_gets_a_share():
    assert native.is_alone("cuda:1", ("cuda:1", "cuda:2"), ["cuda:0"])
    assert not native.is_alone("cuda:0", ("cuda:0",), ["cuda:0"])
    assert not native.is_alone("cuda:1", ("cuda:1", "cuda:1"), ["cuda:0"])
    assert native.is_alone("cpu", ("cpu", "cpu"), ["cpu"])


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_process_beside_the_learner_is_told_its_share(monkeypatch: pytest.MonkeyPatch, device: str):
    hellos: list[float] = []
    monkeypatch.setattr(native, "Fleet", lambda name, replicas, *_: hellos.extend(r.hello.memory for r in replicas))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    model = native.ProcessModel(
        folder=shared_folder(), dtype="float32", device="cuda:0", context=8, vocab_size=9, threads=1, window=None
    )
    native.make_native_fleet(NativeSettings(place="process", devices=(device,), memory=0.3), model)
    assert hellos == [0.3 if device == "cuda:0" else 1.0]
