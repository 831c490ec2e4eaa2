"""The protocol of a learner and its records. A learner takes batches and improves weights.

It returns what it computed, and writes into no record of other code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from cohort.algos.algorithm import Loss
from cohort.data.batch import Batch
from cohort.models.auto import AnyDecoder
from cohort.models.shards import TensorSpec
from cohort.serialize import record
from cohort.types import Group, Provenance, SampleId
from cohort.world import Grid, World


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of samples: per sample one number per token, 0 where the loss may not touch the token."""

    ids: list[SampleId] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)

    def by_id(self) -> dict[SampleId, list[float]]:
        """Returns each sample's log-probabilities by sample id: one per token, 0 where the loss may not touch it."""
        return dict(zip(self.ids, self.logprobs, strict=True))


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Annotations:
    """Log-probabilities of samples by the policy and the reference, computed before the update."""

    old: TokenLogprobs | None = None  # by the policy that is trained, with its current weights; None = not asked for
    ref: TokenLogprobs | None = None  # by the reference policy; None = not asked for
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Results of an update."""

    # Log-probabilities of the samples that came without them: before the update or, by a loss without a ratio, before
    # the first optimizer step on the sample.
    old: TokenLogprobs
    metrics: dict[str, float]  # over all ranks, except "pack/..."
    notices: list[tuple[str, str]] = field(default_factory=list)  # (level, text) to show to the user
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The gradient of a batch, with no optimizer step made."""

    tensors: dict[str, Tensor]  # by parameter, on the host
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchOptions:
    """How a batch is cut into microbatches. The gradient must not depend on it."""

    token_budget: int = 0  # 0 = that of the learner
    share: bool = True  # whether prompts may be shared
    backwards: bool = False  # the microbatches in the opposite order


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The whole state of a learner on the host, which a learner with other settings can take over."""

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]  # those of `Learner.state`, and all master weights; by name
    numbers: dict[str, Any]
    reference: dict[str, Tensor] | None
    num_updates: int  # the length of the learning rate schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor of a learner's state that is put together when it is read, from the parts that the ranks hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]  # returns the whole tensor, perhaps not copied; all ranks must call it

    @classmethod
    def wrap(cls, tensor: Tensor) -> Self:
        """Returns an entry for a tensor that every rank has whole."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateStream:
    """The state of a learner as a checkpoint stores it: counters, and tensors of full shape, one at a time.

    Names, shapes, types and values are the same whatever the number of ranks and their shards. So a run can go on with
    another number.
    """

    numbers: dict[str, Any]  # counters by name
    entries: Mapping[str, StateTensor]  # by name, in the same order on every rank
    is_first: bool = True  # whether this rank gets the tensors

    @classmethod
    def wrap(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Self:
        """Returns a stream of tensors that are in memory."""
        return cls(numbers=dict(numbers), entries={name: StateTensor.wrap(t) for name, t in tensors.items()})

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yields (name, tensor) of all tensors on the first rank, and (name, None) on the others.

        All ranks must run the iterator to its end, in step. A tensor may share memory with the learner. Beside its own
        part of the state, no rank holds more than one tensor that was put together, unless the caller keeps it.
        """
        for name, entry in self.entries.items():
            # Not kept in a variable: it would stay in memory while the next one is put together.
            yield name, self._read(entry)

    def _read(self, entry: StateTensor) -> Tensor | None:
        """Returns the tensor of an entry on the first rank, and None on the others."""
        tensor = entry.read()
        return tensor if self.is_first else None

    def collect(self) -> dict[str, Tensor]:
        """Returns all tensors by name, on the first rank. The others get {}. All ranks must call it."""
        return {name: tensor for name, tensor in self.tensors() if tensor is not None}


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """The weights of the decoder being trained. An engine that uses the same decoder has nothing to copy."""

    module: AnyDecoder

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and type of every weight, by Hugging Face name."""
        return self.module.weight_specs()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_weights()


class CurrentWeights(Protocol):
    """The current weights of a learner. Iterating over them yields (Hugging Face name, whole tensor).

    Where the ranks divide the weights among them, tensors are gathered one by one: then all ranks must iterate.
    """

    @property
    def module(self) -> Any:
        """The decoder that holds the weights. An engine that samples from it has nothing to copy."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and type of every weight, by Hugging Face name. Nothing is gathered for it."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Learner(Protocol):
    """Trains a policy. `update` does all of a step's training."""

    token_budget: int  # most tokens of a microbatch; it shrinks when memory runs out
    world: World  # the ranks that have other data
    grid: Grid  # all ranks, and which of them hold one model together

    def annotate(
        self, groups: Sequence[Group], needs: Collection[str], loss_on: Provenance = Provenance.SAMPLED
    ) -> Annotations:
        """Computes log-probabilities of the groups' samples, without changing the groups.

        `needs` may contain "old" (by the trained policy, with its current weights) and "ref" (by the reference policy).
        The result has None for one that is not in `needs`. Samples that would not be in a batch, such as failed or
        empty ones, get none. Only tokens of the provenance `loss_on` have log-probabilities; others have 0.
        """

    def update(self, batch: Batch, algo: Loss) -> Update:
        """Trains the weights in place: in every epoch one optimizer step per minibatch of the batch.

        Returns metrics, notices for the user, seconds per stage, and the log-probabilities ("old") of samples that came
        without them, which are as in `Update`. A gradient that is zero or not finite changes no weight.
        """

    def compute_gradient(
        self, batch: Batch, algo: Loss, options: MicrobatchOptions | None = None, world: World | None = None
    ) -> Gradient:
        """Returns the gradient and the metrics of a batch with one minibatch. No weight changes.

        The gradient is summed over the ranks; the metrics are of this rank. `options` says how the batch is cut into
        microbatches; None = as in `update`. `world` replaces the learner's ranks for this call; None = its own.
        """

    def measure(self, batch: Batch, algo: Loss) -> dict[str, float]:
        """Returns the metrics that a loss has on a batch with one minibatch. Nothing is trained.

        The metrics are over all ranks, and those of entropies are left out.
        """

    def compute_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probability of every token after the first, by the current policy at temperature 1.

        It proves that an engine has received the weights. Every rank must call it.
        """

    def weights(self) -> CurrentWeights:
        """Returns the current weights. Iterating over them yields (Hugging Face name, tensor), not copied if possible.

        Where the ranks divide the weights among them, all ranks must iterate.
        """

    def state(self) -> StateStream:
        """Returns counters and tensors by name. The tensors are put together when they are read.

        The tensors are the optimizer's, those of adapters, and those of a reference that is refreshed during the run. A
        checkpoint stores counters and tensors beside the weights, and a resumed run needs nothing else of the learner.
        """

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restores the tensors and counters of a `state`. The caller loads the weights. Every rank must call it.

        Only the first rank needs the tensors. The others may pass {}.
        """

    def snapshot(self) -> Snapshot:
        """Returns a copy of weights, optimizer state, adapters, counters and reference, in host memory."""

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces weights (or adapters), optimizer state, counters and reference by those of a snapshot.

        The snapshot may come from a learner with other settings, such as another number type.
        """
