"""The prompt stream: order, cursor, prompts that are too long, held-out prompts, ranks, and bad messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohort.errors import ConfigError, TaskError, UserCodeError
from cohort.run.store.rollouts import load_rollouts, save_rollouts
from cohort.tasks.base import task
from cohort.tasks.draws import Draws, make_permutation
from cohort.tasks.stream import SharedRows, TaskStream
from cohort.types import Group, Provenance


@dataclass
class Rendered:
    tokens: list[int]
    provenance: list[int]
    forced_text: str


class Letters:
    """A tokenizer with one token per letter; a final assistant message is forced."""

    def render(self, messages: list[dict], tools: Any = None) -> Rendered:
        asked = "".join(m["content"] for m in messages if m["role"] != "assistant")
        forced = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        provenance = [Provenance.PROMPT] * len(asked) + [Provenance.FORCED] * len(forced)
        return Rendered([ord(c) for c in asked + forced], provenance, forced)


@task("count")
class Count:
    size: int = 10
    prefix: str = ""

    def rows(self, split: str) -> Iterator[dict]:
        for i in range(self.size):
            yield {"id": f"{split}-{i}", "n": i}

    def prompt(self, row: dict) -> list[dict]:
        asked = [{"role": "user", "content": "n" * (row["n"] + 1)}]
        return asked + ([{"role": "assistant", "content": self.prefix}] if self.prefix else [])

    def score(self, row: dict, answer: Any) -> dict:
        return {"correct": 1.0}


def stream(**settings: Any) -> TaskStream:
    """Returns a prompt stream of `Count` with these settings."""
    cursor = settings.pop("cursor", 0)
    made = TaskStream(settings.pop("task", Count()), Letters(), **{"seed": 3, **settings})
    made.seek(cursor)
    return made


def test_every_epoch_is_a_different_permutation_and_counts_visits() -> None:
    prompts = stream().next_prompts(40)
    epochs = [prompts[i : i + 10] for i in range(0, 40, 10)]
    for visit, epoch in enumerate(epochs):
        assert sorted(p.id for p in epoch) == sorted(f"train-{i}" for i in range(10))
        assert {p.visit for p in epoch} == {visit}
    assert len({tuple(p.id for p in epoch) for epoch in epochs}) == 4


def test_the_cursor_is_the_whole_state() -> None:
    whole = stream().next_prompts(37)
    pieces = stream()
    assert pieces.next_prompts(5) + pieces.next_prompts(0) + pieces.next_prompts(19) + pieces.next_prompts(13) == whole
    assert pieces.cursor == 37
    for cursor in (0, 1, 9, 10, 23):
        assert stream(cursor=cursor).next_prompts(3) == whole[cursor : cursor + 3]


def test_seed_and_split_decide_the_order() -> None:
    def order(**given: Any) -> list[int]:
        return [p.row["n"] for p in stream(**given).next_prompts(10)]

    assert order() == order()
    assert order(seed=4) != order()
    assert order(split="test") != order()


def test_the_order_never_changes() -> None:
    """A resumed run must get the same rows, whatever version of Cohort wrote its checkpoint."""
    assert make_permutation(8, 0, "t", "train", 0) == PINNED
    assert [Draws("t", 0).below(100), Draws("t", 1).below(100)] == PINNED_DRAWS


PINNED = [4, 5, 3, 1, 0, 7, 2, 6]
PINNED_DRAWS = [26, 58]


def test_draws_are_uniform_and_in_range() -> None:
    draws = Draws("uniform")
    counts = [0] * 10
    for _ in range(20_000):
        counts[draws.below(10)] += 1
    assert sum((c - 2000) ** 2 / 2000 for c in counts) < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    assert {draws.between(3, 5) for _ in range(200)} == {3, 4, 5}


def test_prompts_carry_their_rendering() -> None:
    (prompt,) = stream(task=Count(size=1, prefix="<think>")).next_prompts(1)
    assert (prompt.task, prompt.id, prompt.visit) == ("count", "train-0", 0)
    assert prompt.tokens == [ord(c) for c in "n<think>"]
    assert prompt.provenance == [0] + [3] * 7
    assert prompt.forced_text == "<think>"
    assert prompt.messages[0] == {"role": "user", "content": "n"}
    assert prompt.row == {"id": "train-0", "n": 0}


def test_fewer_rows_than_prompts_is_an_error_with_both_numbers() -> None:
    stream().check_enough_rows(10)
    with pytest.raises(ConfigError, match=r"has 10 train rows, fewer than batch.prompts = 11"):
        stream().check_enough_rows(11)


def test_long_prompts_stop_the_run_or_are_skipped_and_counted() -> None:
    with pytest.raises(TaskError, match=r'row "train-\d": the prompt has \d+ tokens, more than the 4 that fit'):
        stream(max_prompt_tokens=4).next_prompts(10)
    skipping = stream(max_prompt_tokens=4, too_long="skip")
    prompts = skipping.next_prompts(8)
    assert sorted(p.row["n"] for p in prompts) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert skipping.num_skipped == skipping.cursor - 8
    again = stream(max_prompt_tokens=4, too_long="skip")
    assert again.next_prompts(3) + again.next_prompts(5) == prompts
    assert again.cursor == skipping.cursor


def test_when_every_prompt_is_too_long_it_says_so() -> None:
    hopeless = stream(task=Count(size=3, prefix="x" * 50), max_prompt_tokens=4, too_long="skip")
    with pytest.raises(TaskError, match="every train prompt is longer than 4 tokens"):
        hopeless.next_prompts(1)


def test_a_prompt_is_found_again_by_its_row_and_visit() -> None:
    source = stream()
    drawn = source.next_prompts(source.num_rows + 5)
    cursor = source.cursor
    assert [source.find_prompt(p.id, p.visit) for p in drawn] == drawn and source.cursor == cursor
    with pytest.raises(TaskError, match='no longer has the train row "gone"'):
        source.find_prompt("gone", 0)


def test_held_out_is_the_test_split_in_its_own_order(caplog: pytest.LogCaptureFixture) -> None:
    source = stream()
    assert [p.id for p in source.render_held_out(3)] == ["test-0", "test-1", "test-2"]
    assert len(source.render_held_out()) == 10
    assert source.cursor == 0
    assert len(source.render_held_out(11)) == 10
    assert caplog.text.count("all 10 test rows are used, because there are not 11") == 1
    assert len(source.render_held_out(11, or_fewer=True)) == 10 and source.num_skipped == 0


@pytest.mark.parametrize("messages", [[], [{"content": "no role"}], None])
def test_a_prompt_that_is_no_list_of_messages_is_refused(messages: Any) -> None:
    class Mute(Count):
        def prompt(self, row: dict) -> Any:
            return messages

    with pytest.raises(TaskError, match=r'row "train-.": the method `prompt` must return a list'):
        stream(task=Mute()).next_prompts(1)


def test_an_exception_in_prompt_names_the_rows_number_and_columns() -> None:
    class Keyed(Count):
        def prompt(self, row: dict) -> Any:
            return [{"role": "user", "content": row["n"] if row["n"] < 7 else row["a"]}]

    with pytest.raises(
        UserCodeError, match=r'"train-7" \(row 7 of train, counted from 0; columns: id, n\), raised KeyError'
    ):
        stream(task=Keyed())
    # The rows that the validation split leaves have other numbers than those that the task yields.
    with pytest.raises(UserCodeError, match=r'"train-\d" \(columns: id, n\), raised KeyError'):
        stream(task=Keyed(), validation_share=0.2)


def test_a_negative_cursor_is_a_bug() -> None:
    with pytest.raises(ValueError, match="-1"):
        stream(cursor=-1)


def test_rows_that_ask_the_same_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """In one split or in both: the held-out rows must not be the ones that are trained."""

    @task("alike")
    class Alike:
        shared: int = 0
        repeated: int = 0

        def rows(self, split):
            names = [f"{split} {n}" for n in range(4)]
            names[: self.shared] = [f"both {n}" for n in range(self.shared)]
            names += names[: self.repeated]
            return ({"id": f"{split}-{n}", "name": name} for n, name in enumerate(names))

        def prompt(self, row):
            return [{"role": "user", "content": row["name"]}]

        def score(self, row, answer):
            return {"correct": 0.0}

    stream(task=Alike()).render_held_out(2)
    assert not caplog.records
    overlapping = stream(task=Alike(shared=2))
    overlapping.render_held_out(1)
    assert overlapping.overlap == SharedRows(split="test", num_shared=2, num_rows=4, first=("test-0", "train-0"))
    stream(task=Alike(repeated=3))
    assert [record.getMessage() for record in caplog.records] == [
        "alike: test rows that ask the same as a train row: 2 of 4 (first: row test-0 asks the same as row train-0)",
        "alike: train rows that ask the same as an earlier row: 3",
    ]


def test_a_prompt_of_another_type_is_refused_with_task_and_row() -> None:
    @task("odd")
    class Odd:
        def rows(self, split):
            return ({"id": f"{split}-{n}"} for n in range(2))

        def prompt(self, row):
            return {1: row["id"], "role": "\ud800"}

        def score(self, row, answer):
            return {"correct": 0.0}

    with pytest.raises(TaskError, match=r'task "odd", row "train-\d": the method `prompt` must return a list'):
        stream(task=Odd()).next_prompts(1)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("too_long", ["error", "skip"])
def test_ranks_read_the_same_stream_and_each_renders_its_own_prompts(size: int, too_long: str) -> None:
    """Where prompts may be skipped, all must be rendered to know which are."""
    whole = stream(too_long=too_long)
    ranks = [stream(too_long=too_long) for _ in range(size)]
    for num in (1, 6, 0, 4, 13):
        expected = whole.next_prompts(num)
        parts = [one.next_prompts(num, lambda i, rank=rank: i % size == rank) for rank, one in enumerate(ranks)]
        assert {one.cursor for one in ranks} == {whole.cursor}
        for rank, part in enumerate(parts):
            assert [(p.task, p.id, p.visit) for p in part] == [(p.task, p.id, p.visit) for p in expected]
            assert part[rank::size] == expected[rank::size]
            others = [p for i, p in enumerate(part) if i % size != rank]
            assert all(bool(p.tokens) == (too_long == "skip") for p in others)
            assert [ranks[rank].find_prompt(p.id, p.visit) for p in part] == expected


def test_skipped_prompts_are_counted_and_the_stream_continues_after_them() -> None:
    """Ten rows of which four fit."""
    fits: dict[str, Any] = {"max_prompt_tokens": 4, "too_long": "skip"}
    one = stream(**fits)
    taken = one.next_prompts(5) + one.next_prompts(7)
    assert one.num_skipped == one.cursor - 12
    assert taken == [prompt for prompt in stream().next_prompts(one.cursor) if prompt.row["n"] < 4]
    again = stream(**fits)
    first = again.next_prompts(5)
    assert first + stream(cursor=again.cursor, **fits).next_prompts(7) == taken


def test_rows_that_fit_are_found_however_many_are_skipped_before() -> None:
    """The end of one epoch and the beginning of the next may skip the same rows."""
    one = stream(task=Count(size=3), max_prompt_tokens=1, too_long="skip")
    assert [prompt.row["n"] for prompt in one.next_prompts(40)] == [0] * 40
    with pytest.raises(TaskError, match="every train prompt is longer than 1 tokens"):
        stream(task=Count(size=3, prefix="x" * 9), max_prompt_tokens=1, too_long="skip").next_prompts(1)


class Speaker(StrEnum):
    USER = "user"


class Shout(str):
    pass


@task("asks-anyhow")
class AsksAnyhow:
    how: str = "plain"

    def rows(self, split: str) -> Iterator[dict]:
        yield {"id": f"{split}-0"}

    def score(self, row: dict, answer: Any) -> dict:
        return {"correct": 1.0}

    def prompt(self, row: dict) -> list[dict]:
        plain = {"role": "user", "content": "ab"}
        changed: dict[str, dict] = {
            "enum": {**plain, "role": Speaker.USER},
            "numpy": {**plain, "content": np.str_("ab")},
            "subclass": {**plain, "content": Shout("ab")},
            "ordered": OrderedDict(plain),
            "keys": {**plain, "extra": {1: (2, None)}},
            "object": {**plain, "extra": object()},
            "set": {**plain, "extra": {1}},
        }
        return [changed.get(self.how, plain)]


@pytest.mark.parametrize("how", ["plain", "enum", "numpy", "subclass", "ordered", "keys"])
def test_messages_of_other_types_become_plain_values_that_rollout_files_hold(how: str, tmp_path: Path) -> None:
    [prompt] = stream(task=AsksAnyhow(how=how)).next_prompts(1)
    extra = {"extra": {"1": [2, None]}} if how == "keys" else {}
    assert prompt.messages == [{"role": "user", "content": "ab", **extra}]
    assert type(prompt.messages[0]) is dict
    assert {type(prompt.messages[0][name]) for name in ("role", "content")} == {str}
    save_rollouts(tmp_path / "a", [Group(prompt=prompt, samples=[])])
    assert load_rollouts(tmp_path / "a")[0].prompt == prompt


@pytest.mark.parametrize("how", ["object", "set"])
def test_messages_that_are_no_json_name_task_and_row(how: str) -> None:
    message = 'task "asks-anyhow", row "train-0": the method `prompt` returned messages that cannot be written as JSON'
    with pytest.raises(TaskError, match=message):
        stream(task=AsksAnyhow(how=how)).next_prompts(1)


def test_a_digest_tells_rows_from_their_order() -> None:
    @task("listed")
    class Listed:
        order: tuple[int, ...] = (0, 1, 2)
        word: str = "n"

        def rows(self, split: str) -> Iterator[dict]:
            yield from ({"id": str(i), "n": i} for i in self.order)

        def prompt(self, row: dict) -> list[dict]:
            return [{"role": "user", "content": self.word * (row["n"] + 1)}]

        def score(self, row: dict, answer: Any) -> dict:
            return {"correct": 1.0}

    first, same, moved, less, worded = (
        stream(task=made).compute_digest()
        for made in (Listed(), Listed(), Listed(order=(2, 0, 1)), Listed(order=(0, 1)), Listed(word="m"))
    )
    assert first == same
    assert moved.content == first.content and moved.order != first.order
    # Another prompt for the same row counts like another row.
    assert len({first.content, less.content, worded.content}) == 3


def test_the_validation_split_is_cut_from_the_training_rows_by_their_ids() -> None:
    big = Count(size=400)
    cut = stream(task=big, validation_share=0.25)
    held = {p.id for p in cut.render_held_out(0, "validation")}
    trained = {p.id for p in cut.next_prompts(cut.num_rows)}
    assert held | trained == {f"train-{i}" for i in range(400)} and not held & trained
    assert 70 < len(held) < 130
    # Neither seed nor other rows matter, and a larger share only adds rows.
    same = stream(task=big, split="validation", validation_share=0.25, seed=99)
    assert {p.id for p in same.next_prompts(same.num_rows)} == held
    fewer = stream(task=Count(size=200), validation_share=0.25).render_held_out(0, "validation")
    assert {p.id for p in fewer} == held & {f"train-{i}" for i in range(200)}
    assert held < {p.id for p in stream(task=big, validation_share=0.5).render_held_out(0, "validation")}
    # Without a share nothing is cut.
    assert stream(task=big).num_rows == 400


def test_a_validation_split_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"validation rows, fewer than the 9 .* larger --validation-share"):
        stream(validation_share=0.5).render_held_out(9, "validation")
    with pytest.raises(TaskError, match=r"no validation rows: .* share of 0.001 .* another --eval.validation-share"):
        stream(validation_share=0.001).render_held_out(0, "validation")
    with pytest.raises(TaskError, match="no train rows"):
        stream(validation_share=0.999)
    with pytest.raises(ConfigError, match=r"train rows besides its validation split, fewer than batch.prompts = 10"):
        stream(validation_share=0.5).check_enough_rows(10)


def test_rows_that_are_too_long_are_counted_before_training() -> None:
    skipping = stream(max_prompt_tokens=7, too_long="skip")
    assert skipping.num_too_long == 3 and stream(max_prompt_tokens=7).num_too_long == stream().num_too_long == 0
    skipping.check_enough_rows(7)
    with pytest.raises(ConfigError, match="7 train rows whose prompts have at most 7 tokens, fewer than"):
        skipping.check_enough_rows(8)
    with pytest.raises(TaskError, match="every train prompt is longer than 1 tokens"):
        stream(task=Count(size=1, prefix="x"), max_prompt_tokens=1, too_long="skip").check_enough_rows(1)
