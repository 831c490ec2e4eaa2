"""The order of calls to vLLM when it shares a GPU with a learner, checked by a stand-in that refuses a wrong order."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import cohort
from cohort.engines import vllm as engine_module
from cohort.engines.base import SleepingEngine
from cohort.engines.sync import WeightSync
from cohort.engines.vllm import VllmEngine
from cohort.errors import EngineError
from tests.helpers.engine_conformance import request
from tests.helpers.small_runs import built_job, run_steps, small_run

TINY = Path(cohort.__file__).parent / "models" / "tiny"
PARTS = ("weights", "kv_cache")


@dataclass
class EngineArgs:
    """The settings of vLLM that the engine uses."""

    model: str = ""
    dtype: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 0
    gpu_memory_utilization: float = 0.0
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = True
    generation_config: str = ""
    logprobs_mode: str = ""
    disable_log_stats: bool = False
    use_tqdm_on_load: bool = True
    load_format: str = ""
    enable_sleep_mode: bool = False
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False
    kv_cache_memory_bytes: int | None = None


class StandIn:
    """vLLM's engine object without a model. It refuses what vLLM refuses, and what would use memory that is not there.

    `calls` has every call that matters for sleep. With `memory` False nothing can be woken.
    """

    newest: ClassVar[StandIn]

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        self.asleep: list[str] = []
        self.weights: dict[str, Tensor] | None = {}  # None = undefined content
        self.requests: list[str] = []
        self.calls: list[str] = []
        self.memory = True
        self.stores_numbers = True
        self.wrong: dict[str, Tensor] = {}  # stored in place of those that are sent
        self.lost: set[str] = set()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 512)
        StandIn.newest = self

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> StandIn:
        # It looks at what the engine changes for the start alone.
        torch.ops._C.init_cpu_memory_env([0])
        torch.set_num_threads = lambda num: None
        return cls(args)

    def sleep(self, level: int) -> None:
        assert self.args.enable_sleep_mode, "sleep mode is not enabled"
        assert not self.asleep and not self.requests, "asleep already, or would abort requests"
        assert level == 2
        self.calls.append("sleep")
        self.asleep, self.weights = list(PARTS), None

    def wake_up(self, tags: list[str]) -> None:
        if not self.memory:
            raise RuntimeError("CUDA Error: out of memory.")
        for tag in tags:
            # 0.26 restores the buffers of the weights with the first call, whichever part it wakes.
            assert self.asleep[:1] == [tag], f"{tag} is awake, or its turn comes later"
            self.asleep.remove(tag)
            self.calls.append(f"wake {tag}")

    def collective_rpc(self, method: str | Callable[[Any], Any], kwargs: dict[str, Any] | None = None) -> list[Any]:
        assert "weights" not in self.asleep, "the memory of the weights is not there"
        if callable(method):
            return [method(SimpleNamespace(get_model=lambda: SimpleNamespace(parameters=self.store)))]
        assert method == "reload_weights" and kwargs is not None
        self.weights = dict(kwargs["weights_iterator"])
        self.calls.append("load")
        return [None]

    def store(self) -> list[Tensor]:
        """Returns the weights as vLLM stores them: joined to one matrix, and padded with zeros."""
        assert self.weights is not None
        stored = {**self.weights, **self.wrong}
        parts = [tensor for name, tensor in stored.items() if name not in self.lost]
        return [torch.cat([*parts[::-1], torch.zeros(2, 4, dtype=torch.bfloat16)])] if self.stores_numbers else []

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        assert not self.asleep and reset_running_requests
        self.calls.append("drop KV")
        return True

    def add_request(self, id: str, prompt: Any, params: Any) -> None:
        assert not self.asleep and self.weights is not None, "vLLM would wait for ever, or draw from undefined weights"
        self.requests.append(id)

    def abort_request(self, ids: list[str]) -> None:
        self.requests = [id for id in self.requests if id not in ids]


def install(monkeypatch: pytest.MonkeyPatch, device: str = "cuda", version: str = "0.32.0") -> None:
    """Puts a stand-in for the package vllm where `import` finds it."""
    platform = SimpleNamespace(is_cpu=lambda: device == "cpu", is_sleep_mode_available=lambda: device != "cpu")
    parts: dict[str, dict[str, Any]] = {
        "vllm.inputs": {"tokens_input": lambda tokens: tokens},
        "vllm.platforms": {"current_platform": platform},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA=1)},
        "vllm": {"EngineArgs": EngineArgs, "LLMEngine": StandIn, "SamplingParams": dict, "__version__": version},
    }
    package = ModuleType("vllm")
    for name, values in parts.items():
        module = package if name == "vllm" else ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        if module is not package:
            setattr(package, name.removeprefix("vllm."), module)
    engine_module.warn_once.cache_clear()


@pytest.fixture(autouse=True)
def keep_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what importing vLLM does to this process."""
    for name, value in engine_module.VLLM_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    level = logging.getLogger("vllm").level
    yield
    logging.getLogger("vllm").setLevel(level)


