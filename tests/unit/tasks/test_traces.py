"""The traces the bundled model is taught on: right where they say so, in their shares, of no other split."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import grade, plain_answer
from cohort.tasks.countdown import Countdown
from cohort.tasks.expression import evaluate
from cohort.tasks.splits import split_of
from cohort.tasks.traces import encode, mixture, scratchpad, search, styles
from cohort.text import Tokenizer
from cohort.types import Provenance
from scripts.tiny.train import SOURCE

MIX = styles.Mix()
NUM = 3000


@cache
def rows() -> mixture.Rows:
    return mixture.load(400)


@cache
def many() -> tuple[styles.Trace, ...]:
    return tuple(mixture.trace(rows(), "test", i, MIX) for i in range(NUM))


@cache
def tokenizer() -> Tokenizer:
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


def test_search_finds_what_it_says() -> None:
    task = Countdown()
    for numbers in ([3, 7, 25], [8, 2, 4, 50]):
        for way in search.tries(numbers):
            row = {"id": "x", "nums": numbers, "target": way.value}
            verdict = grade(task, row, plain_answer(f"<answer>{way.expression}</answer>"))
            assert verdict.parts["correct"] == 1, way


def test_the_graders_agree_with_what_a_trace_says_of_itself() -> None:
    sums, numbers = Arithmetic(), Countdown()
    for trace in many():
        text = trace.messages[-1]["content"]
        question = next(m["content"] for m in trace.messages if m["role"] == "user")
        if trace.task == "countdown":
            target, given = question.removeprefix("Make ").removesuffix(".").split(" from ")
            row = {"id": "x", "nums": [int(n) for n in given.split(", ")], "target": int(target)}
            right = grade(numbers, row, plain_answer(text)).parts["correct"]
        else:
            answer = scratchpad.solve(question)[1]
            right = grade(sums, {"id": "x", "answer": answer}, plain_answer(text)).parts["correct"]
        assert right == trace.right, trace
        if trace.style in ("think", "tool"):
            assert trace.right
        if trace.style == "broken":
            assert not trace.right


def test_styles_come_in_their_shares() -> None:
    sums = [t for t in many() if t.task == "arithmetic"]
    styles = Counter(t.style for t in sums)
    spread = 3 * (0.25 / len(sums)) ** 0.5
    assert abs(len(sums) / NUM - mixture.ARITHMETIC) < 0.03
    assert abs(styles["think"] / len(sums) - MIX.think) < spread
    assert abs(styles["broken"] / len(sums) - MIX.broken) < spread
    guesses = [t.right for t in sums if t.style == "direct"]
    assert 0.15 < sum(guesses) / len(guesses) < 0.35  # answers at once are often wrong, and not always


def test_a_slip_is_wrong() -> None:
    rng = random.Random(1)
    assert all(styles.slip(rng, value) != value for value in (0, 7, -3, 10, 9999) for _ in range(200))


def test_the_seed_decides() -> None:
    again = [mixture.trace(mixture.load(400), "test", i, MIX) for i in range(50)]
    other = [mixture.trace(rows(), "other", i, MIX) for i in range(50)]
    assert again == list(many()[:50])
    assert other != again


def test_no_problem_of_train_or_test_is_taught() -> None:
    held = rows()
    for row in [*held.pairs, *held.triples, *held.spaced, *held.long]:
        assert split_of(map(int, scratchpad.TOKEN.findall(row["expression"])[0::2])) == "traces"
    assert all(split_of(row["nums"]) == "traces" for row in held.numbers)
    taught = {row["expression"].replace(" ", "") for row in [*held.pairs, *held.triples, *held.spaced]}
    asked = {r["expression"] for s in ("train", "test") for r in Arithmetic(train_size=3000).rows(s)}
    assert not taught & asked


def test_targets_are_what_the_assistant_says() -> None:
    for trace in many()[:300]:
        tokens, provenance = encode.encode(tokenizer(), trace)
        target = [t for t, p in zip(tokens, provenance, strict=True) if p == Provenance.TARGET]
        said = "".join(encode.spoken(m) + "<|im_end|>" for m in trace.messages if m["role"] == "assistant")
        assert tokenizer().decode(target, skip_special=False) == said
        between = [t for t, p in zip(tokens, provenance, strict=True) if p == Provenance.ENVIRONMENT]
        told = [m["content"] for m in trace.messages if m["role"] == "tool"]
        assert bool(between) == bool(told)
        assert all(text in tokenizer().decode(between) for text in told)


def test_an_example_ends_with_the_end_of_turn() -> None:
    tokens, provenance = encode.encode(tokenizer(), many()[0])
    assert tokens[-1] == tokenizer().end_of_turn == tokenizer().token_id("<|im_end|>")
    assert provenance[-1] == Provenance.TARGET
