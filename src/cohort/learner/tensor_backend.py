"""Backend of a native decoder that several ranks hold together, each a slice of it. See `cohort.models.tensor`.

Its methods are collective: the ranks of the decoder's world call them with the same microbatches. Optimizer, moments
and masters are those of this rank's slices. Checkpoints have full tensors, so a run may resume with another number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from cohort.config.schema import OptimConfig
from cohort.data.batch import Microbatch
from cohort.errors import ConfigError, RunError
from cohort.learner.backend import FusedBackend
from cohort.learner.head import GradientFunction
from cohort.learner.optim import global_norm
from cohort.learner.tensor_head import NUM_SHARED, gradient_through_sliced_head, sliced_token_logprobs
from cohort.models.config import ModelConfig
from cohort.models.lora import Adapters
from cohort.models.tensor import TensorDecoder, cut_slice, gather_parameter
from cohort.world import World


class TensorBackend(FusedBackend):
    """Backend of a `TensorDecoder`. The reference policy must be one too. Raises ConfigError for adapters."""

    decoder: TensorDecoder

    def __init__(self, decoder: TensorDecoder, optim: OptimConfig, adapters: Adapters | None = None) -> None:
        if adapters is not None:
            raise ConfigError(
                f"learner.tensor = {decoder.world.size} cannot be combined with adapters (learner.lora.rank > 0): "
                "set --learner.tensor 1, or train all weights with --learner.lora.rank 0."
            )
        super().__init__(decoder, optim, None)

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's N target tokens, on the host, without gradient.

        As `FusedBackend.logprobs`, and the same on every rank. Collective.
        """
        policy = self._policy
        assert isinstance(policy, TensorDecoder), "the reference policy is not in slices"
        on_device = micro.to(policy.embed.device)
        hidden = self._compute_hidden(policy, on_device, None)
        head, targets = policy.head_weight, on_device.targets
        values, _ = sliced_token_logprobs(hidden, head, targets, policy.vocabulary, temperature, with_entropy=False)
        return values.cpu()

    def backward(self, micro: Microbatch, temperature: float, gradient: GradientFunction, per_token: bool) -> None:
        """Runs forward and backward on a microbatch and adds its gradient to the gradients of the master weights.

        As `FusedBackend.backward`. `gradient` is called on every rank, with the same numbers. Collective.
        """
        head, vocabulary = self.decoder.head_weight, self.decoder.vocabulary
        with self._gradient_context():
            embedded = self._embed(micro)
            hidden = self._compute_hidden(self.decoder, micro, embedded)
            if not per_token:
                logprobs, entropy = sliced_token_logprobs(hidden, head, micro.targets, vocabulary, temperature)
                gradient = _slice_gradients(*gradient(slice(None), logprobs, entropy))
            total = self.optimizer.master_grad(head) if head.requires_grad else None
            d_hidden = gradient_through_sliced_head(
                hidden, head, total, micro.targets, temperature, gradient, vocabulary
            )
            # All ranks decide the same, because the gradient is the same on all of them.
            if d_hidden.is_cuda or bool(d_hidden.any()):
                hidden.backward(d_hidden)
                self._add_embedding_gradient(micro, embedded)
        self.optimizer.collect_grads()

    def grad_norm(self) -> float:
        """Returns the norm of the gradient of the whole model, the same on every rank. Collective."""
        masters = self.optimizer.masters.items()
        grads = {name: m.grad for name, m in masters if m.grad is not None}
        return grad_norm(grads, self.decoder.world, self.decoder.replicated)

    def state(self) -> dict[str, Tensor]:
        """Returns the optimizer's tensors by name, in full and on the host, on the first rank, and {} on the others.

        Collective. `gather_state` gives the same tensors one at a time.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in gather_state(self.decoder, self.optimizer.state()):
            if self.decoder.world.is_first:
                state[name] = tensor.to("cpu", copy=True)
        return state

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned on the first rank. Not collective: every rank must be given all tensors.

        `num_steps` is the number of optimizer steps that were made until then. Raises RunError where a moment is
        missing or has another shape.
        """
        self.optimizer.load_state(scatter_state(self.decoder, tensors), num_steps)

    def _embed(self, micro: Microbatch) -> Tensor:
        """Returns the embeddings [T, d] of the tokens, detached from the table. Collective."""
        return self.decoder.look_up(micro.tokens).detach().requires_grad_()

    def _add_embedding_gradient(self, micro: Microbatch, embedded: Tensor | None) -> None:
        """Adds the gradient stored in `embedded` to the master gradient of this rank's rows, if they are trained."""
        if self.decoder.embed.requires_grad:
            assert embedded is not None and embedded.grad is not None
            total = self.optimizer.master_grad(self.decoder.embed)
            rows, is_own = self.decoder.vocabulary.locate(micro.tokens)
            # Tokens of other ranks add zeros: to leave them out, the host would have to wait for a GPU.
            total.index_add_(0, rows, embedded.grad.masked_fill(~is_own[:, None], 0).to(total.dtype))


def _slice_gradients(d_logprobs: Tensor, d_entropy: Tensor | None) -> GradientFunction:
    """Returns a gradient function that only cuts rows out of gradients that were computed for all rows before."""
    return lambda rows, *_: (d_logprobs[rows], None if d_entropy is None else d_entropy[rows])


def grad_norm(grads: Mapping[str, Tensor], world: World, replicated: Collection[str]) -> float:
    """Returns the norm of a gradient of which each rank has slices, the same number on every rank. Collective.

    `grads` has this rank's tensors by parameter name. Those in `replicated` are the same on every rank and count once.
    """
    sliced = global_norm([g for name, g in grads.items() if name not in replicated])
    whole = global_norm([g for name, g in grads.items() if name in replicated])
    total = world.sum(torch.tensor(sliced * sliced, dtype=torch.float64))
    return math.sqrt(float(total) + whole * whole)


def gather_state(decoder: TensorDecoder, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor) for an optimizer's state, one at a time. Collective.

    `tensors` are this rank's, as `Optimizer.state` returns them, under names such as "exp_avg/PARAMETER". A tensor that
    every rank has is yielded as it is, not copied.
    """
    for key, own in tensors.items():
        yield key, gather_parameter(decoder, _parameter_of(key), own)


def scatter_state(decoder: TensorDecoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns this rank's slices of the full tensors that `gather_state` yielded, by the same names, as views of them.

    Tensors of other names than the decoder's parameters are left out. Raises RunError for a tensor of another shape.
    """
    slices: dict[str, Tensor] = {}
    for key, full in tensors.items():
        name = _parameter_of(key)
        if name not in decoder.shapes:
            continue
        if full.shape != decoder.shapes[name]:
            raise RunError(
                f'the tensor "{key}" of the checkpoint has shape {list(full.shape)}, and the model needs '
                f"{list(decoder.shapes[name])}. Move this checkpoint out of the run's folder checkpoints, then use "
                "cohort resume RUN: it takes the newest one left."
            )
        slices[key] = cut_slice(name, full, decoder.world)
    return slices


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
