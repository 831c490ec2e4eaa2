"""How new weights get from the learner to the replicas of a fleet: as files, or through memory of a common GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, Protocol

import torch

from cohort.engines.base import Weights
from cohort.engines.fleet import gpu_memory
from cohort.engines.fleet.base import LoadedWeights, OfferedWeights, Replica, TensorPlace
from cohort.engines.fleet.checksum import compute_checksum
from cohort.engines.fleet.folder import WeightFolder
from cohort.engines.fleet.in_vllm.cohort_worker import view_tensor
from cohort.errors import EngineError

log = logging.getLogger(__name__)

PORTION_BYTES = 256 << 20
# Where a tensor may begin, in bytes.
ALIGNMENT = 256


class Transfer(Protocol):
    """The way of weights to the replicas of a fleet."""

    version: int  # of the current weights; -1 = there are none
    checksums: dict[str, int]  # of the current tensors as the learner has them, by name

    def offer(self, weights: Weights, version: int) -> None:
        """Makes these weights the current ones. The learner must not change them before `load_into` has ended."""

    def load_into(self, replica: Replica) -> LoadedWeights:
        """Makes a replica load the current weights, and returns what it has then. Raises as `Replica.load` does."""

    def keep(self) -> None:
        """Makes `load_into` work later, whatever the learner does meanwhile. It must still have the current weights."""

    def close(self) -> None:
        """Gives up all memory and files. A second call does nothing."""


class MemoryTransfer:
    """Passes weights through memory of the GPU on which both learner and replicas are.

    At most `portion_bytes` are taken, or the size of the largest tensor. A replica that is lost later finds the weights
    in `folder`: they are written when it is lost, because the learner has them as long as requests are under way.
    """

    def __init__(self, device: torch.device, folder: WeightFolder, portion_bytes: int = PORTION_BYTES) -> None:
        self.device = device
        self.folder = folder
        self.portion_bytes = portion_bytes
        self.version = -1
        self.checksums: dict[str, int] = {}
        self._weights: Weights | None = None

    def offer(self, weights: Weights, version: int) -> None:
        """Makes these weights the current ones, and computes their checksums where the learner has them."""
        self.folder.close()
        self.version = -1
        self.checksums = {name: compute_checksum(tensor) for name, tensor in weights}
        self._weights, self.version = weights, version

    def load_into(self, replica: Replica) -> LoadedWeights:
        """Makes a replica load the current weights, from the folder if they are there."""
        if self.folder.version == self.version:
            return self.folder.load_into(replica)
        assert self._weights is not None
        tensors = [
            TensorPlace(name=name, dtype=str(spec.dtype).removeprefix("torch."), shape=list(spec.shape))
            for name, spec in self._weights.specs.items()
        ]
        largest = max(spec.num_bytes for spec in self._weights.specs.values())
        memory = gpu_memory.offer_memory(max(largest, self.portion_bytes), self.device)
        try:
            portions = self._fill(memory, self._weights)
            return replica.load_offered(
                OfferedWeights(handle=memory.handle, tensors=tensors, portions=portions), self.version
            )
        finally:
            # A replica that hangs may still have it open. It is ended, and nothing that it has read is used.
            memory.close()

    def _fill(self, memory: gpu_memory.OfferedMemory, weights: Weights) -> Iterator[list[TensorPlace]]:
        """Copies tensors into the memory until no more fit, says where they are, and begins again when it is asked."""
        assert memory.tensor is not None
        portion: list[TensorPlace] = []
        begin = 0
        for name, tensor in weights:
            if begin + tensor.nbytes > memory.handle.num_bytes:
                memory.wait()
                yield portion
                portion, begin = [], 0
            dtype = str(tensor.dtype).removeprefix("torch.")
            place = TensorPlace(name=name, dtype=dtype, shape=list(tensor.shape), offset=begin)
            view_tensor(memory.tensor, dtype, place.shape, begin).copy_(tensor.detach())
            portion.append(place)
            begin += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory.wait()
        yield portion

    def keep(self) -> None:
        """Writes the current weights to the folder, if there are any and it has others.

        Raises EngineError if the learner has changed them meanwhile, or if there is no room.
        """
        if self._weights is None or self.folder.version == self.version:
            return
        self.folder.write(self._weights, self.version)
        if fault := find_difference(self.checksums, self.folder.checksums):
            self.folder.close()
            raise EngineError(
                f"a replica needs version {self.version} of the weights again, and the learner has others by now: "
                f"{fault}. Continue: cohort resume RUN."
            )

    def close(self) -> None:
        """Lets go of the learner's weights, and removes the folder."""
        self._weights, self.version = None, -1
        self.folder.close()


def find_difference(sent: Mapping[str, int], found: Mapping[str, int]) -> str:
    """Returns how the checksums of tensors differ from those of the tensors that were sent; "" = not at all."""
    for names, words in ((sent.keys() - found, "lacks"), (found.keys() - sent, "has also")):
        if names:
            return f"it {words} {len(names)} tensors, {min(names)} among them"
    wrong = sorted(name for name, value in found.items() if value != sent[name])
    return f"{len(wrong)} tensors have other numbers, {wrong[0]} among them" if wrong else ""


def choose_transfer(
    wish: Literal["auto", "files"], folder: WeightFolder, devices: Sequence[str], learner: str, is_divided: bool
) -> Transfer:
    """Returns the way of weights to replicas on `devices`: through memory if all are on the GPU of the learner.

    `learner` is the learner's device. A process that opened memory of another GPU would have to see it too, which takes
    memory there, and the GPUs would have to reach each other. `is_divided` says that ranks divide the model: one of
    them alone could not read the weights again for a replica that is lost.
    """
    if wish == "files" or learner == "cpu" or is_divided or set(devices) != {learner}:
        return folder
    warn_untried()
    return MemoryTransfer(torch.device(learner), folder)


@cache
def warn_untried() -> None:
    """Logs a warning, once, that this way was never tried."""
    log.warning(
        "weights that pass through the memory of a GPU (CUDA IPC) are untested on this hardware: they were tried on a "
        "CPU alone, with mapped files in its place. --engine.transfer files does without"
    )
