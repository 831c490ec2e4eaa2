"""Numerics contract, lines 1, 2 and 9: whole steps of the bundled model, token by token."""

from __future__ import annotations

import copy

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.algos.imitation import Imitation
from cohort.config.schema import GRPO, DrGRPO, LearnerConfig, OptimConfig, SamplingConfig
from cohort.data.pack import pack
from cohort.errors import TrainingStopped
from cohort.jobs.build import RLJob
from cohort.learner.local import LocalLearner
from cohort.loops.sft import make_sft_batch
from cohort.tasks.base import make_plain_answer
from cohort.tasks.grading import grade
from cohort.text import Tokenizer
from cohort.types import Finish, Outcome, Provenance
from tests.helpers.decoders_and_groups import make_group, make_sample, pack_groups, random_groups, small_decoder
from tests.helpers.hostile_task import SPELLINGS, Hostile
from tests.helpers.small_runs import LocalScorer, built_job, gradient_rows, make_producer, run_steps, small_run

P, S, E, F, T = Provenance.PROMPT, Provenance.SAMPLED, Provenance.ENVIRONMENT, Provenance.FORCED, Provenance.TARGET


@pytest.fixture(scope="module")
def parts() -> RLJob:
    with built_job(small_run()) as made:
        yield made


def refuse(*args, **kwargs):
    """Stands in for functions that must not be called."""
    raise AssertionError("text was tokenised again")


def test_4_1_the_ids_the_engine_drew_are_the_ids_that_are_trained(parts, monkeypatch):
    """A whole step with tokenising forbidden once the prompts exist."""
    prompts = parts.producer.stream.next_prompts(6)
    drawn: dict[str, list[int]] = {}
    poll, update = parts.engine.poll, parts.learner.update
    batches = []

    def watched_poll(timeout=0.0):
        events = poll(timeout)
        for event in events:
            drawn.setdefault(event.id, []).extend(event.tokens)
        return events

    def watched_update(batch, algo):
        batches.append(batch)
        return update(batch, algo)

    monkeypatch.setattr(parts.engine, "poll", watched_poll)
    monkeypatch.setattr(parts.learner, "update", watched_update)
    monkeypatch.setattr(parts.producer.stream, "next_prompts", lambda n: prompts)
    monkeypatch.setattr(Tokenizer, "encode", refuse)
    monkeypatch.setattr(Tokenizer, "render", refuse)
    (groups, stats) = run_steps(parts, 1)[0]
    assert [g.prompt for g in groups] == prompts and stats.metrics["updates/done"] == 1.0
    trained = 0
    [batch] = batches
    micros = pack(batch, parts.learner.token_budget)[0].microbatches
    for n, group in enumerate(groups):
        for i, (id, sample) in enumerate(zip(group.ids(), group.samples, strict=True)):
            assert sample.tokens == drawn[f"{n}/{i}"]
            number = batch.ids.index(id) if id in batch.ids else -1
            for micro in micros:
                at = micro.segments == number
                if not at.any():
                    continue
                trained += 1
                assert micro.targets[at].tolist() == sample.tokens
                source = micro.source[at]
                assert micro.tokens[source].tolist() == [group.prompt.tokens[-1], *sample.tokens[:-1]]
                first = len(group.prompt.tokens) - 1
                assert micro.positions[source].tolist() == list(range(first, first + len(sample.tokens)))
    alive = [g for g in groups if not g.excluded]
    assert trained == sum(len(g.samples) for g in alive) > 0


def test_4_1_every_token_has_its_provenance(parts):
    for group in make_producer(parts, 3).collect(4, parts.algo.accept):
        assert group.prompt.provenance == [P] * len(group.prompt.tokens)
        for s in group.samples:
            assert s.provenance == [S] * len(s.tokens)
            assert len(s.sampler_logprobs) == len(s.tokens) and max(s.sampler_logprobs) <= 0.0
            assert s.versions[0][0] == 0


def test_4_1_special_token_spellings_in_rows_stay_text_to_the_end():
    """Row text with turn ends and tags in it, through the template, the engine, the grader and the learner."""
    with built_job(small_run(task=Hostile(), reward={})) as hostile:
        tokenizer = Tokenizer.load(hostile.model.folder)
        plain = [tokenizer.render(Hostile().prompt(r)).tokens for r in Hostile(plain=True).rows("train")]
        ids = [tokenizer.get_token_id(s) for s in SPELLINGS]
        (groups, stats) = run_steps(hostile, 1)[0]
        assert len(groups) == len(SPELLINGS)
        for group in groups:
            # Special tokens come only from the template itself.
            for id in ids:
                assert group.prompt.tokens.count(id) == plain[0].count(id)
            shown = tokenizer.decode(group.prompt.tokens, skip_special=False)
            assert group.prompt.row["text"] in shown
            assert group.prompt.provenance == [P] * len(group.prompt.tokens)
        assert {g.prompt.id for g in groups} == {f"train-{n}" for n in range(len(SPELLINGS))}
        assert stats.metrics["samples/failed"] == 0


