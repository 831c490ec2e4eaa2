"""From logits to tokens: temperature, truncation, inverse CDF. Pure functions, settings by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How each row is to be drawn, and what nobody in the batch asked for (so that it costs nothing)."""

    temperature: Tensor  # [B], 0 = greedy
    top_p: Tensor  # [B], 1 = off
    top_k: Tensor  # [B], 0 = off
    min_p: Tensor  # [B], 0 = off
    scaled: bool = True  # some temperature is neither 0 nor 1
    greedy: bool = True  # some temperature is 0
    truncated: bool = True  # some row truncates
    sorted: bool = True  # some row truncates by rank (top-p or top-k): min-p alone needs no sort


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    tokens: Tensor  # [B]
    logprobs: Tensor  # [B], at the sampling temperature, before truncation; at T = 1 for greedy rows
    kept: Tensor | None  # [B], probability mass that truncation left; None when nobody truncates


def draw(logits: Tensor, settings: Settings, u: Tensor) -> Drawn:
    """One token a row. logits [B, V], u [B] in [0, 1)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if settings.scaled:
        divisor = torch.where(settings.temperature > 0, settings.temperature, 1.0).to(wide.dtype)
        wide = wide / divisor[:, None]
    top = wide.amax(dim=-1, keepdim=True)
    probs = torch.sub(wide, top).exp_()  # not normalised: one pass less, and the draw does not mind
    total, kept = probs.sum(dim=-1), None
    if settings.truncated:
        probs, mass = truncate(probs, settings)
        kept = mass / total
    tokens = inverse_cdf(probs, u)
    if settings.greedy:
        tokens = torch.where(settings.temperature > 0, tokens, wide.argmax(dim=-1))
    logprobs = wide.gather(1, tokens[:, None])[:, 0] - top[:, 0] - total.log()
    return Drawn(tokens=tokens, logprobs=logprobs, kept=kept)


def truncate(probs: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """probs [B, V] (to any scale) with everything outside the kept set at 0, and the mass kept [B].

    Kept are the top_k most probable tokens; of these the smallest set that reaches top_p of their mass; of
    these the ones with at least min_p times the largest probability. Ties are broken by the smaller id.
    """
    top = probs.amax(dim=-1, keepdim=True)
    keep = probs >= settings.min_p.to(probs.dtype)[:, None] * top  # [B, V]; the largest is always in
    if settings.sorted:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(probs.shape[1], device=probs.device)
        limit = torch.where(settings.top_k > 0, settings.top_k, probs.shape[1])[:, None]
        ranked = ranked.double().masked_fill(rank >= limit, 0.0)
        before = ranked.cumsum(dim=-1) - ranked  # mass of the more probable ones
        enough = settings.top_p.double()[:, None] * ranked.sum(dim=-1, keepdim=True)
        # top_p = 1 must keep everything, also what rounding puts beyond the total
        chosen = (rank < limit) & ((before < enough) | (settings.top_p[:, None] >= 1) | (rank == 0))
        keep &= torch.zeros_like(keep).scatter_(1, order, chosen)
    kept = probs.masked_fill(~keep, 0.0)
    return kept, kept.sum(dim=-1)


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first token, in vocabulary order, at which the cumulative probability exceeds u times the total.

    Two levels, blocks of tokens and tokens of one block: little is summed sequentially, and a rare token at
    the end of a large vocabulary keeps its chance, which a running sum in fp32 would round away. At the upper
    end, where rounding can put u x total beyond the sum, the last token of positive probability is taken. One
    of zero probability is never taken. probs [B, V], not necessarily normalised; u [B].

    >>> inverse_cdf(torch.tensor([[0.25, 0.0, 0.75]]).repeat(3, 1), torch.tensor([0.2, 0.25, 0.999])).tolist()
    [0, 2, 2]
    """
    rows, vocab = probs.shape
    blocks = -(-vocab // BLOCK)
    if vocab % BLOCK:
        probs = F.pad(probs, (0, blocks * BLOCK - vocab))
    split = probs.view(rows, blocks, BLOCK)
    sums = split.sum(dim=-1).double().cumsum(dim=-1)  # [B, blocks]
    target = u.double() * sums[:, -1]
    block = first_above(sums, target)
    below = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    flat = torch.arange(rows, device=probs.device) * blocks + block
    inside = split.view(rows * blocks, BLOCK).index_select(0, flat).double().cumsum(dim=-1)  # [B, BLOCK]
    return block * BLOCK + first_above(inside, target - below)


def first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above `target`, or of the first that reaches the total when none is."""
    above = (cumulative <= target[:, None]).sum(dim=-1)
    end = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(above, end)
