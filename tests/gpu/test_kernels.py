"""Triton kernels of the GPU engine, each compared with plain PyTorch code that computes the same.

Shapes: K heads of keys, g heads of queries per head of keys, D entries per head.
"""

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

# The largest error that is allowed, absolute and relative.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = [torch.float32, HALF]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Returns normally distributed numbers on the test device. They depend on shape and seed only."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [32, 100, 576])
def test_add_norm(dtype, d):
    """The residual x is fp32, whatever the type of the model."""
    x, y, weight = random_tensor(5, d), random_tensor(5, d, dtype=dtype, seed=1), random_tensor(d, dtype=dtype, seed=2)
    total = x + y
    normed = add_norm(x, y, weight, 1e-5)
    assert torch.equal(x, total)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5), atol=BOUND[dtype], rtol=BOUND[dtype])
    torch.testing.assert_close(add_norm(total, None, weight, 1e-5), normed, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype):
    wide = random_tensor(7, 2 * 1100, dtype=dtype) * 3
    expected = F.silu(wide[:, :1100]) * wide[:, 1100:]
    torch.testing.assert_close(apply_gate(wide), expected, atol=BOUND[dtype], rtol=BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("K", "g"), [(2, 7), (3, 3), (1, 1)])
def test_rotate_and_store(dtype, norm, K, g):
    D, T = 32, 6
    decoder = Decoder(small_config(head_dim=D)).to(dtype).to(DEVICE)
    qkv = random_tensor(T, K, g + 2, D, dtype=dtype)
    positions = torch.tensor([0, 1, 5, 70, 9, 2], device=DEVICE)
    places = torch.tensor([3 * PAGE + 5, PAGE, 2 * PAGE - 1, 7, 2 * PAGE, 3 * PAGE], device=DEVICE)
    pages = (
        torch.zeros(4, K, PAGE, D, dtype=dtype, device=DEVICE),
        torch.zeros(4, K, PAGE, D, dtype=dtype, device=DEVICE),
    )
    tables = [x.reshape(100, -1) for x in decoder.compute_cos_sin(torch.arange(100, device=DEVICE), dtype)]
    weights = (random_tensor(D, dtype=dtype, seed=3), random_tensor(D, dtype=dtype, seed=4))
    norms = (*weights, 1e-5) if norm else None
    q, k = rotate_and_store(qkv, positions, places, Angles(cos=tables[0], sin=tables[1]), norms, pages, keep=True)
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
    # Nothing else was written.
    assert sum(int((x != 0).any(-1).sum()) for x in pages) == 2 * T * K