def test_4_1_a_forced_prefix_is_marked_and_never_trained():
    with built_job(small_run(task=Hostile(plain=True, forced="<think>7"), reward={})) as made:
        groups = make_producer(made, 4).collect(3, made.algo.accept)
        for g in groups:
            marks = g.prompt.provenance
            first = marks.index(F)
            assert marks == [P] * first + [F] * (len(marks) - first) and first < len(marks)
            assert g.prompt.forced_text == "<think>7"
            for n, s in enumerate(g.samples):
                s.advantage = 1.0 + n
        for micro, touched in gradient_rows(made.learner, pack_groups(groups, 512), made.algo):
            assert touched == set(micro.source.tolist())
        sampled = sum(len(s.tokens) for g in groups for s in g.samples)
        assert sum(len(m.targets) for m in pack_groups(groups, 512).minibatches[0].microbatches) == sampled


MIXED = [5, 6, 7, 8, 9, 10, 11, 12]
# Provenance may come in any order: the mark alone decides.
MARKS = [S, E, S, F, T, P, S, T]


@pytest.mark.parametrize(("kind", "expected"), [(S, {0, 2, 6}), (T, {4, 7})])
def test_4_1_a_loss_touches_the_tokens_of_its_provenance_only(kind, expected):
    """RL sampled tokens, SFT targets: every other prediction has a gradient of exactly zero."""
    decoder = small_decoder(torch.float64)
    learner = LocalLearner(decoder, LearnerConfig(), OptimConfig(), num_updates=1)
    samples = [make_sample(MIXED, MARKS, advantage=1.0), make_sample([4], [kind], advantage=-1.0)]
    batch = pack_groups([make_group([1, 2, 3], samples)], 100, loss_on=kind)
    loss = build_algorithm(GRPO(aggregate="token"), 16) if kind == S else Imitation()
    [(micro, touched)] = gradient_rows(learner, batch, loss)
    # Inputs end with the token that predicts the last target. The sample [4] has no input.
    assert micro.tokens.tolist() == [1, 2, 3, *MIXED[: max(expected)]]
    # Each target is predicted one place before it. Place 2 is the end of the prompt.
    assert touched == {2 + i for i in expected} | {2}
    assert micro.targets.tolist() == [MIXED[i] for i in sorted(expected)] + [4]


def test_4_1_sft_trains_targets_only_and_rl_ignores_them():
    example = ([1, 2, 30, 31, 32, 33], [P, P, T, E, T, T])
    [minibatch] = pack(make_sft_batch([example]), 100)
    assert minibatch.microbatches[0].targets.tolist() == [30, 32, 33]
    assert minibatch.counts.num_tokens == 3
    sample = make_sample(example[0][2:], example[1][2:], advantage=1.0)
    assert pack_groups([make_group([1, 2], [sample])], 100).counts == {"empty": 1}


def test_4_2_a_sampled_end_token_is_trained_on_tiny(parts):
    stops = set(parts.producer.settings.sampling.stop_ids)
    groups = make_producer(parts, 4).collect(6, parts.algo.accept)
    for g in groups:
        for n, s in enumerate(g.samples):
            s.advantage = 1.0 + n
    batch = pack_groups(groups, 512)
    samples = [s for g in groups for s in g.samples]
    ended = [i for i, s in enumerate(samples) if s.finish == Finish.STOP]
    assert len(ended) > 12
    trained = set()
    for micro, touched in gradient_rows(parts.learner, batch, parts.algo):
        for source, target, segment in zip(
            micro.source.tolist(), micro.targets.tolist(), micro.segments.tolist(), strict=True
        ):
            assert source in touched
            if target in stops:
                trained.add(segment)
    assert trained == set(ended)
    for i in ended:
        assert samples[i].tokens[-1] in stops and not stops & set(samples[i].tokens[:-1])


