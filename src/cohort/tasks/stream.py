"""The prompt stream of a task: endless prompts in an order that depends only on (seed, cursor)."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any, Literal, Protocol

from cohort.errors import ConfigError, TaskError
from cohort.tasks.base import Task, load_rows
from cohort.tasks.draws import make_permutation
from cohort.types import Message, Prompt, Row

log = logging.getLogger(__name__)


class Rendering(Protocol):
    """Messages as tokens: the fields of `text.RenderedPrompt` that a prompt stream reads."""

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt."""

    @property
    def provenance(self) -> list[int]:
        """A `Provenance` per token: PROMPT, or FORCED in an assistant message to be continued."""

    @property
    def forced_text(self) -> str:
        """The assistant message to be continued; "" if there is none."""


class Renderer(Protocol):
    """The part of a tokenizer that a prompt stream needs."""

    def render(self, messages: list[Message], tools: Any = None) -> Rendering:
        """Returns the messages as the tokens of a prompt, which offers `tools` if there are any."""


class TaskStream:
    """The prompt stream of a task: every epoch is a new permutation of the rows, keyed by (seed, task, split, epoch).

    The integer `cursor` is the whole state: a stream made with it continues at the same prompt. A prompt of more than
    `max_prompt_tokens` tokens (0 = no limit) raises TaskError, or with too_long="skip" is left out and counted.

    `shard` is (rank, number of ranks). From cursor c, a rank takes the positions c + rank, c + rank + ranks, and so on;
    every position moves its cursor by the number of ranks. Ranks that begin at the same cursor never share a prompt.
    Their cursors stay equal while all take equally many prompts and none is skipped. A rank replaces a skipped prompt
    by its own next one, so that its cursor runs ahead of the others: each rank must save its own cursor.
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
            raise ValueError(f"cursor is {cursor}; it must be 0 or more")
        if not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard is {shard}; it must be (rank, number of ranks) with 0 <= rank < number of ranks")
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
        self._first_ids = self._index_questions(self._rows, split)
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def num_rows(self) -> int:
        """The number of rows in the split, which is the length of an epoch."""
        return len(self._rows)

    def check_enough_rows(self, num_prompts: int) -> None:
        """Raises ConfigError if a step of `num_prompts` prompts needs more rows than the split has.

        Such a step would train on some rows twice.
        """
        if num_prompts > len(self._rows):
            raise ConfigError(
                f'task "{self.task.name}" has {len(self._rows)} {self.split} rows, '
                f"fewer than batch.prompts = {num_prompts}; set --batch.prompts to {len(self._rows)} or less, or "
                "give the task more rows"
            )

    def next_prompts(self, n: int) -> list[Prompt]:
        """Returns the next n prompts of this rank, and moves the cursor past them and past skipped prompts.

        Skipped prompts are added to `num_skipped`. Raises TaskError if every prompt of the split is skipped, if one is
        too long and the stream does not skip, and if `task.prompt` returns no valid messages.
        """
        rank, num_ranks = self.shard
        prompts: list[Prompt] = []
        # Skipped rows are counted by index and not by position in the stream: an epoch may end with the rows with which
        # the next one begins, and these are skipped twice although other rows would fit.
        skipped: set[int] = set()
        while len(prompts) < n:
            epoch, position = divmod(self.cursor + rank, len(self._rows))
            index = self._get_order(epoch)[position]
            prompt = self._render_prompt(self._rows[index], epoch)
            self.cursor += num_ranks
            if prompt is not None:
                prompts.append(prompt)
                continue
            skipped.add(index)
            self.num_skipped += 1
            if len(skipped) == len(self._rows):
                raise self._make_none_fits_error(self.split)
        return prompts

    def find_prompt(self, id: str, visit: int) -> Prompt:
        """Returns the prompt of the row with this id in epoch `visit`, as `next_prompts` gave it.

        The cursor does not move. A resumed run finds with it the prompts that were not finished. Raises TaskError if
        the row is gone, or if its prompt is too long.
        """
        row = next((row for row in self._rows if row["id"] == id), None)
        if row is None:
            raise TaskError(
                f'task "{self.task.name}" no longer has the {self.split} row "{id}", which this run needs; '
                "restore the data that the run began with, then run cohort resume again"
            )
        prompt = self._render_prompt(row, visit)
        if prompt is None:
            raise TaskError(
                f'task "{self.task.name}": the prompt of the {self.split} row "{id}", which this run needs, now has '
                f"more than {self._limit} tokens; restore the data that the run began with, then run cohort resume"
            )
        return prompt

    def render_held_out(self, n: int = 0, split: str = "test") -> list[Prompt]:
        """Returns the prompts of the first n rows of a split, in the order of its rows (n = 0: all).

        The cursor does not move. If the stream skips prompts that are too long, they are left out, not replaced, with a
        warning, and added to `num_skipped`; otherwise they raise TaskError, and so does a split without any prompt that
        fits. Warns of rows that ask the same as a row of this stream's own split, if that is another one. Raises
        ConfigError if the split has fewer than n rows.
        """
        rows = self._rows if split == self.split else self._warn_of_overlap(load_rows(self.task, split), split)
        if n > len(rows):
            raise ConfigError(
                f'task "{self.task.name}" has {len(rows)} {split} rows, fewer than the {n} that --eval.problems or '
                f"--limit asks for; give {len(rows)} or less, or 0 for all of them"
            )
        rendered = (self._render_prompt(row, visit=0) for row in rows[: n or None])
        prompts = [prompt for prompt in rendered if prompt is not None]
        if not prompts:
            raise self._make_none_fits_error(split)
        # Skipped prompts are not replaced by later ones: an evaluation always reads the same first n rows.
        if skipped := (n or len(rows)) - len(prompts):
            log.warning("%s: %s prompts left out, over %d tokens: %d", self.task.name, split, self._limit, skipped)
        self.num_skipped += skipped
        return prompts

    def _make_none_fits_error(self, split: str) -> TaskError:
        """Returns, and does not raise, the error for a split whose prompts are all too long."""
        return TaskError(
            f'task "{self.task.name}": every {split} prompt is longer than {self._limit} tokens; '
            "shorten them, lower --sampling.max-tokens (cohort eval: --max-tokens), or use a model with more context"
        )

    def _index_questions(self, rows: list[Row], split: str) -> dict[bytes, str]:
        """Returns a dict from the hash of each question to the id of the first row that asks it.

        Warns of repeated questions.
        """
        first_ids: dict[bytes, str] = {}
        for row in rows:
            first_ids.setdefault(_hash_question(self.task, row), row["id"])
        if repeated := len(rows) - len(first_ids):
            log.warning("%s: %s rows that ask the same as an earlier row: %d", self.task.name, split, repeated)
        return first_ids

    def _warn_of_overlap(self, rows: list[Row], split: str) -> list[Row]:
        """Returns `rows`, those of another split, unchanged. Warns of rows that ask the same as one of this stream."""
        questions = ((_hash_question(self.task, row), row["id"]) for row in rows)
        shared = [(id, self._first_ids[question]) for question, id in questions if question in self._first_ids]
        if shared:
            log.warning(
                "%s: %s rows that ask the same as a %s row: %d of %d (first: row %s asks the same as row %s)",
                self.task.name,
                split,
                self.split,
                len(shared),
                len(rows),
                *shared[0],
            )
        return rows

    def _get_order(self, epoch: int) -> list[int]:
        """Returns the row indices of an epoch in the order in which they are visited.

        The order of the last epoch asked for is kept.
        """
        if self._order[0] != epoch:
            self._order = (epoch, make_permutation(len(self._rows), self.seed, self.task.name, self.split, epoch))
        return self._order[1]

    def _render_prompt(self, row: Row, visit: int) -> Prompt | None:
        """Returns the prompt of a row as tokens; `visit` is the epoch. None if it is too long and too_long is "skip".

        Raises TaskError if `task.prompt` returns no list of messages that can be written as JSON, or if the prompt is
        too long and too_long is "error".
        """
        messages = self.task.prompt(row)
        if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
            raise TaskError(
                f'task "{self.task.name}", row "{row["id"]}": the method `prompt` must return a list of '
                f'one or more dicts, each with a string as "role", not {str(messages)[:60]}'
            )
        try:
            # Rollout files hold the messages as JSON; a prompt must be the same before and after it was stored.
            messages = json.loads(json.dumps(messages))
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskError(
                f'task "{self.task.name}", row "{row["id"]}": the messages that the method `prompt` returned '
                f"cannot be written as JSON ({error}); use only strings, numbers, lists and dicts in them"
            ) from error
        rendered = self._tokenizer.render(messages)
        if self._limit and len(rendered.tokens) > self._limit:
            if self._too_long == "skip":
                return None
            raise TaskError(
                f'task "{self.task.name}", row "{row["id"]}": the prompt has {len(rendered.tokens)} tokens, '
                f"more than the {self._limit} that fit beside its completion; leave the row out (cohort eval: "
                "--too-long skip), shorten it, or lower --sampling.max-tokens (cohort eval: --max-tokens)"
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
    """Returns whether the value is a dict whose "role" is a text."""
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _hash_question(task: Task, row: Row) -> bytes:
    """Returns a hash of what `task.prompt` returns for a row: equal for rows that ask the same."""
    # `repr` accepts any value. A prompt that is not a list of messages is refused later, in `_render_prompt`.
    return hashlib.blake2b(repr(task.prompt(row)).encode(), digest_size=16).digest()
