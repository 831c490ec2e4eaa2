"""Episodes with several turns and a real model: only the tokens that were sampled are trained on, and all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cohort.config.schema import EvalConfig, ThinkAgain
from cohort.errors import ConfigError
from cohort.loops.learning import annotate
from cohort.types import Finish, Provenance
from tests.helpers.decoders_and_groups import pack_groups
from tests.helpers.small_runs import built_job, gradient_rows, make_producer, run_steps, small_run

WORDS = ("Think again.", "Look once more at <|im_end|> it.")
AGAIN = ThinkAgain(attempts=2, below=10.0, max_tokens=12, words=WORDS)


@pytest.fixture(scope="module")
def job_and_groups():
    with built_job(small_run(turns=AGAIN)) as job:
        groups = make_producer(job, 3).roll_out(job.producer.stream.next_prompts(4))
        annotate(job.learner, groups, ["old"])
        yield job, groups


def test_the_stream_is_the_conversation_as_the_template_renders_it(job_and_groups):
    """After each attempt the user's words follow, as the chat template renders them. No token is encoded again."""
    job, groups = job_and_groups
    tokenizer, seen = job.tokenizer, 0
    for group in groups:
        for sample in group.samples:
            turns, start = [], 0
            for i in range(1, len(sample.tokens) + 1):
                if i == len(sample.tokens) or sample.provenance[i] != sample.provenance[start]:
                    turns.append((sample.provenance[start], sample.tokens[start:i]))
                    start = i
            messages = list(group.prompt.messages)
            for kind, tokens in turns:
                if kind == Provenance.SAMPLED:
                    messages.append({"role": "assistant", "content": tokenizer.decode(tokens)})
                else:
                    words = next(
                        w for w in WORDS if tokenizer.encode_follow_up(w) in (tokens, [tokenizer.end_of_turn, *tokens])
                    )
                    messages.append({"role": "user", "content": words})
                    seen += 1
            attempts = [tokens for kind, tokens in turns if kind == Provenance.SAMPLED]
            again = all(tokenizer.encode(tokenizer.decode(t), markup=True) == t[:-1] for t in attempts)
            if sample.finish is Finish.STOP and again:  # only if encoding its text again gives the same tokens
                end = len(attempts[-1])
                whole = [*group.prompt.tokens, *sample.tokens][:-end]
                assert whole == tokenizer.render(messages[:-1]).tokens
            assert len(attempts) <= 3 and (len(attempts) == 3 or sample.finish is Finish.LENGTH)
    assert seen > 8


def test_sampler_and_learner_agree_on_every_attempt(job_and_groups):
    _, groups = job_and_groups
    for sample in (s for g in groups for s in g.samples):
        assert sample.num_turns > 1 or sample.finish is Finish.LENGTH
        assert sample.old_logprobs == pytest.approx(sample.sampler_logprobs, abs=2e-4)
        drawn = [p == Provenance.SAMPLED for p in sample.provenance]
        assert all(lp == 0.0 for lp, mine in zip(sample.old_logprobs, drawn, strict=True) if not mine)
        assert sum(sample.old_logprobs) < -0.1


def test_only_predictions_of_sampled_tokens_get_a_gradient(job_and_groups):
    job, groups = job_and_groups
    for group in groups:
        for i, sample in enumerate(group.samples):
            sample.advantage = 1.0 + i
    batch = pack_groups(groups, 4096)
    for micro, touched in gradient_rows(job.learner, batch, job.algo):
        assert touched == set(micro.source.tolist())
        assert len(micro.targets) == sum(s.num_sampled for g in groups for s in g.samples)


def test_a_run_with_several_turns_learns_and_counts_them():
    with built_job(small_run(turns=replace(AGAIN, attempts=1, below=0.5))) as job:
        before = {n: p.clone() for n, p in job.model.decoder.named_parameters()}
        (groups, stats), _ = run_steps(job, 2)
        assert 1 < stats.metrics["turns/mean"] <= 2
        rewards = {s.num_turns: s.reward for g in groups for s in g.samples if s.finish is Finish.STOP}
        assert rewards.keys() == {1, 2}
        assert any(not torch.equal(before[n], p) for n, p in job.model.decoder.named_parameters())
        assert all(len(a.text) and "[" not in a.text for item in job.evaluate(2).items for a in item.answers[:1])


def test_an_evaluation_may_have_all_turns_and_says_so():
    again = replace(AGAIN, below=0.5)
    with built_job(small_run(turns=again, eval=EvalConfig(problems=6, turns="all"))) as job:
        found = job.evaluate(0)
        assert found.setting.turns == "all"
        talked = [a for item in found.items for a in item.answers if any(f"[{w}]" in a.text for w in WORDS)]
        wrong_at_first = [a for item in found.items for a in item.answers if a.correct == 0.0 and a.finish == "stop"]
        assert talked and all(a in talked for a in wrong_at_first)
    with built_job(small_run(turns=again)) as job:
        first = job.evaluate(0)
        assert first.setting.turns == "first"
        for short, long in zip(first.items, found.items, strict=True):
            for a, b in zip(short.answers, long.answers, strict=True):
                assert b.text.startswith(a.text) and (b.text == a.text or b.text[len(a.text) :].startswith("\n\n["))


def test_what_does_not_fit_is_refused():
    with (
        pytest.raises(ConfigError, match=r"leaves no room for a prompt"),
        built_job(small_run(turns=replace(AGAIN, max_tokens=400), eval=EvalConfig(problems=2))),
    ):
        pass
