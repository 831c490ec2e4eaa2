"""Reward functions of TRL, verl and Cohort in a task class: how each is called, and what its results become."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cohort.errors import TaskError
from cohort.registry import Registry
from cohort.tasks import base
from cohort.tasks.base import make_plain_answer, task
from cohort.tasks.grading import grade, grade_group, grade_group_async, has_async_grader, scores_groups
from cohort.tasks.parts import NO_PART
from cohort.tasks.rows import Rows
from cohort.types import Answer, Outcome, Row

ROW: Row = {"id": "r", "solution": "4", "level": 2, "prompt": "2+2?"}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the tasks of these tests out of the real registry."""
    monkeypatch.setattr(base, "TASKS", Registry("task"))


def make(*functions: Any, prompt: Any = MESSAGES, **attributes: Any) -> Any:
    """Returns a task whose rewards are the functions. `prompt` is that of every row."""
    methods = {"rows": lambda self, split: iter([ROW]), "prompt": lambda self, row: prompt}
    return task("rewarded")(type("Rewarded", (), {**methods, "rewards": list(functions), **attributes}))()


def answer(text: str, tokens: list[int] | None = None, full: str | None = None) -> Answer:
    plain = make_plain_answer(text)
    known = {name: getattr(plain, name) for name in ("finish", "conversation")}
    ids = tokens or []
    return Answer(text=text, full=text if full is None else full, num_tokens=len(ids), tokens=ids, **known)


def score(made: Any, *answers: Answer, row: Row = ROW) -> list[dict[str, float]]:
    return [outcome.parts for outcome in score_outcomes(made, *answers, row=row)]


def score_outcomes(made: Any, *answers: Answer, row: Row = ROW) -> list[Outcome]:
    """Scores a group as workers do: with a coroutine in an event loop, or directly."""
    if has_async_grader(made):
        return asyncio.run(grade_group_async(made, row, answers))
    return grade_group(made, row, answers)


ANSWERS = (answer("4", [7, 8]), answer("five", [9]), answer("", []))


# ---- styles


def test_a_function_of_trl_is_called_once_per_group_with_columns_and_ids() -> None:
    seen: list[dict[str, Any]] = []

    def right(prompts: Any, completions: Any, completion_ids: Any, solution: Any, **more: Any) -> list[float]:
        seen.append(
            {"prompts": prompts, "completions": completions, "ids": completion_ids, "solution": solution, **more}
        )
        return [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]

    assert score(make(right), *ANSWERS) == [{"right": 1.0}, {"right": 0.0}, {"right": 0.0}]
    [call] = seen
    assert call["prompts"] == [MESSAGES] * 3 and call["solution"] == ["4"] * 3 and call["level"] == [2] * 3
    assert call["completions"] == [[{"role": "assistant", "content": a.full}] for a in ANSWERS]
    assert call["ids"] == [[7, 8], [9], []] and "prompt" not in call


def test_a_function_gets_only_what_it_names() -> None:
    def brief(completions: list[Any]) -> list[float]:
        return [-float(len(c[0]["content"])) for c in completions]

    assert score(make(brief), *ANSWERS) == [{"brief": -1.0}, {"brief": -4.0}, {"brief": 0.0}]


