"""Numerics contract, lines 6, 7, 8 and 10, on the bundled model: what a step draws, keeps, moves and restores."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cohort.config.algo_sections import KLConfig
from cohort.config.schema import GRPO, BatchConfig, EvalConfig, LearnerConfig, OptimConfig, SamplingConfig
from cohort.engines.base import Request, sample
from cohort.engines.native.engine import NativeEngine
from cohort.engines.native.sampler import SamplingSettings, draw_tokens
from cohort.fates import Fate
from cohort.jobs.build import RLJob
from cohort.rollout.episode import EpisodeSettings
from cohort.run import checkpoint
from cohort.tasks.arithmetic import Arithmetic
from cohort.types import Prompt, Provenance
from tests.helpers.decoders_and_groups import pack_groups
from tests.helpers.small_runs import built_job, gradient_rows, make_producer, run_steps, small_run

S, E = Provenance.SAMPLED, Provenance.ENVIRONMENT


@pytest.fixture(scope="module")
def parts() -> Iterator[RLJob]:
    with built_job(small_run()) as made:
        yield made


def weights(parts: RLJob) -> dict[str, torch.Tensor]:
    """Returns copies of the decoder's weights, by name."""
    return {n: p.detach().clone() for n, p in parts.model.decoder.named_parameters()}


def requests(settings: EpisodeSettings, prompts: list[Prompt], group_size: int = 4) -> list[Request]:
    """Returns the requests of `group_size` samples per prompt."""
    return [
        Request(id=f"{p.id}/{p.visit}/{i}", tokens=p.tokens, sampling=settings.sampling, key=settings.make_key(p, i))
        for p in prompts
        for i in range(group_size)
    ]


def test_4_6_equal_samples_in_any_order_batch_and_number_of_slots(parts):
    asked = requests(parts.producer.settings, parts.producer.stream.next_prompts(6))
    reference = sample(parts.engine, asked)
    for seed, slots, window in ((1, 256, 8), (2, 3, 1), (3, 7, 5)):
        shuffled = random.Random(seed).sample(asked, len(asked))
        decoder, decode = parts.model.decoder, parts.engine.decode
        engine = NativeEngine(decoder, decode, slots=slots, max_context=512, window=window)
        # With the last seed, only some of the requests are in the batch.
        chosen = shuffled[: 5 * seed] if seed == 3 else shuffled
        for id, s in sample(engine, chosen).items():
            assert s.tokens == reference[id].tokens, (id, slots)
    assert len({tuple(s.tokens) for s in reference.values()}) > 12


def test_4_6_groups_do_not_depend_on_the_order_of_the_prompts(parts):
    prompts = parts.producer.stream.next_prompts(6)
    forward = make_producer(parts, 4).roll_out(prompts)
    backward = make_producer(parts, 4).roll_out(prompts[::-1])[::-1]
    assert [[s.tokens for s in g.samples] for g in forward] == [[s.tokens for s in g.samples] for g in backward]
    assert [[s.reward for s in g.samples] for g in forward] == [[s.reward for s in g.samples] for g in backward]


def test_4_6_training_and_evaluation_draw_from_different_streams(parts):
    prompts = parts.producer.stream.next_prompts(4)
    train, held_out = parts.producer.settings, parts.eval_producer.settings
    assert train.make_key(prompts[0], 1) == replace(held_out.make_key(prompts[0], 1), purpose="train")
    train = sample(parts.engine, requests(parts.producer.settings, prompts))
    eval = sample(parts.engine, requests(parts.eval_producer.settings, prompts))
    assert parts.producer.settings.sampling == parts.eval_producer.settings.sampling
    same = sum(train[id].tokens == eval[id].tokens for id in train)
    assert same < len(train) / 2


def test_4_6_every_visit_of_a_prompt_draws_anew(parts):
    stream = copy.copy(parts.producer.stream)
    stream.cursor = 0
    epochs = [stream.next_prompts(stream.num_rows) for _ in range(2)]
    first, again = ({p.id: p for p in epoch} for epoch in epochs)
    assert {p.visit for p in epochs[0]} == {0} and {p.visit for p in epochs[1]} == {1}
    ids = list(first)[:4]
    settings = parts.producer.settings
    drawn = [sample(parts.engine, requests(settings, [epoch[id] for id in ids])) for epoch in (first, again)]
    same = sum(drawn[0][f"{id}/0/{i}"].tokens == drawn[1][f"{id}/1/{i}"].tokens for id in ids for i in range(4))
    assert same < 8


