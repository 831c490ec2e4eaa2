"""The operations of a layer (products, norms, gates, rotations), each with a backward that stores little.

Left to autograd, a norm and a gated unit store every intermediate result, which is a third of the memory of a training
step on a CPU. On a GPU with Triton, the kernels of `cohort.models.kernels` do the elementwise work.

In the classes for autograd, `forward` computes the result and saves what `backward` needs. `backward` returns one
gradient per argument of `forward`, None for those that need none.

Letters: T tokens, d and n sizes of vectors, ff size of the feed-forward part, K KV heads, g query heads per KV head,
D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
# oneDNN is used only on x86 CPUs with these instructions.
HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class _Linear(torch.autograd.Function):
    """Autograd function of `linear`. Saves the input and the matrix."""

    @staticmethod
    def forward(ctx, x, weight, bias, collect):  # type: ignore[no-untyped-def]
        """Returns x @ weight.T + bias [T, n]. Bias may be None.

        `collect` is a function that the backward calls instead of computing the gradient of weight (None: it computes).
        """
        ctx.save_for_backward(x, weight)
        ctx.collect = collect
        return multiply(x, weight, bias, exact=True)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Returns the gradients of x, weight, bias and `collect` from `grad`, the gradient [T, n] of the output.

        A gradient is None where it is not needed. With a collector, that of weight is None too: the collector is called
        with `grad` and x instead. That of `collect` is always None.
        """
        x, weight = ctx.saved_tensors
        d_x = multiply(grad, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = _form_weight_gradient(grad, x, ctx.needs_input_grad[1], ctx.collect)
        return d_x, d_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


class _RmsNorm(torch.autograd.Function):
    """Autograd function of `rms_norm` in plain torch. Saves the input and one factor 1 / rms per row."""

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        """Returns x / rms(x) * weight over the last axis of x, in the weight's type."""
        exact = widen(x)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        # Rounded to the weight's type before the multiplication. The kernel rounds at the same place.
        return (exact * scale).to(weight.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Returns the gradients of x and weight from `grad`, the gradient of the output, and None for `eps`.

        The gradient of weight is None if it is not needed.
        """
        x, weight, scale = ctx.saved_tensors
        normed = widen(x) * scale
        d_weight = (grad * normed.to(grad.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        inner = widen(grad * weight)
        # The norm does not change with the length of x, so the gradient has no part along x: that part is removed.
        along = (inner * normed).mean(-1, keepdim=True)
        d_x = inner.addcmul_(normed, along, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class _FusedAddNorm(torch.autograd.Function):
    """Autograd function of `add_norm` by kernels, on a GPU.

    Saves one factor per token and the sum. The sum costs no extra memory, because the residual stream keeps it anyway.
    """

    @staticmethod
    def forward(ctx, x, y, weight, eps):  # type: ignore[no-untyped-def]
        """Returns the sum x + y [T, d] (x itself, if y is None) and the RMS norm of the sum times weight."""
        kernels = _import_kernels()
        total = x if y is None else torch.empty_like(x)
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        normed = kernels.add_norm(x, y, weight, eps, total, scale)
        ctx.save_for_backward(total, weight, scale)
        ctx.y_dtype = None if y is None else y.dtype
        # A missing gradient stays None instead of becoming a tensor of zeros that the kernel would read.
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx, d_total, d_normed):  # type: ignore[no-untyped-def]
        """Returns the gradients of x, y and weight, and None for `eps`. The gradient of y is None if there was no y.

        `d_total` and `d_normed` are the gradients of the two outputs, the sum and the norm; None stands for zero.
        """
        total, weight, scale = ctx.saved_tensors
        d_normed = torch.zeros_like(total, dtype=weight.dtype) if d_normed is None else d_normed.contiguous()
        d_x, d_y, d_weight = _import_kernels().norm_backward(total, weight, scale, d_normed, d_total, ctx.y_dtype)
        return d_x, d_y, d_weight, None


class _FusedRotation(torch.autograd.Function):
    """Autograd function of `split_and_rotate` by kernels, on a GPU. Saves only cos and sin, not qkv."""

    @staticmethod
    def forward(ctx, qkv, cos, sin):  # type: ignore[no-untyped-def]
        """Splits qkv [T, K, g + 2, D] and returns q [T, K, g, D] and k [T, K, D], both rotated, and v [T, K, D]."""
        ctx.save_for_backward(cos, sin)
        return _import_kernels().split_and_rotate(qkv, cos, sin)

    @staticmethod
    def backward(ctx, d_q, d_k, d_v):  # type: ignore[no-untyped-def]
        """Returns the gradient of qkv from those of the outputs q, k and v, and None for cos and sin."""
        cos, sin = ctx.saved_tensors
        grads = (x.contiguous() for x in (d_q, d_k, d_v))
        return _import_kernels().split_and_rotate_backward(*grads, cos, sin), None, None


class _GatedUnit(torch.autograd.Function):
    """Autograd function of `apply_gated_unit`. Saves gate and up [T, 2 ff] and computes silu(gate) * up again."""

    @staticmethod
    def forward(ctx, x, gate_up, gate_up_bias, down, down_bias, collect_gate_up, collect_down):  # type: ignore[no-untyped-def]
        """Returns down(silu(gate(x)) * up(x)) [T, d]: gate, up and down are products with a matrix and may have a bias.

        `collect_gate_up` and `collect_down` are functions that the backward calls instead of computing the gradient of
        that matrix (None: it computes).
        """
        both = multiply(x, gate_up, gate_up_bias)  # [T, 2 ff]
        ctx.save_for_backward(x, gate_up, down, both)
        ctx.collect_gate_up, ctx.collect_down = collect_gate_up, collect_down
        return multiply(_apply_gate(both), down, down_bias, exact=True)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Returns the gradients of all seven arguments of `forward` from `grad`, the gradient [T, d] of the output.

        A gradient is None where it is not needed. That of a matrix with a collector is None too: the collector is
        called with the gradient of the product's output and the product's input. Those of the two collectors are always
        None.
        """
        x, gate_up, down, both = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_both, inner = _apply_gate_backward(both, multiply(grad, down.t()))
        d_down = _form_weight_gradient(grad, inner, needs[3], ctx.collect_down)
        d_x = multiply(d_both, gate_up.t()) if needs[0] else None
        d_gate_up = _form_weight_gradient(d_both, x, needs[1], ctx.collect_gate_up)
        d_gate_up_bias = d_both.sum(0) if needs[2] else None
        d_down_bias = grad.sum(0) if needs[4] else None
        return d_x, d_gate_up, d_gate_up_bias, d_down, d_down_bias, None, None


class _Rotation(torch.autograd.Function):
    """Autograd function of `rotate`. Saves only cos and sin."""

    @staticmethod
    def forward(ctx, x, cos, sin):  # type: ignore[no-untyped-def]
        """Returns x with rotary position embedding applied, as `rotate` describes."""
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Returns the gradient of x from `grad`, the gradient of the output, and None for cos and sin."""
        cos, sin = ctx.saved_tensors
        # The gradient of a rotation is the rotation by the opposite angle.
        return _rotate_halves(grad, cos, -sin), None, None


Product = Callable[[Tensor, Tensor | None], Tensor]
"""A product with one known matrix: called with x [T, d] and a bias [n] or None, returns [T, n]."""

# Products to use instead of the plain one, by the memory address of the matrix. Set by `substitute_products`.
_substitutes: Mapping[int, Product] = {}


@contextmanager
def substitute_products(products: Mapping[int, Product]) -> Iterator[None]:
    """Within the block, `multiply` calls functions from `products` for some matrices instead of its own product.

    The keys are the memory addresses (`data_ptr`) of those matrices. The sampler uses this to multiply with copies of
    the matrices in a faster layout. In a nested block only the inner `products` count. This holds for all threads.
    """
    global _substitutes
    before, _substitutes = _substitutes, products
    try:
        yield
    finally:
        _substitutes = before


Collector = Callable[[Tensor, Tensor], None]
"""Called with the gradient [T, n] of a product's output and the product's input x [T, d].

From these two the gradient of the matrix would be formed. A collector uses them in its own way instead.
"""


def _form_weight_gradient(grad: Tensor, x: Tensor, needed: bool, collect: Collector | None) -> Tensor | None:
    """Returns the gradient [n, d] of a matrix, given the gradient `grad` [T, n] of its product with x [T, d].

    With a collector, calls that with `grad` and x, `needed` or not, and returns None. Returns None too if not `needed`.
    """
    if collect is not None:
        collect(grad, x)
        return None
    return grad.t() @ x if needed else None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, exact: bool = False) -> Tensor:
    """Returns x @ weight.T (+ bias) [T, n]. It is for callers that need no gradient or compute it themselves.

    If `substitute_products` has set a function for this matrix, that function computes the product. Otherwise, for fp32
    on an x86 CPU, the library oneDNN does, a tenth faster but with larger rounding errors. In all other cases, and with
    `exact`, torch's usual product does.
    """
    # The sums of oneDNN are less exact: SmolLM2's log-probabilities lie 1.1e-5 from float64 instead of 0.8e-5, and the
    # contract is 1e-5. In the forward pass it is much faster only for wide matrices (gate, head). So narrow forward
    # products ask for `exact`, and wide or backward ones do not.
    if _substitutes and (substitute := _substitutes.get(weight.data_ptr())) is not None:
        return substitute(x, bias)
    if HAS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and not exact:
        return multiply_by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a^T b to `total` [n, d] in place, for a [T, n] and b [T, d].

    The sum has the type of `total`, which may be fp32 where a and b are bf16. Then a GPU adds the unrounded product,
    but a CPU rounds the product to bf16 first.
    """
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    elif a.is_cuda:
        # The product adds to the fp32 total itself: the bf16 product is never rounded or stored.
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a.t() @ b)


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x @ weight.T (+ bias) [T, n], computed by the CPU library oneDNN.

    `weight` is [n, d], or the same matrix in oneDNN's own layout, which is faster.
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight.T [T, n] in fp32 (float64 for float64 inputs), also for bf16 inputs.

    It is for logits: rounded to bf16, they would cause most of the gap between sampler and learner. Like `multiply`, it
    is for callers that need no gradient or compute it themselves.
    """
    if x.dtype in (torch.float32, torch.float64):
        return multiply(x, weight)
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, collect: Collector | None = None) -> Tensor:
    """Returns x [T, d] times weight [n, d] transposed, plus bias [n]: [T, n].

    With `collect`, the backward computes no gradient of `weight`. It calls `collect` with the gradient of the output
    and x instead.
    """
    if not torch.is_grad_enabled():
        return multiply(x, weight, bias, exact=True)
    return _Linear.apply(x, weight, bias, collect)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the sum x + y [T, d] (x, if y is None), and the sum's RMS norm times weight, in the weight's type."""
    if has_kernels(x):
        total, normed = _FusedAddNorm.apply(x, y, weight, eps)
        return total, normed
    x = x if y is None else x + y
    return x, rms_norm(x, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last axis, in the weight's type. It is computed in at least fp32."""
    if has_kernels(x):
        normed: Tensor = _FusedAddNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), None, weight, eps)[1]
        return normed.view(x.shape)
    return _RmsNorm.apply(x, weight, eps)