@pytest.mark.parametrize("name", ["completion_ids", "prompts", "solution", "level"])
def test_a_function_of_trl_may_name_any_argument_and_take_the_rest(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def named({name}, **kwargs): return [float(len(str(x))) for x in {name}]", space)
    assert len(score(make(space["named"]), *ANSWERS)) == 3


def test_a_function_that_takes_everything_is_trls() -> None:
    def everything(**kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in kwargs["completion_ids"]]

    assert score(make(everything), *ANSWERS) == [{"everything": 2.0}, {"everything": 1.0}, {"everything": 0.0}]


def test_prompts_and_completions_are_texts_where_the_prompt_is_one() -> None:
    seen: list[Any] = []

    def watch(prompts: Any, completions: Any, **_: Any) -> list[int]:
        seen.append((prompts, completions))
        return [1] * len(prompts)

    score(make(watch, prompt="2+2?"), *ANSWERS)
    score(make(watch, prompt="2+2?", completions="messages"), *ANSWERS)
    score(make(watch, completions="text"), *ANSWERS)
    texts, messages = ["4", "five", ""], [[{"role": "assistant", "content": a.text}] for a in ANSWERS]
    assert seen[0] == (["2+2?"] * 3, texts)
    assert seen[1] == ([[{"role": "user", "content": "2+2?"}]] * 3, messages)
    assert seen[2] == (["Be brief.\n2+2?"] * 3, texts)
    with pytest.raises(TaskError, match="completions is 'html'; it must be"):
        make(watch, completions="html")


def test_a_begun_message_is_part_of_the_completion_as_in_trl() -> None:
    seen: list[Any] = []

    def watch(prompts: Any, completions: Any, **_: Any) -> list[int]:
        seen.append((prompts[0], completions[0]))
        return [1]

    score(make(watch, prompt=[*MESSAGES, {"role": "assistant", "content": "<think>"}]), answer("4", full="<think>4"))
    assert seen == [(MESSAGES, [{"role": "assistant", "content": "<think>4"}])]


def test_functions_of_verl_and_cohort_are_called_per_answer() -> None:
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)

    def own(row: Row, answer: Answer) -> float:
        return len(answer.tokens) + row["level"]

    made = make(compute_score, own)
    truth = {"ground_truth": "4"}
    row = {
        "id": "r",
        "level": 2,
        "data_source": "sums",
        "reward_model": {"style": "rule", **truth},
        "extra_info": {"i": 1},
    }
    expected = [
        {"compute_score": 1.0, "own": 4.0},
        {"compute_score": 0.0, "own": 3.0},
        {"compute_score": 0.0, "own": 2.0},
    ]
    assert score(made, *ANSWERS, row=row) == expected
    assert seen == [("sums", text, "4", {"i": 1}) for text in ("4", "five", "")]
    assert score(made, *ANSWERS, row={"id": "r", "level": 2, **truth}) == expected and seen[-1] == ("", "", "4", None)


def test_all_styles_may_be_mixed_and_async() -> None:
    waiting: list[str] = []
    both = asyncio.Event()

    async def meet(name: str) -> None:
        waiting.append(name)
        if len(waiting) == 2 * len(ANSWERS) + 1:
            both.set()
        await both.wait()

    async def judge(completions: list[Any], **_: Any) -> list[float]:
        await meet("trl")
        return [0.5] * len(completions)

    async def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
        await meet("verl")
        return {"score": 0.25, "why": solution_str}

    async def own(row: Row, answer: Answer) -> float:
        await meet("cohort")
        return 1.0

    def plain(row: Row, answer: Answer) -> bool:
        return True

    made = make(judge, compute_score, own, plain)
    assert made.service is True and inspect.iscoroutinefunction(type(made).score_group)
    assert score(made, *ANSWERS) == [{"judge": 0.5, "compute_score": 0.25, "own": 1.0, "plain": 1.0}] * 3


def test_functions_that_are_no_coroutines_run_outside_of_an_event_loop() -> None:
    def starts_a_loop(completions: list[Any], **_: Any) -> list[float]:
        async def ask() -> float:
            return 0.5

        return [asyncio.run(ask()) for _ in completions]

    made = make(starts_a_loop)
    assert made.service is False and score(made, *ANSWERS) == [{"starts_a_loop": 0.5}] * 3
    assert grade(made, ROW, ANSWERS[0]).parts == {"starts_a_loop": 0.5}


def test_a_plain_function_may_return_a_coroutine() -> None:
    async def ask(num: int) -> list[float]:
        return [0.5] * num

    made = make(lambda completions, **_: ask(len(completions)))
    assert score(made, *ANSWERS) == [{"reward_1": 0.5}] * 3


# ---- names


class Graded:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return [self.factor] * len(completions)

    def method(self, completions: list[Any], **_: Any) -> list[float]:
        return [2 * self.factor] * len(completions)


class AsyncGraded(Graded):
    async def __call__(self, completions: list[Any], **_: Any) -> list[float]:  # type: ignore[override]
        return [self.factor] * len(completions)


def scaled(completions: list[Any], factor: float, **_: Any) -> list[float]:
    return [factor] * len(completions)


