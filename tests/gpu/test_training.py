"""The learner on a GPU: each kernel compared with plain PyTorch code, forward and backward, then all together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.device import DEVICE, HALF, only_gpu

# isort: split

from cohort.algos.algorithm import build_algorithm
from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.learner import flash, kernels
from cohort.learner.attention import make_packed_attention
from cohort.learner.flash import make_flash_attention
from cohort.learner.head import gradient_through_head, token_logprobs
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models import functions
from cohort.models import kernels as layer_kernels
from cohort.models.functions import add_norm, add_product, apply_gated_unit, rms_norm, split_and_rotate
from tests.helpers.decoders_and_groups import (
    make_group,
    make_sample,
    naive_logprobs,
    pack_groups,
    random_groups,
    small_decoder,
)

DTYPES = [torch.float32, HALF]
# The largest error that is allowed, relative to the largest entry (at least 1).
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True, "tied": False}, "qwen3": {"qk_norm": True}}


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Returns normally distributed numbers on the test device, as a leaf that needs a gradient."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(DEVICE).requires_grad_()


def assert_within_bound(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = BOUND[dtype] * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(got.float(), expected.float(), atol=bound, rtol=0)


@pytest.fixture
def use_kernels(monkeypatch):
    """Makes the learner use its kernels also on a CPU, where Triton's interpreter runs them."""
    monkeypatch.setattr(functions, "has_kernels", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr("cohort.learner.head.has_kernels", lambda x: x.dtype != torch.float64)


def assert_kernels_agree(run, inputs: list[Tensor], monkeypatch) -> None:
    """Compares outputs and gradients of `run`: by kernels in the type of the inputs, and by plain code in fp32."""
    dtype = inputs[-1].dtype
    monkeypatch.setattr(functions, "has_kernels", lambda x: True)
    outputs = run(*inputs)
    output_grads = [torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o) for o in outputs]
    grads = torch.autograd.grad(outputs, inputs, output_grads)
    monkeypatch.setattr(functions, "has_kernels", lambda x: False)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = run(*exact)
    expected_grads = torch.autograd.grad(expected, exact, [g.float() for g in output_grads])
    for got, want in zip([*outputs, *grads], [*expected, *expected_grads], strict=True):
        assert_within_bound(got, want, dtype)
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [32, 100])
def test_add_norm(dtype, d, monkeypatch):
    inputs = [random_tensor(7, d), random_tensor(7, d, dtype=dtype, seed=1), random_tensor(d, dtype=dtype, seed=2)]
    assert_kernels_agree(lambda x, y, w: add_norm(x, y, w, 1e-5), inputs, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_and_of_a_sum_that_is_not_used_otherwise(dtype, monkeypatch):
    heads = [random_tensor(3, 2, 5, 16, dtype=dtype), random_tensor(16, dtype=dtype, seed=1)]
    assert_kernels_agree(lambda x, w: [rms_norm(x, w, 1e-5)], heads, monkeypatch)
    last = [random_tensor(7, 32), random_tensor(7, 32, dtype=dtype, seed=1), random_tensor(32, dtype=dtype, seed=2)]
    assert_kernels_agree(lambda x, y, w: [add_norm(x, y, w, 1e-5)[1]], last, monkeypatch)


def test_gradient_of_a_norm_over_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr("cohort.models.kernels.MAX_PARTS", 3)
    inputs = [random_tensor(11, 32), random_tensor(11, 32, seed=1), random_tensor(32, seed=2)]
    assert_kernels_agree(lambda x, y, w: add_norm(x, y, w, 1e-5), inputs, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_unit(dtype, monkeypatch):
    x, gate_up, down = (random_tensor(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, 24), (2 * 40, 24), (24, 40)]))
    weights = [(w.detach() / 5).requires_grad_() for w in (gate_up, down)]
    assert_kernels_agree(lambda x, a, b: [apply_gated_unit(x, a, None, b, None)], [x, *weights], monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "g"), [(2, 7), (3, 1)])
