"""Each kernel against the plain form of what it computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.device import DEVICE, HALF, HAS_GPU

# isort: split

from cohort.engines.native.cuda.attention import AttentionPlan, SoftmaxParts, compute_decode_attention
from cohort.engines.native.cuda.draw import choose_tokens
from cohort.engines.native.cuda.rotate import PAGE, Angles, rotate_and_store
from cohort.engines.native.random import draw_uniforms
from cohort.engines.native.sampler import SamplingSettings, draw_tokens
from cohort.models.decoder import Decoder
from cohort.models.functions import rms_norm, rotate
from cohort.models.kernels import add_norm, apply_gate
from tests.helpers.decoders_and_groups import small_config

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = [torch.float32, HALF]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [32, 100, 576])
def test_add_norm(dtype, d):
    """The residual stream x is fp32 whatever the model's type."""
    x, y, weight = random(5, d), random(5, d, dtype=dtype, seed=1), random(d, dtype=dtype, seed=2)
    total = x + y
    normed = add_norm(x, y, weight, 1e-5)
    assert torch.equal(x, total)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5), atol=BOUND[dtype], rtol=BOUND[dtype])
    torch.testing.assert_close(add_norm(total, None, weight, 1e-5), normed, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype):
    wide = random(7, 2 * 1100, dtype=dtype) * 3
    expected = F.silu(wide[:, :1100]) * wide[:, 1100:]
    torch.testing.assert_close(apply_gate(wide), expected, atol=BOUND[dtype], rtol=BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("K", "g"), [(2, 7), (3, 3), (1, 1)])