def test_every_callable_has_a_name() -> None:
    functions = [
        partial(scaled, factor=0.5),
        Graded(3.0),
        Graded(4.0).method,
        lambda completions: [1.0] * len(completions),
        lambda completions: [2.0] * len(completions),
        AsyncGraded(5.0),
    ]
    made = make(*functions)
    names = ("scaled", "Graded", "method", "reward_4", "reward_5", "AsyncGraded")
    assert made.parts == names and made.service and scores_groups(made) and made.accuracy is None
    assert score(made, *ANSWERS) == [dict(zip(names, (0.5, 3.0, 8.0, 1.0, 2.0, 5.0), strict=True))] * 3


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([scaled, partial(scaled, factor=1.0)], "two functions named scaled; give each its own name"),
        ([Graded(1.0), Graded(2.0)], "two functions named Graded"),
        ([], "rewards must be a list of functions"),
        (scaled, "rewards must be a list of functions"),
        (["my/reward-model"], "'my/reward-model', which is no function; .* Reward models are called in a function"),
        ([lambda: 1.0], r"reward_1 takes \(nothing\), which fits no kind"),
        ([lambda answer: 1.0], r"reward_1 takes \(answer\), which fits no kind"),
        ([lambda answer, row: 1.0], r"takes \(answer, row\), which fits no kind"),
        ([print], "reward function print takes .* fits no kind"),
    ],
)
def test_what_cannot_be_called_is_refused_when_the_class_is_defined(rewards: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        make(rewards=rewards)


def test_a_class_that_also_scores_is_refused_and_may_be_registered_twice() -> None:
    for method in ("score", "score_group"):
        with pytest.raises(TaskError, match=f"rewards and a method {method}, which both score; keep one"):
            make(scaled, **{method: lambda self, row, answers: 1.0})
    made = make(Graded(1.0))
    task("rewarded")(type(made))
    assert score(made, *ANSWERS) == [{"Graded": 1.0}] * 3


def test_one_function_may_be_the_accuracy() -> None:
    def right(completions: list[Any], **_: Any) -> list[float]:
        return [float(c[0]["content"] == "4") for c in completions]

    made = make(right, Graded(0.5), accuracy="right")
    assert made.accuracy == "right" and score(made, *ANSWERS)[0] == {"right": 1.0, "Graded": 0.5}
    with pytest.raises(
        TaskError, match=r"Graded returned 0\.5, but accuracy in the class names it: an accuracy is 0 or"
    ):
        score(make(Graded(0.5), accuracy="Graded"), *ANSWERS)


def test_rows_without_a_class_are_told_of_the_flag(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def half(completions, **kwargs):\n    return [0.5 for _ in completions]\n")
    made = Rows(rewards=(f"{tmp_path}/f.py:half",), accuracy_part="half")
    with pytest.raises(TaskError) as raised:
        score(made, *ANSWERS)
    assert "half returned 0.5, but --task.accuracy-part names it" in str(raised.value)
    assert "class" not in str(raised.value) and "method" not in str(raised.value)


def test_a_column_that_a_function_needs_is_named_before_it_is_called(tmp_path: Path) -> None:
    def needs(completions: list[Any], truth: list[str], level: list[int], extra: int = 0) -> list[float]:
        raise AssertionError("it was called")

    with pytest.raises(TaskError, match='needs needs the column "truth"; the row has id, solution, level, prompt'):
        score(make(needs), *ANSWERS)
    (tmp_path / "f.py").write_text("def f(completions, id, truth, **kwargs):\n    return [0.0 for _ in completions]\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    made = Rows(data=str(tmp_path / "rows.jsonl"), rewards=(f"{tmp_path}/f.py:f",))
    with pytest.raises(TaskError, match=r'rows.jsonl, line 1 has no column "truth"; it has \[.*--task.columns truth='):
        list(made.rows("train"))


# ---- results


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, True],
        (1.0, 0.5, 1.0),
        np.array([1.0, 0.5, 1.0]),
        np.array([1.0, 0.5, 1.0], dtype=np.float32),
        torch.tensor([1.0, 0.5, 1.0]),
        [np.float32(1.0), np.float64(0.5), np.bool_(True)],
        [torch.tensor(1.0), torch.tensor(0.5), torch.tensor(1)],
        {1.0: "a", 0.5: "b"}.keys() | {2.0},
    ],
)
def test_numbers_come_in_many_kinds(returned: Any) -> None:
    found = [parts["reward_1"] for parts in score(make(lambda completions: returned), *ANSWERS)]
    assert all(type(value) is float for value in found)
    assert found == [1.0, 0.5, 1.0] or set(found) == {1.0, 0.5, 2.0}


def test_any_iterator_will_do() -> None:
    made = make(lambda completions: (len(c[0]["content"]) for c in completions))
    assert [parts["reward_1"] for parts in score(made, *ANSWERS)] == [1.0, 4.0, 0.0]