def test_4_6_equal_logits_and_uniforms_give_the_equal_token():
    """The drawn token depends on its own logits alone, not on its row, the batch or settings of other rows."""
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(64, 512, generator=generator) * 3, torch.rand(64, generator=generator, dtype=torch.float64)
    ones, zeros = torch.ones(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    plain = SamplingSettings(
        temperature=ones, top_p=ones, top_k=zeros.long(), min_p=zeros, has_temperature=False, has_truncation=False
    )
    tokens = draw_tokens(logits, plain, u).tokens
    cumulative = logits.log_softmax(-1).exp().double().cumsum(-1)
    expected = (cumulative <= (u * cumulative[:, -1])[:, None]).sum(-1)
    assert torch.equal(tokens, expected)
    order = torch.randperm(64, generator=generator)
    assert torch.equal(draw_tokens(logits[order], plain, u[order]).tokens, tokens[order])
    for i in range(0, 64, 9):
        one = SamplingSettings(**{f: getattr(plain, f)[i : i + 1] for f in ("temperature", "top_p", "top_k", "min_p")})
        assert draw_tokens(logits[i : i + 1], one, u[i : i + 1]).tokens[0] == tokens[i]


def test_4_7_masters_moments_and_gradients_of_a_bf16_run_are_fp32():
    with built_job(small_run(learner=LearnerConfig(token_budget=96, dtype="bfloat16"))) as made:
        groups, stats = run_steps(made, 1)[0]
        optimizer = made.learner.optimizer
        assert stats.metrics["pack/microbatches"] > 1 and stats.metrics["updates/done"] == 1.0
        assert {p.dtype for p in made.model.decoder.parameters()} == {torch.bfloat16}
        assert {entry.dtype for entry in optimizer.state().values()} == {torch.float32}
        assert {g.dtype for g in optimizer.grads()} == {torch.float32}
        for name, p in made.model.decoder.named_parameters():
            assert torch.equal(p, optimizer.masters[name].to(torch.bfloat16)), name
        # microbatches are added up in fp32: the sum of their own gradients
        minibatch = pack_groups(groups, 96).minibatches[0]
        made.learner.forward_backward(minibatch, made.algo)
        whole = {n: m.grad.clone() for n, m in optimizer.masters.items()}
        total = {n: torch.zeros_like(g) for n, g in whole.items()}
        for micro in minibatch.microbatches:
            made.learner.forward_backward(replace(minibatch, microbatches=[micro]), made.algo)
            for n, m in optimizer.masters.items():
                total[n] += m.grad
        # rounding of fp32 sums, far below that of bf16 ones
        assert all((total[n] - g).abs().max() <= 1e-6 * g.abs().max() for n, g in whole.items())


def test_4_7_an_fp32_parameter_is_its_own_master(parts):
    for name, p in parts.model.decoder.named_parameters():
        assert parts.learner.optimizer.masters[name] is p and p.dtype == torch.float32


def test_4_8_a_step_without_signal_moves_nothing_though_there_is_momentum():
    """Step 1 fills Adam's moments, step 2 has constant rewards and weight decay is on: not a bit changes."""
    with built_job(small_run(optim=OptimConfig(lr=1e-3, weight_decay=0.1))) as made:
        assert run_steps(made, 1)[0][1].metrics["updates/done"] == 1.0
        before, state = weights(made), made.learner.state()
        moments = {k: v.clone() for k, v in state.collect().items()}
        nothing = {"correct": 0.0, "format": 0.0}  # every reward 0
        made.producer.settings = replace(made.producer.settings, coefficients=nothing)
        groups, stats = run_steps(made, 1, first=1)[0]
        assert {g.excluded for g in groups} == {Fate.CONSTANT_REWARD}
        assert stats.metrics["updates/no_signal"] == 1.0 and stats.metrics["groups/constant_reward"] == len(groups)
        assert "updates/done" not in stats.metrics
        assert all(torch.equal(w, before[n]) for n, w in weights(made).items())
        later = made.learner.state()
        after = later.collect()
        assert all(torch.equal(after[k], moments[k]) for k in moments)
        # The schedule advances, Adam's count does not.
        assert later.numbers == {**state.numbers, "update_index": 2}


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6])
def test_4_8_constant_rewards_give_exactly_zero_even_if_packed(parts, reward):
    groups = make_producer(parts, 3).roll_out(parts.producer.stream.next_prompts(2))
    for s in (s for g in groups for s in g.samples):
        s.reward = reward
    parts.algo.advantages(groups)
    for g in groups:
        assert g.excluded == Fate.CONSTANT_REWARD
        g.excluded = Fate.TRAINED
    parts.learner.forward_backward(pack_groups(groups, 512).minibatches[0], parts.algo)
    assert all(not g.any() for g in parts.learner.optimizer.grads())


