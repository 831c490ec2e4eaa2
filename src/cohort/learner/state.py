"""What a learner keeps between updates, how that is stored and restored, and how ranks read what only the first sees.

Stored tensors have full shapes and the names of parameters, whatever the ranks divide among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cohort.data.transfer import copy_to_host
from cohort.learner.backend import Backend
from cohort.learner.base import CurrentWeights, Snapshot, StateStream
from cohort.learner.optim import Optimizer, WholeOptimizer
from cohort.models.auto import AnyDecoder
from cohort.models.lora import Adapters
from cohort.world import Grid, World

# Prefix of the names of the reference's tensors in the state. They are stored only where the reference moves.
REFERENCE_PREFIX = "reference/"


class SharedTensors(Mapping[str, Tensor]):
    """Tensors of the first rank by name, for all ranks. What the other ranks pass as `tensors` is not used.

    Looking up a tensor is a collective call: all ranks must look up the same names in the same order. Nothing is kept,
    so a rank holds one tensor at a time. Names are known to all ranks from the beginning.
    """

    def __init__(self, tensors: Mapping[str, Tensor], world: World) -> None:
        self._tensors = tensors
        self._world = world
        self._names: dict[str, None] = dict.fromkeys(world.share(list(tensors) if world.is_first else []))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if not self._world.is_first:
            shape, dtype = self._world.share(None)
            return self._world.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)))
        tensor = self._tensors[name].contiguous()
        self._world.share([list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])
        return self._world.broadcast(tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _WithoutPrefix(Mapping[str, Tensor]):
    """Those tensors of a mapping whose names begin with a prefix, by name without it. They are read when looked up."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors = tensors
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _select_reference_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns those tensors of a learner's state that belong to the reference, by parameter name.

    They are read from `tensors` when they are looked up.
    """
    return _WithoutPrefix(tensors, REFERENCE_PREFIX)


class StoredLearner:
    """The part of a learner that outlives an update: model, optimizer, counters and reference."""

    backend: Backend
    world: World  # the ranks with other data
    grid: Grid  # all ranks
    reference: AnyDecoder | None  # the frozen policy of the KL term
    refresh_every: int  # steps after which the reference becomes the current policy; 0 = never
    num_updates: int  # the length of the learning rate schedule
    # Updates attempted. The schedule follows this count, so updates without signal advance it too.
    update_index = 0
    num_bad = 0  # updates with non-finite gradients since the last step that was made
    _annotated_at = -1  # update_index at which old log-probabilities were last annotated

    @property
    def decoder(self) -> AnyDecoder:
        """The model that is trained."""
        return self.backend.decoder

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained; None = the weights of the decoder are trained."""
        return self.backend.adapters

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with master weights and gradients."""
        return self.backend.optimizer

    def weights(self) -> CurrentWeights:
        """Returns the current weights. Iterating over them yields (Hugging Face name, tensor), not copied if possible.

        Where the ranks divide the weights among them, all ranks must iterate.
        """
        return self.backend.weights()

    def load_weights(self, decoder: AnyDecoder) -> None:
        """Replaces the weights by those of `decoder`. Does nothing where that is the decoder that is trained."""
        self.backend.load_weights(decoder)

    def state(self) -> StateStream:
        """Returns counters, and the tensors of the optimizer, of adapters, and of a reference that is refreshed.

        The counters are "update_index", "num_bad" and "optimizer_steps". Every rank must call it.
        """
        entries = self.backend.state()
        # A reference that never moves is the initial model, which a resumed run loads again.
        if self.reference is not None and self.refresh_every:
            stored = self.backend.reference_state(self.reference)
            entries |= {REFERENCE_PREFIX + name: entry for name, entry in stored.items()}
        numbers = {"update_index": self.update_index, "num_bad": self.num_bad}
        numbers["optimizer_steps"] = self.optimizer.num_steps
        return StateStream(numbers=numbers, entries=entries, is_first=self.grid.whole.is_first)

    def _restore_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores counters, optimizer and adapters from those of a state or snapshot, but not the reference."""
        self.update_index, self.num_bad = int(numbers["update_index"]), int(numbers["num_bad"])
        # Earlier annotations were made with other weights.
        self._annotated_at = -1
        self.backend.load_state(tensors, int(numbers["optimizer_steps"]))

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores counters, optimizer, adapters and a refreshed reference from the tensors and counters of a `state`.

        Every rank must call it, with the same counters. Only the first one's tensors are used. They are read one at a
        time. The caller loads the weights. Raises RunError where a moment is missing, and ModelError where adapters do
        not fit.
        """
        if self.grid.whole.size > 1:
            tensors = SharedTensors(tensors, self.grid.whole)
        self._restore_state(tensors, numbers)
        if self.reference is not None and self.refresh_every:
            self.backend.load_reference(self.reference, _select_reference_tensors(tensors))

    def snapshot(self) -> Snapshot:
        """Returns a copy of the learner's whole state, in host memory. It is for a learner of one process.

        It has the weights, all master weights, optimizer state, adapters, counters, the reference model (None if there
        is none) and the length of the learning rate schedule.
        """
        state, optimizer = self.state(), self.optimizer
        assert isinstance(optimizer, WholeOptimizer), "a snapshot is of one process"
        # All masters, also those that are the weights: the weights of another learner may have another type.
        masters = {f"master/{name}": master for name, master in optimizer.masters.items()}
        return Snapshot(
            weights=copy_to_host(self.decoder.state_dict()),
            tensors=copy_to_host(state.collect() | masters),
            numbers=state.numbers,
            reference=None if self.reference is None else copy_to_host(self.reference.state_dict()),
            num_updates=self.num_updates,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces weights (or adapters), optimizer state, counters and schedule length by those of a snapshot.

        The reference is replaced too, if learner and snapshot both have one. The snapshot may come from a learner with
        other settings, such as another number type.
        """
        self.num_updates = snapshot.num_updates
        if self.adapters is None:
            self.decoder.load_state_dict(snapshot.weights)
        self._restore_state(snapshot.tensors, snapshot.numbers)
        if self.reference is not None and snapshot.reference is not None:
            self.reference.load_state_dict(snapshot.reference)
