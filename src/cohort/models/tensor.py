"""The native decoder in slices: several ranks hold one model together, and each has a part of every matrix.

A rank has some of the KV heads (rows of `qkv`, columns of `out`), some of the feed-forward units (rows of `gate_up`,
columns of `down`) and some of the vocabulary (rows of embedding and head). Norms, and the biases of `out` and `down`,
are whole on every rank. The ranks of a `World` run the same tokens and add up the outputs of attention and of
feed-forward, so the residual stream is the same on all of them. So are the gradients of what they have in common.

Every sum over ranks has the type of the residual stream: fp32 in a bf16 model. All functions that sum or join are
collective: every rank must call them, in the same order.

Letters: T tokens, d hidden size, K KV heads, g query heads per KV head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor, nn

from cohort.errors import ConfigError
from cohort.models.auto import AnyDecoder
from cohort.models.config import ModelConfig
from cohort.models.decoder import Attend, Decoder, Layer, Norm, hf_views, to_hf_shape
from cohort.models.functions import rms_norm
from cohort.models.shards import TensorSpec
from cohort.world import World

# The axis along which a parameter is cut, by the last word of its name. Others are whole on every rank.
AXES = {"embed": 0, "head": 0, "qkv": 0, "qkv_bias": 0, "out": 1, "gate_up": 1, "gate_up_bias": 1, "down": 1}


# ---- slices ----------------------------------------------------------------------------------------------------------


def find_axis(name: str) -> int | None:
    """Returns the axis along which the parameter `name` is cut; None = every rank has the whole parameter.

    >>> find_axis("layers.3.out"), find_axis("layers.3.out_bias")
    (1, None)
    """
    return AXES.get(name.rpartition(".")[2])


def find_edges(size: int, num_ranks: int) -> list[int]:
    """Returns where an axis of length `size` is cut: rank r has the indices from edge r up to edge r + 1.

    >>> find_edges(61, 2)
    [0, 30, 61]
    """
    return [size * rank // num_ranks for rank in range(num_ranks + 1)]


def cut_slice(name: str, full: Tensor, world: World) -> Tensor:
    """Returns this rank's slice of the parameter `name`, or of another tensor of its shape, as a view of `full`."""
    axis = find_axis(name)
    if axis is None:
        return full
    edges = find_edges(full.shape[axis], world.size)
    return full.narrow(axis, edges[world.rank], edges[world.rank + 1] - edges[world.rank])