def plain_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns attention [K, g, D] of q [K, g, D] over keys and values [K, n, D], in float64."""
    q, keys, values = q.double(), keys.double(), values.double()
    return torch.softmax(q @ keys.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1) @ values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "prefix_splits"), [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize(("K", "g", "D"), [(2, 7, 64), (2, 6, 128), (3, 3, 64), (2, 8, 128), (1, 1, 32), (1, 16, 32)])
def test_decode_attention_equals_plain_attention(dtype, splits, prefix_splits, K, g, D):
    # Prefixes of no, three and one pages. Row 2 has no own tokens: it is done.
    prefix_lengths = [0, 130, 64]
    own_lengths = [1, 70, 0, 65, 200]
    prefix_of_row = [1, 1, 2, 0, 2]
    B = len(own_lengths)
    queries_per_tile = 64
    pages = (random_tensor(16, K, PAGE, D, dtype=dtype), random_tensor(16, K, PAGE, D, dtype=dtype, seed=1))
    # Pages are used in random order, and page 0 is left out.
    page_order = torch.randperm(15, generator=torch.Generator().manual_seed(5)).int() + 1
    prefix_table, own_table = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(B, 4, dtype=torch.int32)
    num_used = 0
    for table, lengths in ((prefix_table, prefix_lengths), (own_table, own_lengths)):
        for row, length in enumerate(lengths):
            num = -(-length // PAGE)
            table[row, :num] = page_order[num_used : num_used + num]
            num_used += num
    rows_per_tile = queries_per_tile // g
    # Row 3 is in no tile, because its prefix is empty. The last tile is unused.
    rows_of_prefix = {1: [0, 1], 2: [2, 4]}
    tiles = [
        (prefix, rows[i : i + rows_per_tile])
        for prefix, rows in rows_of_prefix.items()
        for i in range(0, len(rows), rows_per_tile)
    ]
    padded = [rows + [-1] * (rows_per_tile - len(rows)) for _, rows in tiles] + [[-1] * rows_per_tile]
    plan = AttentionPlan(
        tile_prefix=torch.tensor([p for p, _ in tiles] + [-1], dtype=torch.int32, device=DEVICE),
        tile_rows=torch.tensor(padded, dtype=torch.int32, device=DEVICE),
        prefix_table=prefix_table.to(DEVICE),
        prefix_length=torch.tensor(prefix_lengths, dtype=torch.int32, device=DEVICE),
        own_table=own_table.to(DEVICE),
        base=torch.tensor([prefix_lengths[p] for p in prefix_of_row], device=DEVICE),
        count=torch.tensor(own_lengths, dtype=torch.int32, device=DEVICE),
        M=queries_per_tile,
        prefix_splits=prefix_splits,
        splits=splits,
    )
    q = random_tensor(B, K, g, D, dtype=dtype, seed=2)
    out = compute_decode_attention(q, pages, plan, SoftmaxParts.allocate(5, B, K, g, D, DEVICE)).view(B, K, g, D)

    def read_pages(x: Tensor, table: Tensor, length: int) -> Tensor:
        """Returns the first `length` keys or values [K, length, D] in the pages of a table."""
        picked = x[table.long().to(DEVICE)].transpose(0, 1).flatten(1, 2)
        return picked[:, :length]

    for row, length in enumerate(own_lengths):
        if not length:
            continue
        prefix = prefix_of_row[row]
        keys, values = (
            torch.cat(
                [
                    read_pages(x, prefix_table[prefix], prefix_lengths[prefix]),
                    read_pages(x, own_table[row], length),
                ],
                dim=1,
            )
            for x in pages
        )
        expected = plain_attention(q[row], keys, values)
        torch.testing.assert_close(out[row].double(), expected, atol=BOUND[dtype], rtol=BOUND[dtype])


def test_choose_tokens_draws_as_the_plain_sampler():
    """Both use the same random numbers and give the same tokens and log-probabilities, also in greedy rows."""
    B, V = 64, 5000
    logits = random_tensor(B, V) * 4
    stream = torch.arange(B, device=DEVICE) * 7919 - 100
    position = torch.arange(B, device=DEVICE) % 9
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5], dtype=torch.float64, device=DEVICE).repeat(B // 4)
    tokens, logprobs = choose_tokens(logits, temperature, stream, position, greedy=True)
    zeros = torch.zeros(B, dtype=torch.float64, device=DEVICE)
    settings = SamplingSettings(
        temperature=temperature,
        top_p=zeros + 1,
        top_k=zeros.long(),
        min_p=zeros,
        has_truncation=False,
        needs_sorting=False,
    )
    expected = draw_tokens(logits, settings, draw_uniforms(stream, position))
    assert torch.equal(tokens, expected.tokens)
    torch.testing.assert_close(logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


def test_chosen_tokens_follow_the_distribution():
    """A chi-square test at a fixed seed. The vocabulary has three blocks of the kernel; few tokens have most mass."""
    # The `num_likely` likeliest tokens are counted one by one, all others together: `num_likely` degrees of freedom.
    # `bound` is the 99.9% point of chi-square with as many.
    N, num_likely, bound = (4096, 30, 59.7) if HAS_GPU else (1024, 12, 32.91)
    V = 5000
    logits = random_tensor(1, V) * 3
    logits[0, :8] += 6
    probs = torch.softmax(logits[0].double(), -1)
    stream = torch.full((N,), 12345, device=DEVICE)
    ones = torch.ones(N, dtype=torch.float64, device=DEVICE)
    tokens, _ = choose_tokens(
        logits.expand(N, V).contiguous(), ones, stream, torch.arange(N, device=DEVICE), greedy=False
    )
    likely = probs.argsort(descending=True)[:num_likely]
    counts = torch.stack([(tokens == t).sum() for t in likely]).double()
    rest = N - counts.sum()
    expected = probs[likely] * N
    chi = ((counts - expected) ** 2 / expected).sum() + (rest - (N - expected.sum())) ** 2 / (N - expected.sum())
    assert chi < bound


def test_a_nan_among_the_logits_gives_a_log_probability_that_is_not_finite():
    logits = random_tensor(2, 3000)
    logits[1, 7] = float("nan")
    ones, zeros = torch.ones(2, dtype=torch.float64, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    tokens, logprobs = choose_tokens(logits, ones, zeros, zeros, greedy=False)
    assert logprobs[0].isfinite() and not logprobs[1].isfinite()
    assert (tokens >= 0).all() and (tokens < 3000).all()
