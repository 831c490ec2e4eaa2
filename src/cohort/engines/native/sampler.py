"""Draws tokens from logits: temperature, truncation, inverse CDF. Pure functions with settings per row.

Letters: B rows, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # tokens that `invert_cdf` sums together


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """Sampling settings per row. The flags say what some row of the batch uses: all other work is skipped."""

    temperature: Tensor  # [B], 0 = greedy
    top_p: Tensor  # [B], 1 = off
    top_k: Tensor  # [B], 0 = off
    min_p: Tensor  # [B], 0 = off
    has_temperature: bool = True  # some temperature is neither 0 nor 1
    has_greedy: bool = True  # some temperature is 0
    has_truncation: bool = True  # some row truncates
    needs_sorting: bool = True  # some row truncates by rank (top-p or top-k): min-p alone needs no sort


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTokens:
    """One drawn token per row, with its log-probability and the kept probability mass."""

    tokens: Tensor  # [B]
    logprobs: Tensor  # [B], at the sampling temperature, before truncation; at temperature 1 for greedy rows
    kept_mass: Tensor | None  # [B], probability mass that truncation left; None if no row truncates


def draw_tokens(logits: Tensor, settings: SamplingSettings, u: Tensor) -> DrawnTokens:
    """Draws one token per row from logits [B, V], with the settings of each row and a uniform number u [B] in [0, 1).

    Returns tokens, log-probabilities (at the row's temperature, 0 counts as 1, and before truncation) and kept
    probability mass (None if no row truncates). Rows with temperature 0 get their most probable token. The same logits,
    settings and u give the same token.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if settings.has_temperature:
        divisor = torch.where(settings.temperature > 0, settings.temperature, 1.0).to(wide.dtype)
        wide = wide / divisor[:, None]
    top = wide.amax(dim=-1, keepdim=True)
    # The probabilities are not normalised: that saves a pass, and the draw scales its target by the sum.
    probs = torch.sub(wide, top).exp_()
    total = probs.sum(dim=-1)
    kept_mass = None
    if settings.has_truncation:
        probs, mass = truncate(probs, settings)
        kept_mass = mass / total
    tokens = invert_cdf(probs, u)
    if settings.has_greedy:
        tokens = torch.where(settings.temperature > 0, tokens, wide.argmax(dim=-1))
    logprobs = wide.gather(1, tokens[:, None])[:, 0] - top[:, 0] - total.log()
    return DrawnTokens(tokens=tokens, logprobs=logprobs, kept_mass=kept_mass)


def truncate(probs: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Applies top-k, top-p and min-p. Returns probs [B, V] with 0 for dropped tokens, and the sum of the kept ones [B].

    Kept are the top_k most probable tokens; of these the smallest set that reaches top_p of their mass; of these the
    ones with at least min_p times the largest probability. Of equally probable tokens,
    the one with the smaller id ranks first. If `settings.needs_sorting` is False, only min-p is applied. `probs` need
    not sum to 1 and does not change.
    """
    top = probs.amax(dim=-1, keepdim=True)
    keep = probs >= settings.min_p.to(probs.dtype)[:, None] * top  # [B, V]; the largest is always in
    if settings.needs_sorting:
        # A stable sort leaves equal probabilities in the order of their ids.
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(probs.shape[1], device=probs.device)
        limit = torch.where(settings.top_k > 0, settings.top_k, probs.shape[1])[:, None]
        ranked = ranked.double().masked_fill(rank >= limit, 0.0)
        before = ranked.cumsum(dim=-1) - ranked  # mass of the more probable tokens
        enough = settings.top_p.double()[:, None] * ranked.sum(dim=-1, keepdim=True)
        # top_p = 1 must keep every token, also those that rounding puts beyond the total.
        chosen = (rank < limit) & ((before < enough) | (settings.top_p[:, None] >= 1) | (rank == 0))
        keep &= torch.zeros_like(keep).scatter_(1, order, chosen)
    kept = probs.masked_fill(~keep, 0.0)
    return kept, kept.sum(dim=-1)


def invert_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Returns per row the first token, in vocabulary order, whose cumulative probability exceeds u times the total.

    `probs` [B, V] need not sum to 1; u is [B]. The search has two levels, blocks of tokens and the tokens of one block.
    So few numbers are summed in sequence, and a rare token at the end of a large vocabulary keeps its chance, which a
    running sum in fp32 would round away. Where rounding puts u times the total beyond the sum, the last token of
    positive probability is returned. A token of zero probability is never returned, unless all are zero.

    >>> invert_cdf(torch.tensor([[0.25, 0.0, 0.75]]).repeat(3, 1), torch.tensor([0.2, 0.25, 0.999])).tolist()
    [0, 2, 2]
    """
    rows, vocab = probs.shape
    blocks = -(-vocab // BLOCK)
    if vocab % BLOCK:
        probs = F.pad(probs, (0, blocks * BLOCK - vocab))
    split = probs.view(rows, blocks, BLOCK)
    # First level: the block in which the target lies, and the mass below this block.
    sums = split.sum(dim=-1).double().cumsum(dim=-1)  # [B, blocks]
    target = u.double() * sums[:, -1]
    block = find_first_above(sums, target)
    below = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    # Second level: the token inside that block.
    flat = torch.arange(rows, device=probs.device) * blocks + block
    inside = split.view(rows * blocks, BLOCK).index_select(0, flat).double().cumsum(dim=-1)  # [B, BLOCK]
    return block * BLOCK + find_first_above(inside, target - below)


def find_first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Returns per row the index [B] of the first entry of `cumulative` [B, n] that is above `target` [B].

    A row of `cumulative` must not decrease. If no entry is above the target, the result is the index of the first
    entry that equals the last one.
    """
    above = (cumulative <= target[:, None]).sum(dim=-1)
    end = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(above, end)