def apply_gated_unit(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    collect_gate_up: Collector | None = None,
    collect_down: Collector | None = None,
) -> Tensor:
    """Returns down(silu(gate(x)) * up(x)) [T, d], for x [T, d], gate_up [2 ff, d] and down [d, ff].

    gate_up has the rows of gate, then those of up. A bias of None is left out. For a matrix with a collector, the
    backward computes no gradient. It calls the collector with the gradient of that matrix's product and the product's
    input instead.
    """
    return _GatedUnit.apply(x, gate_up, gate_up_bias, down, down_bias, collect_gate_up, collect_down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, K, h, D] with rotary position embedding applied, given cos and sin [T, 1, 1, D/2] of the angles.

    Entries i and i + D/2 of the last axis form the pair that angle i rotates (the convention of Hugging Face).
    """
    return _Rotation.apply(x, cos, sin)


def split_and_rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [T, K, g + 2, D] and returns q [T, K, g, D] and k [T, K, D], both rotated, and v [T, K, D].

    Along its third axis qkv has g queries, a key and a value. cos and sin [T, 1, 1, D/2] are those of the angles. v may
    share memory with qkv.
    """
    if has_kernels(qkv) and is_power_of_two(qkv.shape[-1]):
        q, k, v = _FusedRotation.apply(qkv, cos, sin)
        return q, k, v
    # The backward of split is one copy; that of three slices would be three.
    qk, v = qkv.split([qkv.shape[2] - 1, 1], dim=2)
    q, k = rotate(qk, cos, sin).split([qk.shape[2] - 1, 1], dim=2)
    return q, k[:, :, 0], v[:, :, 0]


