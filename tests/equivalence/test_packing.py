"""Numerics contract, lines 3 and 4: however tokens are laid out, log-probabilities and gradients are the same."""

from __future__ import annotations

import pytest
import torch

from cohort.learner.attention import make_packed_attention
from cohort.learner.head import gradient_through_head, token_logprobs
from cohort.types import Provenance
from tests.helpers.decoders_and_groups import (
    TOLERANCE,
    make_group,
    make_sample,
    naive_logprobs,
    pack_groups,
    random_groups,
    small_decoder,
)

S, E = Provenance.SAMPLED, Provenance.ENVIRONMENT
FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tied": False},
    "qwen3": {"qk_norm": True},
    "one query head per KV head": {"num_heads": 2},
}


def logprobs_of_packs(decoder, groups, budget, share, temperature=1.0):
    """Returns {segment: logprobs [n]}, computed through packing, blocks and the chunked head."""
    out = {}
    for minibatch in pack_groups(groups, budget, share=share).minibatches:
        for micro in minibatch.microbatches:
            attend = make_packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
            hidden = decoder(micro.tokens, micro.positions, attend).index_select(0, micro.source)
            logprobs, _ = token_logprobs(hidden, decoder.head_weight, micro.targets, temperature)
            for segment in micro.segments.unique().tolist():
                out[segment] = logprobs[micro.segments == segment]
    return out


def packed_gradients(decoder, groups, budget, share, temperature=1.0):
    """Returns the gradients of log-probabilities times advantages, computed in the same way."""
    decoder.zero_grad()
    for minibatch in pack_groups(groups, budget, share=share).minibatches:
        for micro in minibatch.microbatches:
            attend = make_packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
            hidden = decoder(micro.tokens, micro.positions, attend).index_select(0, micro.source)
            advantages = micro.advantages.to(hidden.dtype)
            d_head = torch.zeros_like(decoder.head_weight)
            gradient = lambda rows, *_, advantages=advantages: (advantages[rows], None)  # noqa: E731
            hidden.backward(
                gradient_through_head(hidden, decoder.head_weight, d_head, micro.targets, temperature, gradient)
            )
            head = decoder.head_weight
            head.grad = d_head if head.grad is None else head.grad + d_head
    return {n: p.grad.clone() for n, p in decoder.named_parameters()}


def gradients(decoder, logprobs_of_segment, groups):
    """Returns the gradients of log-probabilities times advantages, by autograd."""
    decoder.zero_grad()
    advantages = [s.advantage for g in groups for s in g.samples]
    sum(advantages[i] * lp.sum() for i, lp in logprobs_of_segment.items()).backward()
    return {n: p.grad.clone() for n, p in decoder.named_parameters()}


def close(a, b, dtype):
    """Returns whether two tensors agree within the tolerance of the type, relative to the larger of 1 and max |b|."""
    return bool((a - b).detach().abs().max() <= TOLERANCE[dtype] * max(1.0, float(b.detach().abs().max())))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_4_3_packed_padded_prefix_shared_and_naive_agree(dtype, family):
    decoder = small_decoder(dtype, std=0.15, **FAMILIES[family])
    groups = random_groups()
    expected, i = {}, 0
    for g in groups:
        for s in g.samples:
            expected[i] = naive_logprobs(decoder, g.prompt.tokens, s.tokens, 0.7)
            i += 1
    expected_grads = gradients(decoder, expected, groups)
    for budget, share in ((1000, True), (40, True), (1000, False), (17, False)):
        got = logprobs_of_packs(decoder, groups, budget, share, 0.7)
        assert got.keys() == expected.keys()
        for segment, lp in expected.items():
            assert close(got[segment], lp, dtype), (segment, budget, share)
            assert close(got[segment][0], lp[0], dtype), "first token of a sibling"
        for name, grad in packed_gradients(decoder, groups, budget, share, 0.7).items():
            gap = (grad - expected_grads[name]).abs().max() / expected_grads[name].abs().max()
            assert gap <= TOLERANCE[dtype], (name, budget, share)


def test_4_3_padding_never_leaks_into_a_real_token():
    """Very unequal lengths in one block: changing the longest sibling must not move the others."""
    decoder = small_decoder(torch.float64)
    lengths = [1, 2, 30]
    groups = [make_group([5, 6, 7], [make_sample(list(range(n)), advantage=1.0) for n in lengths])]
    before = logprobs_of_packs(decoder, groups, 1000, True)
    groups[0].samples[2] = make_sample([9] * 31, advantage=1.0)
    after = logprobs_of_packs(decoder, groups, 1000, True)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[2][1:], after[2][1:30])