def test_split_and_rotate(dtype, K, g, monkeypatch):
    angle = torch.arange(6, device=DEVICE)[:, None] * torch.rand(16, device=DEVICE)
    cos, sin = (x[:, None, None] for x in (angle.cos(), angle.sin()))
    qkv = random_tensor(6, K, g + 2, 32, dtype=dtype)

    def run(qkv):
        return split_and_rotate(qkv, cos.to(qkv.dtype), sin.to(qkv.dtype))

    assert_kernels_agree(run, [qkv], monkeypatch)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("V", [61, 5000])
def test_log_probabilities_entropy_and_gradient_of_logits(V, temperature):
    logits = random_tensor(4, V) * 3
    targets = torch.tensor([0, 7, V - 1, 3], device=DEVICE)
    logp = (logits / temperature).log_softmax(-1)
    logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    got = kernels.logprobs_and_entropy(logits.detach(), targets, temperature)
    torch.testing.assert_close(got[0], logprobs.detach())
    torch.testing.assert_close(got[1], entropy.detach())
    g, e = torch.tensor([[1.0, -2.0, 0.0, 0.5], [0.3, 0.0, -1.0, 2.0]], device=DEVICE)
    for entropy_grad in (None, e):
        loss = (logprobs * g).sum() + (0 if entropy_grad is None else (entropy * entropy_grad).sum())
        (expected,) = torch.autograd.grad(loss, logits, retain_graph=True)
        logits_grad = kernels.logits_gradient(
            logits.detach(), targets, got[1], got[2], g, entropy_grad, temperature, torch.float32
        )
        torch.testing.assert_close(logits_grad, expected, atol=1e-6, rtol=1e-4)


# ---- attention