@pytest.mark.parametrize("nothing", [None, float("nan"), np.float32("nan"), torch.tensor(float("nan"))])
def test_none_and_nan_of_trl_mean_that_a_function_does_not_apply(nothing: Any) -> None:
    made = make(lambda completions: [nothing, 0.5, nothing], Graded(2.0))
    assert score(made, *ANSWERS) == [{"Graded": 2.0}, {"reward_1": 0.5, "Graded": 2.0}, {"Graded": 2.0}]
    alone = score_outcomes(make(lambda completions: [nothing, 0.5, 0.0]), *ANSWERS)
    assert [o.failure for o in alone] == [NO_PART, "", ""] and alone[0].parts == {}


@pytest.mark.parametrize("made_by", ["verl", "cohort"])
def test_nan_of_other_functions_is_an_error(made_by: str) -> None:
    nan = float("nan")
    functions = {
        "verl": lambda solution_str, ground_truth: nan,
        "cohort": lambda row, answer: nan,
    }
    with pytest.raises(TaskError, match=r"returned 'nan' .* return a finite number"):
        score(make(functions[made_by]), *ANSWERS)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0, 2.0], "returned 2 numbers for 3 answers"),
        ([1.0] * 4, "returned 4 numbers for 3 answers"),
        ([], "returned 0 numbers for 3 answers"),
        (None, "returned a NoneType; return a list of numbers"),
        (1.0, "returned a float; return a list of numbers"),
        (torch.tensor(1.0), "returned a Tensor"),
        ("abc", "returned a str"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "returned a dict"),
        ([1.0, "high", 1.0], "reward_1 returned 'high' for an answer"),
        ([1.0, float("inf"), 1.0], "returned 'inf'"),
        ([1.0, 10**400, 1.0], "return a finite number"),
        (torch.ones(3, 2), "return a finite number"),
    ],
)
def test_what_are_no_numbers_is_an_error(returned: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        score(make(lambda completions: returned), *ANSWERS)


def test_a_dict_of_verl_has_a_score_and_notes() -> None:
    made = make(lambda solution_str, ground_truth: {"score": 1.0, "acc": True, "pred": solution_str})
    outcomes = score_outcomes(made, *ANSWERS)
    assert [o.parts for o in outcomes] == [{"reward_1": 1.0}] * 3
    assert [o.reason for o in outcomes] == ["acc True; pred 4", "acc True; pred five", "acc True; pred "]
    with pytest.raises(TaskError, match=r"reward_1 returned .* return a finite number"):
        score(make(lambda solution_str, ground_truth: {"acc": 1.0}), *ANSWERS)


def test_what_functions_log_is_the_reason() -> None:
    def logs(completions: list[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("share", 0.5)
        log_extra("said", [c[0]["content"] for c in completions])
        log_extra("short", ["only one"])
        log_extra("long", ["x" * 1000] * 3)
        return [1.0] * len(completions)

    reasons = [o.reason for o in score_outcomes(make(logs), *ANSWERS)]
    assert reasons[0].startswith("share 0.5; said 4; short only one; long xxx") and len(reasons[0]) < 300
    assert reasons[1].startswith("share 0.5; said five; long xxx")


def test_a_function_that_reads_the_state_of_a_trainer_is_told_why_it_cannot() -> None:
    def shaped(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        return [trainer_state.global_step / 100] * len(completions)

    with pytest.raises(
        AttributeError, match=r"reads trainer_state.global_step, which Cohort does not have: a score may"
    ):
        score(make(shaped), *ANSWERS)
    # One that is only given it is scored.
    assert score(make(lambda completions, trainer_state: [1.0] * len(completions)), *ANSWERS) == [{"reward_1": 1.0}] * 3


def test_exceptions_of_functions_are_not_scores() -> None:
    def broken(completions: list[Any], **_: Any) -> list[float]:
        raise ConnectionError("down")

    async def broken_later(completions: list[Any], **_: Any) -> list[float]:
        raise ConnectionError("down")

    for function in (broken, broken_later):
        with pytest.raises(ConnectionError, match="down"):
            score(make(Graded(1.0), function), *ANSWERS)
    with pytest.raises(TaskError, match='scaled needs the column "factor"'):
        score(make(scaled), *ANSWERS)


def test_an_answer_alone_is_a_group_of_one() -> None:
    made = make(lambda completions: [float(len(completions))])
    assert grade(made, ROW, ANSWERS[0]).parts == {"reward_1": 1.0}
