"""The prompts of a run, in an order that is a function of (seed, cursor) and nothing else."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any, Literal, Protocol

from cohort.errors import ConfigError, TaskError
from cohort.tasks.base import Task, load_rows
from cohort.tasks.draws import permutation
from cohort.types import Message, Prompt, Row

log = logging.getLogger(__name__)


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

    With a `shard` (rank, number of ranks) the stream is the rank's own: from cursor c it has the places c + rank,
    c + rank + ranks, and so on, and every place moves the cursor by the number of ranks. Ranks that begin at the same
    cursor never have a prompt in common. Their cursors stay equal while all take as many and none is skipped. A rank
    replaces a prompt that it skips by its own next one, so its cursor may then run ahead: each rank keeps its own.
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
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        if cursor < 0:
            raise ValueError(f"cursor {cursor} is negative")
        if not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard {shard} is no (rank, number of ranks)")
        self.task = task
        self.seed = seed
        self.split = split
        self.cursor = cursor
        self.shard = shard
        self.num_skipped = 0
        self._tokenizer = tokenizer
        self._limit = max_prompt_tokens
        self._too_long = too_long
        self._rows = load_rows(task, split)
        self._asked = self._questions(self._rows, split)
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
        """This rank's next n prompts, always n; the cursor moves past them and past what was skipped on the way."""
        rank, size = self.shard
        prompts: list[Prompt] = []
        skipped: set[int] = set()  # rows, not places: one epoch may end with the rows that the next begins with
        while len(prompts) < n:
            epoch, place = divmod(self.cursor + rank, len(self._rows))
            index = self._permutation(epoch)[place]
            prompt = self._render(self._rows[index], epoch)
            self.cursor += size
            if prompt is not None:
                prompts.append(prompt)
                continue
            skipped.add(index)
            self.num_skipped += 1
            if len(skipped) == len(self._rows):
                raise self._none_fits(self.split)
        return prompts

    def find(self, id: str, visit: int) -> Prompt:
        """The prompt of a row in an epoch, as `next` gave it; the cursor stays."""
        row = next((row for row in self._rows if row["id"] == id), None)
        prompt = None if row is None else self._render(row, visit)
        if prompt is None:
            raise TaskError(f'task "{self.task.name}" has no {self.split} row "{id}" any more; put its rows back')
        return prompt

    def held_out(self, n: int = 0, split: str = "test") -> list[Prompt]:
        """The first n prompts of a split in its own order, 0 = all; the cursor stays."""
        rows = self._rows if split == self.split else self._apart(load_rows(self.task, split), split)
        if n > len(rows):
            raise ConfigError(
                f'task "{self.task.name}" has {len(rows)} {split} rows, fewer than the {n} that are asked for '
                f"(--eval.problems, --limit); ask for {len(rows)} or less, or 0 for all of them"
            )
        rendered = (self._render(row, visit=0) for row in rows[: n or None])
        prompts = [prompt for prompt in rendered if prompt is not None]
        if not prompts:
            raise self._none_fits(split)
        if skipped := (n or len(rows)) - len(prompts):
            log.warning("%s: %s prompts left out, over %d tokens: %d", self.task.name, split, self._limit, skipped)
        self.num_skipped += skipped
        return prompts

    def _none_fits(self, split: str) -> TaskError:
        return TaskError(
            f'task "{self.task.name}": every {split} prompt is longer than {self._limit} tokens; '
            "lower max_tokens, shorten the prompts or take a model with a larger context"
        )

    def _questions(self, rows: list[Row], split: str) -> dict[bytes, str]:
        """What the rows ask, each with the id of the first that asks it; says if some ask the same."""
        asked: dict[bytes, str] = {}
        for row in rows:
            asked.setdefault(_question(self.task, row), row["id"])
        if repeated := len(rows) - len(asked):
            log.warning("%s: %s rows that ask what an earlier one asks: %d", self.task.name, split, repeated)
        return asked

    def _apart(self, rows: list[Row], split: str) -> list[Row]:
        """These rows; says if some of them ask what this stream asks."""
        questions = ((_question(self.task, row), row["id"]) for row in rows)
        both = [(id, self._asked[question]) for question, id in questions if question in self._asked]
        if both:
            log.warning(
                "%s: %s rows that ask what a %s row asks: %d of %d (first: %s asks what %s does)",
                self.task.name,
                split,
                self.split,
                len(both),
                len(rows),
                *both[0],
            )
        return rows

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
        try:
            messages = json.loads(json.dumps(messages))  # rollout files hold them as plain values
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskError(
                f'task "{self.task.name}", row "{row["id"]}": its messages cannot be written as JSON ({error})'
            ) from error
        rendered = self._tokenizer.render(messages)
        if self._limit and len(rendered.tokens) > self._limit:
            if self._too_long == "skip":
                return None
            raise TaskError(
                f'task "{self.task.name}", row "{row["id"]}": the prompt has {len(rendered.tokens)} tokens, '
                f"more than the {self._limit} that fit beside its completion; lower max_tokens, shorten the prompt "
                "or leave such rows out (cohort eval does with --too-long skip)"
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


def _question(task: Task, row: Row) -> bytes:
    """Names what a row asks, whatever it is: `_render` says what is wrong with it."""
    return hashlib.blake2b(repr(task.prompt(row)).encode(), digest_size=16).digest()
