"""What Cohort adds to the workers of vLLM: a repair of new weights on a CPU, and weights through memory of the GPU.

vLLM's servers import this file alone, by its own name, in an environment that need not have Cohort. So it imports
nothing but the standard library; torch and vLLM are there when a method is called. Cohort's own engine processes open
memory with the same code.
"""

from __future__ import annotations

import base64
import ctypes
import math
from functools import cache
from typing import Any

OPEN_FLAGS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only one that the driver has
HANDLE_BYTES = 64


class DriverHandle(ctypes.Structure):
    """What the driver calls memory that another process may open (CUipcMemHandle)."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def load_driver() -> Any:
    """Returns NVIDIA's driver. Raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments: Any) -> None:
    """Calls a function of the driver. Raises RuntimeError with what the driver says of a failure."""
    driver = load_driver()
    status = getattr(driver, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")


def name_gpu() -> str:
    """Returns the id of the current GPU, and makes the driver know this thread."""
    import torch

    # The driver's own calls need a context, which torch makes with its first one in a thread.
    torch.cuda.synchronize()
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class _WrappedMemory:
    """Memory of the current GPU in the form of which torch makes a tensor without copying."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def wrap_memory(address: int, num_bytes: int) -> Any:
    """Returns memory of the current GPU as a tensor of bytes. It is not freed with the tensor."""
    import torch

    return torch.as_tensor(_WrappedMemory(address, num_bytes), device="cuda")


def view_tensor(memory: Any, dtype: str, shape: list[int], offset: int) -> Any:
    """Returns the tensor that lies at a byte of memory."""
    import torch

    kind = getattr(torch, dtype)
    return memory[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


class OpenedMemory:
    """Memory of another process, on the GPU of this one, until `close`."""

    def __init__(self, gpu: str, data: str, num_bytes: int) -> None:
        own = name_gpu()
        if own != gpu:
            raise RuntimeError(f"the memory is on the GPU {gpu}, and this process uses {own}")
        self._address = ctypes.c_uint64()
        handle = DriverHandle.from_buffer_copy(base64.b64decode(data))
        call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(self._address), handle, ctypes.c_uint(OPEN_FLAGS))
        self.tensor = wrap_memory(self._address.value, num_bytes)

    def wait(self) -> None:
        """Returns when everything that was copied from the memory, or into it, is there."""
        import torch

        torch.cuda.synchronize()

    def close(self) -> None:
        """Gives the memory back. A second call does nothing."""
        if self.tensor is not None:
            self.wait()
            self.tensor = None
            call_driver("cuIpcCloseMemHandle", self._address)


def pack_tied_head(worker: Any) -> None:
    """Makes vLLM's packed copy of a head again that is the embedding itself, in the process of a vLLM worker.

    On a CPU vLLM computes with packed copies of its matrices. With new weights it packs those that it loads, and it
    loads no tied head: that would stay as it was. Elsewhere there are no such copies, and nothing is done.
    """
    head = getattr(worker.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


class Extension:
    """Methods that vLLM gives to its workers (`--worker-extension-cls cohort_worker.Extension`)."""

    def pack_tied_head(self) -> None:
        """Packs a tied head again: see the function of this name."""
        pack_tied_head(self)

    def begin_weights(self: Any, gpu: str, data: str, num_bytes: int) -> None:
        """Opens the memory through which new weights come, and makes vLLM expect all of them."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.cohort_memory = OpenedMemory(gpu, data, num_bytes)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.get_model())

    def take_weights(self: Any, tensors: list[tuple[str, str, list[int], int]]) -> None:
        """Loads the tensors that are in the memory now: name, type, shape and first byte of each."""
        from vllm.config import set_current_vllm_config

        memory = self.cohort_memory
        # Copies, because vLLM keeps a tensor until it has all of its layer, and others take its place in the memory.
        weights = [
            (name, view_tensor(memory.tensor, dtype, shape, offset).clone()) for name, dtype, shape, offset in tensors
        ]
        memory.wait()
        with set_current_vllm_config(self.vllm_config):
            self.get_model().load_weights(weights)

    def end_weights(self: Any) -> None:
        """Closes the memory, and makes vLLM finish what waits for the last tensor."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self.cohort_memory.close()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.get_model(), self.vllm_config.model_config)
