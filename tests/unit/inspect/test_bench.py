"""Operations counted by hand for a shape small enough to write out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cohort.config.options import BenchOptions, EngineBenchOptions, LearnerBenchOptions
from cohort.errors import ConfigError, ModelError
from cohort.inspect.bench import measure as bench
from cohort.inspect.bench import run as bench_jobs
from cohort.learner.attention import make_packed_attention
from cohort.models.limits import (
    BatchShape,
    Rates,
    count_forward_flops,
    count_kv_bytes,
    count_layer_params,
    draw_lognormal_lengths,
    estimate_head_seconds,
    estimate_layers_seconds,
    estimate_sampling_seconds,
    measure_matmul_rate,
)
from cohort.models.shapes import SHAPES, find_shape
from tests.helpers.decoders_and_groups import pack_groups, small_config, small_decoder

SHAPE = BatchShape(prompts=2, samples=3, prompt_tokens=4, completion_tokens=5)
CONFIG = small_config()  # hidden 32, 2 layers, 6 query and 2 KV heads of 8, ff 40, vocabulary 61


def test_weights_of_the_matrix_products_by_hand():
    # a layer: q 32x48, k and v 32x16 each, out 48x32 = 1536 + 512 + 512 + 1536; gate, up, down 3 x 32x40 = 3840
    assert count_layer_params(CONFIG) == 2 * (4096 + 3840)
    decoder = small_decoder()
    held = sum(p.numel() for n, p in decoder.named_parameters() if p.ndim > 1 and n != "embed")
    assert count_layer_params(CONFIG) == held


def test_forward_operations_by_hand():
    # of a group: 4 + 3 x 4 = 16 tokens through the layers (the last predict nothing), 15 through the head (61 x 32)
    linear = 2 * 15872 * 16 + 2 * 61 * 32 * 15
    # query-key pairs of a group: 4 x 4 / 2 + 3 (4 x 4 + 4 x 4 / 2) = 80; 4 operations x 2 layers x 48 a pair
    attention = 4 * 2 * 48 * 80
    assert count_forward_flops(CONFIG, SHAPE) == 2 * (linear + attention)
    assert SHAPE.num_completion_tokens == 30


def test_forward_operations_agree_with_a_counted_forward():
    """torch counts the matrix products of the real packs; attention aside, which it counts with its padding."""
    decoder = small_decoder(torch.float64)  # in fp32 the products are oneDNN's, which torch does not count
    groups = bench._make_random_groups(decoder, SHAPE)
    [micro] = pack_groups(groups, 1000).minibatches[0].microbatches
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = decoder(
            micro.tokens, micro.positions, make_packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
        )
        decoder.logits(hidden.index_select(0, micro.source))
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if "attention" not in str(op) and "bmm" not in str(op))
    assert products == count_forward_flops(CONFIG, SHAPE) - 2 * 4 * 2 * 48 * 80  # the pairs as counted above


def test_forward_operations_of_unequal_lengths_by_hand():
    shape = BatchShape(prompts=2, samples=2, prompt_tokens=4, completion_tokens=5, lengths=(1, 5, 2, 2))
    linear = 2 * 15872 * (8 + 10 - 4) + 2 * 61 * 32 * 10
    # pairs: two prompts of 8; of 1 token none, then 4 x 4 + 8, twice 4 x 1 + 0.5
    attention = 4 * 2 * 48 * (16 + 24 + 9)
    assert count_forward_flops(CONFIG, shape) == linear + attention
    assert shape.num_completion_tokens == 10
    assert count_forward_flops(CONFIG, SHAPE) == count_forward_flops(CONFIG, replace(SHAPE, lengths=(5,) * 6))


H200 = Rates(flops=790e12, bytes=4.3e12)
SLOW_MEMORY = Rates(flops=1e30, bytes=1e3)
SLOW_ARITHMETIC = Rates(flops=1e3, bytes=1e30)


def test_the_least_time_by_memory_by_hand():
    """Lengths 1 and 3 after one prompt of 4 tokens, 2 bytes a number: three steps."""
    shape = BatchShape(prompts=1, samples=2, prompt_tokens=4, completion_tokens=3, lengths=(1, 3))
    least = estimate_sampling_seconds(CONFIG, shape, SLOW_MEMORY, width=2)
    assert count_kv_bytes(CONFIG, 2) == 2 * 2 * 2 * 8 * 2  # key and value, layers, heads, size, bytes
    assert least.prefill == pytest.approx(2 * 15872 / 1e3)  # the weights are read once
    head, logits = 2 * 61 * 32, 2 * 2 * 61
    heads = 3 * head + (2 + 1 + 1) * logits
    # the first tokens come from the prefill; then one sample reads the prompt and its own 1 and 2 tokens
    layers = 2 * 2 * 15872 + 128 * (4 + 1 + 4 + 2)
    assert least.decode == pytest.approx((heads + layers) / 1e3)
    assert least.total == least.prefill + least.decode


def test_the_least_time_by_arithmetic_by_hand():
    """The same batch: a sample's every token through the head, every token but the last through the layers."""
    shape = BatchShape(prompts=1, samples=2, prompt_tokens=4, completion_tokens=3, lengths=(1, 3))
    least = estimate_sampling_seconds(CONFIG, shape, SLOW_ARITHMETIC, width=2)
    assert least.prefill == pytest.approx((2 * 15872 * 4 + 4 * 2 * 48 * 8) / 1e3)
    assert least.decode == pytest.approx((2 * 61 * 32 * 4 + 2 * 15872 * 2) / 1e3)