def with_tail(tail: list[int], heard: int = 6) -> list:
    """Returns two groups whose samples have two targets, one and one, each followed by `tail` of the environment.

    `heard` is the environment's token between the two targets.
    """

    def one(tokens, marks, advantage):
        return make_sample([*tokens, *tail], [*marks, *[E] * len(tail)], advantage=advantage)

    turns = one([5, heard, 7], [S, E, S], 1.5)
    return [make_group([1, 2, 3], [turns, one([8], [S], -0.7)]), make_group([4, 9], [one([11], [S], 0.4)])]


@pytest.mark.parametrize("share", [True, False])
def test_what_follows_the_last_target_changes_nothing(share):
    """Log-probabilities and gradients stay equal to the last bit, and equal those of whole sequences."""
    decoder = small_decoder(torch.float64)
    seen = logprobs_of_packs(decoder, with_tail([]), 1000, share)
    grads = packed_gradients(decoder, with_tail([]), 1000, share)
    for tail in ([30], [31, 32, 33]):
        groups = with_tail(tail)
        got = logprobs_of_packs(decoder, groups, 1000, share)
        assert all(torch.equal(got[i], lp) for i, lp in seen.items()) and [len(lp) for lp in got.values()] == [2, 1, 1]
        assert all(
            torch.equal(grad, grads[name]) for name, grad in packed_gradients(decoder, groups, 1000, share).items()
        )
        naive = {}
        for g in groups:
            for s in g.samples:
                targets = [i for i, mark in enumerate(s.provenance) if mark == S]
                naive[len(naive)] = naive_logprobs(decoder, g.prompt.tokens, s.tokens)[targets]
        assert all(close(got[i], lp, torch.float64) for i, lp in naive.items())
        for name, grad in gradients(decoder, naive, groups).items():
            assert close(grads[name], grad, torch.float64), name
    # What the environment says before the last target does change it.
    before = logprobs_of_packs(decoder, with_tail([], heard=16), 1000, share)
    assert torch.equal(before[0][0], seen[0][0]) and not close(before[0][1], seen[0][1], torch.float64)


def test_a_group_larger_than_the_budget_is_split_with_its_prompt():
    groups = random_groups(num_groups=1, group_size=6, longest=9)
    batch = pack_groups(groups, token_budget=20)
    micros = batch.minibatches[0].microbatches
    assert len(micros) > 1
    assert all(len(m.tokens) <= 20 for m in micros)
    assert sorted(set().union(*(m.segments.tolist() for m in micros))) == list(range(6))


def test_the_worked_example_of_the_microbatch_record():
    batch = pack_groups([make_group([5, 6], [make_sample([7, 2]), make_sample([8, 2])])], token_budget=100)
    micro = batch.minibatches[0].microbatches[0]
    assert micro.tokens.tolist() == [5, 6, 7, 8]
    assert micro.positions.tolist() == [0, 1, 2, 2]
    assert micro.source.tolist() == [1, 2, 1, 3]
    assert micro.targets.tolist() == [7, 2, 8, 2]


@pytest.mark.parametrize("chunk", [61, 61 * 3, 1 << 24])
def test_the_chunked_head_equals_log_softmax_and_its_entropy(chunk, monkeypatch):
    monkeypatch.setattr("cohort.learner.head.CHUNK_LOGITS", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(61, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 61, (7,))
    logp = torch.log_softmax(hidden @ weight.t() / 0.8, -1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    a, b = torch.randn(2, 7, dtype=torch.float64)
    want = torch.autograd.grad((a * expected[0] + b * expected[1]).sum(), (hidden, weight))
    got = token_logprobs(hidden, weight, targets, 0.8)
    torch.testing.assert_close(got, tuple(x.detach() for x in expected), rtol=0, atol=1e-12)
    d_weight = torch.zeros_like(weight)
    d_hidden = gradient_through_head(hidden, weight, d_weight, targets, 0.8, lambda rows, *_: (a[rows], b[rows]))
    torch.testing.assert_close((d_hidden, d_weight), want, rtol=0, atol=1e-11)
