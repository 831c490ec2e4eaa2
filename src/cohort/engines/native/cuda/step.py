"""One decode step on the device, from the last token to the next, and its capture as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.transfer import put
from cohort.engines.native.cuda.attention import Parts, Reading, decode_attention
from cohort.engines.native.cuda.draw import begin, choose, record
from cohort.engines.native.cuda.pages import Arena, Tables
from cohort.engines.native.cuda.rotate import PAGE, Angles, rotate_and_store
from cohort.engines.native.sampler import draw
from cohort.engines.native.slots import TEMPERATURE, Slots
from cohort.models.decoder import Decoder, Layer
from cohort.models.functions import wide, wide_product
from cohort.models.kernels import add_norm, gate, power

FusedAttend = Callable[[Layer, Tensor], Tensor]
"""attend(layer, qkv [T, K, g + 2, D], not rotated) -> [T, K * g * D]"""

PROGRAMS = 528  # fewer attention programs than this (four a multiprocessor of an H100) split the keys
MAX_SPLITS = 8
MAX_PREFIX_SPLITS = 4
LONG = 512  # keys of a prompt that one program reads in about the time that a row's own take
LOGITS = 1 << 24  # most logits truncated at once
TILE = 64  # queries that meet a shared prompt at once


def fused_forward(decoder: Decoder, tokens: Tensor, attend: FusedAttend) -> Tensor:
    """`Decoder.forward` with its elementwise work fused: the same roundings, a third of the launches."""
    x = wide(decoder.embed.index_select(0, tokens))  # [T, d], the residual stream
    y: Tensor | None = None
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        normed = add_norm(x, y, layer.attn_norm.weight, layer.attn_norm.eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(x), *layer.shape)
        y = F.linear(attend(layer, qkv), layer.out, layer.out_bias)
        normed = add_norm(x, y, layer.mlp_norm.weight, layer.mlp_norm.eps)
        bias = None if layer.gate_up_bias is None else layer.gate_up_bias.flatten()
        y = F.linear(gate(F.linear(normed, layer.gate_up.flatten(0, 1), bias)), layer.down, layer.down_bias)
    return add_norm(x, y, decoder.norm.weight, decoder.norm.eps)


def qk_norms(layer: Layer) -> tuple[Tensor, Tensor, float] | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What a captured step is made for: other rows or wishes are another graph."""

    rows: int
    tile: int  # queries a tile: TILE for siblings, less when nothing is shared
    tiles: int
    prefix_splits: int
    truncated: bool
    sorted: bool
    greedy: bool
    scaled: bool


class State:
    """Everything a step reads and writes besides weights and KV. Allocated once; rows are the slots in order."""

    def __init__(self, decoder: Decoder, rows: int, window: int, max_context: int) -> None:
        c, device = decoder.config, decoder.embed.device
        self.slots = Slots(rows, window, torch.float32, device)
        self.done = torch.ones(rows, dtype=torch.int64, device=device)
        self.tables = Tables(rows, max_context // PAGE + 2, device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tile_prefix = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.tile_rows = torch.full((rows * TILE,), -1, dtype=torch.int32, device=device)
        K, g, D = c.num_kv_heads, c.queries_per_kv, c.head_dim
        self.parts = Parts.make(MAX_SPLITS + MAX_PREFIX_SPLITS, rows, K, g, D, device)
        cos, sin = decoder.angles(torch.arange(max_context, device=device), decoder.embed.dtype)
        self.angles = Angles(cos=cos.reshape(max_context, -1), sin=sin.reshape(max_context, -1))

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy rows over others; KV stays where it is."""
        if source:
            self.slots.move(source, target)
            old, new = put(source, self.done.device), put(target, self.done.device)
            self.done[new] = self.done[old]
            self.tables.own[new] = self.tables.own[old]

    def addresses(self) -> tuple[int, ...]:
        s, t = self.slots, self.tables
        held = (s.ints, s.reals, s.stops, s.tokens, s.logprobs, s.kept, self.done, t.own, t.prefix, t.prefix_length)
        return tuple(x.data_ptr() for x in held)


def make_step(decoder: Decoder, state: State, arena: Arena, variant: Variant) -> Callable[[], None]:
    """The step of the first `variant.rows` rows. Rows that are done compute something nobody reads."""
    B, slots, c = variant.rows, state.slots, decoder.config
    K, g = c.num_kv_heads, c.queries_per_kv
    siblings = variant.tile // g
    here = slice(0, B)
    reading = Reading(
        tile_prefix=state.tile_prefix[: variant.tiles],
        tile_rows=state.tile_rows[: variant.tiles * siblings],
        prefix_table=state.tables.prefix,
        prefix_length=state.tables.prefix_length,
        own_table=state.tables.own,
        base=slots.base,
        count=state.counts,
        M=variant.tile,
        prefix_splits=variant.prefix_splits,
        splits=max(1, min(MAX_SPLITS, PROGRAMS // (2 * B * K))),
    )
    positions, places, counts = state.positions[here], state.places[here], state.counts[here]

    def attend(layer: Layer, qkv: Tensor) -> Tensor:
        pages = arena.layer(layer.index)
        q, _ = rotate_and_store(qkv, positions, places, state.angles, qk_norms(layer), pages)
        return decode_attention(q, pages, reading, state.parts)

    def step() -> None:
        begin(state.done, slots.base, slots.length, state.tables.own, positions, places, counts)
        hidden = fused_forward(decoder, slots.last[here], attend)
        logits = wide_product(hidden, decoder.head_weight)
        if variant.truncated:
            size = max(1, LOGITS // c.vocab_size)  # sorting all rows at once would take gigabytes
            parts = [slice(low, min(low + size, B)) for low in range(0, B, size)]
            drawn = [draw(logits[part], slots.settings(part), slots.uniforms(part)) for part in parts]
            kept = torch.cat([d.kept for d in drawn if d.kept is not None])
            tokens, logprobs = torch.cat([d.tokens for d in drawn]), torch.cat([d.logprobs for d in drawn])
            record(tokens, logprobs, kept, slots, state.done)
        else:
            temperature = slots.reals[TEMPERATURE]
            tokens, logprobs = choose(logits, temperature, slots.stream, slots.position, variant.greedy)
            record(tokens, logprobs, None, slots, state.done)

    return step


def prefix_splits(tiles: int, K: int, longest: int) -> int:
    """Programs that share a prompt's keys: more where there are few prompts, or long ones.

    They run beside those of the rows' own tokens, so they need not fill the device alone.

    >>> [prefix_splits(64, 2, 256), prefix_splits(64, 2, 1024), prefix_splits(8, 2, 256)]
    [1, 2, 4]
    """
    return max(1, min(MAX_PREFIX_SPLITS, max(PROGRAMS // (4 * tiles * K), -(-longest // LONG))))


def tile_size(g: int, most_siblings: int) -> int:
    """Queries a tile: enough for the siblings there are, at least what a matrix unit takes."""
    return max(16, min(max(TILE, power(g)), power(g * most_siblings)))