def test_a_group_reads_its_prompt_once_a_step_while_a_sample_of_it_lives():
    shape = BatchShape(prompts=2, samples=2, prompt_tokens=100, completion_tokens=3, lengths=(3, 3, 2, 1))
    shared = estimate_sampling_seconds(CONFIG, shape, SLOW_MEMORY, width=4)
    alone = estimate_sampling_seconds(CONFIG, shape.without_sharing(), SLOW_MEMORY, width=4)
    # step 1: three samples of two groups; step 2: two samples of one group
    assert alone.decode - shared.decode == pytest.approx(256 * 100 * (1 + 1) / 1e3)
    assert shape.without_sharing().completion_lengths == shape.completion_lengths


@pytest.mark.parametrize(
    ("model", "context", "batch", "milliseconds"),
    [
        ("qwen2.5-0.5b", 512, 64, 0.33),
        ("qwen2.5-0.5b", 512, 512, 1.46),
        ("qwen2.5-0.5b", 2048, 512, 3.71),
        ("qwen2.5-1.5b", 512, 512, 3.82),
        ("qwen2.5-3b", 512, 128, 2.02),
        ("smollm2-135m", 2048, 256, 2.91),
    ],
)
def test_a_decode_step_of_known_models(model, context, batch, milliseconds):
    """A step at 4.3 TB/s and 790 TFLOP/s, worked out independently and rounded to 10 microseconds."""
    c = find_shape(model)
    step = estimate_layers_seconds(c, H200, 2, batch, batch * context) + estimate_head_seconds(c, H200, 2, batch)
    assert 1e3 * step == pytest.approx(milliseconds, abs=0.0051)


@pytest.mark.parametrize(("model", "tokens_per_second"), [("qwen2.5-0.5b", 350e3), ("qwen2.5-1.5b", 134e3)])
def test_decoding_of_known_models(model, tokens_per_second):
    """512 prompts of 256 and completions of 512 tokens read 512 tokens a sample and step on average."""
    shape = BatchShape(prompts=512, samples=1, prompt_tokens=256, completion_tokens=512)
    decode = estimate_sampling_seconds(find_shape(model), shape, H200, width=2).decode
    assert shape.num_completion_tokens / decode == pytest.approx(tokens_per_second, rel=0.005)