def test_4_8_environment_tokens_get_no_gradient_on_tiny(parts):
    """A tool's answer inside a sample: the gradient is that of the sampled tokens alone, to the last bit."""
    groups = make_producer(parts, 3).roll_out(parts.producer.stream.next_prompts(2))
    for g in groups:
        for n, s in enumerate(g.samples):
            middle = len(s.tokens) // 2
            s.tokens[middle:middle] = [65, 66, 67]
            s.provenance[middle:middle] = [E] * 3
            s.sampler_logprobs[middle:middle] = [0.0] * 3
            s.advantage = n - 1.0
    batch = pack_groups(groups, 512)
    num_targets = 0
    for micro, touched in gradient_rows(parts.learner, batch, parts.algo):
        num_targets += len(micro.targets)
        assert touched <= set(micro.source.tolist()) and len(touched) > len(micro.source) / 3  # one advantage is 0
    assert num_targets == sum(s.num_sampled for g in groups for s in g.samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_4_10_two_learners_from_one_checkpoint_make_the_same_next_steps(tmp_path, dtype):
    config = small_run(
        algo=GRPO(kl=KLConfig(weight=0.02), entropy=0.001),
        optim=OptimConfig(lr=3e-4, warmup=2, schedule="cosine"),
        learner=LearnerConfig(token_budget=256, epochs=2, minibatches=2, dtype=dtype),
        batch=BatchConfig(prompts=4, samples=3),
        sampling=SamplingConfig(max_tokens=16, temperature=0.9),
        # The third step is in the second epoch, so prompts are visited again.
        task=Arithmetic(train_size=9, test_size=4),
        eval=EvalConfig(problems=4),
    )
    with built_job(config) as whole:
        start = weights(whole)
        run_steps(whole, 2)
        path = checkpoint.save(tmp_path, whole.make_checkpoint(2), whole.write_model)
        saved = weights(whole)
        expected = run_steps(whole, 2, first=2)
        last, evaluation, final = weights(whole), whole.evaluate(4), whole.make_checkpoint(4)
        final_tensors = final.optimizer.collect()
    assert any(not torch.equal(start[n], w) for n, w in saved.items())
    for _ in range(2):
        with built_job(config) as resumed:
            resumed.restore(checkpoint.load(path))
            assert all(torch.equal(w, saved[n]) for n, w in weights(resumed).items())
            assert resumed.engine.version == 2 and resumed.producer.stream.cursor == 8
            again = run_steps(resumed, 2, first=2)
            assert [stats for _, stats in again] == [stats for _, stats in expected]
            # This compares every list of every record.
            assert [groups for groups, _ in again] == [groups for groups, _ in expected]
            assert all(torch.equal(w, last[n]) for n, w in weights(resumed).items())
            assert resumed.evaluate(4) == evaluation
            state = resumed.make_checkpoint(4)
            assert (state.step, state.cursor, state.numbers) == (final.step, final.cursor, final.numbers)
            tensors = state.optimizer.collect()
            assert tensors.keys() == final_tensors.keys()
            assert all(torch.equal(t, final_tensors[k]) for k, t in tensors.items())
    visits = {(g.prompt.id, g.prompt.visit) for groups, _ in expected for g in groups}
    assert len(visits) == 8 and {v for _, v in visits} == {0, 1}


def test_4_10_the_thread_count_of_the_checkpoint_is_kept(tmp_path):
    with built_job(small_run()) as made:
        path = checkpoint.save(tmp_path, made.make_checkpoint(0), made.write_model)
        state = checkpoint.load(path)
        assert state.numbers["threads"] == 1
        state.numbers["threads"] = 2
        made.restore(state)
        assert torch.get_num_threads() == 2


def test_4_10_a_step_is_the_same_bits_in_every_process():
    """Nothing that differs between two processes (hash seeds, addresses, what ran before) enters a step."""
    results = []
    for warm in (False, True):
        with built_job(small_run()) as made:
            if warm:
                # An evaluation before a step must not change it.
                made.evaluate(0)
            groups, stats = run_steps(made, 1)[0]
            results.append((groups, stats, weights(made)))
    (a, stats, after), (b, same, again) = results
    assert a == b and stats == same
    assert all(torch.equal(w, again[n]) for n, w in after.items())
