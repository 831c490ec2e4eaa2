"""Log-probabilities and entropy of chosen tokens, without ever holding all logits.

The head runs in chunks of rows; at no time do more logits exist than a chunk's. `gradient_through_head` takes the
gradient of a loss that is a sum over tokens while the chunk is there. Any other loss sees the log-probabilities of all
tokens first (`token_logprobs`), and each chunk's logits are computed once more for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cohort.models.functions import add_product, fused, product, wide_product

CHUNK_LOGITS = 1 << 25  # 128 MiB of fp32 logits at a time; each chunk reads the whole head and its gradient
GPU_CHUNK_LOGITS = 1 << 29  # there, 2 GiB: thousands of rows, or the matrix products are too narrow


Gradient = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(rows, their log-probabilities, their entropies) -> the loss's gradients on both; None = no gradient."""


@torch.no_grad()
def gradient_through_head(
    hidden: Tensor, weight: Tensor, d_weight: Tensor | None, targets: Tensor, temperature: float, gradient: Gradient
) -> Tensor:
    """The gradient on hidden [N, d] of a loss that is a sum over tokens; the head's is added to d_weight [V, d].

    Each chunk's logits are used for both directions while they are there, so they are computed once. Without
    d_weight the head is frozen.
    """
    d_hidden = torch.zeros_like(hidden)
    for rows in _chunks(hidden, weight):
        pulled = _pulled_by_kernels if fused(hidden) else _pulled
        d_logits = pulled(hidden[rows], weight, targets[rows], temperature, partial(gradient, rows))
        d_hidden[rows] = product(d_logits, weight.t())
        if d_weight is not None:
            add_product(d_weight, d_logits, hidden[rows])
        del d_logits  # or two would be alive while the next is made
    return d_hidden


Slope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""`Gradient` of a chunk's rows."""


def _pulled(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, slope: Slope) -> Tensor:
    """The gradient on a chunk's logits [n, V]."""
    logits = _logits(hidden, weight, temperature)
    top = logits.amax(dim=-1, keepdim=True)
    probs = torch.sub(logits, top).exp_()  # not normalised yet: its sum goes into factors of [n], not of [n, V]
    total = probs.sum(dim=-1, keepdim=True)
    z = top + total.log()
    logprobs = logits.gather(1, targets[:, None]) - z
    entropy = z - torch.linalg.vecdot(probs, logits)[:, None] / total
    g, e = slope(logprobs[:, 0], entropy[:, 0])
    if e is not None:  # dH/dlogit = -p (log p + H)
        d_logits = probs.div_(total) * (-g[:, None] - e[:, None] * (logits - z + entropy))
    else:
        d_logits = probs.mul_(-g[:, None] / total)
    d_logits.scatter_add_(1, targets[:, None], g[:, None])
    if temperature != 1.0:
        d_logits.div_(temperature)
    return d_logits.to(hidden.dtype)


def _pulled_by_kernels(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, slope: Slope) -> Tensor:
    """The same on a GPU: the logits are read twice, and no other tensor of their size is made but the result."""
    from cohort.learner import kernels

    logits = wide_product(hidden, weight)
    logprobs, entropy, log_z = kernels.describe(logits, targets, temperature)
    g, e = slope(logprobs, entropy)
    return kernels.pull(logits, targets, entropy, log_z, g, e, temperature, hidden.dtype)


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    rows, vocab = hidden.shape[0], weight.shape[0]
    most = max(1, (GPU_CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS) // vocab)
    size = max(1, -(-rows // max(1, -(-rows // most))))  # chunks of equal size: one of a few rows costs nearly as much
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = wide_product(hidden, weight)
    return logits if temperature == 1.0 else logits.div_(temperature)


@torch.no_grad()
def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """hidden [N, d], weight [V, d], targets [N] -> log p(target) [N], entropy [N] (0 if it is not asked for)."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs, entropy = torch.zeros(2, len(hidden), dtype=wide, device=hidden.device)
    for rows in _chunks(hidden, weight):
        if fused(hidden):
            from cohort.learner import kernels

            logits = wide_product(hidden[rows], weight)
            logprobs[rows], entropy[rows], _ = kernels.describe(logits, targets[rows], temperature)
            continue
        logits = _logits(hidden[rows], weight, temperature)  # [n, V]
        z = torch.logsumexp(logits, dim=-1)
        logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - z
        if with_entropy:
            entropy[rows] = z - ((logits - z[:, None]).exp_() * logits).sum(-1)
    return logprobs, entropy
