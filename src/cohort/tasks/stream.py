"""The prompt stream of a task: endless prompts in an order that depends only on (seed, cursor)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from cohort.errors import ConfigError, TaskError
from cohort.tasks.base import Task, has_conversations, load_rows
from cohort.tasks.calls import call_prompt, get_label, make_messages, resolve_row
from cohort.tasks.conversation import open_episode
from cohort.tasks.environment import KeyedDraws, Opening
from cohort.tasks.order import EpochOrder, MixedOrder, Order
from cohort.tasks.splits import cut_validation
from cohort.types import Key, Message, Prompt, Row

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsDigest:
    """Digests of rows with their prompts, by which a resumed run notices that they have changed."""

    order: str  # of the rows in their order
    content: str  # of the rows whatever their order


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """How many rows of a held-out split ask the same as a row that is trained on."""

    split: str  # the held-out one
    num_shared: int
    num_rows: int  # of the held-out split
    first: tuple[str, str] = ("", "")  # ids of a held-out row and of the row that asks the same


class TaskStream:
    """The prompt stream of a task: every epoch is a new permutation of the rows, keyed by (seed, task, split, epoch).

    In a mixture every task has epochs of its own, and the positions of the stream go to the tasks by their shares.

    The integer `cursor` is the whole state: a stream that is moved to it continues at the same prompt. A prompt of more
    than `max_prompt_tokens` tokens (0 = no limit) raises TaskError, or with too_long="skip" is left out and counted.
    With a `validation_share` above 0, that share of the training rows makes up the split "validation", and the split
    "train" has only the others.

    At most `max_rows` rows of its own split are read (0 = all); those of a split that is cut are always read.

    Several ranks read the same stream and keep the same cursor: each asks for the prompts of all, and renders its own.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Renderer,
        seed: int,
        split: str = "train",
        max_prompt_tokens: int = 0,
        too_long: Literal["error", "skip"] = "error",
        max_rows: int = 0,
        validation_share: float = 0.0,
    ) -> None:
        self.task = task
        self.seed = seed
        self.split = split
        self.cursor = 0
        self.num_skipped = 0
        self.overlap: SharedRows | None = None  # of the split that `render_held_out` was called for; None = of none
        self._tokenizer = tokenizer
        self._limit = max_prompt_tokens
        self._too_long = too_long
        self._max_rows = max_rows
        self._validation_share = validation_share
        self._splits: dict[str, list[Row]] = {}
        self._rows = self._load_split(split)
        self._questions = list(self._hash_questions(self._rows, split))
        self._first_ids = self._index_questions()
        self._labels = [get_label(task, row) for row in self._rows]
        self._num_rows = Counter(self._labels)
        self._order = self._make_order()

    @property
    def num_rows(self) -> int:
        """The number of rows in the split, which is the length of an epoch."""
        return len(self._rows)

    def _make_order(self) -> Order:
        """Returns the order in which rows are visited."""
        weights = getattr(self.task, "weights", None)
        if weights is None:
            return EpochOrder(self.task.name, len(self._rows), self.seed, self.split)
        return MixedOrder(self._labels, weights, self.seed, self.split)

    @property
    def num_too_long(self) -> int:
        """The number of rows of the split whose prompts are skipped because they are too long; 0 if none may be.

        The first call renders every prompt of the split.
        """
        return sum(self._num_too_long.values())

    @cached_property
    def _num_too_long(self) -> Counter[str]:
        """The same number by the label of the task."""
        if self._too_long != "skip" or not self._limit:
            return Counter()
        rows = zip(self._labels, self._rows, strict=True)
        return Counter(label for label, row in rows if self._render_prompt(row, visit=0, purpose="train") is None)

    def seek(self, cursor: int) -> None:
        """Moves the stream to a cursor, from which it continues. Raises ValueError if it is negative."""
        if cursor < 0:
            raise ValueError(f"cursor is {cursor}; it must be 0 or more")
        self.cursor = cursor

    def check_enough_rows(self, num_prompts: int) -> None:
        """Raises ConfigError if a step of `num_prompts` prompts needs more rows than the split has.

        Such a step would train on some rows twice. Rows whose prompts are skipped do not count.
        """
        most = self._order.count_most(num_prompts)
        for label, needed in most.items():
            num = self._num_rows[label] - self._num_too_long[label]
            if not num and self._num_rows[label]:
                raise self._make_none_fits_error(self.split, label)
            if needed <= num:
                continue
            cut = " besides its validation split" if self._validation_share and self.split == "train" else ""
            fitting = f" whose prompts have at most {self._limit} tokens" if self._num_too_long[label] else ""
            found = f'task "{label}" has {num} {self.split} rows{fitting}{cut}, fewer than'
            if len(most) == 1:
                raise ConfigError(
                    f"{found} batch.prompts = {num_prompts}; set --batch.prompts to {num} or less, or give the task "
                    "more rows"
                )
            raise ConfigError(
                f"{found} the {needed} that a step with batch.prompts = {num_prompts} takes of it at its share of the "
                "mixture; lower --batch.prompts or its share (--task.shares), or give the task more rows"
            )

    def compute_digest(self) -> RowsDigest:
        """Returns digests of the rows of this split with their prompts: over their order, and over any order."""
        parts = (
            hashlib.blake2b(json.dumps(row, sort_keys=True).encode() + question, digest_size=16).digest()
            for row, question in zip(self._rows, self._questions, strict=True)
        )
        digests = list(parts)
        order, content = (hashlib.sha256(b"".join(d)).hexdigest()[:16] for d in (digests, sorted(digests)))
        return RowsDigest(order=order, content=content)

    def next_prompts(self, n: int, is_own: Callable[[int], bool] = lambda i: True) -> list[Prompt]:
        """Returns the next n prompts, and moves the cursor past them and past skipped prompts.

        A prompt for whose place `is_own(i)` is false, from 0 to n - 1, is of another rank: it need not be rendered, and
        then has no tokens. Skipped prompts are added to `num_skipped`. Raises TaskError if every prompt of the split is
        skipped, if one is too long and the stream does not skip, and if `task.prompt` returns no valid messages.
        """
        prompts: list[Prompt] = []
        # Skipped rows are counted by index and not by position in the stream: an epoch may end with the rows with which
        # the next one begins, and these are skipped twice although other rows would fit.
        skipped: set[int] = set()
        num_skipped: Counter[str] = Counter()
        while len(prompts) < n:
            place = self._order.locate(self.cursor)
            row = self._rows[place.index]
            self.cursor += 1
            # Where prompts may be skipped, all ranks must know which: so each renders all.
            if self._too_long == "error" and not is_own(len(prompts)):
                prompts.append(self._name_prompt(row, place.visit))
                continue
            prompt = self._render_prompt(row, place.visit, "train")
            if prompt is not None:
                prompts.append(prompt)
                continue
            label = self._labels[place.index]
            num_skipped[label] += place.index not in skipped
            skipped.add(place.index)
            self.num_skipped += 1
            if num_skipped[label] == self._num_rows[label]:
                raise self._make_none_fits_error(self.split, label)
        return prompts

    def _name_prompt(self, row: Row, visit: int) -> Prompt:
        """Returns the prompt of a row without tokens and messages, for a ledger of prompts."""
        label, id = get_label(self.task, row), row["id"]
        return Prompt(task=label, id=id, visit=visit, row={}, messages=[], tokens=[], provenance=[], forced_text="")

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
        prompt = self._render_prompt(row, visit, "train")
        if prompt is None:
            raise TaskError(
                f'task "{self.task.name}": the prompt of the {self.split} row "{id}", which this run needs, now has '
                f"more than {self._limit} tokens; restore the data that the run began with, then run cohort resume"
            )
        return prompt

    def render_held_out(self, n: int = 0, split: str = "test", *, or_fewer: bool = False) -> list[Prompt]:
        """Returns the prompts of the first n rows of a split, in the order of its rows (n = 0: all).

        A split with fewer rows gives all that it has, with a warning. `or_fewer` = the caller says so itself, and a
        test split may have no rows at all: then [] is returned. The cursor does not move. If the stream skips prompts
        that are too long, they are left out, not replaced, with a warning, and added to `num_skipped`; otherwise they
        raise TaskError, and so does a split without any prompt that fits. Sets `overlap` and warns of rows that ask the
        same as a row of this stream's own split, if that is another one. Raises ConfigError if the validation split,
        whose size is a setting, has fewer than n rows, and not `or_fewer`.
        """
        if split == self.split:
            rows = self._rows
        else:
            rows = self._warn_of_overlap(self._load_split(split, may_be_empty=or_fewer), split)
        if not rows:
            self.overlap = None
            return []
        if n > len(rows) and not or_fewer and split == "validation":
            raise ConfigError(
                f'task "{self.task.name}" has {len(rows)} validation rows, fewer than the {n} that --limit asks for; '
                f"give {len(rows)} or less, or 0 for all of them, or a larger --validation-share"
            )
        if n > len(rows) and not or_fewer:
            log.warning("%s: all %d %s rows are used, because there are not %d", self.task.name, len(rows), split, n)
        rows = rows[: n or None]
        rendered = (self._render_prompt(row, visit=0, purpose="eval") for row in rows)
        prompts = [prompt for prompt in rendered if prompt is not None]
        if not prompts:
            raise self._make_none_fits_error(split)
        # Skipped prompts are not replaced by later ones: an evaluation always reads the same first n rows.
        if skipped := len(rows) - len(prompts):
            log.warning("%s: %s prompts left out, over %d tokens: %d", self.task.name, split, self._limit, skipped)
        self.num_skipped += skipped
        return prompts

    def _make_none_fits_error(self, split: str, label: str = "") -> TaskError:
        """Returns, and does not raise, the error for a split whose prompts are all too long.

        `label` is the task of a mixture whose prompts are meant; "" = all.
        """
        return TaskError(
            f'task "{label or self.task.name}": every {split} prompt is longer than {self._limit} tokens; '
            "shorten them, lower --sampling.max-tokens (cohort eval: --max-tokens), or use a model with more context"
        )

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendering:
        """Returns messages that are in no row as tokens, as the prompts of the task are rendered."""
        return self._tokenizer.render(messages, tools or None)

    def _load_split(self, split: str, may_be_empty: bool = False) -> list[Row]:
        """Returns the rows of a split. The validation split and what it leaves of the training rows are read once.

        Raises TaskError if the split has no rows, unless it `may_be_empty` and is not cut from the training rows.
        """
        if not self._is_cut(split):
            limit = self._max_rows if split == self.split else 0
            return load_rows(self.task, split, limit=limit, may_be_empty=may_be_empty)
        if not self._splits:
            train, validation = cut_validation(load_rows(self.task, "train"), self._validation_share)
            self._splits = {"train": train, "validation": validation}
        if not self._splits[split]:
            raise TaskError(
                f'task "{self.task.name}" has no {split} rows: the validation split takes a share of '
                f"{self._validation_share:g} of its training rows; set another --eval.validation-share (cohort eval: "
                "--validation-share), or give the task more rows"
            )
        return self._splits[split]

    def _index_questions(self) -> dict[bytes, str]:
        """Returns a dict from the hash of each question of this split to the id of the first row that asks it.

        Warns of repeated questions.
        """
        first_ids: dict[bytes, str] = {}
        for row, question in zip(self._rows, self._questions, strict=True):
            first_ids.setdefault(question, row["id"])
        if repeated := len(self._rows) - len(first_ids):
            log.warning("%s: %s rows that ask the same as an earlier row: %d", self.task.name, self.split, repeated)
        return first_ids

    def _hash_questions(self, rows: list[Row], split: str) -> Iterator[bytes]:
        """Yields a hash of what `task.prompt` returns for each row: equal for rows that ask the same.

        Every row is given to `task.prompt` here first, so the message about one that it cannot take names its number.
        """
        # The rows of a split that is cut have other numbers than those that the task yields.
        for number, row in enumerate(rows):
            place = "" if self._is_cut(split) else f"row {number} of {split}, counted from 0"
            # `repr` accepts any value. A prompt that is not a list of messages is refused in `_render_prompt`.
            if hasattr(resolve_row(self.task, row)[0], "environment"):
                # Episodes that begin alike may be different games: what is drawn is not in the messages.
                asked = (row["id"], self._open_row(row, visit=0, purpose="train").messages)
            else:
                asked = call_prompt(self.task, row, place)
            yield hashlib.blake2b(repr(asked).encode(), digest_size=16).digest()

    def _is_cut(self, split: str) -> bool:
        """Returns whether a split is a part of the training rows: validation, or what it leaves."""
        return split == "validation" or (split == "train" and self._validation_share > 0)

    def _warn_of_overlap(self, rows: list[Row], split: str) -> list[Row]:
        """Returns `rows`, those of another split, unchanged. Warns of rows that ask the same as one of this stream.

        Sets `overlap`.
        """
        questions = zip(self._hash_questions(rows, split), rows, strict=True)
        shared = [(row["id"], self._first_ids[question]) for question, row in questions if question in self._first_ids]
        first = shared[0] if shared else ("", "")
        self.overlap = SharedRows(split=split, num_shared=len(shared), num_rows=len(rows), first=first)
        if shared:
            log.warning(
                "%s: %s rows that ask the same as a %s row: %d of %d (first: row %s asks the same as row %s)",
                self.task.name,
                split,
                self.split,
                len(shared),
                len(rows),
                *first,
            )
        return rows

    def _open_row(self, row: Row, visit: int, purpose: str) -> Opening:
        """Returns the messages and tools with which an episode of a row begins."""
        if not has_conversations(self.task):
            return Opening(messages=make_messages(self.task, row))
        # All samples of a group begin alike, so there is no sample yet.
        label = get_label(self.task, row)
        key = Key(seed=self.seed, purpose=purpose, task=label, prompt_id=row["id"], visit=visit, sample=-1)
        return open_episode(self.task, row, KeyedDraws(key)).describe()

    def _render_prompt(self, row: Row, visit: int, purpose: str) -> Prompt | None:
        """Returns the prompt of a row as tokens; `visit` is the epoch. None if it is too long and too_long is "skip".

        `purpose` is "train" or "eval", which draw different random numbers. Raises TaskError if `task.prompt` returns
        no valid messages, or if the prompt is too long and too_long is "error".
        """
        opening = self._open_row(row, visit, purpose)
        messages = opening.messages
        rendered = self._tokenizer.render(messages, opening.tools or None)
        if self._limit and len(rendered.tokens) > self._limit:
            if self._too_long == "skip":
                return None
            raise TaskError(
                f'task "{get_label(self.task, row)}", row "{row["id"]}": the prompt has {len(rendered.tokens)} tokens, '
                f"more than the {self._limit} that fit beside its completion; leave such rows out with "
                "--batch.too-long skip (cohort eval: --too-long skip), shorten it, or lower --sampling.max-tokens "
                "(cohort eval: --max-tokens)"
            )
        return Prompt(
            task=get_label(self.task, row),
            id=row["id"],
            visit=visit,
            row=row,
            messages=messages,
            tokens=list(rendered.tokens),
            provenance=[int(p) for p in rendered.provenance],
            forced_text=rendered.forced_text,
            tools=opening.tools,
        )
