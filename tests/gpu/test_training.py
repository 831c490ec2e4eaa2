"""The learner on a GPU: each kernel against the plain form, forward and backward, and all of them together."""

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
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True, "tied": False}, "qwen3": {"qk_norm": True}}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(DEVICE).requires_grad_()


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = BOUND[dtype] * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(got.float(), expected.float(), atol=bound, rtol=0)


@pytest.fixture
def by_kernels(monkeypatch):
    """Also on a CPU, where Triton's interpreter runs them."""
    monkeypatch.setattr(functions, "has_kernels", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr("cohort.learner.head.has_kernels", lambda x: x.dtype != torch.float64)


def both_ways(run, inputs: list[Tensor], monkeypatch) -> None:
    """Outputs and gradients by kernels in the inputs' type, and plainly in fp32."""
    dtype = inputs[-1].dtype
    monkeypatch.setattr(functions, "has_kernels", lambda x: True)
    outputs = run(*inputs)
    pulls = [torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o) for o in outputs]
    grads = torch.autograd.grad(outputs, inputs, pulls)
    monkeypatch.setattr(functions, "has_kernels", lambda x: False)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = run(*exact)
    expected_grads = torch.autograd.grad(expected, exact, [p.float() for p in pulls])
    for got, want in zip([*outputs, *grads], [*expected, *expected_grads], strict=True):
        close(got, want, dtype)
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [32, 100])
def test_add_norm(dtype, d, monkeypatch):
    inputs = [random(7, d), random(7, d, dtype=dtype, seed=1), random(d, dtype=dtype, seed=2)]
    both_ways(lambda x, y, w: add_norm(x, y, w, 1e-5), inputs, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_and_of_a_sum_that_goes_nowhere(dtype, monkeypatch):
    heads = [random(3, 2, 5, 16, dtype=dtype), random(16, dtype=dtype, seed=1)]
    both_ways(lambda x, w: [rms_norm(x, w, 1e-5)], heads, monkeypatch)
    last = [random(7, 32), random(7, 32, dtype=dtype, seed=1), random(32, dtype=dtype, seed=2)]
    both_ways(lambda x, y, w: [add_norm(x, y, w, 1e-5)[1]], last, monkeypatch)


def test_gradient_of_a_norm_over_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr("cohort.models.kernels.MAX_PARTS", 3)
    inputs = [random(11, 32), random(11, 32, seed=1), random(32, seed=2)]
    both_ways(lambda x, y, w: add_norm(x, y, w, 1e-5), inputs, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(dtype, monkeypatch):
    x, gate_up, down = (random(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, 24), (2 * 40, 24), (24, 40)]))
    weights = [(w.detach() / 5).requires_grad_() for w in (gate_up, down)]
    both_ways(lambda x, a, b: [apply_gated_unit(x, a, None, b, None)], [x, *weights], monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "g"), [(2, 7), (3, 1)])
def test_split_rotated(dtype, K, g, monkeypatch):
    angle = torch.arange(6, device=DEVICE)[:, None] * torch.rand(16, device=DEVICE)
    cos, sin = (x[:, None, None] for x in (angle.cos(), angle.sin()))
    qkv = random(6, K, g + 2, 32, dtype=dtype)

    def run(qkv):
        return split_and_rotate(qkv, cos.to(qkv.dtype), sin.to(qkv.dtype))

    both_ways(run, [qkv], monkeypatch)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("V", [61, 5000])