def test_rotate_and_store(dtype, norm, K, g):
    D, T = 32, 6
    decoder = Decoder(small_config(head_dim=D)).to(dtype).to(DEVICE)
    qkv = random(T, K, g + 2, D, dtype=dtype)
    positions = torch.tensor([0, 1, 5, 70, 9, 2], device=DEVICE)
    places = torch.tensor([3 * PAGE + 5, PAGE, 2 * PAGE - 1, 7, 2 * PAGE, 3 * PAGE], device=DEVICE)
    pages = (
        torch.zeros(4, K, PAGE, D, dtype=dtype, device=DEVICE),
        torch.zeros(4, K, PAGE, D, dtype=dtype, device=DEVICE),
    )
    every = [x.reshape(100, -1) for x in decoder.compute_cos_sin(torch.arange(100, device=DEVICE), dtype)]
    weights = (random(D, dtype=dtype, seed=3), random(D, dtype=dtype, seed=4))
    norms = (*weights, 1e-5) if norm else None
    q, k = rotate_and_store(qkv, positions, places, Angles(cos=every[0], sin=every[1]), norms, pages, keep=True)
    heads, keys = qkv[:, :, :g], qkv[:, :, g : g + 1]
    if norm:
        heads, keys = rms_norm(heads, weights[0], 1e-5), rms_norm(keys, weights[1], 1e-5)
    cos, sin = decoder.compute_cos_sin(positions, dtype)
    close = {"atol": BOUND[dtype], "rtol": BOUND[dtype]}
    torch.testing.assert_close(q, rotate(heads, cos, sin), **close)
    torch.testing.assert_close(k, rotate(keys, cos, sin)[:, :, 0], **close)
    for t, place in enumerate(places.tolist()):
        assert torch.equal(pages[0][place // PAGE, :, place % PAGE], k[t])
        assert torch.equal(pages[1][place // PAGE, :, place % PAGE], qkv[t, :, -1])
    assert sum(int((x != 0).any(-1).sum()) for x in pages) == 2 * T * K  # and nothing else was written


def plain(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [K, g, D], keys, values [K, n, D] -> [K, g, D], in float64."""
    q, keys, values = q.double(), keys.double(), values.double()
    return torch.softmax(q @ keys.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1) @ values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "prefix_splits"), [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize(("K", "g", "D"), [(2, 7, 64), (2, 6, 128), (3, 3, 64), (2, 8, 128), (1, 1, 32), (1, 16, 32)])
def test_decode_attention_is_the_plain_form(dtype, splits, prefix_splits, K, g, D):
    prefixes, own = [0, 130, 64], [1, 70, 0, 65, 200]  # a row that is done, prompts of none, one and several pages
    of = [1, 1, 2, 0, 2]  # row -> prefix
    B, tile = len(own), 64
    pages = (random(16, K, PAGE, D, dtype=dtype), random(16, K, PAGE, D, dtype=dtype, seed=1))
    order = torch.randperm(15, generator=torch.Generator().manual_seed(5)).int() + 1
    prefix_table, own_table = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(B, 4, dtype=torch.int32)
    taken = 0
    for table, lengths in ((prefix_table, prefixes), (own_table, own)):
        for row, length in enumerate(lengths):
            num = -(-length // PAGE)
            table[row, :num] = order[taken : taken + num]
            taken += num
    each = tile // g
    members = {1: [0, 1], 2: [2, 4]}
    tiles = [(p, rows[i : i + each]) for p, rows in members.items() for i in range(0, len(rows), each)]
    padded = [m + [-1] * (each - len(m)) for _, m in tiles] + [[-1] * each]
    plan = AttentionPlan(
        tile_prefix=torch.tensor([p for p, _ in tiles] + [-1], dtype=torch.int32, device=DEVICE),
        tile_rows=torch.tensor(padded, dtype=torch.int32, device=DEVICE),
        prefix_table=prefix_table.to(DEVICE),
        prefix_length=torch.tensor(prefixes, dtype=torch.int32, device=DEVICE),
        own_table=own_table.to(DEVICE),
        base=torch.tensor([prefixes[p] for p in of], device=DEVICE),
        count=torch.tensor(own, dtype=torch.int32, device=DEVICE),
        M=tile,
        prefix_splits=prefix_splits,
        splits=splits,
    )
    q = random(B, K, g, D, dtype=dtype, seed=2)
    out = compute_decode_attention(q, pages, plan, SoftmaxParts.allocate(5, B, K, g, D, DEVICE)).view(B, K, g, D)

    def read(x: Tensor, table: Tensor, length: int) -> Tensor:  # -> [K, length, D]
        picked = x[table.long().to(DEVICE)].transpose(0, 1).flatten(1, 2)
        return picked[:, :length]

    for row, length in enumerate(own):
        if not length:
            continue
        keys, values = (
            torch.cat([read(x, prefix_table[of[row]], prefixes[of[row]]), read(x, own_table[row], length)], dim=1)
            for x in pages
        )
        expected = plain(q[row], keys, values)
        torch.testing.assert_close(out[row].double(), expected, atol=BOUND[dtype], rtol=BOUND[dtype])


def test_choose_draws_as_the_plain_sampler():
    """Same keys, same numbers, same order: the same tokens and log-probabilities, also for greedy rows."""
    B, V = 64, 5000
    logits = random(B, V) * 4
    stream = torch.arange(B, device=DEVICE) * 7919 - 100
    position = torch.arange(B, device=DEVICE) % 9
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5], dtype=torch.float64, device=DEVICE).repeat(B // 4)
    tokens, logprobs = choose_tokens(logits, temperature, stream, position, greedy=True)
    nothing = torch.zeros(B, dtype=torch.float64, device=DEVICE)
    settings = SamplingSettings(
        temperature=temperature,
        top_p=nothing + 1,
        top_k=nothing.long(),
        min_p=nothing,
        has_truncation=False,
        needs_sorting=False,
    )
    expected = draw_tokens(logits, settings, draw_uniforms(stream, position))
    assert torch.equal(tokens, expected.tokens)
    torch.testing.assert_close(logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


def test_chosen_tokens_follow_the_distribution():
    """Chi-square at a fixed seed, over a vocabulary of three blocks with most mass in few tokens."""
    # the likeliest tokens and the rest, and the 99.9% point of chi-square with as many degrees of freedom
    N, most, bound = (4096, 30, 59.7) if HAS_GPU else (1024, 12, 32.91)
    V = 5000
    logits = random(1, V) * 3
    logits[0, :8] += 6
    probs = torch.softmax(logits[0].double(), -1)
    stream = torch.full((N,), 12345, device=DEVICE)
    ones = torch.ones(N, dtype=torch.float64, device=DEVICE)
    tokens, _ = choose_tokens(
        logits.expand(N, V).contiguous(), ones, stream, torch.arange(N, device=DEVICE), greedy=False
    )
    likely = probs.argsort(descending=True)[:most]
    counts = torch.stack([(tokens == t).sum() for t in likely]).double()
    rest = N - counts.sum()
    expected = probs[likely] * N
    chi = ((counts - expected) ** 2 / expected).sum() + (rest - (N - expected.sum())) ** 2 / (N - expected.sum())
    assert chi < bound


def test_what_is_not_finite_is_seen():
    logits = random(2, 3000)
    logits[1, 7] = float("nan")
    ones, zeros = torch.ones(2, dtype=torch.float64, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    tokens, logprobs = choose_tokens(logits, ones, zeros, zeros, greedy=False)
    assert logprobs[0].isfinite() and not logprobs[1].isfinite()
    assert (tokens >= 0).all() and (tokens < 3000).all()
