"""What a learner is: batches in, better weights out. What it found comes back; it writes into nobody's records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from cohort.algos.algorithm import Loss
from cohort.data.batch import Batch
from cohort.models.auto import AnyDecoder
from cohort.serialize import record
from cohort.types import Group, SampleId
from cohort.world import World


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Log-probabilities of samples: per sample one number per token, 0 where nothing was sampled."""

    ids: list[SampleId] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)

    def by_id(self) -> dict[SampleId, list[float]]:
        return dict(zip(self.ids, self.logprobs, strict=True))


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Annotations:
    """What the policy and the reference said of the samples before the update."""

    old: Found | None = None  # of the policy that is trained, as it is now
    ref: Found | None = None  # of the reference policy
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What came of an update."""

    old: Found  # log-probabilities before the update, of the samples that came without
    metrics: dict[str, float]  # over all ranks
    notices: list[tuple[str, str]] = field(default_factory=list)  # (level, text) worth telling the user
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The gradient of a batch, without a step."""

    tensors: dict[str, Tensor]  # by parameter, on the host
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a batch is cut into microbatches. The gradient must not depend on it."""

    token_budget: int = 0  # 0 = the learner's own
    share: bool = True
    backwards: bool = False  # the microbatches in the opposite order


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The whole state of a learner, on the host, to be taken over by one with other settings."""

    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]  # as `state`, masters included
    numbers: dict[str, Any]
    reference: dict[str, Tensor] | None
    num_updates: int  # the length of the schedule


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """The decoder being trained. An engine that holds the same one has nothing to copy."""

    module: AnyDecoder

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_weights()


class Learner(Protocol):
    """`update` is the whole of a step."""

    token_budget: int  # most tokens of a microbatch; it shrinks when memory runs out
    world: World  # the ranks that train together

    def annotate(self, groups: Sequence[Group], needs: Collection[str]) -> Annotations:
        """The log-probabilities named in `needs` ("old", "ref") of these groups' samples."""

    def update(self, batch: Batch, algo: Loss) -> Update:
        """Epochs x minibatches x microbatches."""

    def gradient(self, batch: Batch, algo: Loss, cut: Cut | None = None, world: World | None = None) -> Gradient:
        """The gradient of a batch of one minibatch. Nothing is changed."""

    def weights(self) -> LiveWeights:
        """The weights as they are now, by Hugging Face name."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Optimizer tensors by name, and numbers: with the weights, everything a resumed run needs."""

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Become a `state`; the weights are loaded by others."""

    def snapshot(self) -> Snapshot:
        """A copy of everything."""

    def restore(self, snapshot: Snapshot) -> None:
        """Become a snapshot, perhaps of a learner with other settings."""
