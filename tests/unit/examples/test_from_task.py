"""The right answers of a task as conversations, which its own grader finds right."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from cohort.errors import ConfigError, TaskError
from cohort.examples.from_task import make_task_conversations
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import TASKS, load_rows, make_plain_answer, task
from cohort.tasks.countdown import Countdown
from cohort.tasks.grading import grade


@pytest.mark.parametrize("made", [Arithmetic(), Countdown(), Countdown(instructions=True, think=True)])
def test_every_conversation_is_the_tasks_prompt_with_a_right_answer(made: Any) -> None:
    rows = list(islice(load_rows(made, "train"), 20))
    for row, talk in zip(rows, make_task_conversations(made, rows), strict=True):
        prompt = made.prompt(row)
        assert talk.messages[: len(prompt) - (prompt[-1]["role"] == "assistant")] == [
            m for m in prompt if m["role"] != "assistant"
        ]
        answer = talk.messages[-1]
        assert answer["role"] == "assistant" and [m["role"] for m in talk.messages].count("assistant") == 1
        if prompt[-1]["role"] == "assistant":
            assert answer["content"].startswith(prompt[-1]["content"])
        assert grade(made, row, make_plain_answer(answer["content"])).parts["correct"] == 1
        assert row["id"] in talk.place


def test_a_task_without_right_answers_or_with_empty_ones_is_refused() -> None:
    class Base:
        def rows(self, split: str) -> Any:
            yield {"id": "7"}

        def prompt(self, row: Any) -> Any:
            return [{"role": "user", "content": "q"}]

        def score(self, row: Any, answer: Any) -> Any:
            return {"correct": 0.0}

    try:
        silent = task("silent-one")(type("Silent", (Base,), {}))
        empty = task("empty-one")(type("Empty", (Base,), {"gold": lambda self, row: " "}))
        with pytest.raises(ConfigError, match="the task silent-one has no method gold"):
            list(make_task_conversations(silent(), [{"id": "7"}]))  # type: ignore[arg-type]
        with pytest.raises(TaskError, match=r'task "empty-one", row "7": its method `gold` returned an empty answer'):
            list(make_task_conversations(empty(), [{"id": "7"}]))  # type: ignore[arg-type]
    finally:
        TASKS.pop("silent-one", None)
        TASKS.pop("empty-one", None)