def test_describe_and_pull(V, temperature):
    logits = random(4, V) * 3
    targets = torch.tensor([0, 7, V - 1, 3], device=DEVICE)
    logp = (logits / temperature).log_softmax(-1)
    logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    got = kernels.logprobs_and_entropy(logits.detach(), targets, temperature)
    torch.testing.assert_close(got[0], logprobs.detach())
    torch.testing.assert_close(got[1], entropy.detach())
    g, e = torch.tensor([[1.0, -2.0, 0.0, 0.5], [0.3, 0.0, -1.0, 2.0]], device=DEVICE)
    for pull_e in (None, e):
        loss = (logprobs * g).sum() + (0 if pull_e is None else (entropy * pull_e).sum())
        (expected,) = torch.autograd.grad(loss, logits, retain_graph=True)
        pulled = kernels.logits_gradient(logits.detach(), targets, got[1], got[2], g, pull_e, temperature, torch.float32)
        torch.testing.assert_close(pulled, expected, atol=1e-6, rtol=1e-4)


# ---- attention


def pieces(runs):
    """(slice of the queries, slice of the keys) of each sequence."""
    q, k = runs.queries.tolist(), runs.keys.tolist()
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def spread(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def plain_scores(q, k):
    """[H, queries, keys]; the last query sees all keys, the one before all but the last, and so on."""
    scores = torch.einsum("qhd,khd->hqk", q, spread(k, q)) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
    return scores.masked_fill(hidden, float("-inf"))


def plain_forward(q, k, v, runs):
    """What flash attention computes, one sequence after the other."""
    scores = [plain_scores(q[here], k[seen]) for here, seen in pieces(runs)]
    values = [spread(v[seen], q) for _, seen in pieces(runs)]
    outs = [torch.einsum("hqk,khd->qhd", s.softmax(-1), x) for s, x in zip(scores, values, strict=True)]
    return torch.cat(outs), torch.cat([s.logsumexp(-1) for s in scores], dim=1)


def plain_backward(d_out, q, k, v, out, lse, runs):
    """From out and lse alone, as flash attention does it."""
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (d_out * out).sum(-1).T  # [H, T]
    g = q.shape[1] // k.shape[1]
    for here, seen in pieces(runs):
        probs = (plain_scores(q[here], k[seen]) - lse[:, here, None]).exp()
        d_probs = torch.einsum("qhd,khd->hqk", d_out[here], spread(v[seen], q))
        d_scores = probs * (d_probs - delta[:, here, None]) * q.shape[-1] ** -0.5
        d_q[here] = torch.einsum("hqk,khd->qhd", d_scores, spread(k[seen], q))
        d_k[seen] = torch.einsum("hqk,qhd->khd", d_scores, q[here]).unflatten(1, (-1, g)).sum(2)
        d_v[seen] = torch.einsum("hqk,qhd->khd", probs, d_out[here]).unflatten(1, (-1, g)).sum(2)
    return d_q, d_k, d_v


def attended(attend, dtype, T: int) -> tuple[Tensor, ...]:
    """Output and gradients of an `attend` on random q, k, v, with K = 2, g = 3."""
    inputs = [random(T, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(2, 3, 16), (2, 16), (2, 16)])]
    out = attend(0, *inputs)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return out, *torch.autograd.grad(out, inputs, pull)


def layouts():
    groups = random_groups(num_groups=4, longest=12)
    groups += [make_group([3, 4], [make_sample([5], advantage=1.0), make_sample([6], advantage=-1.0)], id="9")]
    short = make_group([3, 4, 5], [make_sample([5, 6], advantage=1.0), make_sample([6], advantage=-1.0)], id="10")
    yield pack_groups([short], 1000).minibatches[0].microbatches[0].layout  # one query to the shared prompt
    for budget, share in ((1000, True), (45, True), (1000, False)):
        for micro in pack_groups(groups, budget, share=share).minibatches[0].microbatches:
            yield micro.layout


@pytest.mark.parametrize("by_kernel", [True, False])
def test_attention_over_runs_is_attention_over_blocks(monkeypatch, by_kernel):
    """Which keys are gathered and where their gradients go, with plain forms in the place of the flash kernels."""
    monkeypatch.setattr(flash, "flash_forward", plain_forward)
    monkeypatch.setattr(flash, "flash_backward", plain_backward)
    monkeypatch.setattr(flash, "has_kernels", lambda x: by_kernel)
    seen = set()
    for layout in layouts():
        seen.add(layout.make_runs(DEVICE).copies is not None)
        blocks = make_packed_attention(layout, torch.zeros(1, dtype=torch.float64, device=DEVICE), 16)
        expected = attended(blocks, torch.float64, layout.num_tokens)
        got = attended(make_flash_attention(layout.make_runs(DEVICE)), torch.float32, layout.num_tokens)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)
    assert seen == {True, False}


