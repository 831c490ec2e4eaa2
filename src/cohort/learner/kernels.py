"""Triton kernels of the learner.

They compute log-probability and entropy of rows of logits, the gradient on the logits, and the sum of the gradients of
keys and values that were copied. Numbers that change from batch to batch, and the addresses at which slices begin, are
kept out of what a kernel is compiled for, so that it is not compiled again for them.

Letters: N rows of logits, V vocabulary, T tokens, S keys with the copies, K KV heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cohort.data.layout import Copies
from cohort.models.kernels import next_power_of_two

VOCAB_BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["target_ptr", "logprob_ptr", "entropy_ptr", "log_z_ptr"])
def _logprobs_and_entropy_kernel(
    logits_ptr, target_ptr, logprob_ptr, entropy_ptr, log_z_ptr, V, temperature, BLOCK: tl.constexpr
):
    """Computes, per program, log p(target), entropy and log normaliser of one row of logits [N, V] / temperature.

    The results go to entry `row` of logprob_ptr, entropy_ptr and log_z_ptr. target_ptr has the token id per row. The
    logits are read once, BLOCK at a time.
    """
    # Running sums are relative to the largest logit so far. When a larger one comes, `fade` scales the earlier sums.
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    along = tl.zeros([], tl.float32)  # sum of exp(x - top) * x
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < V
        x = tl.load(logits_ptr + row * V + at, mask=here, other=float("-inf")) / temperature
        new = tl.maximum(top, tl.max(x, axis=0))
        fade = tl.exp(top - new)
        weight = tl.exp(x - new)
        total = total * fade + tl.sum(weight, axis=0)
        # Beyond the row's end, 0 * -inf would be NaN.
        along = along * fade + tl.sum(tl.where(here, weight * x, 0.0), axis=0)
        top = new
    log_z = top + tl.log(total)
    chosen = tl.load(logits_ptr + row * V + tl.load(target_ptr + row)) / temperature
    tl.store(logprob_ptr + row, chosen - log_z)
    # The entropy is log z - sum of p x.
    tl.store(entropy_ptr + row, log_z - along / total)
    tl.store(log_z_ptr + row, log_z)


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (log p(target), entropy, log of the softmax normaliser) of each row of logits [N, V] / temperature.

    Each result is [N] in fp32. `targets` [N] has one token id per row.
    """
    N, V = logits.shape
    logprobs, entropy, log_z = torch.empty(3, N, dtype=torch.float32, device=logits.device)
    if N:
        _logprobs_and_entropy_kernel[(N,)](
            logits,
            targets,
            logprobs,
            entropy,
            log_z,
            V,
            temperature,
            min(VOCAB_BLOCK, next_power_of_two(V)),
            num_warps=8,
        )
    return logprobs, entropy, log_z


@triton.jit(do_not_specialize_on_alignment=["target_ptr", "entropy_ptr", "log_z_ptr", "g_ptr", "e_ptr"])
def _logits_gradient_kernel(
    logits_ptr, target_ptr, entropy_ptr, log_z_ptr, g_ptr, e_ptr, out_ptr, V, temperature,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes, per program, the gradient on BLOCK logits of one row and writes it to out_ptr [N, V].

    logits_ptr [N, V] has the logits before the division by temperature, on which the gradient is. g_ptr [N] and e_ptr
    [N] have the gradients of the loss on log p(target) and on the entropy. entropy_ptr and log_z_ptr [N] are results of
    the forward kernel. ENTROPY = whether the entropy has a gradient; if not, e_ptr is not read.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < V
    logp = tl.load(logits_ptr + row * V + at, mask=here, other=0.0) / temperature - tl.load(log_z_ptr + row)
    g = tl.load(g_ptr + row)
    factor = -g
    # d H / d logit = -p (log p + H).
    if ENTROPY:
        factor = -g - tl.load(e_ptr + row) * (logp + tl.load(entropy_ptr + row))
    pull = tl.exp(logp) * factor + tl.where(at == tl.load(target_ptr + row), g, 0.0)
    tl.store(out_ptr + row * V + at, (pull / temperature).to(out_ptr.dtype.element_ty), mask=here)


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    log_z: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient of a loss on the raw logits [N, V], those before the division by `temperature`, in `dtype`.

    `d_logprobs` and `d_entropy` [N] are the gradients of the loss on log p(target) and on the entropy; `d_entropy` None
    = the loss does not depend on the entropy. `entropy` and `log_z` [N] are results of `logprobs_and_entropy` for the
    same logits, targets and temperature.
    """
    N, V = logits.shape
    out = torch.empty(N, V, dtype=dtype, device=logits.device)
    if N:
        block = min(VOCAB_BLOCK, next_power_of_two(V))
        # Without a gradient on the entropy the kernel does not read `e`, but needs some tensor there.
        e = d_logprobs if d_entropy is None else d_entropy
        _logits_gradient_kernel[(N, triton.cdiv(V, block))](
            *(logits, targets, entropy, log_z, d_logprobs, e, out, V, temperature, d_entropy is not None, block),
            num_warps=8,
        )
    return out


@triton.jit
def _sum_copies_kernel(k_ptr, v_ptr, back_ptr, edges_ptr, k_out_ptr, v_out_ptr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up, per program, the rows of k and of v that are copies of one token, and writes both sums.

    The sums go to row `token` of k_out_ptr and v_out_ptr. The numbers of the copied rows are back_ptr[edges_ptr[token]
    : edges_ptr[token + 1]]. Sums are in fp32. W is the number of entries of a row, BLOCK the next power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < W
    k = tl.zeros([BLOCK], tl.float32)
    v = tl.zeros([BLOCK], tl.float32)
    for n in range(tl.load(edges_ptr + token), tl.load(edges_ptr + token + 1)):
        row = tl.load(back_ptr + n).to(tl.int64) * W
        k += tl.load(k_ptr + row + at, mask=here, other=0.0).to(tl.float32)
        v += tl.load(v_ptr + row + at, mask=here, other=0.0).to(tl.float32)
    tl.store(k_out_ptr + token * W + at, k.to(k_out_ptr.dtype.element_ty), mask=here)
    tl.store(v_out_ptr + token * W + at, v.to(v_out_ptr.dtype.element_ty), mask=here)


def sum_copies(k: Tensor, v: Tensor, copies: Copies) -> tuple[Tensor, Tensor]:
    """Returns, for k and for v, the sum of each token's copies: [S, K, D] -> [T, K, D], in the type of the input.

    `copies` says which of the S rows are copies of which of the T tokens. Sums are formed in fp32, in a fixed order, so
    that the result is always the same to the last bit. k and v must be contiguous.
    """
    assert k.is_contiguous() and v.is_contiguous()
    T, W = len(copies.token_edges) - 1, k[0].numel()
    out = k.new_empty(T, *k.shape[1:]), v.new_empty(T, *v.shape[1:])
    block = next_power_of_two(W)
    num_warps = min(8, max(1, block // 128))
    _sum_copies_kernel[(T,)](k, v, copies.copies_by_token, copies.token_edges, *out, W, block, num_warps=num_warps)
    return out
