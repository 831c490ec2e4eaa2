"""Backend of a native decoder that several ranks hold together, each a slice of it. See `cohort.models.tensor`.

Its methods are collective: the ranks of the decoder's world call them with the same microbatches. Optimizer, moments
and masters are those of this rank's slices. Checkpoints have full tensors, so a run may resume with another number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cohort.config.schema import OptimConfig
from cohort.data.batch import Microbatch
from cohort.errors import ConfigError, RunError
from cohort.learner.backend import FusedBackend
from cohort.learner.base import StateTensor
from cohort.learner.head import GradientFunction
from cohort.learner.optim import WholeOptimizer, global_norm
from cohort.learner.tensor_head import NUM_SHARED, gradient_through_sliced_head, sliced_token_logprobs
from cohort.models.auto import AnyDecoder
from cohort.models.config import ModelConfig
from cohort.models.functions import widen
from cohort.models.lora import Adapters
from cohort.models.tensor import TensorDecoder, cut_slice, gather_parameter, load_full, shard_decoder
from cohort.world import World


class TensorOptimizer(WholeOptimizer):
    """AdamW on the slices of a decoder that this rank has. What it stores and reads are full tensors."""

    def __init__(self, decoder: TensorDecoder, config: OptimConfig) -> None:
        super().__init__(decoder, config)
        self._decoder = decoder
        # The backward itself sums over the ranks of the model. Two groups of ranks at once could wait for each other.
        self.overlaps = False

    def grad_norm(self) -> float:
        """Returns the norm of the gradient of the whole model, the same on every rank. Collective."""
        grads = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        return grad_norm(grads, self._decoder.world, self._decoder.replicated)

    def full_grads(self) -> dict[str, Tensor]:
        """Returns the gradient by parameter, as full tensors on the host. Collective."""
        decoder = self._decoder
        found = ((name, m.grad) for name, m in self.masters.items() if m.grad is not None)
        return {name: gather_parameter(decoder, name, grad).to("cpu", copy=True) for name, grad in found}

    def state(self) -> dict[str, StateTensor]:
        """Returns, by name, moments and copied masters, which are put together when they are read. Collective then."""
        return {key: self._join(key, entry) for key, entry in super().state().items()}

    def _join(self, key: str, entry: StateTensor) -> StateTensor:
        """Returns an entry for the full tensor of which `entry` is this rank's slice."""
        name, decoder = _parameter_of(key), self._decoder
        read = lambda: gather_parameter(decoder, name, entry.read())  # noqa: E731
        return StateTensor(shape=tuple(decoder.shapes[name]), dtype=entry.dtype, read=read)

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. Raises RunError where a moment is missing or has another shape."""
        super().load_state(_Slices(tensors, self._decoder), num_steps)


class _Slices(Mapping[str, Tensor]):
    """This rank's slices of full tensors whose names end in those of parameters. They are read when looked up."""

    def __init__(self, tensors: Mapping[str, Tensor], decoder: TensorDecoder) -> None:
        self._tensors = tensors
        self._decoder = decoder

    def __getitem__(self, key: str) -> Tensor:
        return cut_state(self._decoder, key, self._tensors[key])

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class TensorBackend(FusedBackend):
    """Backend of a `TensorDecoder`. Its methods are collective."""

    decoder: TensorDecoder
    can_retry = False  # the other ranks of the model would wait

    def __init__(self, decoder: TensorDecoder, optim: OptimConfig) -> None:
        super().__init__(decoder, TensorOptimizer(decoder, optim), None)

    def divide_reference(self, reference: AnyDecoder | None) -> AnyDecoder | None:
        """Returns this rank's slices of the reference. None = there is none."""
        return None if reference is None else shard_decoder(reference, self.decoder.world).requires_grad_(False)

    def load_weights(self, decoder: AnyDecoder) -> None:
        """Replaces the weights by this rank's slices of those of `decoder`, which is whole."""
        load_full(self.decoder, ((name, p.detach()) for name, p in decoder.named_parameters()))

    def reference_state(self, reference: AnyDecoder) -> dict[str, StateTensor]:
        """Returns the weights of the reference by parameter name, in at least fp32. They are joined when read."""
        assert isinstance(reference, TensorDecoder)
        own = {name: widen(p.detach()) for name, p in reference.named_parameters()}
        return {name: self._join_reference(reference, name, tensor) for name, tensor in own.items()}

    def _join_reference(self, reference: TensorDecoder, name: str, own: Tensor) -> StateTensor:
        """Returns an entry for a whole parameter of the reference."""
        read = lambda: gather_parameter(reference, name, own)  # noqa: E731
        return StateTensor(shape=tuple(reference.shapes[name]), dtype=own.dtype, read=read)

    def load_reference(self, reference: AnyDecoder, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the weights of the reference by this rank's slices of those that `reference_state` returned."""
        assert isinstance(reference, TensorDecoder)
        for name, p in reference.named_parameters():
            p.data.copy_(cut_slice(name, tensors[name], reference.world))

    def _token_logprobs(
        self, decoder: Any, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies [N] of targets [N], the same on every rank."""
        head = decoder.head_weight
        return sliced_token_logprobs(hidden, head, targets, decoder.vocabulary, temperature, with_entropy=with_entropy)

    def _gradient_through_head(
        self, hidden: Tensor, total: Tensor | None, targets: Tensor, temperature: float, gradient: GradientFunction
    ) -> Tensor:
        """Returns the gradient of the loss on hidden states [N, d]; `total` is that of this rank's rows of the head.

        `gradient` is called on every rank, with the same numbers.
        """
        head, vocabulary = self.decoder.head_weight, self.decoder.vocabulary
        return gradient_through_sliced_head(hidden, head, total, targets, temperature, gradient, vocabulary)

    def _embed(self, micro: Microbatch) -> Tensor:
        """Returns the embeddings [T, d] of the tokens, detached from the table. Collective."""
        return self.decoder.look_up(micro.tokens).detach().requires_grad_()

    def _add_embedding_gradient(self, micro: Microbatch, embedded: Tensor | None) -> None:
        """Adds the gradient stored in `embedded` to the master gradient of this rank's rows, if they are trained."""
        if self.decoder.embed.requires_grad:
            assert embedded is not None and embedded.grad is not None
            total = self.optimizer.master_grad(self.decoder.embed)
            assert total is not None
            rows, is_own = self.decoder.vocabulary.locate(micro.tokens)
            # Tokens of other ranks add zeros: to leave them out, the host would have to wait for a GPU.
            total.index_add_(0, rows, embedded.grad.masked_fill(~is_own[:, None], 0).to(total.dtype))


def make_tensor_backend(
    decoder: AnyDecoder, optim: OptimConfig, adapters: Adapters | None, shard: str, world: World
) -> TensorBackend:
    """Returns a backend that trains this rank's slices of a copy of `decoder`. `world` are the ranks that hold it.

    Raises ConfigError for adapters, shards and models that cannot be divided so.
    """
    if adapters is not None:
        raise ConfigError(
            f"learner.tensor = {world.size} cannot be combined with adapters (learner.lora.rank > 0): set "
            "--learner.tensor 1, or train all weights with --learner.lora.rank 0."
        )
    if shard in ("optimizer", "full"):
        raise ConfigError(
            f"learner.tensor = {world.size} cannot be combined with learner.shard = {shard}: set --learner.shard none, "
            "or --learner.tensor 1."
        )
    return TensorBackend(shard_decoder(decoder, world), optim)


def grad_norm(grads: Mapping[str, Tensor], world: World, replicated: Collection[str]) -> float:
    """Returns the norm of a gradient of which each rank has slices, the same number on every rank. Collective.

    `grads` has this rank's tensors by parameter name. Those in `replicated` are the same on every rank and count once.
    """
    sliced = global_norm([g for name, g in grads.items() if name not in replicated])
    whole = global_norm([g for name, g in grads.items() if name in replicated])
    total = world.sum(torch.tensor(sliced * sliced, dtype=torch.float64))
    return math.sqrt(float(total) + whole * whole)


def cut_state(decoder: TensorDecoder, key: str, full: Tensor) -> Tensor:
    """Returns this rank's slice of a full tensor of the state, such as "exp_avg/PARAMETER", as a view of it.

    Raises RunError for a tensor of another shape than the parameter's.
    """
    name = _parameter_of(key)
    if full.shape != decoder.shapes[name]:
        raise RunError(
            f'the tensor "{key}" of the checkpoint has shape {list(full.shape)}, and the model needs '
            f"{list(decoder.shapes[name])}. Move this checkpoint out of the run's folder checkpoints, then use "
            "cohort resume RUN: it takes the newest one left."
        )
    return cut_slice(name, full, decoder.world)


def _parameter_of(key: str) -> str:
    """Returns the parameter's name in a name of the optimizer's state.

    >>> _parameter_of("exp_avg/layers.0.qkv")
    'layers.0.qkv'
    """
    return key.partition("/")[2]


def tensor_bytes_per_microbatch(
    config: ModelConfig,
    tokens: int,
    targets: int,
    k: int,
    *,
    dtype: torch.dtype,
    per_token: bool = True,
    recompute: bool = False,
) -> dict[str, int]:
    """Returns the bytes that a rank hands to collectives of each kind in `TensorBackend.backward` of one microbatch.

    The microbatch has `tokens` tokens and `targets` targets, and its loss a gradient; `k` ranks hold the model, whose
    weights are of type `dtype`. `per_token` is that of the loss, and `recompute` that of the decoder.
    """
    if k == 1:
        return {}
    size = torch.promote_types(dtype, torch.float32).itemsize
    # The embedding; per layer attention and feed-forward, each forward and backward; the hidden states of the targets.
    # A layer that is computed again does not repeat its last sum, because nothing of it is kept.
    streams = 1 + config.num_layers * (5 if recompute else 4)
    sums = (streams * tokens + targets) * config.hidden
    # The weights of the norms of queries and keys.
    sums += 2 * config.num_layers * config.head_dim if config.qk_norm else 0
    return {"sum": sums * size, "join": NUM_SHARED * targets * (1 if per_token else 2) * size}
