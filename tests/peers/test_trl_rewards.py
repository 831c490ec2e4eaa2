"""Reward functions of TRL 1.16.0 and verl 0.9.1, unchanged, through Cohort's path: the scores are theirs.

TRL's numbers come from its own `GRPOTrainer._calculate_rewards`, called on an object that has the attributes it reads.
It keeps them in float32; Cohort's are rounded to it before they are compared. Where the package math_verify is not
installed, TRL's accuracy rewards raise on both sides; so does verl's prime_math without pylatexenc.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import inspect
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cohort.registry import Registry
from cohort.tasks import base
from cohort.tasks.base import task
from cohort.tasks.grading import grade_group, grade_group_async, has_async_grader
from cohort.types import Answer, Outcome, Row

pytestmark = pytest.mark.peers
try:
    importlib.import_module("trl.rewards")
    importlib.metadata.distribution("verl")
# PackageNotFoundError of importlib.metadata is an ImportError too.
except ImportError:
    if os.environ.get("COHORT_REQUIRE_PEERS") == "1":
        raise
    pytest.skip("peers have their own environment: make test-peers", allow_module_level=True)

TEXTS = [
    r"<think>\nOne third.\n</think>\nIt is \boxed{\frac{1}{3}}.",
    r"<think>no end \boxed{\frac{1}{3}}",
    "",
    r"The answer is \boxed{1/2}. " * 3,
    "<think>a</think>\n<answer>7</answer>",
    "<think><think>twice</think>",
    "Ünïcödé 密钥 7",
    "#### 7",
]
IDS = [[1, 2, 3], list(range(90)), [], [5] * 12, [1, 2, 3, 1, 2, 3, 1, 2, 3], [4] * 100, [9, 9], [1] * 130]
ROWS: list[Row] = [
    {"id": "a", "solution": r"\frac{1}{3}", "ground_truth": "7", "task": "math", "numbers": [1, 2], "level": 3},
    {"id": "b", "solution": "1/2", "ground_truth": "0.5", "task": "code", "numbers": [], "level": 0},
    {"id": "c", "solution": "no formula", "ground_truth": "", "task": "other", "numbers": [7], "level": -1},
]
MESSAGES = [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is it?"}]
PROMPTS: dict[str, Any] = {"messages": MESSAGES, "text": "What is it?"}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the tasks of these tests out of the real registry."""
    monkeypatch.setattr(base, "TASKS", Registry("task"))


class StandInTrainer:
    """Has what TRL's `_calculate_rewards` reads of a trainer, for a list of functions."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        from trl.trainer.utils import get_callable_name

        self.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
        self.reward_funcs = functions
        self.reward_func_names = [get_callable_name(f) for f in functions]
        self.reward_processing_classes = [None] * len(functions)
        self.environments = None
        self.state = SimpleNamespace(global_step=0)
        self.args = SimpleNamespace(report_to=[])
        self.model = SimpleNamespace(training=True)
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}
        self.async_loop = asyncio.new_event_loop()
        threading.Thread(target=self.async_loop.run_forever, daemon=True).start()

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, value))

    def _log_completion_extra(self, column: str, values: list[Any]) -> None:
        self.extra[column] = list(values)

    def score(self, row: Row, prompt: Any) -> torch.Tensor:
        """Returns TRL's rewards of all texts: one row per completion, one column per function."""
        from trl import GRPOTrainer

        completions: list[Any] = list(TEXTS)
        if not isinstance(prompt, str):
            completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
        inputs = [{"prompt": prompt, **row}] * len(TEXTS)
        try:
            return GRPOTrainer._calculate_rewards(self, inputs, [prompt] * len(TEXTS), completions, IDS)
        finally:
            self.async_loop.call_soon_threadsafe(self.async_loop.stop)


def make_task(functions: list[Callable[..., Any]], prompt: Any) -> Any:
    """Returns a task class with the functions as its `rewards`, made."""
    methods = {"rows": lambda self, split: iter(ROWS), "prompt": lambda self, row: prompt, "rewards": functions}
    return task("rewarded")(type("Rewarded", (), methods))()


def score_here(functions: list[Callable[..., Any]], row: Row, prompt: Any) -> list[Outcome]:
    """Returns Cohort's outcomes of the same completions."""
    made = make_task(functions, prompt)
    answers = [
        Answer(text=text, full=text, finish="stop", num_tokens=len(ids), conversation=[], tokens=ids)
        for text, ids in zip(TEXTS, IDS, strict=True)
    ]
    if has_async_grader(made):
        return asyncio.run(grade_group_async(made, row, answers))
    return grade_group(made, row, answers)


