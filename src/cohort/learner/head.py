"""Log-probabilities and entropy of chosen tokens, computed without ever holding all logits.

The head runs in chunks of rows, and only the logits of one chunk exist at a time. `gradient_through_head` takes the
gradient of a loss that is a sum over tokens while the chunk's logits exist. Any other loss needs the log-probabilities
of all tokens first (`token_logprobs`); the logits of each chunk are then computed again for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cohort.models.functions import add_product, has_kernels, multiply, multiply_wide

# Logits of one chunk on a CPU: 128 MiB in fp32. Not fewer, because each chunk reads the whole head and its gradient.
CHUNK_LOGITS = 1 << 25
# On a GPU 2 GiB: matrix products with fewer than thousands of rows are too narrow for it.
GPU_CHUNK_LOGITS = 1 << 29


GradientFunction = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(rows, their log-probabilities, their entropies) -> gradients of the loss on both; None = none on the entropies."""


@torch.no_grad()
def gradient_through_head(
    hidden: Tensor,
    weight: Tensor,
    d_weight: Tensor | None,
    targets: Tensor,
    temperature: float,
    gradient: GradientFunction,
) -> Tensor:
    """Returns the gradient of the loss on the hidden states [N, d].

    The gradient of the head `weight` [V, d] is added to `d_weight` [V, d] in place; None = the head is frozen.
    `targets` [N] are token ids. `gradient` gets some rows with their log-probabilities and entropies (of logits divided
    by `temperature`) and returns the gradients of the loss on both. It is called once per chunk of rows, while the
    chunk's logits exist, so it must not need other rows.
    """
    d_hidden = torch.zeros_like(hidden)
    for rows in split_rows(hidden, len(weight)):
        logits_gradient = _logits_gradient_by_kernels if has_kernels(hidden) else _logits_gradient
        d_logits = logits_gradient(hidden[rows], weight, targets[rows], temperature, partial(gradient, rows))
        d_hidden[rows] = multiply(d_logits, weight.t())
        if d_weight is not None:
            add_product(d_weight, d_logits, hidden[rows])
        # Freed here: otherwise two chunks would be in memory while the next one is made.
        del d_logits
    return d_hidden


ChunkGradientFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""A `GradientFunction` for the rows of one chunk: (log-probabilities, entropies) -> gradients of the loss on both."""


def _logits_gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, loss_gradient: ChunkGradientFunction
) -> Tensor:
    """Returns the gradient of the loss on the raw logits [n, V] of one chunk, before the division by `temperature`.

    `hidden` [n, d] and `targets` [n] (token ids) are the rows of the chunk; `weight` [V, d] is the head.
    `loss_gradient` maps log-probabilities and entropies [n] (at that temperature) to the gradients of the loss on both.
    The result has the type of `hidden`.
    """
    logits = compute_logits(hidden, weight, temperature)
    top = logits.amax(dim=-1, keepdim=True)
    # Not normalised here: the sum goes into factors of shape [n], which cost less than a division of [n, V].
    probs = torch.sub(logits, top).exp_()
    total = probs.sum(dim=-1, keepdim=True)
    z = top + total.log()
    logprobs = logits.gather(1, targets[:, None]) - z
    entropy = z - torch.linalg.vecdot(probs, logits)[:, None] / total
    g, e = loss_gradient(logprobs[:, 0], entropy[:, 0])
    # d log p(target) / d logit = (1 at the target, else 0) - p, and d H / d logit = -p (log p + H).
    if e is not None:
        d_logits = probs.div_(total) * (-g[:, None] - e[:, None] * (logits - z + entropy))
    else:
        d_logits = probs.mul_(-g[:, None] / total)
    d_logits.scatter_add_(1, targets[:, None], g[:, None])
    if temperature != 1.0:
        d_logits.div_(temperature)
    return d_logits.to(hidden.dtype)


def _logits_gradient_by_kernels(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, loss_gradient: ChunkGradientFunction
) -> Tensor:
    """Returns the same as `_logits_gradient`, by Triton kernels.

    The logits are read twice, and the result is the only other tensor of their size.
    """
    from cohort.learner import kernels

    logits = multiply_wide(hidden, weight)
    logprobs, entropy, log_z = kernels.logprobs_and_entropy(logits, targets, temperature)
    g, e = loss_gradient(logprobs, entropy)
    return kernels.logits_gradient(logits, targets, entropy, log_z, g, e, temperature, hidden.dtype)


def split_rows(hidden: Tensor, vocab: int) -> list[slice]:
    """Returns slices that cut the rows of `hidden` [N, d] into chunks of nearly equal size.

    The logits of a chunk, `vocab` per row, are at most CHUNK_LOGITS numbers (GPU_CHUNK_LOGITS on a GPU), or one row
    where a row has more.
    """
    rows = hidden.shape[0]
    most = max(1, (GPU_CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS) // vocab)
    # Chunks of equal size, because a last chunk of a few rows would cost nearly as much as a full one.
    size = max(1, -(-rows // max(1, -(-rows // most))))
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def compute_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Returns the logits [n, V] of hidden states [n, d], divided by the temperature, in fp32 (float64 for float64)."""
    logits = multiply_wide(hidden, weight)
    return logits if temperature == 1.0 else logits.div_(temperature)


@torch.no_grad()
def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns (log p(target) [N], entropy of the next-token distribution [N]) for hidden [N, d], without gradient.

    `weight` [V, d] is the head, `targets` [N] are token ids. The logits are divided by `temperature`. Results are fp32
    (float64 for float64). Without `with_entropy` the entropies are not meant to be used: they may be zeros.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs, entropy = torch.zeros(2, len(hidden), dtype=wide, device=hidden.device)
    for rows in split_rows(hidden, len(weight)):
        if has_kernels(hidden):
            from cohort.learner import kernels

            logits = multiply_wide(hidden[rows], weight)
            # The kernel computes the entropy in any case.
            logprobs[rows], entropy[rows], _ = kernels.logprobs_and_entropy(logits, targets[rows], temperature)
            continue
        logits = compute_logits(hidden[rows], weight, temperature)  # [n, V]
        z = torch.logsumexp(logits, dim=-1)
        logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - z
        if with_entropy:
            entropy[rows] = z - ((logits - z[:, None]).exp_() * logits).sum(-1)
    return logprobs, entropy
