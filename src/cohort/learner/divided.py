"""A native decoder whose parameters are divided among the ranks, by torch's `fully_shard`.

Every rank keeps a part of each parameter. A layer is gathered while it runs, forward and again backward, and its
gradient is summed such that each rank gets the sum for its part. Embedding, last norm and head are gathered with the
pass as a whole. All ranks must therefore make the same passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from cohort.data.batch import Microbatch
from cohort.errors import ConfigError
from cohort.learner.attention import make_packed_attention
from cohort.learner.head import GradientFunction, gradient_through_head, token_logprobs
from cohort.learner.minibatch import slice_gradients
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder
from cohort.models.functions import widen
from cohort.world import ProcessGroup, World

# Kinds under which a world counts the bytes of these collectives.
GATHERED, REDUCED = "gather_weights", "reduce_gradients"


class _GatherFunction:
    """The call that gathers parameters, for `fully_shard`. It is counted, and its failure names the rank."""

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for the gathered parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gathers the parts of all ranks. The group is that of the world."""
        return self._world.begin_join(output_tensor, input_tensor, GATHERED, async_op)


class _SumFunction(_GatherFunction):
    """The call that sums gradients, for `fully_shard`. Each rank gets the sum for its part."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:  # type: ignore[override]
        """Sums the gradients of all ranks. `op` is a plain sum: see `DividedModel`."""
        return self._world.begin_sum_scattered(output_tensor, input_tensor, REDUCED, async_op)


class _HeadLoss(torch.autograd.Function):
    """The loss behind the head as autograd sees it: a number whose gradient is known before the backward begins."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, gradient, per_token):  # type: ignore[no-untyped-def]
        """Returns 0. The gradients on hidden states [N, d] and head [V, d] are formed here, in one pass over logits.

        `gradient` and `per_token` are those of `Backend.backward`.
        """
        if not per_token:
            # Such a loss needs all log-probabilities first. The logits are computed again for the gradient.
            gradient = slice_gradients(gradient(slice(None), *token_logprobs(hidden, weight, targets, temperature)))
        d_weight = torch.zeros_like(weight, dtype=widen(weight[:0]).dtype)
        d_hidden = gradient_through_head(hidden, weight, d_weight, targets, temperature, gradient)
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Returns the gradients of hidden states and head, and None for the others. `grad` is 1."""
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden, d_weight, None, None, None, None


class DividedModel(nn.Module):
    """A decoder with its head, divided among the ranks of `world`. A pass runs through `forward` as a whole.

    `decoder` is divided in place: its parameters are parts afterwards. With `dtype` a copy of it, with parameters of
    this type, is divided instead, and computes in the type of `decoder`. The copy is made layer by layer: beside its
    parts, a rank never holds more than one layer of it, or embedding and head.
    """

    def __init__(self, decoder: Decoder, world: World, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        assert isinstance(world, ProcessGroup), "one process has nothing to divide"
        _require_even_parts(decoder.config, world)
        self.compute_dtype = decoder.embed.dtype
        self._world = world
        mesh = _make_mesh(world, decoder.embed.device)
        divided = decoder if dtype is None else _make_shell(decoder)
        for i, layer in enumerate(decoder.layers):
            own = layer if dtype is None else deepcopy(layer).to(dtype)
            self._divide(own, mesh)
            divided.layers[i] = own
        if dtype is not None:
            _copy_ends(decoder, divided, dtype)
        self.decoder = divided
        # The parameters that no layer has are those of this module.
        self._divide(self, mesh)
        # The parts, by name. They stay the same objects, also while others are in their places during a pass.
        self.parts: dict[str, DTensor] = {}
        for name, p in divided.named_parameters():
            assert isinstance(p, DTensor)
            self.parts[name] = p

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Divides the parameters of a module that are not divided yet, in place."""
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=self._make_policy(module),
            # Two rows, one of gate and one of up, would leave all ranks but two without a part.
            shard_placement_fn=lambda p: Shard(axis_of(p)),
        )
        assert isinstance(module, FSDPModule)
        # Gradients are added up: the loss is divided by counts over all ranks.
        module.set_gradient_divide_factor(1.0)
        # Plain sums: gloo has no others.
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_GatherFunction(self._world))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_SumFunction(self._world))  # type: ignore[arg-type]

    def _make_policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        """Returns in which types a module is gathered and its gradient summed."""
        exact = next(module.parameters()).dtype
        # Inputs keep their types: the residual stream is wider than the parameters.
        if exact == self.compute_dtype:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=exact, cast_forward_inputs=False)

    def forward(
        self, micro: Microbatch, temperature: float, gradient: GradientFunction | None = None, per_token: bool = True
    ) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's N targets; with `gradient` a number to call backward on.

        `micro` must be on the model's device. `gradient` and `per_token` are those of `Backend.backward`.
        """
        decoder = self.decoder
        attend = make_packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
        hidden = decoder(micro.tokens, micro.positions, attend).index_select(0, micro.source)
        if gradient is None:
            return token_logprobs(hidden, decoder.head_weight, micro.targets, temperature, with_entropy=False)[0]
        loss: Tensor = _HeadLoss.apply(hidden, decoder.head_weight, micro.targets, temperature, gradient, per_token)
        return loss

    @torch.no_grad()
    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's N targets, without gradient."""
        values: Tensor = self(micro, temperature)
        # Otherwise embedding and head stay gathered, and the next pass would use them although they were trained.
        assert isinstance(self, FSDPModule)
        self.reshard()
        return values

    def reduce_next(self, is_reduced: bool) -> None:
        """Sets whether the next backward sums gradients over ranks. Otherwise every rank keeps its whole gradient."""
        assert isinstance(self, FSDPModule)
        self.set_requires_gradient_sync(is_reduced)


