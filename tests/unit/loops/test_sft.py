"""The loop of supervised fine-tuning: which tokens are trained on, and that the model learns them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.imitation import Imitation
from cohort.algos.inputs import LossInputs
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.pack import pack
from cohort.errors import ConfigError
from cohort.learner.local import LocalLearner
from cohort.loops.sft import add_perplexity, make_example_group, make_sft_batch, train
from cohort.models.catalog import resolve_model
from cohort.run.job import StepRecord
from cohort.text import Tokenizer
from cohort.types import Finish, Provenance
from tests.helpers.decoders_and_groups import naive_logprobs, small_decoder

P, E, F, T = Provenance.PROMPT, Provenance.ENVIRONMENT, Provenance.FORCED, Provenance.TARGET
EXAMPLES = [
    ([1, 2, 3, 30, 31, 2], [P, P, P, T, T, T]),
    ([4, 5, 32, 40, 41, 33, 2], [P, F, T, E, E, T, T]),  # two turns with a tool's answer between them
    ([6, 34, 2], [P, T, T]),
]


def make_learner(decoder, **optim) -> LocalLearner:
    return LocalLearner(decoder, LearnerConfig(), OptimConfig(**{"lr": 1e-2, **optim}), num_updates=10)


def test_an_example_is_a_group_of_one_whose_prompt_precedes_the_first_target():
    group = make_example_group("1", *EXAMPLES[1])
    assert (group.prompt.tokens, group.prompt.provenance) == ([4, 5], [P, F])
    [sample] = group.samples
    assert (sample.tokens, sample.provenance) == ([32, 40, 41, 33, 2], [T, E, E, T, T])
    assert sample.finish == Finish.STOP and len(sample.sampler_logprobs) == 5


@pytest.mark.parametrize("budget", [100, 8])
def test_targets_only_are_imitated_and_counted(budget):
    batch = make_sft_batch(EXAMPLES)
    [minibatch] = pack(batch, budget)
    assert (minibatch.counts.num_tokens, minibatch.counts.num_samples) == (8, 3)
    targets = sorted(t for m in minibatch.microbatches for t in m.targets.tolist())
    assert targets == sorted([30, 31, 2, 32, 33, 2, 34, 2])  # the end of every turn among them
    assert batch.fates == {"packed": 3}
    assert len(minibatch.microbatches) == (1 if budget == 100 else 3)


@pytest.mark.parametrize("budget", [100, 8])
def test_the_gradient_is_that_of_the_mean_over_all_targets(budget):
    decoder = small_decoder(torch.float64)
    learner = make_learner(decoder)
    [minibatch] = pack(make_sft_batch(EXAMPLES), budget)
    metrics = learner.forward_backward(minibatch, Imitation()).tally.to_metrics()
    got = {n: m.grad.clone() for n, m in learner.optimizer.masters.items()}
    decoder.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for tokens, marks in EXAMPLES:
        first = marks.index(T)
        lp = naive_logprobs(decoder, tokens[:first], tokens[first:])
        total = total + lp[torch.tensor([m == T for m in marks[first:]])].sum()
    (-total / 8).backward()
    for name, p in decoder.named_parameters():
        assert (got[name] - p.grad).abs().max() <= 1e-10 * max(1.0, float(p.grad.abs().max())), name
    assert metrics["loss"] == pytest.approx(-total.item() / 8, abs=1e-10) and metrics["tokens"] == 8.0


def test_the_loss_by_hand():
    zeros = torch.zeros(3)
    lengths = Lengths(sample=torch.tensor([2, 2, 1]), group=torch.tensor([2, 2, 1]))
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -2.0, -6.0]),
        entropy=zeros,
        old_logprobs=None,
        ref_logprobs=None,
        sampler_logprobs=zeros,
        advantages=zeros,  # not used
        weights=Imitation().weigh_tokens(lengths, Totals(num_tokens=6, num_samples=2, num_prompts=2)),
        segments=torch.tensor([0, 0, 1]),
    )
    loss, tally = Imitation().loss(inputs)
    assert loss.item() == pytest.approx(1.5) and tally.to_metrics()["loss"] == pytest.approx(3.0)  # 9/6, 9/3


@dataclass
class StepsInMemory:
    """A run of `num` steps without a directory. It keeps the record of each."""

    num: int
    ended: list[StepRecord] = field(default_factory=list)

    def steps(self) -> Iterator[int]:
        for step in range(self.num):
            yield step
            assert len(self.ended) == step + 1

    def end_step(self, step: int, record: StepRecord) -> None:
        assert step == len(self.ended)
        self.ended.append(record)


def test_one_update_lowers_the_loss_and_many_learn_the_examples():
    run = StepsInMemory(40)
    batch = make_sft_batch(EXAMPLES)
    train(run, make_learner(small_decoder()), lambda step: batch)
    losses = [record.metrics["loss"] for record in run.ended]
    assert losses[1] < losses[0]
    assert losses[0] > math.log(61) / 2 and losses[-1] < 0.1
    assert [r.metrics["perplexity"] for r in run.ended] == pytest.approx([math.exp(loss) for loss in losses])
    assert all(record.groups is None and record.showcase is None for record in run.ended)


def test_every_step_trains_on_the_batch_of_its_number():
    run = StepsInMemory(3)
    train(run, make_learner(small_decoder()), lambda step: make_sft_batch([EXAMPLES[step]]))
    assert [record.metrics["tokens"] for record in run.ended] == [3.0, 3.0, 2.0]


def test_the_loop_is_one_update_after_the_other():
    """The loop written out: the weights are equal to the last bit."""
    by_loop, by_hand = small_decoder(), small_decoder()
    batches = [make_sft_batch(EXAMPLES[:n], minibatches) for n, minibatches in ((1, 1), (2, 2), (3, 1))]
    train(StepsInMemory(3), make_learner(by_loop), lambda step: batches[step])
    learner = make_learner(by_hand)
    for batch in batches:
        for minibatch in pack(batch, 100):
            learner.forward_backward(minibatch, Imitation())
            learner.optim_step()
    assert all(p.equal(q) for p, q in zip(by_loop.parameters(), by_hand.parameters(), strict=True))
    assert not by_loop.embed.equal(small_decoder().embed)


def test_a_step_without_a_loss_has_no_perplexity():
    assert add_perplexity({"updates/no_signal": 1.0}) == {"updates/no_signal": 1.0}
    assert add_perplexity({"loss": 1e6})["perplexity"] == pytest.approx(math.exp(700))


def test_the_end_of_the_turn_is_a_target_of_the_bundled_tokenizer():
    tokenizer = Tokenizer.load(resolve_model("tiny"))
    prompt = tokenizer.render([{"role": "user", "content": "2+2 = ?"}])
    target = [*tokenizer.encode("<answer>4</answer>", markup=True), tokenizer.end_of_turn]
    example = (prompt.tokens + target, prompt.provenance + [int(T)] * len(target))
    [micro] = pack(make_sft_batch([example]), 200)[0].microbatches
    assert micro.targets.tolist() == target and micro.targets[-1] in tokenizer.stop_ids


def test_an_example_without_targets_trains_nothing():
    decoder = small_decoder()
    before = decoder.embed.detach().clone()
    batch = make_sft_batch([([1, 2, 3], [P, P, P])])
    assert batch.fates == {"empty": 1} and batch.counts[0].num_tokens == 0
    metrics = make_learner(decoder).update(batch, Imitation()).metrics
    assert metrics["updates/no_signal"] == 1.0 and torch.equal(decoder.embed, before)


def test_an_example_that_begins_with_a_target_is_refused():
    """No token precedes its first. In a pack, the last token of another example would predict it."""
    with pytest.raises(ConfigError, match="a sample has no prompt"):
        pack(make_sft_batch([EXAMPLES[0], ([30, 31], [T, T])]), 100)