def assert_same(functions: list[Callable[..., Any]], row: Row, prompt: Any) -> torch.Tensor:
    """Compares Cohort's parts with TRL's rewards, which are returned; NaN = the function does not apply."""
    trainer = StandInTrainer(functions)
    theirs = trainer.score(row, prompt)
    outcomes = score_here(functions, row, prompt)
    names = list(make_task(functions, prompt).parts)
    # Only a lambda has no name on either side.
    assert all(our == their or their == "<lambda>" for our, their in zip(names, trainer.reward_func_names, strict=True))
    ours = torch.tensor([[o.parts.get(name, math.nan) for name in names] for o in outcomes], dtype=torch.float32)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert [bool(o.failure) for o in outcomes] == theirs.isnan().all(1).tolist()
    return theirs


# ---- functions that come with TRL


def test_every_function_of_trl_is_tried_here() -> None:
    names = set(dir(importlib.import_module("trl.rewards"))) - {"accuracy_rewards", "format_rewards", "other_rewards"}
    names = {name for name in names if not name.startswith("_")}
    assert names == {
        *("accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward"),
        *("think_format_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"),
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_the_functions_that_need_no_package(row: Row) -> None:
    from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

    functions = [think_format_reward, get_repetition_penalty_reward(), get_soft_overlong_punishment(100, 20)]
    theirs = assert_same(functions, row, MESSAGES)
    assert len(set(theirs[:, 0].tolist())) == 2 and len(set(theirs[:, 2].tolist())) >= 3 and theirs[:, 1].min() < 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_the_functions_that_need_math_verify(row: Row) -> None:
    from trl.rewards import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward

    functions = [accuracy_reward, reasoning_accuracy_reward, get_cosine_scaled_reward(max_len=100)]
    theirs = assert_same(functions, row, MESSAGES)
    # The first solution is a formula that some of the texts have.
    assert row["id"] != "a" or all(len(set(column.tolist())) >= 2 for column in theirs.T)


# ---- functions as TRL's documentation writes them


def reward_len(completions: list[Any], **kwargs: Any) -> list[float]:
    return [-abs(20 - len(c if isinstance(c, str) else c[0]["content"])) for c in completions]


def reward_ids(completions: list[Any], completion_ids: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def format_reward_func(completions: list[Any], **kwargs: Any) -> list[float]:
    pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content, re.DOTALL) else 0.0 for content in contents]


def ground_truth_reward(completions: list[Any], ground_truth: list[str], **kwargs: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [1.0 if truth and truth in text else 0.0 for text, truth in zip(texts, ground_truth, strict=True)]


def math_reward_func(prompts: list[Any], completions: list[Any], task: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0 if kind == "math" else None for kind in task]


def coding_reward_func(
    prompts: list[Any], completions: list[Any], task: list[str], **kwargs: Any
) -> list[float | None]:
    return [0.5 if kind == "code" else None for kind in task]


async def async_reward(
    prompts: list[Any], completions: list[Any], completion_ids: list[Any], **kwargs: Any
) -> list[float]:
    await asyncio.sleep(0)
    return [len(ids) / 7 for ids in completion_ids]


class Judge:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, prompts: list[Any], completions: list[Any], level: list[int], **kwargs: Any) -> list[float]:
        return [self.factor * number for number in level]


class AsyncJudge(Judge):
    async def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:  # type: ignore[override]
        return [self.factor] * len(completions)


def scaled_reward(completions: list[Any], factor: float, **kwargs: Any) -> torch.Tensor:
    return torch.full((len(completions),), factor)


def logging_reward(
    completions: list[Any], solution: list[str], log_extra: Any = None, log_metric: Any = None, **kwargs: Any
) -> list[float]:
    if log_extra:
        log_extra("solution", list(solution))
    if log_metric:
        log_metric("mean", 0.25)
    return [0.25] * len(completions)


def list_column(completions: list[Any], numbers: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ns)) for ns in numbers]


def nothing_applies(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None] * len(completions)


BOTH_KINDS: list[Callable[..., Any]] = [
    *(reward_len, reward_ids, ground_truth_reward, math_reward_func, coding_reward_func, async_reward),
    *(Judge(0.5), AsyncJudge(2.0), partial(scaled_reward, factor=0.75), logging_reward, list_column, nothing_applies),
    lambda completions, **kwargs: [1.0] * len(completions),
]


