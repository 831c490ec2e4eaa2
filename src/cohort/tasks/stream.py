"""The prompts of a run, in an order that is a function of (seed, cursor) and nothing else."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from cohort.errors import ConfigError, TaskError
from cohort.tasks.base import Task, load_rows
from cohort.tasks.draws import permutation
from cohort.types import Message, Prompt, Row


class Rendering(Protocol):
    """Messages as tokens."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def provenance(self) -> list[int]: ...
    @property
    def forced_text(self) -> str: ...


class Renderer(Protocol):
    """The part of a tokenizer that a stream needs."""

    def render(self, messages: list[Message], tools: Any = None) -> Rendering: ...


class TaskStream:
    """Endless prompts: every epoch is a new permutation of the rows, keyed by (seed, task, split, epoch).

    `cursor`, one integer, is the whole state: a stream made with it continues exactly. A prompt over
    `max_prompt_tokens` (0 = no limit) stops the run, or with too_long="skip" is passed over and counted.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Renderer,
        seed: int,
        split: str = "train",
        cursor: int = 0,
        max_prompt_tokens: int = 0,
        too_long: Literal["error", "skip"] = "error",
    ) -> None:
        if cursor < 0:
            raise ValueError(f"cursor {cursor} is negative")
        self.task = task
        self.seed = seed
        self.split = split
        self.cursor = cursor
        self.num_skipped = 0
        self._tokenizer = tokenizer
        self._limit = max_prompt_tokens
        self._too_long = too_long
        self._rows = load_rows(task, split)
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def check(self, num_prompts: int) -> None:
        """Refuse a step that needs more prompts than there are rows: it would train some of them twice."""
        if num_prompts > len(self._rows):
            raise ConfigError(
                f'task "{self.task.name}" has {len(self._rows)} {self.split} rows, '
                f"fewer than batch.prompts = {num_prompts}; lower batch.prompts or add rows"
            )

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts; the cursor moves past them and past what was skipped on the way."""
        prompts: list[Prompt] = []
        skipped_in_a_row = 0
        while len(prompts) < n:
            epoch, place = divmod(self.cursor, len(self._rows))
            prompt = self._render(self._rows[self._permutation(epoch)[place]], epoch)
            self.cursor += 1
            if prompt is not None:
                prompts.append(prompt)
                skipped_in_a_row = 0
                continue
            skipped_in_a_row += 1
            self.num_skipped += 1
            if skipped_in_a_row >= len(self._rows):
                raise TaskError(
                    f'task "{self.task.name}": every {self.split} prompt is longer than '
                    f"{self._limit} tokens; raise the limit or shorten the prompts"
                )
        return prompts

    def held_out(self, n: int = 0, split: str = "test") -> list[Prompt]:
        """The first n prompts of a split in its own order, 0 = all; the cursor stays."""
        rows = self._rows if split == self.split else load_rows(self.task, split)
        if n > len(rows):
            raise ConfigError(
                f'task "{self.task.name}" has {len(rows)} {split} rows, fewer than the {n} that are asked for '
                f"(--eval.problems, --limit); ask for {len(rows)} or less, or 0 for all of them"
            )
        rendered = (self._render(row, visit=0) for row in rows[: n or None])
        prompts = [prompt for prompt in rendered if prompt is not None]
        self.num_skipped += (n or len(rows)) - len(prompts)
        return prompts

    def _permutation(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self._rows), self.seed, self.task.name, self.split, epoch))
        return self._order[1]

    def _render(self, row: Row, visit: int) -> Prompt | None:
        messages = self.task.prompt(row)
        if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
            raise TaskError(
                f'task "{self.task.name}", row "{row["id"]}": prompt must return a list of messages '
                f'like {{"role": "user", "content": "..."}}, not {str(messages)[:60]}'
            )
        rendered = self._tokenizer.render(messages)
        if self._limit and len(rendered.tokens) > self._limit:
            if self._too_long == "skip":
                return None
            raise TaskError(
                f'task "{self.task.name}", row "{row["id"]}": the prompt has {len(rendered.tokens)} tokens, '
                f"more than the limit of {self._limit}; raise the limit, shorten the prompt or skip such rows"
            )
        return Prompt(
            task=self.task.name,
            id=row["id"],
            visit=visit,
            row=row,
            messages=messages,
            tokens=list(rendered.tokens),
            provenance=[int(p) for p in rendered.provenance],
            forced_text=rendered.forced_text,
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)
