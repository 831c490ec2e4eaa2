"""The native decoder, used both for sampling and for training.

Parameters are stored in the layout that suits the sampler. `qkv` is grouped by KV head: the rows [q_0 .. q_{g-1}, k, v]
of the first KV head, then those of the second, and so on. `gate_up` is [2, ff, d]. So each needs one matrix product,
and a slice along the KV heads (or along ff) is a tensor-parallel shard. Tensors with Hugging Face names are views of
these parameters (`hf_views`).

Tokens are one flat stream of length T. Attention is an argument, so engine and learner run the same code and differ
only in what a token may see. In a bf16 model the residual stream is fp32, which saves two roundings per layer.

Letters: T tokens, d hidden size, K KV heads, g query heads per KV head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cohort.models.config import ModelConfig
from cohort.models.functions import Collector, add_norm, apply_gated_unit, linear, rms_norm, split_and_rotate, widen
from cohort.models.shards import TensorSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention: attend(layer index, q [T, K, g, D], k [T, K, D], v [T, K, D]) returns the mixed values [T, K, g, D]."""


class Norm(nn.Module):
    """RMS normalisation, computed in at least fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x / rms(x) * weight over the last axis of x, in the type of the norm's weight."""
        return rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    """One layer: attention and feed-forward, each applied to the normed residual stream and added to it."""

    def __init__(self, c: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.shape = (c.num_kv_heads, c.queries_per_kv + 2, c.head_dim)  # K, g + 2, D
        rows = c.num_kv_heads * (c.queries_per_kv + 2) * c.head_dim
        self.attn_norm = Norm(c.hidden, c.norm_eps)
        self.qkv = nn.Parameter(torch.empty(rows, c.hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if c.qkv_bias else None
        self.q_norm = Norm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = Norm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.out = nn.Parameter(torch.empty(c.hidden, c.num_heads * c.head_dim))
        self.out_bias = nn.Parameter(torch.zeros(c.hidden)) if c.out_bias else None
        self.mlp_norm = Norm(c.hidden, c.norm_eps)
        self.gate_up = nn.Parameter(torch.empty(2, c.ff, c.hidden))
        self.gate_up_bias = nn.Parameter(torch.zeros(2, c.ff)) if c.mlp_bias else None
        self.down = nn.Parameter(torch.empty(c.hidden, c.ff))
        self.down_bias = nn.Parameter(torch.zeros(c.hidden)) if c.mlp_bias else None
        self.collectors: dict[str, Collector] = {}  # by the name of a matrix; set by `redirect_gradients`

    def forward(self, x: Tensor, y: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Runs the layer on the residual stream x + y, both [T, d] (y is None: on x).

        Returns two tensors [T, d]: the stream after attention, and the feed-forward output, which the caller must add
        to it. The next layer does so together with its first norm, by one kernel. `cos` and `sin` come from
        `compute_cos_sin`. `attend` computes attention.
        """
        x, normed = add_norm(x, y, self.attn_norm.weight, self.attn_norm.eps)
        y = self.apply_attention(normed, cos, sin, attend, self.out_bias)
        x, normed = add_norm(x, y, self.mlp_norm.weight, self.mlp_norm.eps)
        return x, self.apply_feed_forward(normed, self.down_bias)

    def apply_attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, bias: Tensor | None) -> Tensor:
        """Returns the attention output [T, d] for the normed stream x [T, d]. Adds `bias` [d] to it; None = none."""
        T = x.shape[0]
        qkv = linear(x, self.qkv, self.qkv_bias, self.collectors.get("qkv")).view(T, *self.shape)  # [T, K, g + 2, D]
        # Qwen3 normalises queries and keys per head before rotation.
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([self.shape[1] - 2, 1, 1], dim=2)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)
        mixed = attend(self.index, *split_and_rotate(qkv, cos, sin))  # [T, K, g, D]
        return linear(mixed.reshape(T, -1), self.out, bias, self.collectors.get("out"))

    def apply_feed_forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the feed-forward output [T, d] for the normed stream x [T, d]. `bias` is as in `apply_attention`."""
        inner_bias = None if self.gate_up_bias is None else self.gate_up_bias.flatten()
        gate_up = self.gate_up.flatten(0, 1)
        collect = self.collectors.get
        return apply_gated_unit(x, gate_up, inner_bias, self.down, bias, collect("gate_up"), collect("down"))


class Decoder(nn.Module):
    """The model without its head: computes final hidden states [T, d] from tokens [T] and positions [T]."""

    inv_freq: Tensor
    is_native = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # True: compute each layer's activations again in the backward instead of keeping them
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_layers)])
        self.norm = Norm(config.hidden, config.norm_eps)
        self.head = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        # fp32 whatever the model's type: rounded frequencies would give wrong angles in long contexts.
        self.register_buffer("inv_freq", torch.tensor(config.rope.inv_freq, dtype=torch.float32), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the output head [vocab, d]: the embedding itself in a model with tied weights."""
        return self.embed if self.head is None else self.head

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, embedded: Tensor | None = None) -> Tensor:
        """Returns the final hidden states [T, d], after the last norm, of tokens [T] at `positions` [T].

        `attend` computes attention and decides which tokens see which others. `embedded` [T, d] replaces the embeddings
        of the tokens. It is for callers that compute the embedding's gradient themselves.
        """
        x = widen(self.look_up(tokens) if embedded is None else embedded)  # [T, d]
        cos, sin = self.compute_cos_sin(positions, self.embed.dtype)
        y = None
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                # A layer draws no random numbers, so no state of a generator has to be kept for the second pass.
                x, y = checkpoint(layer, x, y, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x, y = layer(x, y, cos, sin, attend)
        return add_norm(x, y, self.norm.weight, self.norm.eps)[1]

    def look_up(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [T, d] of tokens [T], with a backward."""
        # index_select has a deterministic backward, plain indexing has not.
        return self.embed.index_select(0, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [T, vocab] for final hidden states [T, d], in the model's type, with a backward."""
        return linear(hidden, self.head_weight)

    def forward_one_sequence(self, tokens: Tensor) -> Tensor:
        """Returns the final hidden states [T, d] of tokens [T] that are one sequence, by plain causal attention.

        It is the reference: the same sequence inside a packed stream must get the same states.
        """
        return self(tokens, torch.arange(len(tokens), device=tokens.device), _attend_causally)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Returns an iterator over all weights: (Hugging Face name, tensor in the shape that Hugging Face stores).

        A tensor is a view of the decoder's storage or a copy (see `to_hf_shape`), without gradient. A tied head is left
        out.
        """
        return ((name, to_hf_shape(name, view)) for name, view in hf_views(self))

    def weight_specs(self, dtype: torch.dtype | None = None) -> dict[str, TensorSpec]:
        """Returns shape and type of every weight, by the names of `named_weights`, without reading any.

        `dtype` replaces the types of the parameters.
        """
        outlines = hf_views(self, lambda p: torch.empty(p.shape, dtype=dtype or p.dtype, device="meta"))
        shaped = ((name, to_hf_shape(name, view)) for name, view in outlines)
        return {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, t in shaped}

    def compute_cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of the rotary angles of positions [T], each [T, 1, 1, D/2] in `dtype`.

        Both are multiplied by the rope's `scale`, which differs from 1 only for YaRN.
        """
        angle = positions.to(torch.float32)[:, None] * self.inv_freq.float()
        scale = self.config.rope.scale
        cos, sin = angle.cos() * scale, angle.sin() * scale
        return cos.to(dtype)[:, None, None], sin.to(dtype)[:, None, None]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Replaces all tensors by `fn(tensor)`, as torch does for `.to()`, and returns self.

        The rotary frequencies only change their device: `.to(dtype)` must not round them.
        """
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.embed.device)
        return self


def _attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the mixed values [T, K, g, D] of causal attention in one sequence. See `Attend`; `layer` is unused."""
    queries = q.flatten(1, 2).transpose(0, 1)[None]  # [1, H, T, D]
    # Each KV head is repeated once per query head that shares it.
    keys, values = (x.repeat_interleave(q.shape[2], 1).transpose(0, 1)[None] for x in (k, v))
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return mixed[0].transpose(0, 1).reshape(q.shape)


MATRICES = ("qkv", "out", "gate_up", "down")  # the matrices of a layer, by attribute name


@contextmanager
def redirect_gradients(decoder: Decoder, collectors: Mapping[str, Collector]) -> Iterator[None]:
    """Makes forward passes in the block call collectors in their backward instead of computing weight gradients.

    `collectors` has the names of parameters as keys, such as "layers.0.qkv". A collector is called with the gradient
    [T, out] of the matrix product's output and with its input [T, in]. Other names than those of layers' matrices are
    ignored. The backward belongs into the block too, because recomputed layers run forward again in it. Afterwards the
    decoder has no collectors, so blocks must not be nested.
    """
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        names = {name: f"layers.{i}.{name}" for name in MATRICES}
        layer.collectors = {short: collectors[name] for short, name in names.items() if name in collectors}
    try:
        yield
    finally:
        for layer in decoder.layers:
            assert isinstance(layer, Layer)
            layer.collectors = {}


def initialise(decoder: Decoder, seed: int, std: float = 0.02) -> None:
    """Fills embedding, head and matrices in place with normal random numbers of standard deviation `std`.

    The same seed gives the same numbers on every device. Norms and biases stay unchanged.
    """
    # Drawn on the CPU and in the order of names, so that neither device nor order of definition matters.
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(decoder.named_parameters()):
        # The bias of gate and up has two axes too.
        if p.ndim >= 2 and not name.endswith("bias"):
            p.data.copy_(torch.randn(p.shape, generator=generator) * std)


def hf_views(
    decoder: Decoder, select: Callable[[nn.Parameter], Tensor] = lambda p: p.data
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, view of the decoder's storage) for every weight, without copying.

    A view may have more axes than the tensor that Hugging Face stores: see `to_hf_shape`. A tied head is left out.
    `select` chooses the tensor that is viewed: by default a parameter's data, else any tensor of the same shape, such
    as its gradient.
    """
    c = decoder.config
    K = c.num_kv_heads
    g = c.queries_per_kv
    D = c.head_dim
    yield "model.embed_tokens.weight", select(decoder.embed)
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        path = f"model.layers.{i}."
        yield path + "input_layernorm.weight", select(layer.attn_norm.weight)
        # The rows of one KV head: those of its g query heads, then its key's, then its value's.
        split = select(layer.qkv).view(K, g + 2, D, c.hidden)
        for name, part in (("q", split[:, :g]), ("k", split[:, g]), ("v", split[:, g + 1])):
            yield f"{path}self_attn.{name}_proj.weight", part
        if layer.qkv_bias is not None:
            bias = select(layer.qkv_bias).view(K, g + 2, D)
            for name, part in (("q", bias[:, :g]), ("k", bias[:, g]), ("v", bias[:, g + 1])):
                yield f"{path}self_attn.{name}_proj.bias", part
        if layer.q_norm is not None and layer.k_norm is not None:
            yield path + "self_attn.q_norm.weight", select(layer.q_norm.weight)
            yield path + "self_attn.k_norm.weight", select(layer.k_norm.weight)
        yield path + "self_attn.o_proj.weight", select(layer.out)
        if layer.out_bias is not None:
            yield path + "self_attn.o_proj.bias", select(layer.out_bias)
        yield path + "post_attention_layernorm.weight", select(layer.mlp_norm.weight)
        for j, name in enumerate(("gate", "up")):
            yield f"{path}mlp.{name}_proj.weight", select(layer.gate_up)[j]
            if layer.gate_up_bias is not None:
                yield f"{path}mlp.{name}_proj.bias", select(layer.gate_up_bias)[j]
        yield path + "mlp.down_proj.weight", select(layer.down)
        if layer.down_bias is not None:
            yield path + "mlp.down_proj.bias", select(layer.down_bias)
    yield "model.norm.weight", select(decoder.norm.weight)
    if decoder.head is not None:
        yield "lm_head.weight", select(decoder.head)


def to_hf_shape(name: str, view: Tensor) -> Tensor:
    """Returns a view from `hf_views` in the shape that Hugging Face stores: a vector [out] or a matrix [out, in].

    `name` is the weight's Hugging Face name. The result shares memory with `view`, or is a copy where it has to be.
    """
    return view.flatten() if name.endswith(".bias") else view.flatten(0, -2) if view.ndim > 2 else view
