"""An engine process on the learner's own GPU: weights reach it through the GPU's memory, and none of it is left."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.device import only_gpu

pytest.importorskip("tyro")

# isort: split

from cohort.config.engines import EngineConfig, NativeEngine
from cohort.config.rollout import RolloutConfig
from cohort.config.schema import LearnerConfig
from cohort.engines.fleet import gpu_memory
from cohort.engines.fleet.base import TensorPlace
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.folder import WeightFolder
from cohort.engines.fleet.transfer import MemoryTransfer
from cohort.errors import EngineError, ModelError
from cohort.jobs.build import RLJob
from cohort.models.device import limit_memory
from tests.helpers.fleets import find_process
from tests.helpers.small_runs import built_job, run_steps, small_run

pytestmark = only_gpu

BESIDE = NativeEngine(place="process", devices=("cuda:0",), memory=0.3)
MIB = 1 << 20


def config(engine: EngineConfig, dtype: str = "float32") -> Any:
    """Returns a small run on the GPU. In fp32 the canary and the comparison of tokens are sharp."""
    learner = LearnerConfig(dtype=dtype)  # type: ignore[arg-type]
    return replace(small_run(engine=engine, learner=learner), device="cuda", rollout=RolloutConfig(order="rounds"))


@contextmanager
def built(engine: EngineConfig, dtype: str = "float32") -> Iterator[RLJob]:
    """Yields the job of a run, and lets torch have the whole GPU again afterwards."""
    try:
        with built_job(config(engine, dtype)) as job:
            yield job
    finally:
        limit_memory(torch.device("cuda", 0), 1.0)


def get_transfer(job: RLJob) -> MemoryTransfer:
    assert isinstance(job.engine, Fleet) and isinstance(job.engine.transfer, MemoryTransfer)
    return job.engine.transfer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_steps_are_those_of_an_engine_in_the_process(dtype: str) -> None:
    """Equal bits are not promised on a GPU, but the same keys draw the same tokens up to near ties, and from the first
    step's weights all of them do.
    """
    found = []
    for engine in (NativeEngine(), BESIDE):
        with built(engine, dtype) as job:
            found.append([(groups, dict(record.metrics)) for groups, record in run_steps(job, 2)])
    here, beside = found
    for (groups, metrics), (theirs, _) in zip(beside, here, strict=True):
        assert [g.prompt.id for g in groups] == [g.prompt.id for g in theirs]
        assert metrics["sampler_gap/mean"] < (1e-3 if dtype == "float32" else 0.05)
        assert metrics["sync/load_seconds"] > 0 and metrics["sync/gap"] >= 0
    ours, theirs = ([x.tokens for g in steps[0][0] for x in g.samples] for steps in (beside, here))
    equal = sum(x == y for x, y in zip(ours, theirs, strict=True))
    assert equal >= (0.95 if dtype == "float32" else 0.5) * len(ours), f"{equal} of {len(ours)}"


def test_weights_pass_through_memory_and_the_learner_leaves_room(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), built(BESIDE) as job:
        assert isinstance(job.engine, Fleet)
        job.sync.send(1)
        assert get_transfer(job).folder.version == -1 and job.engine.num_restarts == 0
        total = torch.cuda.mem_get_info()[1]
        assert torch.cuda.get_per_process_memory_fraction(0) < 0.7
        assert job.learner.plan is not None and job.learner.plan.available < 0.7 * total
        assert job.learner.plan.kv == 0
    assert "engines on the learner's GPU get 30% of its memory" in caplog.text


def test_files_give_the_same_samples() -> None:
    found = []
    for transfer in ("auto", "files"):
        with built(replace(BESIDE, transfer=transfer)) as job:
            assert isinstance(job.engine, Fleet)
            assert isinstance(job.engine.transfer, MemoryTransfer if transfer == "auto" else WeightFolder)
            found.append([[s.tokens for g in groups for s in g.samples] for groups, _ in run_steps(job, 1)])
    assert found[0] == found[1]


# ---- wrong loads

Spoil = Callable[[Iterator[list[TensorPlace]], Tensor], Iterator[list[TensorPlace]]]


def flip(portions: Iterator[list[TensorPlace]], memory: Tensor) -> Iterator[list[TensorPlace]]:
    """Changes one bit on the way."""
    for portion in portions:
        memory[portion[0].offset] ^= 1
        torch.cuda.synchronize()
        yield portion


def swap(portions: Iterator[list[TensorPlace]], memory: Tensor) -> Iterator[list[TensorPlace]]:
    """Exchanges two tensors of one shape."""
    for portion in portions:
        a, b = [p for p in portion if p.name.endswith("input_layernorm.weight")][:2]
        moved = {a.name: replace(a, offset=b.offset), b.name: replace(b, offset=a.offset)}
        yield [moved.get(p.name, p) for p in portion]


def lose(portions: Iterator[list[TensorPlace]], memory: Tensor) -> Iterator[list[TensorPlace]]:
    """Loses a tensor."""
    for portion in portions:
        yield portion[1:]


WRONG = [(flip, "1 tensors have other"), (swap, "2 tensors have other"), (lose, "lack 1")]


@pytest.mark.parametrize(("spoil", "words"), WRONG)
def test_a_wrong_load_is_caught(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, words: str) -> None:
    fill = MemoryTransfer._fill

    def fill_wrongly(transfer: MemoryTransfer, memory: Any, weights: Any) -> Iterator[list[TensorPlace]]:
        return spoil(fill(transfer, memory, weights), memory.tensor)

    with built(BESIDE) as job:
        with torch.no_grad():
            # The two norms of `swap` must differ.
            for n, p in enumerate(job.learner.decoder.parameters()):
                p.add_(0.001 * n)
        monkeypatch.setattr(MemoryTransfer, "_fill", fill_wrongly)
        with pytest.raises((EngineError, ModelError), match=words):
            job.sync.send(1)


# ---- memory


def measure_used() -> int:
    """Returns the bytes of the GPU that all processes use, without what torch keeps here of freed tensors."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def test_ten_loads_leave_no_memory() -> None:
    with built(BESIDE) as job:
        # The first ones make workspaces that stay.
        for version in (1, 2):
            job.sync.send(version)
        before = measure_used()
        for version in range(3, 13):
            job.sync.send(version)
        assert abs(measure_used() - before) < 64 * MIB


