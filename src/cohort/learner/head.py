"""Log-probabilities and entropy of chosen tokens, without ever holding all logits.

The head runs in chunks of rows; at no time do more logits exist than a chunk's. `token_logprobs` keeps the
log-normaliser of each row, and its backward computes each chunk's logits again. A loss that is a sum over tokens needs
no second time: `gradient_through_head` takes its gradient while the chunk is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cohort.models.functions import add_product, fused, product, wide_product

CHUNK_LOGITS = 1 << 25  # 128 MiB of fp32 logits at a time; each chunk reads the whole head and its gradient
GPU_CHUNK_LOGITS = 1 << 29  # there, 2 GiB: thousands of rows, or the matrix products are too narrow


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy):  # type: ignore[no-untyped-def]
        N = hidden.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(N, dtype=wide, device=hidden.device)
        entropy = torch.zeros(N, dtype=wide, device=hidden.device)
        log_z = torch.empty(N, dtype=wide, device=hidden.device)
        for rows in _chunks(hidden, weight):
            if fused(hidden):
                from cohort.learner import kernels

                logits = wide_product(hidden[rows], weight)
                logprobs[rows], entropy[rows], log_z[rows] = kernels.describe(logits, targets[rows], temperature)
                continue
            logits = _logits(hidden[rows], weight, temperature)  # [n, V]
            z = torch.logsumexp(logits, dim=-1)
            log_z[rows] = z
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - z
            if with_entropy:
                probs = (logits - z[:, None]).exp_()
                entropy[rows] = z - (probs * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=log_z.dtype) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight, ctx.temperature)
            g, e = d_logprobs[rows, None], d_entropy[rows, None]
            logp = logits.sub_(log_z[rows, None])
            if e.is_cuda or bool(e.any()):  # dH/dlogit = -p (log p + H)
                probs = logp.exp()
                d_logits = probs * (-g - e * (logp + entropy[rows, None]))
            else:
                d_logits = logp.exp_().mul_(-g)
            d_logits.scatter_add_(1, targets[rows, None], g)
            d_logits = (d_logits / ctx.temperature if ctx.temperature != 1.0 else d_logits).to(hidden.dtype)
            d_hidden[rows] = product(d_logits, weight.t())
            if d_weight is not None:
                add_product(d_weight, d_logits, hidden[rows])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


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


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """hidden [N, d], weight [V, d], targets [N] -> log p(target) [N], entropy [N], both differentiable.

    Without `with_entropy` the second is zero and carries no gradient.
    """
    logprobs, entropy = _ChunkedHead.apply(hidden, weight, targets, temperature, with_entropy)
    return logprobs, entropy