def test_lognormal_lengths():
    lengths = draw_lognormal_lengths(20_000, cap=512)
    assert sum(lengths) / len(lengths) == pytest.approx(186, abs=3)
    assert min(lengths) >= 1 and max(lengths) == 512
    assert sorted(lengths)[10_000] == pytest.approx(0.284 * 512, rel=0.03)
    assert lengths[:9] == draw_lognormal_lengths(9, cap=512) != draw_lognormal_lengths(9, cap=512, seed=1)
    assert set(draw_lognormal_lengths(50, cap=1)) == {1}


def test_the_measured_rate_is_a_rate():
    assert 1e8 < measure_matmul_rate(seconds=0.02, size=256) < 1e15


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(bench.limits, "measure_matmul_rate", lambda dtype: 1e9)


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
    least = passes * count_forward_flops(CONFIG, SHAPE) / 1e9
    assert result.details["limit s"] == pytest.approx(least)
    assert result.fraction == pytest.approx(least / result.seconds)
    assert result.tokens_per_second == pytest.approx(30 / result.seconds) and result.seconds > 0


def test_the_step_benchmark_really_samples_and_trains(quick, monkeypatch):
    decoder, drawn = small_decoder(), []
    before = decoder.embed.detach().clone()
    trained = bench._train_on

    def watched(learner, groups, shape):
        drawn.append(groups)
        trained(learner, groups, shape)

    monkeypatch.setattr(bench, "_train_on", watched)
    result = bench.bench_step(decoder, BenchOptions(**OPTIONS))
    assert len(drawn) == 2 and not torch.equal(decoder.embed, before)  # one warms up, one is measured
    assert all(len(s.tokens) == 5 for groups in drawn for g in groups for s in g.samples)
    phases = result.details["sample s"], result.details["train s"]
    assert min(phases) > 0 and sum(phases) <= result.seconds


def test_the_engine_benchmark_gives_every_request_its_own_length(quick, monkeypatch):
    asked = []
    sample = bench.sample

    def watched(engine, requests):
        done = sample(engine, requests)
        asked.append([r.sampling.max_tokens for r in requests])
        assert [len(done[r.id].tokens) for r in requests] == asked[-1]
        return done

    monkeypatch.setattr(bench, "sample", watched)
    options = EngineBenchOptions(**{**OPTIONS, "completion_tokens": 40}, lengths="lognormal")
    result = bench.bench_engine(small_decoder(), options)
    lengths = draw_lognormal_lengths(6, cap=40)
    assert asked == [[1], [*lengths], [*lengths]]  # to the first token, warming up, measured
    assert result.tokens_per_second == pytest.approx(sum(lengths) / result.seconds)
    phases = [result.details[f"{name} s"] for name in ("prefill", "decode", "draw")]
    assert min(phases) > 0 and sum(phases) <= result.seconds  # of the measured run alone
    assert result.details["start-up s"] > 0 and "peak GPU memory GiB" not in result.details


def test_every_run_has_its_own_prompts():
    decoder = small_decoder()
    first, second = (bench._make_requests(bench._make_prompts(decoder, SHAPE, seed), SHAPE) for seed in (0, 1))
    assert [r.tokens for r in first] != [r.tokens for r in second]
    assert len({tuple(r.tokens) for r in first}) == 2  # a group shares its prompt


def test_the_model_of_a_benchmark(monkeypatch):
    monkeypatch.setitem(SHAPES, "little", {**SHAPES["qwen2.5-0.5b"], "num_hidden_layers": 1, "vocab_size": 99})
    decoder = bench_jobs._load_model(EngineBenchOptions(model="little", weights="random", dtype="bfloat16"))
    assert decoder.embed.shape == (99, 896) and decoder.embed.dtype == torch.bfloat16
    with pytest.raises(ModelError, match=r'there is no model "tiny".*qwen2.5-0.5b'):
        bench_jobs._load_model(EngineBenchOptions(weights="random"))
    with pytest.raises(ModelError, match="context is 32768 tokens, but prompt and completion take 40064"):
        bench_jobs._load_model(EngineBenchOptions(model="little", weights="random", completion_tokens=40_000))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is cuda, but .* sees no CUDA device"):
        bench_jobs._load_model(EngineBenchOptions(device="cuda"))