def join_slices(name: str, own: Tensor, shape: torch.Size, world: World) -> Tensor:
    """Returns the full tensor of the parameter `name`, of this `shape`, from the slices `own` of all ranks. Collective.

    A parameter that every rank has is returned as it is, not copied.
    """
    axis = find_axis(name)
    if axis is None or world.size == 1:
        return own
    lengths = [stop - start for start, stop in pairwise(find_edges(shape[axis], world.size))]
    rows = own.movedim(axis, 0)
    # Ranks exchange parts of equal length. Only a vocabulary may be cut into unequal ones.
    if missing := max(lengths) - len(rows):
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    parts = world.join(rows.flatten()).view(world.size, *rows.shape)
    return torch.cat([part[:n].movedim(0, axis) for part, n in zip(parts, lengths, strict=True)], dim=axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularySpan:
    """The token ids, from `start` up to `stop`, whose rows of embedding and head this rank has."""

    start: int
    stop: int
    largest: int  # the most ids that any rank has
    world: World

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (row of each id in this rank's slice, whether it is in the slice). Ids of other ranks get any row."""
        is_own = (ids >= self.start) & (ids < self.stop)
        return (ids - self.start).clamp(0, self.stop - self.start - 1), is_own


# ---- the decoder -----------------------------------------------------------------------------------------------------


def sum_wide(x: Tensor, world: World) -> Tensor:
    """Returns the sum of `x` over all ranks as a new tensor, in fp32 or, for float64, in float64. Collective."""
    return world.sum(x.to(torch.promote_types(x.dtype, torch.float32), copy=True))


class _SummedGradient(torch.autograd.Function):
    """Autograd function at the entry of what each rank computes a part of: its backward sums over the ranks."""

    @staticmethod
    def forward(ctx, x, world):  # type: ignore[no-untyped-def]
        """Returns x."""
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Returns the gradient of x, which is the sum of `grad` over all ranks, and None for `world`."""
        return sum_wide(grad, ctx.world).to(grad.dtype), None


class _SummedOutput(torch.autograd.Function):
    """Autograd function at the exit of what each rank computes a part of: its forward sums over the ranks."""

    @staticmethod
    def forward(ctx, y, world):  # type: ignore[no-untyped-def]
        """Returns the sum of y over all ranks."""
        ctx.dtype = y.dtype
        return sum_wide(y, world)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Returns the gradient of this rank's y, which is `grad` itself, and None for `world`."""
        return grad.to(ctx.dtype), None


class TensorNorm(Norm):
    """RMS normalisation of this rank's heads, with a weight that all ranks have. Its gradient is that of all heads."""

    def __init__(self, size: int, eps: float, world: World) -> None:
        super().__init__(size, eps)
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        """Returns x / rms(x) * weight over the last axis of x, in the type of the norm's weight."""
        weight: Tensor = _SummedGradient.apply(self.weight, self.world)
        return rms_norm(x, weight, self.eps)


class TensorLayer(Layer):
    """This rank's slice of a layer. `c` has the sizes of the slice."""

    def __init__(self, c: ModelConfig, index: int, world: World) -> None:
        super().__init__(c, index)
        self.world = world
        if c.qk_norm:
            self.q_norm = TensorNorm(c.head_dim, c.norm_eps, world)
            self.k_norm = TensorNorm(c.head_dim, c.norm_eps, world)

    def apply_attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, bias: Tensor | None) -> Tensor:
        """Returns the attention output [T, d] of all heads for the normed stream x [T, d], plus bias. Collective."""
        entered = _SummedGradient.apply(x, self.world)
        return self._sum_outputs(super().apply_attention(entered, cos, sin, attend, None), bias)

    def apply_feed_forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the feed-forward output [T, d] of all units for the normed stream x [T, d], plus bias. Collective."""
        entered = _SummedGradient.apply(x, self.world)
        return self._sum_outputs(super().apply_feed_forward(entered, None), bias)

    def _sum_outputs(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the sum of y [T, d] over all ranks, plus `bias` [d] once; None = no bias."""
        total: Tensor = _SummedOutput.apply(y, self.world)
        return total if bias is None else total + bias


class TensorDecoder(Decoder):
    """This rank's slice of a decoder, with the parameter names of the whole one. The weights are not yet set.

    `config` describes the whole model. Raises ConfigError where it cannot be divided among the ranks of `world`.
    """

    def __init__(self, config: ModelConfig, world: World) -> None:
        check_divisible(config, world.size)
        edges = find_edges(config.vocab_size, world.size)
        span = VocabularySpan(
            start=edges[world.rank],
            stop=edges[world.rank + 1],
            largest=max(stop - start for start, stop in pairwise(edges)),
            world=world,
        )
        slice_config = replace(
            config,
            vocab_size=span.stop - span.start,
            num_heads=config.num_heads // world.size,
            num_kv_heads=config.num_kv_heads // world.size,
            ff=config.ff // world.size,
        )
        super().__init__(slice_config)
        self.layers = nn.ModuleList([TensorLayer(slice_config, i, world) for i in range(config.num_layers)])
        self.config = config
        self.world = world
        self.vocabulary = span
        self.shapes = {name: p.shape for name, p in _make_outline(config).named_parameters()}  # of the whole decoder

    @property
    def replicated(self) -> frozenset[str]:
        """The names of the parameters that every rank has as a whole."""
        return frozenset(name for name in self.shapes if find_axis(name) is None)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [T, d] of tokens [T], in the type of the residual stream, with a backward. Collective.

        The backward forms the gradient of this rank's rows.
        """
        rows, is_own = self.vocabulary.locate(tokens)
        found = self.embed.index_select(0, rows).masked_fill(~is_own[:, None], 0)
        total: Tensor = _SummedOutput.apply(found, self.world)
        return total

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises NotImplementedError: a rank has only its part of the vocabulary. See `learner/tensor_head.py`."""
        raise NotImplementedError("the logits of the whole vocabulary are on no rank")

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Returns an iterator over all weights of the whole model, as `Decoder.named_weights` does. Collective.

        The tensors are copies, made one at a time, except those of parameters that every rank has.
        """
        own = dict(self.named_parameters())
        outline = _make_outline(self.config)
        names = {p: name for name, p in outline.named_parameters()}

        # Gate and up are one parameter, which is asked for twice, with its bias in between.
        @lru_cache(maxsize=2)
        def gather(p: nn.Parameter) -> Tensor:
            """Returns the full tensor of a parameter."""
            return gather_parameter(self, names[p], own[names[p]])

        return ((name, to_hf_shape(name, view)) for name, view in hf_views(outline, gather))

    def weight_specs(self, dtype: torch.dtype | None = None) -> dict[str, TensorSpec]:
        """Returns shape and type of every weight of the whole model. Not collective."""
        return _make_outline(self.config).weight_specs(dtype or self.embed.dtype)


def check_divisible(config: ModelConfig, num_ranks: int) -> None:
    """Raises ConfigError unless `num_ranks` ranks can hold one model of this config together."""
    if config.num_kv_heads % num_ranks or config.ff % num_ranks:
        most = gcd(config.num_kv_heads, config.ff)
        valid = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise ConfigError(
            f"learner.tensor = {num_ranks} does not divide the model's {config.num_kv_heads} KV heads and "
            f"{config.ff} feed-forward units; use one of {valid} (--learner.tensor)."
        )


def shard_decoder(decoder: AnyDecoder, world: World) -> TensorDecoder:
    """Returns this rank's slice of a decoder, in storage of its own, with the decoder's device, type and options.

    The decoder stays as it is. A slice of a frozen parameter is frozen. Raises ConfigError for a model of transformers,
    and where the sizes cannot be divided among the ranks of `world`.
    """
    if not isinstance(decoder, Decoder):
        raise ConfigError(
            f"learner.tensor = {world.size} needs a model that Cohort's own decoder supports, and this one is run by "
            "transformers: set --learner.tensor 1, or use another model."
        )
    # Without memory: the parameters are replaced.
    with torch.device("meta"):
        sharded = TensorDecoder(decoder.config, world)
    full = dict(decoder.named_parameters())
    slices = {name: cut_slice(name, p.detach(), world) for name, p in full.items()}
    contiguous = torch.contiguous_format
    copies = {name: own.clone(memory_format=contiguous) for name, own in slices.items()}
    sharded.load_state_dict(copies, assign=True)
    for name, p in sharded.named_parameters():
        p.requires_grad_(full[name].requires_grad)
    sharded.inv_freq = decoder.inv_freq.clone()
    sharded.recompute = decoder.recompute
    return sharded


def _make_outline(config: ModelConfig) -> Decoder:
    """Returns a decoder whose parameters have shapes but no memory."""
    with torch.device("meta"):
        return Decoder(config)


# ---- slices of a whole model -----------------------------------------------------------------------------------------

Select = Callable[[str, nn.Parameter], Tensor | None]
"""(name, this rank's parameter) -> a tensor of the parameter's shape, such as its gradient; None = leave it out."""


def select_weight(name: str, param: nn.Parameter) -> Tensor:
    """Returns the parameter's own data."""
    return param.data


def gather_parameter(decoder: TensorDecoder, name: str, own: Tensor) -> Tensor:
    """Returns the full tensor of the parameter `name` from the slices `own` of all ranks. Collective.

    `own` is the parameter's data, or a tensor of that shape, such as its gradient. It is returned as it is, not copied,
    where every rank has the whole parameter.
    """
    return join_slices(name, own.detach(), decoder.shapes[name], decoder.world)


def full_views(decoder: TensorDecoder, select: Select = select_weight) -> Iterator[tuple[str, Tensor]]:
    """Yields (parameter name, full tensor) for every parameter, one at a time, in the decoder's order. Collective.

    `select` chooses the tensor: weights by default. It must leave out the same parameters on every rank.
    """
    for name, param in decoder.named_parameters():
        own = select(name, param)
        if own is not None:
            yield name, gather_parameter(decoder, name, own)


@torch.no_grad()
def load_full(decoder: TensorDecoder, tensors: Iterable[tuple[str, Tensor]], select: Select = select_weight) -> None:
    """Copies this rank's slices of full tensors, given as (parameter name, tensor), into what `select` returns.

    It is the inverse of `full_views` and not collective: every rank must be given the full tensors.
    """
    params = dict(decoder.named_parameters())
    for name, full in tensors:
        own = select(name, params[name])
        if own is not None:
            own.copy_(cut_slice(name, full, decoder.world))
