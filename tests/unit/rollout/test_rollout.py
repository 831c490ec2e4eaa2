"""From prompts to scored groups, with an engine that follows a script and a scorer in this process."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cohort.engines.base import Request
from cohort.engines.scripted import Script, ScriptedEngine
from cohort.errors import EngineError, TrainingStopped
from cohort.rollout.episode import EpisodeSettings, make_answer
from cohort.rollout.producer import Producer, stop_if_scoring_is_broken
from cohort.rollout.refills import MAX_REFILLS
from cohort.types import Finish, Group, Key, Outcome, Prompt, Sample, Sampling
from tests.helpers.engine_conformance import spell
from tests.helpers.small_runs import LocalScorer

STOP = 2


class Stream:
    """Prompts 0, 1, 2, ... with their number as the only token before a 1."""

    def __init__(self) -> None:
        self.cursor = 0
        self.asked: list[int] = []

    def seek(self, cursor: int) -> None:
        self.cursor = cursor

    def next_prompts(self, n: int) -> list[Prompt]:
        self.asked.append(n)
        first, self.cursor = self.cursor, self.cursor + n
        return [prompt(i) for i in range(first, first + n)]


def prompt(n: int, **changes) -> Prompt:
    messages = [{"role": "user", "content": f"number {n}"}]
    values = {"task": "t", "id": f"p{n}", "visit": n % 3, "row": {"id": f"p{n}", "n": n}, "messages": messages}
    return Prompt(**{**values, "tokens": [n + 10, 1], "provenance": [0, 0], **changes})


def says(request: Request) -> Script:
    """The engine's script for prompt n and sample i: n + 10, i + 100, some 5s, then the stop token."""
    n, i = request.tokens[0], request.key.sample
    return Script(tokens=[n, i + 100, *[5] * ((n * 7 + i * 3) % 11), STOP])


def right_if_even(row, answer) -> Outcome:
    index = int(answer.text.split(".")[1]) - 100
    return Outcome(parts={"correct": float((row["n"] + index) % 2 == 0), "style": 0.5}, reason=f"{row['n']}/{index}")


def settings(**changes) -> EpisodeSettings:
    sampling = Sampling(max_tokens=20, stop_ids=(STOP,))
    return EpisodeSettings(**{"sampling": sampling, "group_size": 2, "seed": 3, "coefficients": {}, **changes})


def producer(grade: Callable = right_if_even, late: int = 0, *, answers=says, order="rounds", **changes) -> Producer:
    """`changes` are fields of the settings, or one of engine, scorer and stream."""
    engine = changes.pop("engine", None) or ScriptedEngine(answers, spell)
    scorer, stream = changes.pop("scorer", None) or LocalScorer(grade, late), changes.pop("stream", None) or Stream()
    return Producer(engine, scorer, stream, settings(**changes), order)


def engine(**changes) -> ScriptedEngine:
    return ScriptedEngine(says, spell, **changes)


def test_groups_keep_the_order_of_their_prompts_and_samples_their_index():
    groups = producer(group_size=3).roll_out([prompt(n) for n in (4, 0, 2)])
    assert [g.prompt.id for g in groups] == ["p4", "p0", "p2"]
    for g in groups:
        n = g.prompt.row["n"]
        assert [s.tokens[:2] for s in g.samples] == [[n + 10, 100 + i] for i in range(3)]
        assert [s.reason for s in g.samples] == [f"{n}/{i}" for i in range(3)]
        assert [s.parts["correct"] for s in g.samples] == [float((n + i) % 2 == 0) for i in range(3)]


@pytest.mark.parametrize(("at_once", "window", "late"), [(1, 1, 0), (2, 3, 2), (64, 50, 7)])
def test_the_order_in_which_samples_finish_changes_nothing(at_once, window, late):
    prompts = [prompt(n) for n in range(5)]
    expected = producer(group_size=4).roll_out(prompts)
    for order in ("rounds", "continuous"):
        driven = engine(slots=at_once, window=window, silent_polls=late)
        assert producer(late=late, engine=driven, order=order, group_size=4).roll_out(prompts) == expected


def test_the_key_of_a_sample_names_everything_it_depends_on():
    asked: list[Request] = []

    def record_request(request: Request) -> Script:
        asked.append(request)
        return says(request)

    held_out = producer(purpose="eval", answers=record_request)
    held_out.roll_out([prompt(4), prompt(5)])
    assert [r.key for r in asked] == [
        Key(seed=3, purpose="eval", task="t", prompt_id=f"p{n}", visit=n % 3, sample=i) for n in (4, 5) for i in (0, 1)
    ]
    assert all(r.sampling is held_out.settings.sampling and r.start == 0 for r in asked)
    assert [r.tokens for r in asked] == [[14, 1], [14, 1], [15, 1], [15, 1]]


def test_the_reward_is_the_sum_of_coefficient_times_part():
    parts = {"correct": 1.0, "format": 0.5, "length": -2.0}
    assert settings().compute_reward(parts) == -0.5  # a part that is not named has the coefficient 1
    assert settings(coefficients={"length": 0.0}).compute_reward(parts) == 1.5
    assert settings(coefficients={"correct": 2.0, "format": -1.0, "length": 0.25}).compute_reward(parts) == 1.0
    [group] = producer(coefficients={"style": 4.0}).roll_out([prompt(0)])
    assert [s.reward for s in group.samples] == [3.0, 2.0]  # correct 1 and 0, style 0.5 x 4
    assert [s.parts for s in group.samples] == [{"correct": 1.0, "style": 0.5}, {"correct": 0.0, "style": 0.5}]