def slices_of_runs(runs):
    """Returns (slice of the queries, slice of the keys) of each sequence."""
    q, k = runs.query_edges.tolist(), runs.key_edges.tolist()
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def repeat_heads(x, q):
    """Returns keys or values x with each head repeated, so that there are as many as in q."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def plain_scores(q, k):
    """Returns scores [H, queries, keys]. The last query sees all keys, the one before all but the last, and so on."""
    scores = torch.einsum("qhd,khd->hqk", q, repeat_heads(k, q)) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
    return scores.masked_fill(hidden, float("-inf"))


def plain_forward(q, k, v, runs):
    """Computes what flash attention does, one sequence after the other. Returns outputs and logsumexp of the scores."""
    scores = [plain_scores(q[here], k[seen]) for here, seen in slices_of_runs(runs)]
    values = [repeat_heads(v[seen], q) for _, seen in slices_of_runs(runs)]
    outs = [torch.einsum("hqk,khd->qhd", s.softmax(-1), x) for s, x in zip(scores, values, strict=True)]
    return torch.cat(outs), torch.cat([s.logsumexp(-1) for s in scores], dim=1)


def plain_backward(d_out, q, k, v, out, lse, runs):
    """Returns the gradients of q, k and v. Like flash attention, it recomputes all scores from `out` and `lse`."""
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (d_out * out).sum(-1).T  # [H, T]
    g = q.shape[1] // k.shape[1]
    for here, seen in slices_of_runs(runs):
        probs = (plain_scores(q[here], k[seen]) - lse[:, here, None]).exp()
        d_probs = torch.einsum("qhd,khd->hqk", d_out[here], repeat_heads(v[seen], q))
        d_scores = probs * (d_probs - delta[:, here, None]) * q.shape[-1] ** -0.5
        d_q[here] = torch.einsum("hqk,khd->qhd", d_scores, repeat_heads(k[seen], q))
        d_k[seen] = torch.einsum("hqk,qhd->khd", d_scores, q[here]).unflatten(1, (-1, g)).sum(2)
        d_v[seen] = torch.einsum("hqk,qhd->khd", probs, d_out[here]).unflatten(1, (-1, g)).sum(2)
    return d_q, d_k, d_v


def attend_and_differentiate(attend, dtype, T: int) -> tuple[Tensor, ...]:
    """Returns the output of `attend` for random q, k, v with K = 2 and g = 3, and the gradients of q, k and v."""
    inputs = [random_tensor(T, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(2, 3, 16), (2, 16), (2, 16)])]
    out = attend(0, *inputs)
    output_grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return out, *torch.autograd.grad(out, inputs, output_grad)


def make_layouts():
    """Yields layouts of microbatches with and without shared prompts."""
    groups = random_groups(num_groups=4, longest=12)
    groups += [make_group([3, 4], [make_sample([5], advantage=1.0), make_sample([6], advantage=-1.0)], id="9")]
    short = make_group([3, 4, 5], [make_sample([5, 6], advantage=1.0), make_sample([6], advantage=-1.0)], id="10")
    # One sample has a single query over the shared prompt.
    yield pack_groups([short], 1000).minibatches[0].microbatches[0].layout
    for budget, share in ((1000, True), (45, True), (1000, False)):
        for micro in pack_groups(groups, budget, share=share).minibatches[0].microbatches:
            yield micro.layout


@pytest.mark.parametrize("with_kernel", [True, False])
def test_attention_over_runs_is_attention_over_blocks(monkeypatch, with_kernel):
    """Tests which keys are gathered and where their gradients go. Plain code replaces the flash kernels."""
    monkeypatch.setattr(flash, "flash_forward", plain_forward)
    monkeypatch.setattr(flash, "flash_backward", plain_backward)
    monkeypatch.setattr(flash, "has_kernels", lambda x: with_kernel)
    has_copies = set()
    for layout in make_layouts():
        has_copies.add(layout.make_runs(DEVICE).copies is not None)
        blocks = make_packed_attention(layout, torch.zeros(1, dtype=torch.float64, device=DEVICE), 16)
        expected = attend_and_differentiate(blocks, torch.float64, layout.num_tokens)
        got = attend_and_differentiate(make_flash_attention(layout.make_runs(DEVICE)), torch.float32, layout.num_tokens)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)
    assert has_copies == {True, False}


@only_gpu
def test_flash_attention_is_attention_over_blocks():
    for layout in make_layouts():
        exact = attend_and_differentiate(
            make_packed_attention(layout, torch.zeros(1, device=DEVICE), 16), torch.float32, layout.num_tokens
        )
        got = attend_and_differentiate(
            make_packed_attention(layout, torch.zeros(1, device=DEVICE, dtype=HALF), 16), HALF, layout.num_tokens
        )
        for a, b in zip(got, exact, strict=True):
            assert_within_bound(a, b, HALF)


# ---- all together


def compute_gradients(decoder, groups, share: bool) -> dict[str, Tensor]:
    """Returns the gradients of a GRPO loss with an entropy bonus, by name of the parameter."""
    learner = LocalLearner(decoder, LearnerConfig(token_budget=200, prefix_sharing=share), OptimConfig(), num_updates=1)
    batch = pack_groups(groups, 200, share=share)
    learner.forward_backward(batch.minibatches[0], build_algorithm(GRPO(entropy=0.01), 16))
    return {name: master.grad.clone() for name, master in learner.optimizer.masters.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_kernels_equal_those_without(family, monkeypatch, use_kernels):
    """The kernels compute in fp32, the plain code in float64."""
    if not torch.cuda.is_available():
        # Attention over blocks, which a GPU uses for fp32 too.
        monkeypatch.setattr("cohort.learner.attention.has_kernels", lambda x: False)
    options = {"head_dim": 16, **FAMILIES[family]}
    groups = random_groups()
    got = compute_gradients(small_decoder(torch.float32, std=0.15, **options).to(DEVICE), groups, True)
    expected = compute_gradients(small_decoder(torch.float64, std=0.15, **options), groups, True)
    for name, grad in expected.items():
        bound = 1e-4 * max(1e-3, float(grad.abs().max()))
        error = float((got[name].cpu().double() - grad).abs().max())
        assert error <= bound, (name, error, bound)


def test_gradient_through_the_head_by_kernels(use_kernels, monkeypatch):
    monkeypatch.setattr("cohort.learner.head.GPU_CHUNK_LOGITS", 61 * 5)
    monkeypatch.setattr("cohort.learner.head.CHUNK_LOGITS", 61 * 5)
    hidden, weight = random_tensor(12, 16).detach(), random_tensor(61, 16, seed=1).detach()
    targets = torch.arange(12, device=DEVICE) % 61
    g, e = torch.linspace(-1, 1, 12, device=DEVICE), torch.linspace(0.5, -0.5, 12, device=DEVICE)
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logp = (leaves[0] @ leaves[1].T / 0.7).log_softmax(-1)
    logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    expected = torch.autograd.grad((logprobs * g).sum() + (entropy * e).sum(), leaves)
    d_weight = torch.zeros_like(weight)
    d_hidden = gradient_through_head(hidden, weight, d_weight, targets, 0.7, lambda rows, *_: (g[rows], e[rows]))
    torch.testing.assert_close(d_hidden.double(), expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(d_weight.double(), expected[1], atol=1e-5, rtol=1e-4)
    got = token_logprobs(hidden, weight, targets, 0.7)
    torch.testing.assert_close(got[0].double(), logprobs.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[1].double(), entropy.detach(), atol=1e-5, rtol=1e-4)


@only_gpu
def test_a_product_is_added_without_rounding():
    """bf16 has neither 257 nor the total, so that a rounded product would show."""
    ones = torch.ones(257, 16, dtype=torch.bfloat16, device=DEVICE)
    total = torch.full((16, 16), 0.5, device=DEVICE)
    add_product(total, ones, ones)
    add_product(total, ones, ones)
    assert torch.equal(total, torch.full((16, 16), 514.5, device=DEVICE))


@only_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [True, False])
def test_bf16_gradients_are_those_of_fp32_within_its_precision(family, share):
    options = {"head_dim": 64, "std": 0.15, **FAMILIES[family]}
    half = small_decoder(torch.bfloat16, **options).to(DEVICE)
    exact = small_decoder(torch.float32, **options).to(DEVICE)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), half.parameters(), strict=True):
            p.copy_(q.float())
    groups = random_groups()
    got, expected = compute_gradients(half, groups, share), compute_gradients(exact, groups, share)
    for name, grad in expected.items():
        assert F.cosine_similarity(got[name].flatten(), grad.flatten(), dim=0) > 0.995, name


@only_gpu
def test_nothing_is_compiled_after_the_first_steps():
    """Every batch has another size, and all need only the kernels that the first two compiled."""
    # Imported after tests.gpu.device has chosen between GPU and interpreter.
    from triton.runtime.jit import JITFunction

    decoder = small_decoder(torch.bfloat16, head_dim=64).to(DEVICE)
    learner = LocalLearner(decoder, LearnerConfig(token_budget=120), OptimConfig(), num_updates=9)
    algo = build_algorithm(GRPO(), 16)
    jitted = [f for module in (kernels, layer_kernels) for f in vars(module).values() if isinstance(f, JITFunction)]

    def count_compiled() -> int:
        """Returns the number of compiled variants of all kernels."""
        return sum(len(cache[0]) for f in jitted for cache in f.device_caches.values())

    counts = []
    for step in range(6):
        groups = random_groups(num_groups=3 + step, group_size=2 + step, seed=step, longest=5 + 4 * step)
        learner.update(make_batch(groups), algo)
        counts.append(count_compiled())
    assert counts[1] == counts[-1] > 0


@only_gpu
def test_log_probabilities_in_bf16_are_close_to_those_in_fp32():
    decoder = small_decoder(torch.bfloat16, std=0.1, head_dim=64).to(DEVICE)
    groups = random_groups()
    learner = LocalLearner(decoder, LearnerConfig(token_budget=200), OptimConfig(), num_updates=1)
    annotate(learner, groups, ["old"])
    for group in groups:
        for s in group.samples:
            with torch.device(DEVICE):
                exact = naive_logprobs(decoder.float(), group.prompt.tokens, s.tokens, 1.0)
            decoder.bfloat16()
            torch.testing.assert_close(torch.tensor(s.old_logprobs), exact.detach().float().cpu(), atol=0.05, rtol=0)
