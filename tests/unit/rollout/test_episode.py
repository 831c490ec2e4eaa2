"""Episodes with several turns (think again): which samples get another attempt, their tokens and their reward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cohort.engines.base import Request
from cohort.engines.scripted import Script
from cohort.rollout.episode import LaterTurns
from cohort.tasks.environment import AgainRules
from cohort.types import Finish, Outcome, Provenance, Sampling
from tests.helpers.small_runs import LocalScorer
from tests.unit.rollout.test_rollout import STOP, producer, prompt

USER = [40, 41, 42]
AGAIN = AgainRules(attempts=1, below=0.2, cost=0.0, words=("once more",), coefficients={})
LATER_TURNS = LaterTurns(max_tokens=5, encode_replies=lambda replies: [STOP, *USER])


def says(request: Request) -> Script:
    """The engine's script: 7 and the stop token first; 8, 9 and the stop token after the user's turn."""
    again = len(request.tokens) > 2
    return Script(tokens=[8, 9, STOP] if again else [7, STOP])


def grade(row, answer) -> Outcome:
    """The second attempt is right; in row 1 the first one is."""
    return Outcome(parts={"correct": float(answer.text.startswith("8") or row["n"] == 1)}, reason=answer.text)


def make_talking_producer(
    rules: AgainRules | None = AGAIN, late: int = 0, later_turns=LATER_TURNS, grader=grade, answers=says, **changes
):
    scorer = LocalScorer(grader, late, again=rules)
    return producer(scorer=scorer, answers=answers, later_turns=None if rules is None else later_turns, **changes)


def sample_two_prompts(rules: AgainRules | None = AGAIN, **changes):
    made = make_talking_producer(rules, **changes)
    return [g.samples for g in made.roll_out([prompt(0), prompt(1)])], made


def test_a_low_reward_gets_another_attempt_and_a_high_one_does_not():
    (low, high), _ = sample_two_prompts()
    for sample in low:
        assert sample.tokens == [7, STOP, *USER, 8, 9, STOP]
        kinds = [Provenance.SAMPLED] * 2 + [Provenance.ENVIRONMENT] * 3 + [Provenance.SAMPLED] * 3
        assert sample.provenance == [int(k) for k in kinds]
        assert sample.sampler_logprobs[2:5] == [0.0] * 3 and len(sample.sampler_logprobs) == 8
        assert (sample.reward, sample.finish, sample.num_sampled) == (1.0, Finish.STOP, 5)
        assert sample.reason.startswith("8") and "[once more]" in sample.text
        assert [first for first, _ in sample.versions] == [0, 5]
    assert [s.tokens for s in high] == [[7, STOP]] * 2 and high[0].reward == 1.0


def test_a_reward_of_just_the_threshold_is_low():
    """Such a reward may be that of the format alone, without a right answer."""
    grader = LocalScorer(lambda row, answer: Outcome(parts={"correct": 0.2}))
    (low, _), _ = sample_two_prompts(replace(AGAIN, below=0.2), grader=grader.grade)
    assert low[0].tokens.count(40) == 1
    (low, _), _ = sample_two_prompts(replace(AGAIN, below=0.19), grader=grader.grade)
    assert low[0].tokens.count(40) == 0


def test_without_rules_there_is_one_attempt():
    (low, _), _ = sample_two_prompts(None)
    assert [s.tokens for s in low] == [[7, STOP]] * 2 and low[0].reward == 0.0


def test_each_attempt_costs_and_there_are_no_more_than_asked_for():
    never = LocalScorer(lambda row, answer: Outcome(parts={"correct": 0.0}))
    (low, _), _ = sample_two_prompts(replace(AGAIN, attempts=3, cost=0.25), grader=never.grade)
    assert low[0].tokens.count(40) == 3 and low[0].reward == -0.75


def test_the_grader_sees_the_last_attempt_alone_and_the_whole_conversation():
    (_, _), made = sample_two_prompts()
    answer = made.scorer.seen["0/0"]
    assert answer.text == answer.full and answer.text.startswith("8") and answer.num_tokens == 3
    roles = [m["role"] for m in answer.conversation]
    assert roles == ["user", "assistant", "user", "assistant"] and answer.conversation[2]["content"] == "once more"


def test_a_further_attempt_has_its_own_limit_and_continues_the_keys_random_numbers():
    seen: list[Request] = []

    def watch(request: Request) -> Script:
        seen.append(request)
        return says(request)

    sample_two_prompts(answers=watch)
    first, second = (next(r for r in seen if r.id == "0/0" and (len(r.tokens) > 2) == again) for again in (False, True))
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (20, 5)
    assert second.key == first.key and (second.start, second.shared) == (5, 2)
    assert second.tokens == [*first.tokens, 7, STOP, *USER]
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"]


def test_a_cut_off_attempt_and_one_that_could_not_be_scored_are_the_last():
    (low, _), _ = sample_two_prompts(sampling=Sampling(max_tokens=1, stop_ids=(STOP,)))
    assert low[0].tokens == [7] and low[0].finish is Finish.LENGTH
    (low, _), _ = sample_two_prompts(grader=lambda row, answer: Outcome(failure="died"))
    assert low[0].tokens == [7, STOP] and low[0].failure == "died" and low[0].reward is None


def test_a_forced_prefix_belongs_to_the_first_attempt_only():
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>"}]
    asked = prompt(0, messages=messages, forced_text="<think>")
    made = make_talking_producer(group_size=1)
    made.roll_out([asked])
    answer = made.scorer.seen["0/0"]
    assert answer.full == answer.text
    assert [m["role"] for m in answer.conversation] == ["user", "assistant", "user", "assistant"]
    assert answer.conversation[1]["content"].startswith("<think>7")


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_result_does_not_depend_on_when_the_grader_answers(late):
    expected, _ = sample_two_prompts()
    for order in ("rounds", "continuous"):
        found, _ = sample_two_prompts(late=late, order=order)
        assert found == expected


def test_a_turn_without_the_end_token_is_closed_by_the_template():
    """A turn may end with a stop string. Then the end token is the environment's and is not trained on."""
    odd = replace(LATER_TURNS, encode_replies=lambda replies: [3, *USER])
    (low, _), _ = sample_two_prompts(later_turns=odd)
    assert low[0].tokens == [7, STOP, 3, *USER, 8, 9, STOP]
    assert low[0].provenance[2] == Provenance.ENVIRONMENT


def test_a_round_begins_when_all_are_scored_in_their_order():
    asked: list[str] = []

    def watch(request: Request) -> Script:
        asked.append(request.id)
        return says(request)

    for late in (0, 2):
        asked.clear()
        make_talking_producer(late=late, answers=watch).roll_out([prompt(0), prompt(2), prompt(1)])
        assert asked == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1", "0/0", "0/1", "1/0", "1/1"]


def test_completions_are_cut_to_what_their_own_prompt_leaves():
    made = make_talking_producer(None, context=4, group_size=1)
    long = prompt(1, tokens=[11, 1, 1], provenance=[0, 0, 0])
    samples = [g.samples[0] for g in made.roll_out([prompt(0), long])]
    assert [s.tokens for s in samples] == [[7, STOP], [8]]
    assert [s.finish for s in samples] == [Finish.STOP, Finish.LENGTH]