def test_a_failure_is_not_a_zero():
    def grade(row, answer) -> Outcome:
        broken = answer.text.startswith("11.")
        return Outcome(failure="worker died") if broken else Outcome(parts={"correct": 0.0})

    groups = producer(grade).roll_out([prompt(0), prompt(1)])
    assert [(s.reward, s.failure) for g in groups for s in g.samples] == [(0.0, "")] * 2 + [(None, "worker died")] * 2
    assert groups[1].samples[0].parts == {}


def test_the_grader_sees_the_completion_and_the_forced_prefix():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>"}]
    forced = prompt(0, messages=messages, forced_text="<think>")
    scorer = LocalScorer(lambda row, answer: Outcome(parts={"correct": 1.0}))
    [group] = producer(scorer=scorer, group_size=1).roll_out([forced])
    answer = scorer.seen["0/0"]
    assert answer.text == group.samples[0].text == "10.100.5.5.5.5."
    assert answer.full == "<think>" + answer.text
    assert (answer.finish, answer.num_tokens) == ("stop", 7)  # the stop token counts, but is not in the text
    assert answer.conversation == [messages[0], {"role": "assistant", "content": answer.full}]


def test_without_a_forced_prefix_the_whole_history_is_kept():
    sample = Sample(tokens=[1], provenance=[1], sampler_logprobs=[0.0], text="4", finish=Finish.LENGTH)
    answer = make_answer(prompt(0), sample)
    assert answer.full == answer.text == "4" and answer.finish == "length"
    assert [m["role"] for m in answer.conversation] == ["user", "assistant"]


def test_collect_takes_what_is_accepted_the_first_time():
    made = producer()
    groups = made.collect(4, accept=lambda g: True)
    assert made.stream.asked == [4] and [g.excluded for g in groups] == [""] * 4


def test_collect_refills_what_is_not_accepted_and_keeps_it_marked():
    made = producer()
    groups = made.collect(4, accept=lambda g: g.prompt.row["n"] % 3 == 0)
    # 0 1 2 3 -> two missing; 4 5 -> two; 6 7 -> one; 8 -> one; 9 -> none
    assert made.stream.asked == [4, 2, 2, 1, 1]
    assert [g.prompt.row["n"] for g in groups] == list(range(10))
    assert [g.prompt.row["n"] for g in groups if not g.excluded] == [0, 3, 6, 9]
    assert {g.excluded for g in groups} == {"", "not accepted"}


def test_collect_gives_up_after_a_bounded_number_of_refills():
    made = producer()
    groups = made.collect(2, accept=lambda g: False)
    assert made.stream.asked == [2] * MAX_REFILLS
    assert {g.excluded for g in groups} == {"not accepted"} and len(groups) == 2 * MAX_REFILLS


def make_group_with_failures(num_failed: int, num: int) -> Group:
    made = [Sample(tokens=[1], provenance=[1], sampler_logprobs=[0.0], reward=0.0) for _ in range(num)]
    for s in made[:num_failed]:
        s.reward, s.failure = None, "service unreachable"
    return Group(prompt=prompt(0), samples=made)


def test_failures_above_five_percent_stop_the_run_and_name_the_first():
    stop_if_scoring_is_broken([make_group_with_failures(5, 100)])
    stop_if_scoring_is_broken([make_group_with_failures(0, 3), make_group_with_failures(0, 1)])
    with pytest.raises(TrainingStopped, match=r"service unreachable .6 of 100 samples .* 5%.*resume"):
        stop_if_scoring_is_broken([make_group_with_failures(5, 50), make_group_with_failures(1, 50)])
    with pytest.raises(TrainingStopped, match="1 of 2 samples"):
        stop_if_scoring_is_broken([make_group_with_failures(1, 2)])


def test_collect_looks_at_all_groups_of_the_step_together():
    """One failure in the first round of 4 x 2 is 12%; the refills bring the step's share down to 5%."""
    failing = iter([True])

    def grade(row, answer) -> Outcome:
        return Outcome(failure="died") if next(failing, False) else Outcome(parts={"correct": 1.0})

    groups = producer(grade).collect(4, accept=lambda g: g.prompt.row["n"] >= 6)
    assert len(groups) == 10 and sum(bool(s.failure) for g in groups for s in g.samples) == 1


def test_an_engine_that_loses_a_request_is_reported():
    lossy = engine()
    poll = lossy.poll

    def losing(timeout=0.0):
        lossy.drafts.pop("1/0", None)
        return poll(timeout)

    lossy.poll = losing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="is idle, but 1 of its requests have not ended"):
        producer(engine=lossy).roll_out([prompt(0), prompt(1)])


def test_the_order_of_prompts_changes_no_sample():
    prompts = [prompt(n) for n in range(6)]
    expected = {g.prompt.id: g for g in producer(group_size=3).roll_out(prompts)}
    for g in producer(group_size=3).roll_out(random.Random(0).sample(prompts, 6)):
        assert g == expected[g.prompt.id]