def make(shares_gpu: bool = True) -> tuple[VllmEngine, StandIn]:
    """Returns an engine on the stand-in, and the stand-in."""
    return VllmEngine(TINY, max_context=100, slots=4, shares_gpu=shares_gpu), StandIn.newest


def make_tensors(seed: int) -> dict[str, Tensor]:
    """Returns two matrices of random numbers in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 4, generator=generator).bfloat16() for name in ("a", "b")}


@dataclass
class GivenWeights:
    """Weights from a dict."""

    tensors: dict[str, Tensor] = field(default_factory=lambda: make_tensors(seed=0))
    module: Any = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def test_weights_are_loaded_before_kv_wakes(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    engine, inner = make()
    assert isinstance(engine, SleepingEngine)
    for version in (1, 2):
        inner.calls.clear()
        engine.submit(request())
        engine.abort("0/0")
        engine.sleep()
        engine.sleep()  # nothing is left to free
        assert inner.asleep == list(PARTS)
        engine.load(GivenWeights(), version)
        assert inner.calls == ["sleep", "wake weights", "load", "wake kv_cache", "drop KV"]
        assert engine.version == version and inner.weights is not None and list(inner.weights) == ["a", "b"]


def test_a_load_without_sleep_wakes_nothing(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    engine, inner = make()
    engine.submit(request())
    engine.load(GivenWeights(), 1)
    assert inner.calls == ["load", "drop KV"] and inner.requests == ["0/0"]


def test_vllm_stays_awake_while_requests_are_under_way(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    engine, inner = make()
    engine.submit(request())
    engine.sleep()
    assert inner.calls == [] and inner.requests == ["0/0"]
    engine.abort("0/0")
    engine.sleep()
    assert inner.calls == ["sleep"]
    engine.close()
    engine.sleep()
    assert inner.calls == ["sleep"]


def test_a_request_to_a_sleeping_engine_is_refused(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    engine, _ = make()
    engine.sleep()
    with pytest.raises(EngineError, match="vLLM sleeps and has no weights"):
        engine.submit(request())
    assert engine.idle and engine.poll() == []
    engine.load(GivenWeights(), 1)
    engine.submit(request())


def test_too_little_memory_to_wake_up_names_the_setting(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    engine, inner = make()
    engine.sleep()
    inner.memory = False
    with pytest.raises(EngineError, match=r"no GPU memory for its weights .* out of memory\. Lower --engine.memory"):
        engine.load(GivenWeights(), 1)
    with pytest.raises(EngineError, match="sleeps"):
        engine.submit(request())


def change_one_bit(tensor: Tensor) -> Tensor:
    """Returns a copy whose last number differs in its last bit."""
    changed = tensor.clone()
    changed.view(torch.int16)[-1, -1] ^= 1
    return changed


def test_numbers_that_differ_from_those_sent_are_noticed_to_the_last_bit(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch)
    engine, inner = make()
    old, new = make_tensors(seed=1), make_tensors(seed=2)
    engine.load(GivenWeights(old), 1)
    engine.load(GivenWeights(new), 2)
    words = "version 3 of the weights did not arrive whole in the vllm engine: it stores other numbers"
    for wrong in ({"a": old["a"]}, {"b": change_one_bit(new["b"])}, {"a": new["a"] * 2}, old):
        inner.wrong = wrong
        with pytest.raises(EngineError, match=words):
            engine.load(GivenWeights(new), 3)
    inner.wrong, inner.lost = {}, {"b"}
    with pytest.raises(EngineError, match=words):
        engine.load(GivenWeights(new), 3)
    inner.lost = set()
    engine.load(GivenWeights(new), 3)
    assert engine.version == 3


def test_numbers_are_not_compared_where_vllm_stores_packed_copies(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "cpu")
    engine, inner = make()
    inner.stores_numbers = False
    for version in (1, 2):
        engine.load(GivenWeights(make_tensors(version)), version)
    assert engine.version == 2


@pytest.mark.parametrize(("device", "shares_gpu"), [("cuda", False), ("cpu", True), ("cpu", False)])
def test_vllm_does_not_sleep_where_no_learner_needs_its_memory(
    device: str, shares_gpu: bool, monkeypatch: pytest.MonkeyPatch
):
    install(monkeypatch, device)
    engine, inner = make(shares_gpu)
    engine.sleep()
    engine.load(GivenWeights(), 1)
    assert not inner.args.enable_sleep_mode and inner.calls == ["load", "drop KV"]


def test_settings_by_device(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "cpu")
    args = make()[1].args
    assert (args.enforce_eager, args.enable_chunked_prefill, args.kv_cache_memory_bytes) == (True, False, 1 << 30)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert make()[1].args.kv_cache_memory_bytes is None  # vLLM follows the variable
    install(monkeypatch, "cuda")
    args = make()[1].args
    assert (args.enforce_eager, args.enable_chunked_prefill, args.kv_cache_memory_bytes) == (False, True, None)
    assert args.enable_sleep_mode and args.logprobs_mode == "processed_logprobs"


def test_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "cpu")
    before = torch.set_num_threads
    make()
    assert torch.set_num_threads is before and "init_cpu_memory_env" not in vars(torch.ops._C)


@pytest.mark.parametrize(
    ("device", "version", "words"),
    [
        ("cpu", "0.32.1", []),
        ("cpu", "0.26.0", ["vLLM 0.26.0 was never tried with Cohort, only 0.32"]),
        ("cpu", "0.320.0", ["vLLM 0.320.0 was never tried with Cohort, only 0.32"]),
        ("cuda", "0.32.0", ["vLLM as a part of training was never tried on this hardware, only on a CPU"]),
    ],
)
def test_what_was_never_tried_is_said_once(
    device: str, version: str, words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    install(monkeypatch, device, version)
    with caplog.at_level(logging.WARNING, "cohort"):
        make()
        make()
    assert [record.getMessage() for record in caplog.records] == words


def test_the_loop_frees_the_engines_memory_for_the_update(monkeypatch: pytest.MonkeyPatch):
    """The engine is asleep exactly from the end of a rollout to the next load."""
    happened: list[str] = []
    with built_job(small_run(steps=2)) as job:
        engine, learner = job.engine, job.learner

        def record(target: Any, name: str) -> None:
            original = getattr(target, name)

            def recorded(*args: Any, **kwargs: Any) -> Any:
                if happened[-1:] != [name]:
                    happened.append(name)
                return original(*args, **kwargs)

            monkeypatch.setattr(target, name, recorded)

        monkeypatch.setattr(engine, "sleep", lambda: None, raising=False)
        for target, name in ((engine, "submit"), (engine, "sleep"), (learner, "update"), (engine, "load")):
            record(target, name)
        run_steps(job, 2)
    assert happened == ["submit", "sleep", "update", "load"] * 2


def test_an_engine_without_memory_of_its_own_is_left_alone():
    WeightSync(get_weights=GivenWeights, engine=SimpleNamespace(name="native")).free_memory()  # type: ignore[arg-type]
