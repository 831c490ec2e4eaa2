"""The plan of a GPU's memory: what is counted, and which way is chosen when room gets short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cohort.errors import ConfigError
from cohort.learner.plan import (
    ENOUGH,
    MOST,
    Load,
    head_bytes,
    kept_bytes,
    layer_bytes,
    num_params,
    plan_memory,
    state_bytes,
    update_bytes,
    work_bytes,
)
from cohort.models.shapes import named_shape

GIB = 2**30
QWEN = named_shape("qwen2.5-0.5b")
LOAD = Load(model=QWEN, width=2, longest=768, batch_tokens=278_528, kv_tokens=278_528)


def test_counts_by_hand():
    """Qwen2.5-0.5B: d 896, ff 4864, 14 and 2 heads of 64, 24 layers, 494 million parameters, tied."""
    assert num_params(QWEN) == pytest.approx(494e6, rel=0.002)
    assert state_bytes(LOAD) == (2 + 4 + 8) * num_params(QWEN)  # bf16, master, two moments
    assert state_bytes(replace(LOAD, width=4)) == (4 + 8) * num_params(QWEN)  # its own master
    assert state_bytes(replace(LOAD, has_reference=True)) == state_bytes(LOAD) + 2 * num_params(QWEN)
    assert state_bytes(replace(LOAD, trained=1000)) == 2 * num_params(QWEN) + 12 * 1000
    assert state_bytes(replace(LOAD, trained=1000, base=77)) == 2 * num_params(QWEN) + 12 * 1000 + 77
    # two fp32 sums, two bf16 norms, q and mixed [14, 64], k and v [2, 64], gate and up
    kept = 2 * 4 * 896 + 2 * (2 * 896 + (14 + 14 + 2 + 2) * 64 + 2 * 4864) + 4 * 14 + 8
    assert layer_bytes(QWEN, 2) == kept
    assert kept_bytes(QWEN, 2, recompute=False) == 24 * kept + 3 * (4 + 2) * 896
    assert kept_bytes(QWEN, 2, recompute=True) == 24 * (4 + 2) * 896 + 3 * (4 + 2) * 896
    assert work_bytes(QWEN, 2, recompute=True) - work_bytes(QWEN, 2, recompute=False) == kept


def test_what_is_never_there_together_is_not_added():
    """The head's chunk and a layer's backward; logits and the gradient of the head."""
    small, large = 20_000, 200_000  # tokens: with few the head needs more, with many the layers
    per = kept_bytes(QWEN, 2, recompute=False)
    logits = 2**29
    assert head_bytes(LOAD, small) == logits * (2 + 4)
    assert update_bytes(LOAD, small, recompute=False) == 4 * num_params(QWEN) + small * per + logits * (2 + 4)
    work = large * work_bytes(QWEN, 2, recompute=False)
    assert update_bytes(LOAD, large, recompute=False) == 4 * num_params(QWEN) + large * per + work
    assert head_bytes(LOAD, 100) == 100 * 151_936 * 2 + 4 * 151_936 * 896  # few rows: the head's own is larger
    assert head_bytes(replace(LOAD, trained=1000), 100) == 100 * 151_936 * (2 + 4)


@pytest.mark.parametrize(
    ("shape", "budget", "tokens", "measured"),
    [
        ("qwen2.5-0.5b", 17_408, 17_376, 18.1),
        ("qwen2.5-0.5b", 32_768, 30_408, 28.2),
        ("qwen2.5-0.5b", 65_536, 65_160, 55.4),
        ("qwen2.5-1.5b", 32_768, 30_408, 57.7),
    ],
)
def test_plans_lie_little_above_what_an_h200_took(shape, budget, tokens, measured):
    """Groups of 256 + 8 x 512 tokens, as many as the budget holds, of which the last targets are no inputs."""
    plan = plan_memory(replace(LOAD, model=named_shape(shape)), 139 * GIB, token_budget=budget)
    assert 1.0 <= plan.update_of(tokens) / GIB / measured < 1.06


def test_a_large_gpu_keeps_everything():
    plan = plan_memory(LOAD, 140 * GIB)
    assert (plan.recompute, plan.keep_kv, plan.token_budget) == (False, True, MOST)
    assert plan.peak < 0.92 * 140 * GIB
    assert "32768 tokens a microbatch" in plan.words and "computed twice" not in plan.words


def test_what_gives_way_first():
    """KV between rollouts, then activations, then large microbatches; each plan fits."""
    found, large = [], []
    for gib in (140, 26, 22, 18, 14, 12):
        plan = plan_memory(LOAD, gib * GIB)
        assert plan.peak <= gib * GIB and plan.token_budget >= LOAD.longest
        found.append((plan.recompute, plan.keep_kv))
        large.append(plan.token_budget >= ENOUGH)
    assert found[:3] == [(False, True), (False, True), (False, False)]
    assert (True, False) in found
    assert large == sorted(large, reverse=True) and not large[-1]


def test_a_small_batch_needs_no_large_budget():
    small = replace(LOAD, batch_tokens=900, kv_tokens=900)
    assert plan_memory(small, 140 * GIB).token_budget == 900 < ENOUGH


def test_a_given_budget_stays():
    plan = plan_memory(LOAD, 140 * GIB, token_budget=5000)
    assert plan.token_budget == 5000
    assert plan.update == update_bytes(LOAD, 5000, recompute=False)


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"768 tokens needs 1\d\.\d GiB .* has 6\.0; .*--learner.lora.rank 16"):
        plan_memory(LOAD, 6 * GIB)
