"""Log-probabilities and entropy of chosen tokens, without ever holding all logits.

The head runs in chunks of rows. Forward keeps only the log-normaliser of each row; backward computes each chunk's
logits again. At no time do more than `chunk` x vocabulary logits exist.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 24  # 64 MiB of fp32 logits at a time


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy):  # type: ignore[no-untyped-def]
        N = hidden.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(N, dtype=wide, device=hidden.device)
        entropy = torch.zeros(N, dtype=wide, device=hidden.device)
        log_z = torch.empty(N, dtype=wide, device=hidden.device)
        for rows in _chunks(N, weight.shape[0]):
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
        d_weight = torch.zeros_like(weight, dtype=log_z.dtype)
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            logits = _logits(hidden[rows], weight, ctx.temperature)
            g, e = d_logprobs[rows, None], d_entropy[rows, None]
            logp = logits.sub_(log_z[rows, None])
            if bool(e.any()):  # dH/dlogit = -p (log p + H)
                probs = logp.exp()
                d_logits = probs * (-g - e * (logp + entropy[rows, None]))
            else:
                d_logits = logp.exp_().mul_(-g)
            d_logits.scatter_add_(1, targets[rows, None], g)
            d_logits = (d_logits / ctx.temperature if ctx.temperature != 1.0 else d_logits).to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight.addmm_(d_logits.t().to(d_weight.dtype), hidden[rows].to(d_weight.dtype))
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _chunks(rows: int, vocab: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocab)
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.t()
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """hidden [N, d], weight [V, d], targets [N] -> log p(target) [N], entropy [N], both differentiable.

    Without `with_entropy` the second is zero and carries no gradient.
    """
    logprobs, entropy = _ChunkedHead.apply(hidden, weight, targets, temperature, with_entropy)
    return logprobs, entropy