def is_power_of_two(n: int) -> bool:
    """Returns whether n is a power of two (True for 0 too). Some kernels take only head sizes that are."""
    return n & (n - 1) == 0


def has_kernels(x: Tensor) -> bool:
    """Returns whether Triton kernels work on this tensor: it is on a GPU, not float64, and Triton is installed."""
    return x.is_cuda and x.dtype != torch.float64 and HAS_TRITON


def _import_kernels():  # type: ignore[no-untyped-def]
    """Returns the module cohort.models.kernels. It is imported late: it needs Triton, which only GPU machines have."""
    from cohort.models import kernels

    return kernels


def _apply_gate(both: Tensor) -> Tensor:
    """Returns silu(gate) * up [T, ff], for `both` = gate and up side by side [T, 2 ff]."""
    if has_kernels(both):
        inner: Tensor = _import_kernels().apply_gate(both)
        return inner
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _apply_gate_backward(both: Tensor, d_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of `both`, which is gate and up side by side [T, 2 ff], and silu(gate) * up [T, ff] again.

    `d_inner` [T, ff] is the gradient of silu(gate) * up. Its memory may be overwritten.
    """
    if has_kernels(both):
        d_both, inner = _import_kernels().apply_gate_backward(both, d_inner)
        return d_both, inner
    gate, up = both.chunk(2, dim=-1)
    d_both = torch.empty_like(both)
    d_gate, d_up = d_both.chunk(2, dim=-1)
    opened = F.silu(gate)
    # Results are written into the two halves of d_both, and products overwrite tensors that are no longer needed.
    torch.mul(opened, d_inner, out=d_up)
    torch.ops.aten.silu_backward(d_inner.mul_(up), gate, grad_input=d_gate)
    return d_both, opened.mul_(up)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x with each pair (entry i, entry i + D/2) of the last axis rotated by angle i, given its cos and sin."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (low, high) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=low).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=high).addcmul_(a, sin)
    return out


def widen(x: Tensor) -> Tensor:
    """Returns x itself if it is fp32 or float64, else a copy in fp32, such as of bf16."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