@pytest.mark.parametrize("choice", ["keep", "mask", "penalize"])
def test_4_2_truncated_samples_follow_an_explicit_choice(choice, monkeypatch):
    config = small_run(sampling=SamplingConfig(max_tokens=5), algo=DrGRPO(truncated=choice))
    with built_job(config) as made:
        right = Outcome(parts={"correct": 1.0, "format": 0.0})
        monkeypatch.setattr(made.producer, "scorer", LocalScorer(lambda row, answer: right))
        groups, stats = run_steps(made, 1)[0]
        monkeypatch.undo()
    samples = [s for g in groups for s in g.samples]
    cut = [s for s in samples if s.finish == Finish.LENGTH]
    assert 0 < len(cut) < len(samples)
    assert all(len(s.tokens) == 5 for s in cut) and all(s.reward == 1.0 for s in samples)
    assert stats.metrics["samples/length"] == len(cut)
    assert [s.masked for s in cut] == ["truncated" if choice == "mask" else ""] * len(cut)
    for group in groups:
        inside = sum(s.finish == Finish.LENGTH for s in group.samples)
        mixed = 0 < inside < len(group.samples)
        # All rewards are 1 unless penalised.
        assert bool(group.excluded) == (choice != "penalize" or not mixed)
        if choice == "penalize" and mixed:
            mean = 1 - inside / len(group.samples)
            for s in group.samples:
                assert s.advantage == pytest.approx((s.finish == Finish.STOP) - mean, abs=1e-12)


def test_4_9_a_failed_sample_leaves_its_group_and_the_baseline_is_recomputed():
    groups = [make_group([5, 6], [make_sample([7, 8, 2]) for _ in range(4)], id=str(n)) for n in range(6)]
    for g in groups:
        for s, reward in zip(g.samples, (1.0, 0.0, 0.0, 0.0), strict=True):
            s.reward = reward
    lost = groups[2].samples[1]
    lost.reward, lost.failure = None, "the grader's process died"
    algo = build_algorithm(DrGRPO(), 16)
    algo.advantages(groups)
    assert [s.advantage for s in groups[0].samples] == [0.75, -0.25, -0.25, -0.25]
    assert [s.advantage for s in groups[2].samples] == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3], abs=1e-15)
    assert lost.masked == "failed" and not groups[2].excluded
    batch = pack_groups(groups, 1000)
    assert batch.counts == {"packed": 23, "failed": 1}
    assert (batch.minibatches[0].counts.num_samples, batch.minibatches[0].counts.num_tokens) == (23, 69)
    decoder = small_decoder(torch.float64)
    learner = LocalLearner(decoder, LearnerConfig(), OptimConfig(), num_updates=1)
    learner.forward_backward(batch.minibatches[0], algo)
    got = {n: g.clone() for n, g in zip(learner.optimizer.masters, learner.optimizer.grads(), strict=True)}
    without = copy.deepcopy(groups)
    # The same group as if that sample had never been drawn.
    del without[2].samples[1]
    learner.forward_backward(pack_groups(algo.advantages(without), 1000).minibatches[0], algo)
    for name, g in zip(learner.optimizer.masters, learner.optimizer.grads(), strict=True):
        assert (g - got[name]).abs().max() <= 1e-10 * max(1.0, float(g.abs().max())), name


@pytest.mark.parametrize("num_failed", [1, 2])
def test_4_9_above_five_percent_of_a_step_the_run_stops(parts, num_failed):
    """20 samples: one failure is 5% and is counted and shown, two are more and stop the run."""
    failing = iter([True] * num_failed + [False] * 20)
    ok, broken = Outcome(parts={"correct": 1.0, "format": 0.0}), Outcome(failure="the grader's process died")
    producer = make_producer(parts, 4, scorer=LocalScorer(lambda row, answer: broken if next(failing) else ok))
    if num_failed == 2:
        with pytest.raises(TrainingStopped, match=r"process died .2 of 20 samples .* 5%"):
            producer.collect(5, parts.algo.accept)
        return
    groups = producer.collect(5, parts.algo.accept)
    lost = [s for g in groups for s in g.samples if s.failure]
    assert len(lost) == 1 and lost[0].reward is None and lost[0].parts == {}


def test_4_9_what_the_answer_causes_is_a_verdict_with_its_reason(parts):
    row = parts.producer.stream.next_prompts(1)[0].row
    for text in ("", "<answer>", "<answer>9**9**9**9</answer>", "<answer>" + "(" * 10_000 + "</answer>"):
        outcome = grade(parts.config.task, row, make_plain_answer(text))
        assert outcome.parts["correct"] == 0.0 and outcome.reason and not outcome.failure


def test_4_9_a_group_of_failures_trains_nothing():
    groups = random_groups(num_groups=2, group_size=3)
    for g, kept in zip(groups, (1, 3), strict=True):
        for i, s in enumerate(g.samples):
            s.reward, s.failure = (float(i), "") if i < kept else (None, "service unreachable")
    build_algorithm(GRPO(), 16).advantages(groups)
    assert groups[0].excluded == "too few scored samples" and not groups[1].excluded
    assert pack_groups(groups, 1000).counts == {"excluded": 1, "failed": 2, "packed": 3}
