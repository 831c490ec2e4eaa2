"""The right answers of a task as conversations: its own prompts, each followed by its gold answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cohort.errors import ConfigError, TaskError
from cohort.examples.rows import Conversation, check_order, hash_question
from cohort.tasks.base import Task
from cohort.tasks.calls import get_gold, make_messages, quote_id
from cohort.types import Message, Row


def make_task_conversations(task: Task, rows: Iterable[Row]) -> Iterator[Conversation]:
    """Yields a conversation per row of a task: the prompt, and the answer that the task's method `gold` gives.

    Raises ConfigError for a task without such a method, and TaskError for an empty answer or a prompt out of order.
    """
    for row in rows:
        place = f'task "{task.name}", row {quote_id(row["id"])}'
        answer = get_gold(task, row)
        if answer is None:
            raise ConfigError(
                f"the task {task.name} has no method gold, so there are no right answers to imitate. Add it to the "
                "task, or set --data conversations with answers of your own."
            )
        if not answer.strip():
            raise TaskError(f"{place}: its method `gold` returned an empty answer; return a right one")
        messages = _add_answer(make_messages(task, row), answer)
        try:
            check_order(messages)
        except ValueError as error:
            raise TaskError(f"{place}: {error}; correct the task's method `prompt`") from error
        yield Conversation(messages=messages, place=place, key=hash_question(messages))


def _add_answer(prompt: list[Message], answer: str) -> list[Message]:
    """Returns the prompt with the answer. It continues a message of the assistant, if the prompt ends with one."""
    last = prompt[-1]
    if last["role"] != "assistant":
        return [*prompt, {"role": "assistant", "content": answer}]
    return [*prompt[:-1], {**last, "content": f"{last['content']}{answer}"}]
