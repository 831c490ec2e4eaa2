"""Operations counted by hand for a shape small enough to write out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cohort import bench
from cohort.config.options import BenchOptions, EngineBenchOptions, LearnerBenchOptions
from cohort.learner.attention import packed_attention
from cohort.limits import Shape, forward_flops, layer_params, matmul_rate
from tests.support import small_config, small_decoder

SHAPE = Shape(prompts=2, samples=3, prompt_tokens=4, completion_tokens=5)
CONFIG = small_config()  # hidden 32, 2 layers, 6 query and 2 KV heads of 8, ff 40, vocabulary 61


def test_weights_of_the_matrix_products_by_hand():
    # a layer: q 32x48, k and v 32x16 each, out 48x32 = 1536 + 512 + 512 + 1536; gate, up, down 3 x 32x40 = 3840
    assert layer_params(CONFIG) == 2 * (4096 + 3840)
    decoder = small_decoder()
    held = sum(p.numel() for n, p in decoder.named_parameters() if p.ndim > 1 and n != "embed")
    assert layer_params(CONFIG) == held


def test_forward_operations_by_hand():
    # tokens of a group: 4 + 3 x 5 = 19 through the layers, 15 through the head (61 x 32)
    linear = 2 * 15872 * 19 + 2 * 61 * 32 * 15
    # query-key pairs of a group: 4 x 4 / 2 + 3 (4 x 5 + 5 x 5 / 2) = 105.5; 4 operations x 2 layers x 48 a pair
    attention = 4 * 2 * 48 * 105.5
    assert forward_flops(CONFIG, SHAPE) == 2 * (linear + attention)
    assert SHAPE.num_completion == 30


def test_forward_operations_agree_with_a_counted_forward():
    """torch counts the matrix products of the real packs; attention aside, which it counts with its padding."""
    decoder = small_decoder()
    groups = bench._random_groups(decoder, SHAPE)
    [micro] = bench.pack(groups, 1000).minibatches[0].microbatches
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = decoder(micro.tokens, micro.positions, packed_attention(micro.layout, torch.float32))
        decoder.logits(hidden.index_select(0, micro.source))
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if "attention" not in str(op) and "bmm" not in str(op))
    assert products == 2 * (2 * 15872 * 19 + 2 * 61 * 32 * 15)


def test_the_measured_rate_is_a_rate():
    assert 1e8 < matmul_rate(seconds=0.02, size=256) < 1e15


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(bench.limits, "matmul_rate", lambda: 1e9)


OPTIONS = {"prompts": 2, "samples": 3, "prompt_tokens": 4, "completion_tokens": 5, "repeats": 1}


@pytest.mark.parametrize(
    ("measure", "options", "passes"),
    [
        (bench.bench_engine, EngineBenchOptions(**OPTIONS, slots=4), 1),
        (bench.bench_learner, LearnerBenchOptions(**OPTIONS, token_budget=64), 3),
        (bench.bench_step, BenchOptions(**OPTIONS), 4),
    ],
)
def test_a_benchmark_reports_the_share_of_the_limit(quick, measure, options, passes):
    """Sampling is one forward, training three: the fraction is the counted time over the measured one."""
    result = measure(small_decoder(), options)
    least = passes * forward_flops(CONFIG, SHAPE) / 1e9
    assert result.details["limit s"] == pytest.approx(least)
    assert result.fraction == pytest.approx(least / result.seconds)
    assert result.tokens_per_second == pytest.approx(30 / result.seconds) and result.seconds > 0


def test_the_step_benchmark_really_samples_and_trains(quick, monkeypatch):
    decoder, drawn = small_decoder(), []
    before = decoder.embed.detach().clone()
    trained = bench._trained

    def watched(learner, groups, shape):
        drawn.append(groups)
        trained(learner, groups, shape)

    monkeypatch.setattr(bench, "_trained", watched)
    result = bench.bench_step(decoder, BenchOptions(**OPTIONS))
    assert len(drawn) == 2 and not torch.equal(decoder.embed, before)  # one warms up, one is measured
    assert all(len(s.tokens) == 5 for groups in drawn for g in groups for s in g.samples)
    phases = result.details["sample s"], result.details["train s"]
    assert min(phases) > 0 and sum(phases) <= result.seconds