def test_a_process_that_is_killed_leaves_no_memory_and_gets_the_weights_again() -> None:
    with built(BESIDE) as job:
        assert isinstance(job.engine, Fleet)
        job.sync.send(1)
        job.sync.send(2)
        before = measure_used()
        [expected] = job.engine.compute_logprobs([1, 2, 3])
        os.kill(find_process(job.engine), signal.SIGKILL)
        while not job.engine.num_restarts:
            job.engine.poll()
        [found] = job.engine.compute_logprobs([1, 2, 3])
        assert found == pytest.approx(expected, abs=1e-5)
        assert get_transfer(job).folder.version == 2 and job.engine.num_restarts == 1
        job.sync.send(3)
        assert get_transfer(job).folder.version == -1
        assert abs(measure_used() - before) < 256 * MIB


def test_a_portion_bounds_the_memory_and_is_freed() -> None:
    device = torch.device("cuda", 0)
    # The first one makes what the driver keeps.
    gpu_memory.offer_memory(8 * MIB, device).close()
    before = measure_used()
    memory = gpu_memory.offer_memory(64 * MIB, device)
    assert measure_used() - before == pytest.approx(64 * MIB, abs=4 * MIB)
    assert memory.tensor is not None
    memory.tensor.fill_(7)
    assert int(memory.tensor.sum()) == 7 * 64 * MIB
    memory.close()
    assert abs(measure_used() - before) < 4 * MIB


def test_segments_that_grow_are_no_obstacle() -> None:
    """torch's allocator may keep tensors in memory that cannot be passed on. Ours is not from it."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with built(BESIDE) as job:
            job.sync.send(1)
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
