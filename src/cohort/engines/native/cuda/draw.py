"""Triton kernels around a decode step: prepare rows, draw tokens by inverse CDF, record them. The host is not involved.

The draw is that of `sampler.invert_cdf` with the numbers of `random.draw_uniforms`: same numbers, same order.

Letters: B rows, V vocabulary size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cohort.engines.native.cuda.rotate import PAGE
from cohort.engines.native.slots import Slots
from cohort.models.kernels import next_power_of_two

VOCAB_BLOCK = 2048  # logits that one program sums


@triton.jit
def _blocks_kernel(
    logits_ptr,
    temperature_ptr,
    top_ptr,
    sum_ptr,
    best_ptr,
    V,
    blocks,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Reduces one block of BLOCK logits of one row per program, for `_choose_kernel`.

    Stores the largest logit in top_ptr and the sum of exp(logit - largest) in sum_ptr, [rows, blocks] each. GREEDY: the
    token of the largest logit goes to best_ptr. Logits are first divided by the row's temperature (0 counts as 1).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    x = x / tl.where(temperature > 0, temperature, 1.0)
    top = tl.max(x, axis=0)
    tl.store(top_ptr + row * blocks + block, top)
    tl.store(sum_ptr + row * blocks + block, tl.sum(tl.exp(x - top), axis=0))
    if GREEDY:
        tl.store(best_ptr + row * blocks + block, block * BLOCK + tl.argmax(x, axis=0))


@triton.jit
def _mix(x):
    """Returns a uint64 number with mixed bits: a bijection in which each input bit flips about half of the output.

    It gives the same bits as `random.mix_bits`.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(stream, position):
    """Returns the uniform number in [0, 1) of one random stream and position, as `random.draw_uniforms` does."""
    bits = _mix(stream.to(tl.uint64) ^ _mix(position.to(tl.uint64) + 0x9E3779B97F4A7C15))
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _first_above(cumulative, target, total):
    """Returns the index of the first entry of `cumulative` above `target`, for one row that does not decrease.

    If none is above, returns that of the first entry equal to `total`, the last one, as `sampler.find_first_above`
    does.
    """
    above = tl.sum((cumulative <= target).to(tl.int32), axis=0)
    end = tl.sum((cumulative < total).to(tl.int32), axis=0)
    return tl.minimum(above, end)


@triton.jit
def _choose_kernel(
    logits_ptr,
    temperature_ptr,
    stream_ptr,
    position_ptr,
    top_ptr,
    sum_ptr,
    best_ptr,
    token_ptr,
    logprob_ptr,
    V,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of two >= blocks
    GREEDY: tl.constexpr,
):
    """Draws the token of one row per program by inverse CDF. Stores token and log-probability at their pointers.

    The log-probability is at the row's temperature (0 counts as 1). The kernel uses the block sums of `_blocks_kernel`;
    only the block in which the token lies (BLOCK logits) is read again. GREEDY: rows with temperature 0 get their most
    probable token.
    """
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    tops = tl.load(top_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * blocks + b, mask=b < blocks, other=0.0)
    top = tl.max(tops, axis=0)
    # Block sums are relative to the largest logit of their block: bring them to the scale of the row.
    mass = (sums * tl.exp(tops - top)).to(tl.float64)
    cumulative = tl.cumsum(mass, axis=0)
    total = tl.sum(mass, axis=0)
    last = tl.max(cumulative, axis=0)
    # First level: the block in which the target lies, and the mass below this block.
    target = _uniform(tl.load(stream_ptr + row), tl.load(position_ptr + row)) * last
    block = _first_above(cumulative, target, last)
    below = tl.sum(tl.where(b < block, mass, 0.0), axis=0)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    # Second level: the token inside that block.
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32) / divisor
    inside = tl.cumsum(tl.exp(x - top).to(tl.float64), axis=0)
    token = block * BLOCK + _first_above(inside, target - below, tl.max(inside, axis=0))
    if GREEDY:
        best = tl.load(best_ptr + row * blocks + b, mask=b < blocks, other=0)
        first = tl.argmax(tops, axis=0)
        greedy = tl.sum(tl.where(b == first, best, 0), axis=0)
        token = tl.where(temperature > 0, token, greedy)
    chosen = tl.load(logits_ptr + row * V + token).to(tl.float32) / divisor
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, chosen - top - tl.log(total).to(tl.float32))


