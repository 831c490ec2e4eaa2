"""A worker of vLLM's stand-in, with the methods that real workers get from Cohort, and the parts of vLLM these call."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from cohort.engines.fleet.in_vllm import cohort_worker
from tests.helpers import mapped_memory

WORKER_METHODS = ("begin_weights", "take_weights", "end_weights")


class StandInWorker(cohort_worker.Extension):
    """A worker, and its model. As the real one it uses tensors only when a load is finished, in `sampler`."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.vllm_config = SimpleNamespace(model_config="the model's config")
        self.calls: list[str] = []
        self.waiting: list[tuple[str, Tensor]] = []

    def get_model(self) -> StandInWorker:
        """Returns what has `load_weights`."""
        return self

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keeps tensors until the load is finished."""
        self.calls.append("load")
        self.waiting += weights


def begin(model: StandInWorker) -> None:
    """Begins a load."""
    model.calls.append("begin")
    model.waiting = []


def finish(model: StandInWorker, config: object) -> None:
    """Finishes a load."""
    assert config == "the model's config"
    model.calls.append("finish")
    model.sampler.load(model.waiting, refuses_unknown=True)


def pretend_vllm(patch: pytest.MonkeyPatch) -> None:
    """Makes this process have what the methods of workers need of vLLM, and mapped memory in place of a GPU's."""
    modules = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda config: nullcontext()},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": begin,
            "finalize_layerwise_reload": finish,
        },
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        patch.setitem(sys.modules, name, module)

    def open_memory(gpu: str, data: str, num_bytes: int) -> mapped_memory.MappedMemory:
        assert gpu == mapped_memory.GPU
        return mapped_memory.MappedMemory(data, num_bytes)

    patch.setattr(cohort_worker, "OpenedMemory", open_memory)
