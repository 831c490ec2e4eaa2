"""Packing by hand: which samples are in which microbatch, and how each counts in the denominators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.algorithm import build_algorithm
from cohort.config.schema import GRPO, DrGRPO
from cohort.data.pack import make_batch, pack, pack_minibatch, with_old_logprobs
from cohort.errors import ConfigError
from cohort.fates import Fate
from cohort.serialize import dumps, loads
from cohort.types import Finish, Group, Provenance
from tests.helpers.decoders_and_groups import make_group, make_sample, pack_groups, random_groups

S, E, T = Provenance.SAMPLED, Provenance.ENVIRONMENT, Provenance.TARGET


def of_length(*lengths: int, **values) -> list:
    """Returns samples of these lengths."""
    return [make_sample(list(range(3, 3 + n)), **values) for n in lengths]


def group(*samples, prompt: int = 2, excluded: str = "") -> Group:
    made = make_group(list(range(20, 20 + prompt)), list(samples))
    made.excluded = Fate(excluded)
    return made


def test_how_samples_of_every_fate_count():
    """Masked and empty samples count without tokens. Failed samples and excluded groups do not count."""
    truncated, failed = {"masked": Fate.TRUNCATED, "finish": Finish.LENGTH}, {"masked": Fate.FAILED, "failure": "died"}
    groups = [
        group(*of_length(3, 2)),
        group(*of_length(4, 1), excluded=Fate.CONSTANT_REWARD),
        group(*of_length(7, 0), *of_length(6, **truncated), excluded="not accepted"),
        group(*of_length(2, 0), *of_length(5, **truncated), *of_length(8, **failed)),
        group(*of_length(3, **truncated), *of_length(0), excluded=Fate.CONSTANT_REWARD),
    ]
    batch = pack_groups(groups, 100)
    assert batch.counts == {"packed": 3, "no_signal": 2, "excluded": 3, "masked": 2, "empty": 2, "failed": 1}
    [minibatch] = batch.minibatches
    assert minibatch.counts.num_samples == 2 + 2 + 0 + 3 + 2
    assert minibatch.counts.num_prompts == 4  # not the excluded one
    assert minibatch.counts.num_tokens == (3 + 2) + (4 + 1) + 0 + 2 + 0
    assert sum(len(m.targets) for m in minibatch.microbatches) == 3 + 2 + 2
    assert batch.sample_places() == [0, 1, 7]  # counted over all


@pytest.mark.parametrize(
    ("config", "weight"),
    [
        (GRPO(aggregate="token"), 1 / 12),
        (GRPO(), 1 / (9 * 3)),
        (DrGRPO(), 1 / (9 * 16)),
        (GRPO(aggregate="prompt"), 1 / (4 * 3)),
    ],
)
def test_the_weight_of_a_token_of_the_first_sample(config, weight):
    """12 tokens and 9 samples as counted above: per token, per token of a sample of 3, per 16 tokens of room."""
    [micro] = pack_groups([group(*of_length(3))], 100).minibatches[0].microbatches
    lengths = Lengths(sample=micro.lengths, group=micro.group_lengths)
    totals = Totals(num_tokens=12, num_samples=9, num_prompts=4)
    assert build_algorithm(config, 16).weigh_tokens(lengths, totals).tolist() == pytest.approx([weight] * 3)


def test_only_tokens_of_the_loss_count_as_length():
    sample = make_sample([5, 6, 7, 8, 9], [S, E, E, S, T], advantage=2.0)
    batch = pack_groups([group(sample)], 100)
    [micro] = batch.minibatches[0].microbatches
    assert (micro.lengths.tolist(), micro.targets.tolist()) == ([2, 2], [5, 8])
    assert batch.minibatches[0].counts.num_tokens == 2
    # the last of them and the target of another loss behind it predict nothing, so they are no inputs
    assert (micro.tokens.tolist(), micro.positions.tolist()) == ([20, 21, 5, 6, 7], [0, 1, 2, 3, 4])
    assert micro.source.tolist() == [1, 4]
    assert micro.advantages.tolist() == [2.0, 2.0]


def test_per_token_vectors_follow_their_tokens():
    sample = make_sample([5, 6, 7], [S, E, S], sampler_logprobs=[-1.0, 0.0, -3.0])
    sample.old_logprobs, sample.ref_logprobs = [-1.1, 0.0, -3.1], [-1.2, 0.0, -3.2]
    [micro] = pack_groups([group(sample)], 100).minibatches[0].microbatches
    assert micro.sampler_logprobs.tolist() == [-1.0, -3.0]
    assert micro.old_logprobs.tolist() == [-1.1, -3.1] and micro.ref_logprobs.tolist() == [-1.2, -3.2]


def test_minibatches_divide_the_groups_and_count_their_own_tokens():
    groups = [group(*of_length(n, n)) for n in (1, 2, 3, 4, 5)]
    batch = pack_groups(groups, 100, minibatches=3)
    assert [(m.counts.num_samples, m.counts.num_tokens) for m in batch.minibatches] == [(2, 2), (4, 10), (4, 18)]
    assert [batch.sample_places(m) for m in range(3)] == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_minibatch_without_signal_is_there_and_empty():
    batch = pack_groups(
        [group(*of_length(3, 3), excluded=Fate.CONSTANT_REWARD), group(*of_length(3, 3))], 100, minibatches=2
    )
    assert [len(m.microbatches) for m in batch.minibatches] == [0, 1]
    assert [m.counts.num_tokens for m in batch.minibatches] == [6, 6]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [12, 13, 25, 1000])
def test_no_microbatch_exceeds_the_budget(budget, share):
    groups = [group(*of_length(9, 3, 8, 1), prompt=3) for _ in range(4)]
    [minibatch] = pack_groups(groups, budget, share=share).minibatches
    sizes = [len(m.tokens) for m in minibatch.microbatches]
    whole = [n + len(m.segments.unique()) for n, m in zip(sizes, minibatch.microbatches, strict=True)]
    # The budget counts whole samples, although the last token of each is no input.
    assert max(whole) <= budget
    assert sum(len(m.targets) for m in minibatch.microbatches) == minibatch.counts.num_tokens == 84
    # The prompt is stored once per group with sharing, else once per sample.
    if budget == 1000:
        assert sizes == [84 - 16 + (4 if share else 16) * 3]


def test_a_sample_over_the_budget_names_the_numbers():
    with pytest.raises(
        ConfigError, match=r"3 prompt \+ 9 completion tokens .*budget of 11 .* at least 12 .*--learner.token_budget"
    ):
        pack_groups([group(*of_length(9), prompt=3)], 11)


def test_a_sample_without_a_prompt_is_refused():
    with pytest.raises(ConfigError, match="a sample has no prompt"):
        pack_groups([group(*of_length(2)), group(*of_length(2), prompt=0)], 100)
    assert pack_groups([group(*of_length(0), prompt=0)], 100).counts == {"empty": 1}


def test_half_annotated_samples_are_a_mistake():
    samples = of_length(2, 2)
    samples[0].old_logprobs = [-1.0, -1.0]
    with pytest.raises(AssertionError, match="some are not"):
        pack_groups([group(*samples)], 100)


def test_the_longest_sample_counts_what_follows_its_last_target():
    """A token budget below it is refused."""
    sample = make_sample([7, 8, 9, 1, 1], provenance=[S, S, E, E, E])
    minibatch = pack_groups([make_group([5, 6], [sample, make_sample([7])])], 50).minibatches[0]
    assert minibatch.longest_sample == 7
    assert pack_minibatch(minibatch.batch, 0, 7).microbatches
    with pytest.raises(ConfigError, match=r"at least 7 .*token_budget"):
        pack_minibatch(minibatch.batch, 0, 6)


def test_every_minibatch_gets_its_share_of_the_groups_that_count_and_of_those_used_again():
    """Groups that were not accepted lie between the others and are only counted."""
    groups = [group(*of_length(2)) for _ in range(12)]
    for n in (0, 1, 2, 5):
        groups[n].excluded = Fate.NOT_ACCEPTED
    for g in groups[-4:]:
        g.reused = 1
    made = pack_groups(groups, 100, minibatches=4)
    assert [m.counts.num_prompts for m in made.minibatches] == [2, 2, 2, 2]
    segments = [made.sample_places(m) for m in range(4)]
    assert sorted(s for row in segments for s in row) == [n for n in range(12) if n not in (0, 1, 2, 5)]
    assert all(sum(groups[s].reused for s in row) == 1 for row in segments)  # one sample per group


def test_two_samples_with_one_id_are_refused():
    one = group(*of_length(2))
    with pytest.raises(ValueError, match="the same id"):
        make_batch([one, one])


def test_a_batch_can_be_serialised():
    """A batch refers to no group: after serialisation it is packed into the same tensors."""
    groups = random_groups(num_groups=4)
    groups[0].samples[0].token_advantages = [float(n) for n in range(len(groups[0].samples[0].tokens))]
    batch = make_batch(groups, minibatches=2)
    for here, there in zip(pack(batch, 40), pack(loads(dumps(batch)), 40), strict=True):
        assert here.counts == there.counts and here.longest_sample == there.longest_sample
        for a, b in zip(here.microbatches, there.microbatches, strict=True):
            for name in ("tokens", "positions", "source", "targets", "segments", "lengths", "advantages"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_advantages_may_differ_from_token_to_token():
    sample = make_sample([5, 6, 7, 8], [S, E, S, S], token_advantages=[1.0, 0.0, -2.0, 3.0])
    [micro] = pack_groups([group(sample)], 100).minibatches[0].microbatches
    assert micro.advantages.tolist() == [1.0, -2.0, 3.0]


def test_old_logprobs_are_added_at_their_tokens():
    """The result equals that of a batch which had them from the start."""
    groups = random_groups(num_groups=3)
    groups[1].samples[0].provenance[0] = int(E)
    bare = make_batch(groups)
    old = {n: np.arange(len(tokens)) + 100.0 * n for n, tokens in enumerate(bare.tokens)}
    filled = with_old_logprobs(pack_minibatch(bare, 0, 30), old)
    given = replace(bare, old_logprobs=[old[n] for n in range(len(bare.ids))])
    assert len(filled.microbatches) > 1
    for a, b in zip(filled.microbatches, pack_minibatch(given, 0, 30).microbatches, strict=True):
        assert torch.equal(a.old_logprobs, b.old_logprobs)
