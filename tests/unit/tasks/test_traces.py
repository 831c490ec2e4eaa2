"""Traces: they are right where they claim it, come in the shares of the mix, and use only their own split."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import make_plain_answer
from cohort.tasks.countdown import Countdown
from cohort.tasks.expression import evaluate
from cohort.tasks.grading import grade
from cohort.tasks.splits import assign_split
from cohort.tasks.traces import encode, mixture, scratchpad, search, styles
from cohort.text import Tokenizer
from cohort.types import Provenance
from scripts.tiny.train import SOURCE

MIX = styles.Mix()
NUM = 3000


@cache
def load_rows() -> mixture.TraceRows:
    return mixture.load_trace_rows(400)


@cache
def make_traces() -> tuple[styles.Trace, ...]:
    return tuple(mixture.make_trace(load_rows(), "test", i, MIX) for i in range(NUM))


@cache
def load_tokenizer() -> Tokenizer:
    return Tokenizer.load(SOURCE)


@pytest.mark.parametrize(
    ("expression", "steps", "value"),
    [
        ("7*86", ["7*86=602"], 602),
        ("12-45+7", ["12-45=-33", "-33+7=-26"], -26),
        ("50-99*47", ["99*47=3960+693=4653", "50-4653=-4603"], -4603),
        ("40 * 30", ["40*30=1200"], 1200),
        ("12*10*15", ["12*10=120", "120*15=1000+200+500+100=1200+500+100=1700+100=1800"], 1800),
    ],
)
def test_steps_by_hand(expression: str, steps: list[str], value: int) -> None:
    assert scratchpad.solve(expression) == (steps, value)


def test_every_step_holds() -> None:
    rng = random.Random(0)
    for _ in range(500):
        numbers = [rng.randint(0, 99) for _ in range(rng.choice((2, 3)))]
        expression = "".join(f"{n}{rng.choice('+-*')}" for n in numbers)[:-1]
        for step in scratchpad.solve(expression)[0]:
            assert len({evaluate(side).value for side in step.split("=")}) == 1, step


def test_every_attempt_has_the_value_that_it_states() -> None:
    task = Countdown()
    for numbers in ([3, 7, 25], [8, 2, 4, 50]):
        for attempt in search.list_attempts(numbers):
            row = {"id": "x", "nums": numbers, "target": attempt.value}
            verdict = grade(task, row, make_plain_answer(f"<answer>{attempt.expression}</answer>"))
            assert verdict.parts["correct"] == 1, attempt


def test_the_graders_agree_with_the_field_right_of_a_trace() -> None:
    sums, numbers = Arithmetic(), Countdown()
    for trace in make_traces():
        text = trace.messages[-1]["content"]
        question = next(m["content"] for m in trace.messages if m["role"] == "user")
        if trace.task == "countdown":
            target, given = question.removeprefix("Make ").removesuffix(".").split(" from ")
            row = {"id": "x", "nums": [int(n) for n in given.split(", ")], "target": int(target)}
            right = grade(numbers, row, make_plain_answer(text)).parts["correct"]
        else:
            answer = scratchpad.solve(question)[1]
            right = grade(sums, {"id": "x", "answer": answer}, make_plain_answer(text)).parts["correct"]
        assert right == trace.right, trace
        if trace.style in ("think", "tool"):
            assert trace.right
        if trace.style == "broken":
            assert not trace.right


def test_styles_come_in_their_shares() -> None:
    sums = [t for t in make_traces() if t.task == "arithmetic"]
    styles = Counter(t.style for t in sums)
    spread = 3 * (0.25 / len(sums)) ** 0.5
    assert abs(len(sums) / NUM - mixture.ARITHMETIC_SHARE) < 0.03
    assert abs(styles["think"] / len(sums) - MIX.think) < spread
    assert abs(styles["broken"] / len(sums) - MIX.broken) < spread
    guesses = [t.right for t in sums if t.style == "direct"]
    assert 0.15 < sum(guesses) / len(guesses) < 0.35  # direct answers are often wrong, but not always


def test_a_slip_is_wrong() -> None:
    rng = random.Random(1)
    assert all(styles.make_slip(rng, value) != value for value in (0, 7, -3, 10, 9999) for _ in range(200))


def test_the_seed_decides() -> None:
    again = [mixture.make_trace(mixture.load_trace_rows(400), "test", i, MIX) for i in range(50)]
    other = [mixture.make_trace(load_rows(), "other", i, MIX) for i in range(50)]
    assert again == list(make_traces()[:50])
    assert other != again


def test_no_problem_of_train_or_test_is_taught() -> None:
    held = load_rows()
    for row in [*held.pairs, *held.triples, *held.spaced, *held.long]:
        assert assign_split(map(int, scratchpad.TOKEN.findall(row["expression"])[0::2])) == "traces"
    assert all(assign_split(row["nums"]) == "traces" for row in held.numbers)
    taught = {row["expression"].replace(" ", "") for row in [*held.pairs, *held.triples, *held.spaced]}
    asked = {r["expression"] for s in ("train", "test") for r in Arithmetic(train_size=3000).rows(s)}
    assert not taught & asked


def test_targets_are_what_the_assistant_says() -> None:
    for trace in make_traces()[:300]:
        tokens, provenance = encode.encode_trace(load_tokenizer(), trace)
        target = [t for t, p in zip(tokens, provenance, strict=True) if p == Provenance.TARGET]
        said = "".join(encode.write_message(m) + "<|im_end|>" for m in trace.messages if m["role"] == "assistant")
        assert load_tokenizer().decode(target, skip_special=False) == said
        between = [t for t, p in zip(tokens, provenance, strict=True) if p == Provenance.ENVIRONMENT]
        told = [m["content"] for m in trace.messages if m["role"] == "tool"]
        assert bool(between) == bool(told)
        assert all(text in load_tokenizer().decode(between) for text in told)


def test_an_example_ends_with_the_end_of_turn() -> None:
    tokens, provenance = encode.encode_trace(load_tokenizer(), make_traces()[0])
    assert tokens[-1] == load_tokenizer().end_of_turn == load_tokenizer().get_token_id("<|im_end|>")
    assert provenance[-1] == Provenance.TARGET
