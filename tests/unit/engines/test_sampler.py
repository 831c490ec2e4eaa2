"""Drawing from given logits: tokens and masses worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from cohort.engines.native.sampler import BLOCK, SamplingSettings, draw_tokens, invert_cdf, truncate

PROBS = [0.1, 0.4, 0.0, 0.3, 0.2]  # in vocabulary order; cumulative 0.1, 0.5, 0.5, 0.8, 1.0


def settings(rows: int = 1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> SamplingSettings:
    def column(value, dtype=torch.float64):
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return SamplingSettings(
        temperature=column(temperature),
        top_p=column(top_p),
        top_k=column(top_k, torch.int64),
        min_p=column(min_p),
    )


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor([[math.log(p) if p else -math.inf for p in probs]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 3), (0.7999, 3), (0.8001, 4), (1 - 2**-53, 4)],
)
def test_token_is_where_the_cumulative_probability_passes_u(u: float, token: int):
    drawn = draw_tokens(logits_of(PROBS), settings(), torch.tensor([u], dtype=torch.float64))
    assert drawn.tokens.tolist() == [token]
    assert drawn.logprobs.item() == pytest.approx(math.log(PROBS[token]), abs=1e-12)
    assert drawn.kept_mass.item() == pytest.approx(1.0)


def test_exact_boundaries_belong_to_the_next_token():
    probs = torch.tensor([[0.25, 0.25, 0.0, 0.5]], dtype=torch.float64).expand(4, -1)
    u = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    assert invert_cdf(probs, u).tolist() == [0, 1, 3, 3]


@pytest.mark.parametrize("vocab", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_zero_probability_is_never_drawn_at_the_ends(vocab: int):
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for only in {0, vocab // 2, vocab - 1}:
        probs = torch.zeros(2, vocab)
        probs[:, only] = 1e-30  # not normalised, as after truncation
        assert invert_cdf(probs, u).tolist() == [only, only]


def test_u_that_rounds_to_the_total_takes_the_last_possible_token():
    probs = torch.zeros(1, 2 * BLOCK)
    probs[0, 3], probs[0, BLOCK + 4] = 0.5, 0.5
    assert invert_cdf(probs, torch.tensor([1.0], dtype=torch.float64)).tolist() == [BLOCK + 4]


def test_two_levels_equal_one_exact_sum():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(200, 3 * BLOCK + 19, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    expected = []
    for row, number in zip(probs.tolist(), u.tolist(), strict=True):
        target = number * math.fsum(row)
        expected.append(next(i for i in range(len(row)) if math.fsum(row[: i + 1]) > target))
    assert invert_cdf(probs, u).tolist() == expected


def test_rare_token_at_the_end_of_a_large_vocabulary_keeps_its_chance():
    """A running fp32 sum could not see these last tokens at all: 1 + 2e-8 is 1."""
    probs = torch.full((1, 50_000), 2e-5)
    probs[0, -100:] = 2e-8
    total = probs.double().sum()
    at = probs.double()[0, :-1].sum() / total + 1e-8 / total  # the middle of the last token
    assert invert_cdf(probs, at[None]).item() in (49_998, 49_999)
    u = 1 - torch.linspace(0, 1.9e-6, 2000, dtype=torch.float64)[1:]
    seen = set(invert_cdf(probs.expand(len(u), -1), u).tolist())
    assert len(seen & set(range(49_900, 50_000))) > 90


def test_temperature_divides_the_logits():
    drawn = draw_tokens(logits_of(PROBS), settings(temperature=0.5), torch.tensor([0.9], dtype=torch.float64))
    squares = [p * p / 0.3 for p in PROBS]  # 0.01 + 0.16 + 0 + 0.09 + 0.04 = 0.3; cumulative .033 .567 .567 .867 1
    assert drawn.tokens.item() == 4
    assert drawn.logprobs.item() == pytest.approx(math.log(squares[4]), abs=1e-12)


def test_temperature_zero_is_greedy_with_plain_logprobs():
    drawn = draw_tokens(logits_of(PROBS), settings(temperature=0.0), torch.tensor([0.99], dtype=torch.float64))
    assert drawn.tokens.item() == 1
    assert drawn.logprobs.item() == pytest.approx(math.log(0.4), abs=1e-12)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.5}, [1, 3, 4]),
        ({"min_p": 0.76}, [1]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of the two kept, 0.4 / 0.7 already reaches half
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
        ({"top_p": 0.95, "min_p": 0.7}, [1, 3]),
    ],
)
def test_truncation_keeps_what_it_says(limits: dict, kept: list[int]):
    probs, mass = truncate(logits_of(PROBS).exp(), settings(**limits))
    expected = [p if i in kept else 0.0 for i, p in enumerate(PROBS)]
    assert probs[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert mass.item() == pytest.approx(sum(expected), abs=1e-12)


def test_ties_go_to_the_smaller_id():
    probs, mass = truncate(torch.full((1, 1000), 0.001), settings(top_k=3))
    assert probs[0].nonzero()[:, 0].tolist() == [0, 1, 2]
    assert mass.item() == pytest.approx(0.003)


def test_logprob_is_before_truncation():
    u = torch.tensor([0.99], dtype=torch.float64)
    drawn = draw_tokens(logits_of(PROBS), settings(top_k=2), u)
    assert drawn.tokens.item() == 3
    assert drawn.logprobs.item() == pytest.approx(math.log(0.3), abs=1e-12)
    assert drawn.kept_mass.item() == pytest.approx(0.7, abs=1e-12)


def test_every_row_has_its_own_settings():
    rows = settings(temperature=[1.0, 0.0, 0.5, 1.0], top_p=[1.0, 1.0, 1.0, 0.5], top_k=[0, 0, 1, 0], min_p=[0.0] * 4)
    u = torch.full((4,), 0.99, dtype=torch.float64)
    drawn = draw_tokens(logits_of(PROBS).expand(4, -1), rows, u)
    assert drawn.tokens.tolist() == [4, 1, 1, 3]
    logs = [math.log(0.2), math.log(0.4), math.log(0.16 / 0.3), math.log(0.3)]
    assert drawn.logprobs.tolist() == pytest.approx(logs, abs=1e-12)
    assert drawn.kept_mass.tolist() == pytest.approx([1.0, 1.0, 0.16 / 0.3, 0.7], abs=1e-12)


def test_unused_options_are_skipped_without_a_change():
    plain = SamplingSettings(
        **{name: getattr(settings(), name) for name in ("temperature", "top_p", "top_k", "min_p")},
        has_temperature=False,
        has_greedy=False,
        has_truncation=False,
        needs_sorting=False,
    )
    u = torch.tensor([0.6], dtype=torch.float64)
    fast, full = draw_tokens(logits_of(PROBS), plain, u), draw_tokens(logits_of(PROBS), settings(), u)
    assert fast.kept_mass is None
    assert (fast.tokens.item(), fast.logprobs.item()) == (full.tokens.item(), full.logprobs.item())


def test_half_precision_logits_are_widened():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    drawn = draw_tokens(logits, settings(), torch.tensor([0.5], dtype=torch.float64))
    assert drawn.logprobs.dtype == torch.float32
    assert drawn.logprobs.item() == pytest.approx(torch.log_softmax(logits[0].float(), -1)[2].item(), abs=1e-7)


def test_distribution_of_draws():
    """Chi-square at fixed streams: positions of one stream, against the softmax."""
    from cohort.engines.native.random import draw_uniforms

    n, vocab = 50_000, 40
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3))
    u = draw_uniforms(torch.full((n,), 12345), torch.arange(n))
    drawn = draw_tokens(logits.expand(n, -1), settings(n, temperature=0.8), u)
    expected = (logits[0] / 0.8).softmax(-1) * n
    counts = torch.bincount(drawn.tokens, minlength=vocab)
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert chi2 < 72.1  # 99.9% quantile with 39 degrees of freedom