def axis_of(parameter: Tensor) -> int:
    """Returns the axis along which a parameter is cut: the first, or the second where that has rows of gate and up."""
    return int(parameter.ndim > 1 and parameter.shape[0] == 2)


def gather_parts(part: Tensor, shape: torch.Size, axis: int, world: World) -> Tensor:
    """Returns a whole tensor of this shape, in the type of `part`. Every rank must call it, with its own part.

    All ranks but the last have ceil(n / ranks) of the n entries of the axis; the last ones may have fewer or none.
    """
    size = -(-shape[axis] // world.size)
    rows = part.detach().movedim(axis, 0)
    padded = rows.new_zeros(size, *rows.shape[1:])
    padded[: len(rows)].copy_(rows)
    whole = world.join(padded.flatten()).view(world.size * size, *rows.shape[1:])[: shape[axis]]
    return whole.movedim(0, axis).contiguous()


def cut_part(whole: Tensor, axis: int, world: World) -> Tensor:
    """Returns the part of a whole tensor that this rank has, as a view."""
    size = -(-whole.shape[axis] // world.size)
    begin = min(world.rank * size, whole.shape[axis])
    return whole.narrow(axis, begin, min(size, whole.shape[axis] - begin))


def _require_even_parts(c: ModelConfig, world: World) -> None:
    """Raises ConfigError where the feed-forward size is no multiple of the number of ranks."""
    if c.ff % world.size:
        raise ConfigError(
            f"learner.shard = full divides the feed-forward size {c.ff} of the model among {world.size} ranks, and it "
            "is no multiple of that: use another number of ranks, or --learner.shard optimizer."
        )


def _make_mesh(world: ProcessGroup, device: torch.device) -> DeviceMesh:
    """Returns the ranks of a world in the form that `fully_shard` wants."""
    return DeviceMesh.from_group(world.group, device.type)


def _make_shell(decoder: Decoder) -> Decoder:
    """Returns a decoder of the same shape whose parameters have no memory yet."""
    with torch.device("meta"):
        shell = Decoder(decoder.config)
    shell.inv_freq = decoder.inv_freq.clone()
    shell.recompute = decoder.recompute
    return shell


def _copy_ends(source: Decoder, target: Decoder, dtype: torch.dtype) -> None:
    """Replaces embedding, last norm and head of `target` by copies of those of `source`, in `dtype`."""
    target.embed = nn.Parameter(source.embed.detach().to(dtype, copy=True))
    target.norm = deepcopy(source.norm).to(dtype)
    if source.head is not None:
        target.head = nn.Parameter(source.head.detach().to(dtype, copy=True))