@pytest.mark.parametrize("kind", sorted(PROMPTS))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
@pytest.mark.parametrize("function", BOTH_KINDS, ids=lambda f: type(f).__name__ + getattr(f, "__name__", ""))
def test_a_function_of_the_documentation(function: Callable[..., Any], row: Row, kind: str) -> None:
    assert_same([function], row, PROMPTS[kind])


@pytest.mark.parametrize("kind", sorted(PROMPTS))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_all_functions_together(row: Row, kind: str) -> None:
    functions = [*BOTH_KINDS, format_reward_func] if kind == "messages" else BOTH_KINDS
    assert_same(functions, row, PROMPTS[kind])


@pytest.mark.parametrize("num", [0, 1, 9])
def test_a_wrong_number_of_rewards_is_refused_on_both_sides(num: int) -> None:
    from cohort.errors import TaskError

    def miscounts(completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0] * num

    with pytest.raises(ValueError, match=f"returned {num} rewards, but 8 were expected"):
        StandInTrainer([miscounts]).score(ROWS[0], MESSAGES)
    with pytest.raises(TaskError, match=f"miscounts returned {num} numbers for 8 answers"):
        score_here([miscounts], ROWS[0], MESSAGES)


def test_what_is_logged_reaches_both() -> None:
    trainer = StandInTrainer([logging_reward])
    trainer.score(ROWS[0], MESSAGES)
    assert trainer.metrics == [("mean", 0.25)] and trainer.extra == {"solution": [ROWS[0]["solution"]] * 8}
    reasons = {o.reason for o in score_here([logging_reward], ROWS[0], MESSAGES)}
    assert reasons == {rf"solution {ROWS[0]['solution']}; mean 0.25"}


# ---- verl


@pytest.fixture(autouse=True, scope="module")
def without_ray() -> Iterator[None]:
    """Gives `verl` and `verl.utils` an empty `__init__`: theirs import Ray, which no function here touches."""
    root = Path(str(importlib.metadata.distribution("verl").locate_file("verl")))
    assert importlib.metadata.version("verl") == "0.9.1"
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "verl"}
    for name in before:
        del sys.modules[name]
    for name, folder in (("verl", root), ("verl.utils", root / "utils")):
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.update(before)


def find_verl_scores() -> dict[str, Callable[..., Any]]:
    """Returns verl's functions that take a solution_str, by module; those whose packages are missing are left out."""
    found: dict[str, Callable[..., Any]] = {}
    for name in ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em"):
        function = importlib.import_module(f"verl.utils.reward_score.{name}").compute_score
        assert "solution_str" in inspect.signature(function).parameters
        found[name] = function
    return found


VERL_ROWS: list[Row] = [
    {"id": "gsm8k", "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "7"}},
    {"id": "math", "data_source": "lighteval/MATH", "reward_model": {"ground_truth": r"\frac{1}{3}"}, "extra_info": {}},
    {"id": "dapo", "data_source": "math_dapo", "ground_truth": "1/2"},
    {"id": "qa", "data_source": "searchR1_nq", "ground_truth": {"target": ["7", "seven"]}},
    {"id": "prime", "data_source": "numina_amc_aime", "ground_truth": "1/2"},
]


def get_truth(row: Row) -> Any:
    return row["ground_truth"] if "ground_truth" in row else row["reward_model"]["ground_truth"]


def read(result: Any) -> float:
    """Returns the score in what verl's function returned, as verl's reward manager reads it."""
    return float(result["score"] if isinstance(result, dict) else result)


@pytest.mark.parametrize("row", VERL_ROWS[:4], ids=lambda row: row["id"])
def test_scores_of_verl_are_its_own(row: Row) -> None:
    names = {"gsm8k": "gsm8k", "math": "math_reward", "dapo": "math_dapo", "qa": "search_r1_like_qa_em"}
    function = find_verl_scores()[names[row["id"]]]
    theirs = [read(function(solution_str=text, ground_truth=get_truth(row))) for text in TEXTS]
    ours = [o.parts["compute_score"] for o in score_here([function], row, MESSAGES)]
    assert ours == theirs and len(set(theirs)) == 2


@pytest.mark.parametrize("row", VERL_ROWS, ids=lambda row: row["id"])
def test_verls_choice_by_data_source_is_its_own(row: Row) -> None:
    from verl.utils.reward_score import default_compute_score

    functions = [default_compute_score]
    theirs = [read(default_compute_score(row["data_source"], text, get_truth(row))) for text in TEXTS]
    outcomes = score_here(functions, row, MESSAGES)
    assert [o.parts["default_compute_score"] for o in outcomes] == theirs and len(set(theirs)) == 2
    if row["id"] == "dapo":
        assert all(o.reason.startswith("acc ") for o in outcomes)
