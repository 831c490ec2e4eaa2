"""The memory plan of a GPU: what is counted, and what the plan gives up first when memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cohort.errors import ConfigError
from cohort.learner.plan import (
    GOOD_BUDGET,
    MAX_BUDGET,
    MemoryDemand,
    choose_shard,
    head_bytes,
    kept_bytes_per_token,
    layer_bytes_per_token,
    num_params,
    plan_memory,
    state_bytes,
    update_bytes,
    work_bytes_per_token,
)
from cohort.models.limits import count_layer_params
from cohort.models.shapes import find_shape

GIB = 2**30
QWEN = find_shape("qwen2.5-0.5b")
DEMAND = MemoryDemand(model=QWEN, bytes_per_number=2, longest=768, batch_tokens=278_528, kv_tokens=278_528)


def test_counts_by_hand():
    """Qwen2.5-0.5B: d 896, ff 4864, 14 and 2 heads of 64, 24 layers, 494 million parameters, tied."""
    assert num_params(QWEN) == pytest.approx(494e6, rel=0.002)
    # bf16 weights, masters and two moments.
    assert state_bytes(DEMAND) == (2 + 4 + 8) * num_params(QWEN)
    assert state_bytes(replace(DEMAND, bytes_per_number=4)) == (4 + 8) * num_params(QWEN)  # its own master
    assert state_bytes(replace(DEMAND, has_reference=True)) == state_bytes(DEMAND) + 2 * num_params(QWEN)
    assert state_bytes(replace(DEMAND, num_trained=1000)) == 2 * num_params(QWEN) + 12 * 1000
    assert state_bytes(replace(DEMAND, num_trained=1000, frozen_bytes=77)) == 2 * num_params(QWEN) + 12 * 1000 + 77
    # two fp32 sums, two bf16 norms, q and mixed [14, 64], k and v [2, 64], gate and up
    kept = 2 * 4 * 896 + 2 * (2 * 896 + (14 + 14 + 2 + 2) * 64 + 2 * 4864) + 4 * 14 + 8
    assert layer_bytes_per_token(QWEN, 2) == kept
    assert kept_bytes_per_token(QWEN, 2, recompute=False) == 24 * kept + 3 * (4 + 2) * 896
    assert kept_bytes_per_token(QWEN, 2, recompute=True) == 24 * (4 + 2) * 896 + 3 * (4 + 2) * 896
    assert work_bytes_per_token(QWEN, 2, recompute=True) - work_bytes_per_token(QWEN, 2, recompute=False) == kept


def test_ranks_that_hold_one_model_have_slices_and_a_whole_copy():
    two = replace(DEMAND, tensor=2)
    # The whole weights to sample from; half of the weights, the masters and the moments.
    assert state_bytes(two) == 2 * num_params(QWEN) + (2 + 4 + 8) * num_params(QWEN) // 2
    whole, half = (update_bytes(demand, 8192, recompute=False) for demand in (DEMAND, two))
    # Gradients and logits are halved; the residual stream is not.
    assert whole / 2 < half < 0.75 * whole


def test_tensors_that_never_exist_together_are_not_added():
    """These are the head's chunk and a layer's backward, and the logits and the gradient of the head."""
    # Numbers of tokens: with few the head needs more memory, with many the layers do.
    small, large = 20_000, 200_000
    per = kept_bytes_per_token(QWEN, 2, recompute=False)
    logits = 2**29
    assert head_bytes(DEMAND, small) == logits * (2 + 4)
    assert update_bytes(DEMAND, small, recompute=False) == 4 * num_params(QWEN) + small * per + logits * (2 + 4)
    work = large * work_bytes_per_token(QWEN, 2, recompute=False)
    assert update_bytes(DEMAND, large, recompute=False) == 4 * num_params(QWEN) + large * per + work
    # With few rows, the gradient of the head is larger than the logits.
    assert head_bytes(DEMAND, 100) == 100 * 151_936 * 2 + 4 * 151_936 * 896
    assert head_bytes(replace(DEMAND, num_trained=1000), 100) == 100 * 151_936 * (2 + 4)


@pytest.mark.parametrize(
    ("shape", "budget", "tokens", "measured"),
    [
        ("qwen2.5-0.5b", 17_408, 17_376, 18.1),
        ("qwen2.5-0.5b", 32_768, 30_408, 28.2),
        ("qwen2.5-0.5b", 65_536, 65_160, 55.4),
        ("qwen2.5-1.5b", 32_768, 30_408, 57.7),
    ],
)
def test_plans_are_little_above_what_an_h200_took(shape, budget, tokens, measured):
    """Groups of 256 + 8 x 512 tokens, as many as the budget holds, of which the last targets are no inputs."""
    plan = plan_memory(replace(DEMAND, model=find_shape(shape)), 139 * GIB, token_budget=budget)
    assert 1.0 <= plan.update_bytes_for(tokens) / GIB / measured < 1.06


def test_a_large_gpu_keeps_everything():
    plan = plan_memory(DEMAND, 140 * GIB)
    assert (plan.recompute, plan.keep_kv, plan.token_budget) == (False, True, MAX_BUDGET)
    assert plan.peak < 0.92 * 140 * GIB
    assert "32768 tokens per microbatch" in plan.description and "computed twice" not in plan.description


def test_what_the_plan_gives_up_first():
    """First KV between rollouts, then kept activations, then large microbatches. Every plan fits."""
    found, large = [], []
    for gib in (140, 26, 22, 18, 14, 12):
        plan = plan_memory(DEMAND, gib * GIB)
        assert plan.peak <= gib * GIB and plan.token_budget >= DEMAND.longest
        found.append((plan.recompute, plan.keep_kv))
        large.append(plan.token_budget >= GOOD_BUDGET)
    assert found[:3] == [(False, True), (False, True), (False, False)]
    assert (True, False) in found
    assert large == sorted(large, reverse=True) and not large[-1]


def test_a_small_batch_needs_no_large_budget():
    small = replace(DEMAND, batch_tokens=900, kv_tokens=900)
    assert plan_memory(small, 140 * GIB).token_budget == 900 < GOOD_BUDGET


def test_a_given_budget_stays():
    plan = plan_memory(DEMAND, 140 * GIB, token_budget=5000)
    assert plan.token_budget == 5000
    assert plan.update == update_bytes(DEMAND, 5000, recompute=False)


def test_a_model_that_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"768 tokens needs 1\d\.\d GiB .* 6\.0 GiB are available: .*lora.rank 16"):
        plan_memory(DEMAND, 6 * GIB)


def test_one_rank_divides_nothing():
    for shard in ("none", "optimizer", "full"):
        alone = replace(DEMAND, shard=shard)
        assert state_bytes(alone) == state_bytes(DEMAND)
        assert update_bytes(alone, 5000, False) == update_bytes(DEMAND, 5000, False)
        assert choose_shard(alone, 140 * GIB) == "none"


def test_ranks_have_parts_of_the_state():
    """bf16: 2 bytes per weight, 4 per master, 8 for moments."""
    params, eight = num_params(QWEN), replace(DEMAND, ranks=8, has_reference=True)
    assert state_bytes(replace(eight, shard="none")) == (2 * 2 + 12) * params
    assert state_bytes(replace(eight, shard="optimizer")) == 2 * 2 * params + 12 * params // 8
    # The weights that are sampled from stay whole, the reference does not.
    assert state_bytes(replace(eight, shard="full")) == 2 * params + 2 * params // 8 + 12 * params // 8
    # fp32 weights are their own masters, unless the trained ones are a divided copy.
    wide = replace(DEMAND, ranks=8, bytes_per_number=4)
    assert state_bytes(replace(wide, shard="optimizer")) == 4 * params + params
    assert state_bytes(replace(wide, shard="full")) == 4 * params + 12 * params // 8
    adapters = replace(DEMAND, ranks=8, num_trained=1001, frozen_bytes=77, shard="optimizer")
    assert state_bytes(adapters) == 2 * params + 77 + -(-12 * 1001 // 8)


def test_ranks_that_divide_everything_have_parts_of_the_gradient():
    params, budget, eight = num_params(QWEN), 5000, replace(DEMAND, ranks=8)
    alone = update_bytes(DEMAND, budget, False)
    assert update_bytes(replace(eight, shard="none"), budget, False) == alone
    # The slice's sum is formed when the activations, which are larger, are gone.
    assert update_bytes(replace(eight, shard="optimizer"), budget, False) == alone
    full = replace(eight, shard="full")
    layer, ends = count_layer_params(QWEN) // QWEN.num_layers, params - count_layer_params(QWEN)
    gathered = 2 * (2 * layer + ends) + (2 + 4) * (layer + ends)
    assert update_bytes(full, budget, False) == alone - 4 * params + 4 * params // 8 + gathered
    # With hardly any activations the sum for the slice counts: two ranks, half of the gradient each.
    two = replace(DEMAND, ranks=2, shard="optimizer", model=replace(QWEN, num_layers=400))
    assert update_bytes(two, 1, False) == 6 * num_params(two.model)


def test_the_first_shard_that_fits_is_chosen():
    """A model of 7.6 billion weights on 8 ranks: 18, 7.5 and about 5 bytes per weight, without activations."""
    demand = replace(DEMAND, model=find_shape("qwen2.5-7b"), ranks=8)
    chosen = {gib: choose_shard(demand, gib * GIB) for gib in (180, 100, 60)}
    assert chosen == {180: "none", 100: "optimizer", 60: "full"}
    for gib, shard in chosen.items():
        assert plan_memory(replace(demand, shard=shard), gib * GIB).peak <= gib * GIB
    with pytest.raises(ConfigError, match=r"needs .* GiB"):
        choose_shard(demand, 20 * GIB)
    # What cannot be divided is not chosen: the error is that of the next smaller demand.
    for odd in (replace(demand, ranks=7), replace(demand, num_trained=num_params(demand.model))):
        with pytest.raises(ConfigError):
            choose_shard(odd, 60 * GIB)
