"""One decode step on the device, from the last token of each row to the next, as a function that can be captured.

Letters: T tokens, d hidden size, B rows, K KV heads, g query heads per KV head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.transfer import copy_to_device
from cohort.engines.native.cuda.attention import AttentionPlan, SoftmaxParts, compute_decode_attention
from cohort.engines.native.cuda.draw import choose_tokens, prepare_rows, record_tokens
from cohort.engines.native.cuda.pages import PageArena, PageTables
from cohort.engines.native.cuda.rotate import PAGE, Angles, rotate_and_store
from cohort.engines.native.sampler import draw_tokens
from cohort.engines.native.slots import TEMPERATURE, Slots
from cohort.models.decoder import Decoder, Layer
from cohort.models.functions import multiply_wide, widen
from cohort.models.kernels import add_norm, apply_gate, next_power_of_two

FusedAttend = Callable[[Layer, Tensor], Tensor]
"""attend(layer, qkv [T, K, g + 2, D], not rotated) -> [T, K * g * D]"""

# Keys are split if there would be fewer attention programs than this: four per multiprocessor of an H100.
MIN_PROGRAMS = 528
MAX_SPLITS = 8  # programs that share the own keys of a row
MAX_PREFIX_SPLITS = 4  # programs that share the keys of a prefix
KEYS_PER_SPLIT = 512  # keys of a prompt that one program reads in about the time that a row's own keys take
MAX_LOGITS = 1 << 24  # most logits truncated at once
MAX_TILE = 64  # queries that read a shared prompt together


def run_decoder_fused(decoder: Decoder, tokens: Tensor, attend: FusedAttend) -> Tensor:
    """Returns the final hidden states [T, d] of tokens [T]: `Decoder.forward` with its elementwise work fused.

    `attend(layer, qkv)` must rotate, store KV and attend. The function rounds where the decoder rounds, and launches a
    third of the kernels.
    """
    x = widen(decoder.embed.index_select(0, tokens))  # [T, d], the residual stream
    # Output of the last block. The next norm adds it to x in place.
    y: Tensor | None = None
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        normed = add_norm(x, y, layer.attn_norm.weight, layer.attn_norm.eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(x), *layer.shape)
        y = F.linear(attend(layer, qkv), layer.out, layer.out_bias)
        normed = add_norm(x, y, layer.mlp_norm.weight, layer.mlp_norm.eps)
        bias = None if layer.gate_up_bias is None else layer.gate_up_bias.flatten()
        y = F.linear(apply_gate(F.linear(normed, layer.gate_up.flatten(0, 1), bias)), layer.down, layer.down_bias)
    return add_norm(x, y, decoder.norm.weight, decoder.norm.eps)


def get_qk_norms(layer: Layer) -> tuple[Tensor, Tensor, float] | None:
    """Returns (norm weights of queries, norm weights of keys, eps) of a layer. None for models without qk-norm.

    The eps of the query norm stands for both.
    """
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps


@dataclass(frozen=True, kw_only=True, slots=True)
class StepVariant:
    """What a captured step depends on besides the contents of its buffers. Every other variant is another graph."""

    rows: int
    tile_size: int  # queries per tile: MAX_TILE for siblings, fewer if no prompt is shared
    num_tiles: int
    prefix_splits: int
    has_truncation: bool
    needs_sorting: bool
    has_greedy: bool
    has_temperature: bool


class DecodeState:
    """Everything that a step reads and writes besides weights and KV. Rows are the slots, in order.

    It is allocated once, so that captured addresses stay valid.
    """

    def __init__(self, decoder: Decoder, rows: int, window: int, max_context: int) -> None:
        c, device = decoder.config, decoder.embed.device
        self.slots = Slots(rows, window, torch.float32, device)
        self.done = torch.ones(rows, dtype=torch.int64, device=device)  # 1 = the row does not change
        self.tables = PageTables(rows, max_context // PAGE + 2, device)
        # Of each row's new token: `prepare_rows` fills these in every step.
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        # Which rows read which prefix together: see `AttentionPlan`.
        self.tile_prefix = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.tile_rows = torch.full((rows * MAX_TILE,), -1, dtype=torch.int32, device=device)
        self.parts = SoftmaxParts.allocate(
            MAX_SPLITS + MAX_PREFIX_SPLITS, rows, c.num_kv_heads, c.queries_per_kv, c.head_dim, device
        )
        cos, sin = decoder.compute_cos_sin(torch.arange(max_context, device=device), decoder.embed.dtype)
        self.angles = Angles(cos=cos.reshape(max_context, -1), sin=sin.reshape(max_context, -1))

    def move_rows(self, source: list[int], target: list[int]) -> None:
        """Copies the state (slots, `done`, own pages) of the source rows over the target rows, pair by pair.

        KV stays in place, because rows refer to it by page. The tiles do not change: they must be planned again.
        """
        if source:
            self.slots.move_slots(source, target)
            old, new = copy_to_device(source, self.done.device), copy_to_device(target, self.done.device)
            self.done[new] = self.done[old]
            self.tables.own[new] = self.tables.own[old]

    def list_addresses(self) -> tuple[int, ...]:
        """Returns the memory addresses of `done` and of the buffers of slots and page tables.

        Captured graphs are valid only while these do not change. The other buffers are never replaced.
        """
        s, t = self.slots, self.tables
        held = (
            *(s.ints, s.reals, s.stop_ids, s.tokens, s.logprobs, s.kept_mass),
            *(self.done, t.own, t.prefix, t.prefix_length),
        )
        return tuple(x.data_ptr() for x in held)


def make_step(decoder: Decoder, state: DecodeState, arena: PageArena, variant: StepVariant) -> Callable[[], None]:
    """Returns a function that runs one decode step: it computes, draws and records one token per row.

    It works on the first `variant.rows` rows of `state`, where the tokens go, and stores KV in the arena. Rows that are
    done are computed too, but their tokens are not recorded and their KV goes to page 0.
    """
    B = variant.rows
    slots, c = state.slots, decoder.config
    K, g = c.num_kv_heads, c.queries_per_kv
    # Rows per tile.
    siblings = variant.tile_size // g
    here = slice(0, B)
    plan = AttentionPlan(
        tile_prefix=state.tile_prefix[: variant.num_tiles],
        tile_rows=state.tile_rows[: variant.num_tiles * siblings],
        prefix_table=state.tables.prefix,
        prefix_length=state.tables.prefix_length,
        own_table=state.tables.own,
        base=slots.prefix_length,
        count=state.counts,
        M=variant.tile_size,
        prefix_splits=variant.prefix_splits,
        # Keys are split until there are about MIN_PROGRAMS / 2 programs: those of the prefixes run beside them.
        splits=max(1, min(MAX_SPLITS, MIN_PROGRAMS // (2 * B * K))),
    )
    positions = state.positions[here]
    places = state.places[here]
    counts = state.counts[here]

    def attend(layer: Layer, qkv: Tensor) -> Tensor:
        """qkv [B, K, g + 2, D], not rotated -> [B, K * g * D]"""
        pages = arena.get_layer(layer.index)
        q, _ = rotate_and_store(qkv, positions, places, state.angles, get_qk_norms(layer), pages)
        return compute_decode_attention(q, pages, plan, state.parts)

    def step() -> None:
        """Computes and records one token for every row that is not done."""
        prepare_rows(state.done, slots.prefix_length, slots.own_length, state.tables.own, positions, places, counts)
        hidden = run_decoder_fused(decoder, slots.last_token[here], attend)
        logits = multiply_wide(hidden, decoder.head_weight)
        if variant.has_truncation:
            # Rows are truncated in parts: sorting all at once would take gigabytes.
            size = max(1, MAX_LOGITS // c.vocab_size)
            parts = [slice(low, min(low + size, B)) for low in range(0, B, size)]
            drawn = [draw_tokens(logits[part], slots.get_settings(part), slots.draw_uniforms(part)) for part in parts]
            kept = torch.cat([d.kept_mass for d in drawn if d.kept_mass is not None])
            tokens, logprobs = torch.cat([d.tokens for d in drawn]), torch.cat([d.logprobs for d in drawn])
            record_tokens(tokens, logprobs, kept, slots, state.done)
        else:
            temperature = slots.reals[TEMPERATURE]
            tokens, logprobs = choose_tokens(
                logits, temperature, slots.random_stream, slots.position, variant.has_greedy
            )
            record_tokens(tokens, logprobs, None, slots, state.done)

    return step


def choose_prefix_splits(tiles: int, K: int, longest: int) -> int:
    """Returns how many programs share the keys of a prefix: more if there are few tiles, or long prefixes.

    It is between 1 and MAX_PREFIX_SPLITS. `tiles` x K (KV heads) programs run without splits; `longest` is the number
    of tokens of the longest prefix. The programs run beside those of the rows' own tokens, so they need not fill the
    device alone.

    >>> [choose_prefix_splits(64, 2, 256), choose_prefix_splits(64, 2, 1024), choose_prefix_splits(8, 2, 256)]
    [1, 2, 4]
    """
    return max(1, min(MAX_PREFIX_SPLITS, max(MIN_PROGRAMS // (4 * tiles * K), -(-longest // KEYS_PER_SPLIT))))


def choose_tile_size(g: int, most_siblings: int) -> int:
    """Returns the number of queries that read a prefix together, a power of two.

    It is enough for the largest group (`most_siblings` rows with g queries each), but at most MAX_TILE, or what one row
    needs if that is more. It is at least 16, which is what a matrix unit takes.
    """
    return max(16, min(max(MAX_TILE, next_power_of_two(g)), next_power_of_two(g * most_siblings)))
