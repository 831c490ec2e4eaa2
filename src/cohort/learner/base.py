"""What a learner is: batches in, better weights out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from cohort.algos.algorithm import Loss
from cohort.algos.tally import Tally
from cohort.data.batch import Batch, Minibatch
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.decoder import hf_shaped, hf_views
from cohort.types import Group


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """The decoder being trained. An engine that holds the same one has nothing to copy."""

    module: AnyDecoder

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self.module, AutoDecoder):
            return iter(self.module.model.named_parameters())
        return ((name, hf_shaped(name, view)) for name, view in hf_views(self.module))


class Learner(Protocol):
    """`update` is the whole of a step; `forward_backward` and `optim_step` are its halves, for other loops."""

    token_budget: int  # most tokens of a microbatch; it shrinks when memory runs out

    def annotate(self, groups: Sequence[Group], needs: Collection[str]) -> None:
        """Fill in the samples' `old_logprobs` and `ref_logprobs`, those named in `needs`."""

    def update(self, batch: Batch, algo: Loss) -> dict[str, float]:
        """Epochs x minibatches x microbatches; returns metrics. Samples it sees get the `old_logprobs` they lack."""

    def forward_backward(self, minibatch: Minibatch, algo: Loss) -> Tally:
        """Gradient of one minibatch, summed over ranks, ready for `optim_step`."""

    def optim_step(self) -> dict[str, float]:
        """Clip, guard, update."""

    def weights(self) -> LiveWeights: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Optimizer tensors by name, and numbers: with the weights, everything a resumed run needs."""

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None: ...