@only_gpu
def test_flash_attention_is_attention_over_blocks():
    for layout in layouts():
        exact = attended(make_packed_attention(layout, torch.zeros(1, device=DEVICE), 16), torch.float32, layout.num_tokens)
        got = attended(make_packed_attention(layout, torch.zeros(1, device=DEVICE, dtype=HALF), 16), HALF, layout.num_tokens)
        for a, b in zip(got, exact, strict=True):
            close(a, b, HALF)


# ---- all together


def gradients(decoder, groups, share: bool) -> dict[str, Tensor]:
    learner = LocalLearner(decoder, LearnerConfig(token_budget=200, prefix_sharing=share), OptimConfig(), num_updates=1)
    batch = pack_groups(groups, 200, share=share)
    learner.forward_backward(batch.minibatches[0], build_algorithm(GRPO(entropy=0.01), 16))
    return {name: master.grad.clone() for name, master in learner.optimizer.masters.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learner_by_kernels_is_the_learner_without(family, monkeypatch, by_kernels):
    """Every gradient of a GRPO loss in fp32."""
    if not torch.cuda.is_available():  # no flash attention in fp32 anyway: blocks
        monkeypatch.setattr("cohort.learner.attention.has_kernels", lambda x: False)
    options = {"head_dim": 16, **FAMILIES[family]}
    groups = random_groups()
    got = gradients(small_decoder(torch.float32, std=0.15, **options).to(DEVICE), groups, True)
    expected = gradients(small_decoder(torch.float64, std=0.15, **options), groups, True)
    for name, grad in expected.items():
        bound = 1e-4 * max(1e-3, float(grad.abs().max()))
        off = float((got[name].cpu().double() - grad).abs().max())
        assert off <= bound, (name, off, bound)


def test_head_by_kernels(by_kernels, monkeypatch):
    monkeypatch.setattr("cohort.learner.head.GPU_CHUNK_LOGITS", 61 * 5)
    monkeypatch.setattr("cohort.learner.head.CHUNK_LOGITS", 61 * 5)
    hidden, weight = random(12, 16).detach(), random(61, 16, seed=1).detach()
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
    """257 is no bf16 number, and neither is the total."""
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
    got, expected = gradients(half, groups, share), gradients(exact, groups, share)
    for name, grad in expected.items():
        assert F.cosine_similarity(got[name].flatten(), grad.flatten(), dim=0) > 0.995, name


@only_gpu
def test_nothing_is_compiled_after_the_first_steps():
    """Batches of any sizes, none like another: what the first two needed is enough."""
    from triton.runtime.jit import JITFunction  # not before the interpreter is chosen

    decoder = small_decoder(torch.bfloat16, head_dim=64).to(DEVICE)
    learner = LocalLearner(decoder, LearnerConfig(token_budget=120), OptimConfig(), num_updates=9)
    algo = build_algorithm(GRPO(), 16)
    jitted = [f for module in (kernels, layer_kernels) for f in vars(module).values() if isinstance(f, JITFunction)]

    def compiled() -> int:
        return sum(len(cache[0]) for f in jitted for cache in f.device_caches.values())

    counts = []
    for step in range(6):
        groups = random_groups(num_groups=3 + step, group_size=2 + step, seed=step, longest=5 + 4 * step)
        learner.update(make_batch(groups), algo)
        counts.append(compiled())
    assert counts[1] == counts[-1] > 0


@only_gpu
def test_log_probabilities_in_bf16():
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
