"""Memory of a GPU that passes between processes: the calls of the driver, which a stand-in answers here."""

from __future__ import annotations

import base64
import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cohort.engines.fleet import gpu_memory
from cohort.engines.fleet.in_vllm import cohort_worker
from cohort.engines.fleet.in_vllm.cohort_worker import DriverHandle, view_tensor
from cohort.errors import EngineError

ADDRESS = 0x7F00_0000_0000
# The name of memory has zeros in it: it is no text that ends with one.
NAME = bytes(range(32)) + bytes(32)


class Driver:
    """Stands in for the driver: hands out one address, and remembers the calls. `failures` are statuses to return."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failures: dict[str, list[int]] = {}

    def answer(self, name: str, *values: Any) -> int:
        self.calls.append((name, *values))
        return self.failures[name].pop(0) if self.failures.get(name) else 0

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        address._obj.value = ADDRESS
        return self.answer("alloc", size.value)

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        return self.answer("free", address.value)

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        ctypes.memmove(handle, NAME, len(NAME))
        return self.answer("name", address.value)

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: DriverHandle, flags: ctypes.c_uint) -> int:
        address._obj.value = ADDRESS
        return self.answer("open", bytes(handle), flags.value)

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        return self.answer("close", address.value)

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = {2: b"out of memory", 999: None}[status]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cohort_worker, "load_driver", lambda: made)
    for module in (cohort_worker, gpu_memory):
        monkeypatch.setattr(module, "name_gpu", lambda: "GPU-7")
        monkeypatch.setattr(module, "wrap_memory", lambda address, num: torch.zeros(num, dtype=torch.uint8))
    pretended = SimpleNamespace(
        synchronize=lambda *_: None, device=lambda _: nullcontext(), empty_cache=lambda: made.calls.append("empty")
    )
    monkeypatch.setattr(torch, "cuda", pretended)
    return made


def test_memory_is_taken_in_whole_pages_named_and_freed_once(driver: Driver):
    memory = gpu_memory.offer_memory((2 << 20) + 1, torch.device("cuda:0"))
    assert memory.tensor is not None and len(memory.tensor) == memory.handle.num_bytes == (2 << 20) + 1
    assert (memory.handle.gpu, base64.b64decode(memory.handle.data)) == ("GPU-7", NAME)
    memory.close()
    memory.close()
    assert driver.calls == [("alloc", 4 << 20), ("name", ADDRESS), ("free", ADDRESS)]


def test_memory_is_opened_by_its_whole_name_and_closed_once(driver: Driver):
    handle = gpu_memory.offer_memory(100, torch.device("cuda:0")).handle
    driver.calls.clear()
    memory = gpu_memory.open_memory(handle)
    assert len(memory.tensor) == 100
    memory.close()
    memory.close()
    assert driver.calls == [("open", NAME, 1), ("close", ADDRESS)]


def test_memory_that_torch_keeps_is_given_back_before_it_counts_as_lacking(driver: Driver):
    driver.failures["alloc"] = [2]
    gpu_memory.offer_memory(5, torch.device("cuda:0")).close()
    assert driver.calls == [("alloc", 2 << 20), "empty", ("alloc", 2 << 20), ("name", ADDRESS), ("free", ADDRESS)]


def test_what_the_driver_refuses_is_one_line_with_the_remedy(driver: Driver):
    handle = gpu_memory.offer_memory(100, torch.device("cuda:0")).handle
    driver.failures = {"alloc": [2, 2], "open": [999]}
    with pytest.raises(EngineError) as error:
        gpu_memory.offer_memory(300 << 20, torch.device("cuda:0"))
    words = "300 MiB of cuda:0 cannot be shared (cuMemAlloc_v2: out of memory)"
    assert str(error.value) == f"{words}. Let weights pass as files: --engine.transfer files."
    with pytest.raises(EngineError, match=r"cuIpcOpenMemHandle_v2: unknown error.*--engine\.transfer files"):
        gpu_memory.open_memory(handle)


def test_memory_that_cannot_be_passed_on_is_freed(driver: Driver):
    driver.failures["name"] = [999]
    with pytest.raises(EngineError, match=r"cuIpcGetMemHandle.*--engine\.transfer files"):
        gpu_memory.offer_memory(5, torch.device("cuda:0"))
    assert driver.calls[-1] == ("free", ADDRESS)


def test_memory_of_another_gpu_is_refused_by_name(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    handle = gpu_memory.offer_memory(100, torch.device("cuda:0")).handle
    monkeypatch.setattr(cohort_worker, "name_gpu", lambda: "GPU-8")
    with pytest.raises(EngineError, match="is on the GPU GPU-7, and this process uses GPU-8"):
        gpu_memory.open_memory(handle)


def test_a_machine_without_the_driver_is_told_so(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    def load() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cohort_worker, "load_driver", load)
    with pytest.raises(EngineError, match=r"libcuda\.so\.1.*--engine\.transfer files"):
        gpu_memory.offer_memory(1, torch.device("cuda:0"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_tensor_is_viewed_where_it_lies(dtype: str):
    memory = torch.zeros(1024, dtype=torch.uint8)
    tensor = torch.arange(6, dtype=getattr(torch, dtype)).view(2, 3)
    memory[256 : 256 + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
    view = view_tensor(memory, dtype, [2, 3], 256)
    assert torch.equal(view, tensor)
    view.zero_()
    assert not memory.any()
