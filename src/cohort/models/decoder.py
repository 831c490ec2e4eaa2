"""The one native decoder: it samples and it trains.

Parameters live in the layout the sampler wants. `qkv` is grouped by KV head, [q_0 .. q_{g-1}, k, v] for each, and
`gate_up` is [2, ff, d]: one matrix product each, and a slice along the KV heads (or along ff) is a tensor-parallel
shard. Hugging Face names are views of them (`hf_views`).

Tokens are one flat stream; attention is an argument, so engine and learner run the same code and differ only in
what a token may see. In bf16 the residual stream is fp32: two roundings a layer less.

Letters: T tokens, d hidden, K KV heads, g query heads a KV head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cohort.models.config import ModelConfig
from cohort.models.functions import Collector, add_norm, gated, linear, rms_norm, split_rotated, wide

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [T, K, g, D], k [T, K, D], v [T, K, D]) -> [T, K, g, D]"""


class Norm(nn.Module):
    """RMS normalisation, computed in at least fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

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
        self.collectors: dict[str, Collector] = {}  # by the name of a matrix: see `collecting`

    def forward(self, x: Tensor, y: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The stream x and what is still to be added to it, before and after."""
        T, collect = x.shape[0], self.collectors.get
        x, normed = add_norm(x, y, self.attn_norm.weight, self.attn_norm.eps)
        qkv = linear(normed, self.qkv, self.qkv_bias, collect("qkv")).view(T, *self.shape)  # [T, K, g + 2, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([self.shape[1] - 2, 1, 1], dim=2)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)
        mixed = attend(self.index, *split_rotated(qkv, cos, sin))  # [T, K, g, D]
        y = linear(mixed.reshape(T, -1), self.out, self.out_bias, collect("out"))
        x, normed = add_norm(x, y, self.mlp_norm.weight, self.mlp_norm.eps)
        bias = None if self.gate_up_bias is None else self.gate_up_bias.flatten()
        gate_up = self.gate_up.flatten(0, 1)
        y = gated(normed, gate_up, bias, self.down, self.down_bias, collect("gate_up"), collect("down"))
        return x, y


class Decoder(nn.Module):
    """tokens [T], positions [T], attend -> final hidden states [T, d]."""

    inv_freq: Tensor
    is_native = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # each layer's activations in the backward, instead of keeping them
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_layers)])
        self.norm = Norm(config.hidden, config.norm_eps)
        self.head = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        # fp32 whatever the model's dtype: angles of long contexts do not survive rounding
        self.register_buffer("inv_freq", torch.tensor(config.rope.inv_freq, dtype=torch.float32), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        return self.embed if self.head is None else self.head

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, embedded: Tensor | None = None) -> Tensor:
        """`embedded` [T, d] takes the place of the tokens' embeddings, for whoever forms their gradient himself."""
        # index_select: its backward is deterministic, that of indexing is not
        x = wide(self.embed.index_select(0, tokens) if embedded is None else embedded)  # [T, d]
        cos, sin = self.angles(positions, self.embed.dtype)
        y = None
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x, y = checkpoint(layer, x, y, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x, y = layer(x, y, cos, sin, attend)
        return add_norm(x, y, self.norm.weight, self.norm.eps)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head_weight)  # [T, vocab]

    def one_sequence(self, tokens: Tensor) -> Tensor:
        """Final hidden states [T, d] of one sequence, by plain causal attention: what packs must be equal to."""
        return self(tokens, torch.arange(len(tokens), device=tokens.device), _causal)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor in the shape Hugging Face stores)."""
        return ((name, hf_shaped(name, view)) for name, view in hf_views(self))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, 1, 1, D/2]."""
        angle = positions.to(torch.float32)[:, None] * self.inv_freq.float()
        scale = self.config.rope.scale
        cos, sin = angle.cos() * scale, angle.sin() * scale
        return cos.to(dtype)[:, None, None], sin.to(dtype)[:, None, None]

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """`.to(dtype)` must not round the frequencies."""
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.embed.device)
        return self


def _causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, K, g, D], k, v [T, K, D] of one sequence."""
    queries = q.flatten(1, 2).transpose(0, 1)[None]  # [1, H, T, D]
    keys, values = (x.repeat_interleave(q.shape[2], 1).transpose(0, 1)[None] for x in (k, v))
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return mixed[0].transpose(0, 1).reshape(q.shape)


MATRICES = ("qkv", "out", "gate_up", "down")  # of a layer


@contextmanager
def collecting(decoder: Decoder, collectors: Mapping[str, Collector]) -> Iterator[None]:
    """Within, matrices of layers get no gradient of their own: what it is made of goes to these.

    `collectors` are named as parameters are: "layers.0.qkv".
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
    """Random weights: normal matrices, unit norms, zero biases; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(decoder.named_parameters()):
        if p.ndim >= 2 and p is not None:
            p.data.copy_(torch.randn(p.shape, generator=generator) * std)


def hf_views(decoder: Decoder, of: Callable[[nn.Parameter], Tensor] = lambda p: p.data) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, view of the storage). A view may have split leading axes: see `hf_shaped`.

    `of` picks what is viewed: the data, or something of the parameter's shape such as its gradient.
    """
    c = decoder.config
    K, g, D = c.num_kv_heads, c.queries_per_kv, c.head_dim
    yield "model.embed_tokens.weight", of(decoder.embed)
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", of(layer.attn_norm.weight)
        split = of(layer.qkv).view(K, g + 2, D, c.hidden)
        for name, part in (("q", split[:, :g]), ("k", split[:, g]), ("v", split[:, g + 1])):
            yield f"{at}self_attn.{name}_proj.weight", part
        if layer.qkv_bias is not None:
            bias = of(layer.qkv_bias).view(K, g + 2, D)
            for name, part in (("q", bias[:, :g]), ("k", bias[:, g]), ("v", bias[:, g + 1])):
                yield f"{at}self_attn.{name}_proj.bias", part
        if layer.q_norm is not None and layer.k_norm is not None:
            yield at + "self_attn.q_norm.weight", of(layer.q_norm.weight)
            yield at + "self_attn.k_norm.weight", of(layer.k_norm.weight)
        yield at + "self_attn.o_proj.weight", of(layer.out)
        if layer.out_bias is not None:
            yield at + "self_attn.o_proj.bias", of(layer.out_bias)
        yield at + "post_attention_layernorm.weight", of(layer.mlp_norm.weight)
        for j, name in enumerate(("gate", "up")):
            yield f"{at}mlp.{name}_proj.weight", of(layer.gate_up)[j]
            if layer.gate_up_bias is not None:
                yield f"{at}mlp.{name}_proj.bias", of(layer.gate_up_bias)[j]
        yield at + "mlp.down_proj.weight", of(layer.down)
        if layer.down_bias is not None:
            yield at + "mlp.down_proj.bias", of(layer.down_bias)
    yield "model.norm.weight", of(decoder.norm.weight)
    if decoder.head is not None:
        yield "lm_head.weight", of(decoder.head)


def hf_shaped(name: str, view: Tensor) -> Tensor:
    """A view of `hf_views` in the shape Hugging Face stores (copies when the view is strided)."""
    return view.flatten() if name.endswith(".bias") else view.flatten(0, -2) if view.ndim > 2 else view