def choose_tokens(
    logits: Tensor, temperature: Tensor, stream: Tensor, position: Tensor, greedy: bool
) -> tuple[Tensor, Tensor]:
    """Draws one token per row from logits [B, V], without truncation. Returns tokens and log-probabilities, [B] each.

    `temperature`, `stream` and `position` have one number per row; the last two select the row's random number.
    `greedy` must be True if some temperature is 0: rows with temperature 0 get their most probable token. The
    log-probabilities are at the row's temperature (0 counts as 1).
    """
    B, V = logits.shape
    blocks = triton.cdiv(V, VOCAB_BLOCK)
    # Per block: the largest logit, the sum, and (for greedy rows) the token of the largest logit.
    tops, sums = (torch.empty(B, blocks, device=logits.device) for _ in range(2))
    best = torch.empty((B, blocks) if greedy else (1,), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(B, device=logits.device)
    _blocks_kernel[(B, blocks)](logits, temperature, tops, sums, best, V, blocks, VOCAB_BLOCK, greedy, num_warps=4)
    _choose_kernel[(B,)](
        *(logits, temperature, stream, position, tops, sums, best, tokens, logprobs),
        *(V, blocks, VOCAB_BLOCK, next_power_of_two(blocks), greedy),
        num_warps=4,
    )
    return tokens, logprobs


@triton.jit
def _begin_kernel(
    done_ptr, base_ptr, length_ptr, table_ptr, position_ptr, place_ptr, count_ptr, table_width, PAGE: tl.constexpr
):
    """Computes position, place and count of one row's new token per program and stores them, see `prepare_rows`.

    A row that is done gets a place in page 0 and count 0. PAGE: tokens per page.
    """
    row = tl.program_id(0)
    done = tl.load(done_ptr + row) != 0
    length = tl.load(length_ptr + row)
    # The new token is own token number `length`, counted from 0.
    page = tl.load(table_ptr + row * table_width + length // PAGE)
    tl.store(position_ptr + row, tl.load(base_ptr + row) + length)
    # Rows that are done write somewhere into page 0.
    tl.store(place_ptr + row, tl.where(done, row % PAGE, page * PAGE + length % PAGE).to(tl.int64))
    tl.store(count_ptr + row, tl.where(done, 0, length + 1).to(tl.int32))


def prepare_rows(
    done: Tensor, base: Tensor, length: Tensor, table: Tensor, positions: Tensor, places: Tensor, counts: Tensor
) -> None:
    """Computes where each row's new token goes, and writes it to `positions`, `places` and `counts` [rows].

    positions: index in the whole sequence. places: where the KV goes, page * PAGE + offset; in page 0 for a row that is
    done (`done` = 1). counts: own tokens that the row will read, the new one included; 0 for a row that is done. `base`
    is the length of the row's prefix, `length` the number of its own tokens in the cache, `table` the pages of its own
    tokens. Only the first len(positions) rows of these are read.
    """
    grid = (len(positions),)
    _begin_kernel[grid](done, base, length, table, positions, places, counts, table.shape[1], PAGE, num_warps=1)


@triton.jit
def _record_kernel(
    token_ptr,
    logprob_ptr,
    kept_ptr,
    done_ptr,
    last_ptr,
    length_ptr,
    position_ptr,
    left_ptr,
    filled_ptr,
    stops_ptr,
    tokens_ptr,
    logprobs_ptr,
    kepts_ptr,
    num_stops,
    window,
    STOPS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Stores the drawn token of one row per program in the row's window and advances its counters, see `record_tokens`.

    Rows that are done are skipped. STOPS: num_stops, padded to a power of two. KEPT: the kept mass is stored too.
    """
    row = tl.program_id(0)
    if tl.load(done_ptr + row) != 0:
        return
    token = tl.load(token_ptr + row)
    filled = tl.load(filled_ptr + row)
    tl.store(tokens_ptr + row * window + filled, token)
    tl.store(logprobs_ptr + row * window + filled, tl.load(logprob_ptr + row))
    if KEPT:
        tl.store(kepts_ptr + row * window + filled, tl.load(kept_ptr + row))
    # The row ends at one of its stop ids, or when no token is left to draw.
    left = tl.load(left_ptr + row) - 1
    s = tl.arange(0, STOPS)
    stops = tl.load(stops_ptr + row * num_stops + s, mask=s < num_stops, other=-1)
    stopped = tl.sum((stops == token).to(tl.int32), axis=0) > 0
    tl.store(last_ptr + row, token)
    tl.store(length_ptr + row, tl.load(length_ptr + row) + 1)
    tl.store(position_ptr + row, tl.load(position_ptr + row) + 1)
    tl.store(left_ptr + row, left)
    tl.store(filled_ptr + row, filled + 1)
    tl.store(done_ptr + row, (stopped | (left <= 0)).to(tl.int64))


def record_tokens(tokens: Tensor, logprobs: Tensor, kept: Tensor | None, slots: Slots, done: Tensor) -> None:
    """Stores one drawn token per row in the slots' windows, in place, and as the slots' last token.

    Advances own_length, position, remaining and num_filled of the slots. Sets `done` to 1 for rows that drew a stop id
    or their last token. Rows that were done before do not change. `kept` is the probability mass per row that
    truncation kept; None = no row truncates.
    """
    s = slots
    grid = (len(tokens),)
    width = s.stop_ids.shape[1]
    _record_kernel[grid](
        # Without kept mass, any tensor stands in its place: the kernel does not read it.
        *(tokens, logprobs, logprobs if kept is None else kept, done),
        *(s.last_token, s.own_length, s.position, s.remaining, s.num_filled),
        *(s.stop_ids, s.tokens, s.logprobs, s.kept_mass),
        *(width, s.tokens.shape[1], max(2, next_power_of_two(width)), kept is not None),
        num_warps=1,
    )
