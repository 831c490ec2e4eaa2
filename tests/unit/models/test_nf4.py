"""Tests of NF4: its values, blocks and scales by hand, bounds of its error, and adapters on a quantised base."""

from __future__ import annotations

import pytest
import torch

from cohort.config.algo_sections import KLConfig
from cohort.config.schema import GRPO, LearnerConfig, LoraConfig, OptimConfig
from cohort.models import nf4
from cohort.models.decoder import hf_views, to_hf_shape
from cohort.models.lora import Adapters
from cohort.models.nf4 import CODE, make_dynamic_code, quantise
from cohort.run import checkpoint
from tests.helpers.decoders_and_groups import small_decoder
from tests.helpers.small_runs import built_job, run_steps, small_run

CPU = torch.device("cpu")


def draw_normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_code_is_that_of_the_paper():
    """Quantiles of the normal distribution between offset and 1/2: eight above zero, seven below, scaled to 1."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64))[:-1]
    below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64))[:-1]
    expected = torch.cat([above, below, torch.zeros(1, dtype=torch.float64)]).sort().values / above.max()
    torch.testing.assert_close(torch.tensor(CODE, dtype=torch.float64), expected, rtol=0, atol=1e-6)


def test_the_code_of_scales_is_dynamic():
    """In the highest decade 64 values of each sign, in the next 32, ...; 0 and 1."""
    code = make_dynamic_code(CPU)
    assert len(code) == 256 and torch.equal(code, code.sort().values)
    assert code[-1] == 1.0 and (code == 0).sum() == 1
    for i in range(7):
        low, high = 10.0 ** (i - 7), 10.0 ** (i - 6)
        inside = (code.abs() > low) & (code.abs() < high) & (code != 1)
        assert inside.sum() == 2 * 2**i
    assert code[-2] == pytest.approx(1 - 0.9 / 64 / 2)


def test_entries_by_hand():
    """The scale of this block is 2, so 0.5 is stored as 0.25, rounded to 0.2461. A single scale is stored exactly."""
    row = torch.zeros(1, 64)
    row[0, :6] = torch.tensor([2.0, -2.0, 0.5, -0.1, 0.08, 1.28])
    made = quantise(row)
    assert made.codes[0, :3].tolist() == [(15 << 4) + 0, (10 << 4) + 6, (8 << 4) + 13]
    assert made.codes[0, 3:].tolist() == [(7 << 4) + 7] * 29
    expected = torch.tensor([2.0, -2.0, 2 * CODE[10], 2 * CODE[6], 2 * CODE[8], 2 * CODE[13]])
    assert torch.equal(made.read_rows(0, 1)[0, :6], expected)
    assert not made.read_rows(0, 1)[0, 6:].any()


def test_the_error_is_within_its_bounds():
    """An entry errs by at most half of the widest gap between values, times the scale, plus the error of the scale."""
    matrix = draw_normal(96, 160)
    made = quantise(matrix)
    scales = matrix.view(-1, 64).abs().amax(-1)
    kept = make_dynamic_code(CPU)[made.scales.int()] * made.peaks.repeat_interleave(256)[: len(scales)] + made.mean
    widest = float(make_dynamic_code(CPU).diff().max())
    assert ((kept - scales).abs() <= made.peaks.max() * widest / 2 * 1.001).all()
    gap = float(torch.tensor(CODE).diff().max())
    bound = (gap / 2 * scales + (kept - scales).abs())[:, None]
    error = (made.read_rows(0, 96).view(-1, 64) - matrix.view(-1, 64)).abs()
    assert (error <= bound * 1.001).all()
    assert 0.07 < float(error.square().mean().sqrt()) < 0.11  # of a standard deviation of 1


def test_values_that_are_in_the_code_survive():
    """Equal scales are stored exactly, because they equal their mean. So multiples of the values stay exact."""
    matrix = torch.tensor(CODE).repeat(8, 8) * 0.5
    assert torch.equal(quantise(matrix).read_rows(0, 8), matrix)
    zeros = torch.zeros(3, 50)
    assert torch.equal(quantise(zeros).read_rows(0, 3), zeros)


@pytest.mark.parametrize("shape", [(40, 64), (17, 33), (5, 7), (130, 200)])
def test_rows_are_rows_and_pieces_change_nothing(shape, monkeypatch):
    matrix = draw_normal(*shape)
    whole = quantise(matrix)
    full = whole.read_rows(0, shape[0])
    assert full.shape == shape
    for start, stop in ((0, 1), (1, 4), (shape[0] - 1, shape[0])):
        assert torch.equal(whole.read_rows(start, stop), full[start:stop])
    monkeypatch.setattr(nf4, "PIECE", 128)
    assert torch.equal(quantise(matrix).read_rows(0, shape[0]), full)


def test_it_takes_a_little_more_than_four_bits():
    made = quantise(draw_normal(1024, 1024))
    assert 8 * made.num_bytes / 2**20 == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policy_and_reference_start_from_the_quantised_base(dtype):
    decoder, original = small_decoder(dtype), small_decoder(dtype)
    adapters = Adapters(decoder, LoraConfig(rank=2, targets=("k_proj", "up_proj"), base="nf4"))
    rounded = {n: to_hf_shape(n, v).clone() for n, v in hf_views(decoder)}
    for name, view in hf_views(original):
        exact = to_hf_shape(name, view)
        if name.endswith(("k_proj.weight", "up_proj.weight")):
            assert torch.equal(rounded[name], quantise(exact).read_rows(0, len(exact)))
            assert not torch.equal(rounded[name], exact)
        else:
            assert torch.equal(rounded[name], exact)
    for tensor in adapters.tensors().values():
        tensor.fill_(0.1)
    adapters.merge()
    assert not torch.equal(decoder.layers[0].qkv, original.layers[0].qkv)
    with adapters.hold_base():
        assert all(torch.equal(to_hf_shape(n, v), rounded[n]) for n, v in hf_views(decoder))


def test_a_run_on_a_4_bit_base_resumes_exactly(tmp_path):
    lora = LoraConfig(rank=4, base="nf4")
    config = small_run(
        learner=LearnerConfig(lora=lora), optim=OptimConfig(lr=1e-3), algo=GRPO(kl=KLConfig(weight=0.01))
    )
    with built_job(config) as parts:
        run_steps(parts, 1)
        path = checkpoint.save(tmp_path, parts.make_checkpoint(1), parts.write_model)
        expected = run_steps(parts, 1, first=1)[0][1].metrics
        weights = {n: p.clone() for n, p in parts.model.decoder.named_parameters()}
    with built_job(config) as other:
        other.restore(checkpoint.load(path))
        found = run_steps(other, 1, first=1)[0][1].metrics
        assert {n: v for n, v in found.items() if "time" not in n} == {
            n: v for n, v in expected.items() if "time" not in n
        }
        assert all(torch.equal(p, weights[n]) for n, p in other.model.decoder.named_parameters())
