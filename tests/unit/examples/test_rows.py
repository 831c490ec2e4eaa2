"""Rows as they are found in the wild: every format, and every mistake with its file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.examples.rows import MAX_CHARACTERS, Conversation, Pair, RowRules, read_conversations, read_pairs

USER, ASSISTANT, SYSTEM = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def conversations(folder: Path, *rows: Any, format: str = "auto", columns: tuple[str, ...] = ()) -> list[Conversation]:
    return list(read_conversations(write(folder, *rows), "train", format, columns))  # type: ignore[arg-type]


def pairs(folder: Path, *rows: Any, columns: tuple[str, ...] = ()) -> list[Pair]:
    return list(read_pairs(write(folder, *rows), "train", columns))


TWO = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": TWO}, TWO),
        ({"messages": [SYSTEM, *TWO]}, [SYSTEM, *TWO]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, TWO),
        ({"conversations": TWO}, TWO),
        ({"prompt": "q", "completion": "a"}, TWO),
        ({"prompt": TWO[:1], "completion": TWO[1:]}, TWO),
        ({"prompt": "q", "completion": "a", "system": "s"}, [SYSTEM, *TWO]),
        ({"instruction": "q", "output": "a"}, TWO),
        ({"instruction": "q", "input": "", "output": "a"}, TWO),
        ({"instruction": "q", "input": "x", "output": "a"}, [{"role": "user", "content": "q\n\nx"}, TWO[1]]),
        # A prompt that looks like JSON and is none stays a text.
        ({"prompt": "[{q}]", "completion": "a"}, [{"role": "user", "content": "[{q}]"}, TWO[1]]),
        # Cells of CSV files have messages as JSON.
        ({"messages": json.dumps(TWO)}, TWO),
    ],
)
def test_every_format_gives_messages(row: dict[str, Any], messages: list[Any], tmp_path: Path) -> None:
    [found] = conversations(tmp_path, row)
    assert found.messages == messages and found.text == "" and found.place.endswith("rows.jsonl, line 1")


def test_plain_text_and_mixed_formats(tmp_path: Path) -> None:
    text, talk = conversations(tmp_path, {"text": "a story"}, {"messages": TWO})
    assert (text.text, text.messages, talk.messages) == ("a story", [], TWO)


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    columns = ("prompt=question", "completion=answer")
    [found] = conversations(tmp_path, {"question": "q", "answer": "a", "prompt": "unused"}, columns=columns)
    assert found.messages == TWO
    with pytest.raises(TaskError, match=r'--data.columns has the entry "question"'):
        conversations(tmp_path, {"question": "q"}, columns=("question",))


def test_tools_are_read_also_from_text(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    talk = [TWO[0], call, {"role": "tool", "content": "7"}, TWO[1]]
    for value in (tools, json.dumps(tools)):
        [found] = conversations(tmp_path, {"messages": talk, "tools": value})
        assert found.tools == tools and found.messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2], "is [1, 2]; correct it: a row must be a JSON object"),
        ("text", "a row must be a JSON object"),
        ({"question": "q"}, "show no format; a row has messages, conversations"),
        ({"messages": []}, "its messages is [], not a list of messages"),
        ({"messages": "hello"}, "its messages is 'hello', not a list of messages"),
        ({"messages": [USER]}, "it has no message of the assistant"),
        ({"messages": [USER, ASSISTANT, USER]}, "its last message is of the user"),
        ({"messages": [ASSISTANT, USER, ASSISTANT]}, "its first message is of the assistant, not of the user"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "message 3 is of the assistant and follows one of the assistant"),
        ({"messages": [SYSTEM, USER, USER, ASSISTANT]}, "message 3 is of the user and follows one of the user"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, "message 2 is of the system and follows one of the user"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "has the unknown role 'wizard'"),
        ({"messages": [{"content": "x"}]}, "not an object with"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "the content of message 2 of its messages is 7"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "of the assistant, is empty"),
        ({"conversations": [{"from": "human"}]}, 'it must have "from" and "value"'),
        ({"prompt": "", "completion": "a"}, "its prompt is empty"),
        ({"prompt": "q", "completion": " "}, "its completion is empty"),
        ({"prompt": 3, "completion": "a"}, "its prompt is 3, not a list of messages"),
        ({"prompt": TWO, "completion": "a"}, "its prompt ends with a message of the assistant"),
        ({"instruction": " ", "output": "a"}, "its instruction is empty"),
        ({"text": ""}, "its text is empty"),
        ({"text": ["a"]}, "its text is ['a'], not a text"),
        ({"messages": TWO, "tools": "{"}, "its tools are no JSON"),
        ({"text": "x" * 10_000_000}, f"it has 10,000,000 characters, and a row may have {MAX_CHARACTERS:,}"),
    ],
)
def test_a_mistake_is_named_with_its_line(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError) as error:
        conversations(tmp_path, {"text": "fine"}, row)
    assert message in str(error.value) and "rows.jsonl, line 2" in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_given_format_says_which_column_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r'line 1 has no column "output"; it has .*--data.columns output=COLUMN'):
        conversations(tmp_path, {"instruction": "q", "text": "a"}, format="alpaca")


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no rows; add rows, or name another source"):
        conversations(tmp_path)


def test_the_same_question_has_the_same_key(tmp_path: Path) -> None:
    one, same, other = conversations(
        tmp_path,
        {"prompt": "What  IS it?", "completion": "a"},
        {"messages": [SYSTEM, {"role": "user", "content": "what is it?"}, ASSISTANT]},
        {"prompt": "What is that?", "completion": "a"},
    )
    assert one.key == same.key != other.key


CHOSEN, REJECTED = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": TWO[:1], "chosen": CHOSEN, "rejected": REJECTED},
        # Whole conversations, with and without the prompt beside them.
        {"prompt": "q", "chosen": [TWO[0], *CHOSEN], "rejected": [TWO[0], *REJECTED]},
        {"chosen": [TWO[0], *CHOSEN], "rejected": [TWO[0], *REJECTED]},
    ],
)
def test_pairs_of_every_form(row: dict[str, Any], tmp_path: Path) -> None:
    [found] = pairs(tmp_path, row)
    assert (found.prompt, found.chosen, found.rejected) == (TWO[:1], CHOSEN, REJECTED)


def test_a_prompt_may_have_several_turns_and_a_system_message(tmp_path: Path) -> None:
    talk = [SYSTEM, *TWO, {"role": "user", "content": "again"}]
    one, two = pairs(
        tmp_path,
        {"prompt": talk, "chosen": "good", "rejected": "bad"},
        {"chosen": [*talk, *CHOSEN], "rejected": [*talk, *REJECTED]},
    )
    assert one.prompt == two.prompt == talk and one.chosen == two.chosen == CHOSEN


def test_equal_whole_conversations_keep_their_last_turn_as_the_answer(tmp_path: Path) -> None:
    [found] = pairs(tmp_path, {"chosen": [*TWO], "rejected": [*TWO]})
    assert found.prompt == TWO[:1] and found.chosen == found.rejected == TWO[1:]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "good"}, "has no column \"rejected\"; it has ['prompt', 'chosen']"),
        ({"prompt": "q", "chosen": "", "rejected": "bad"}, "its chosen is empty"),
        ({"prompt": "q", "chosen": "good", "rejected": [USER]}, "its rejected does not end with a message of the ass"),
        ({"chosen": "good", "rejected": "bad"}, "it has no prompt, and its answers have no common beginning"),
        ({"prompt": [ASSISTANT, USER], "chosen": "a", "rejected": "b"}, "its first message is of the assistant"),
    ],
)
def test_a_mistake_in_a_pair_is_named_with_its_line(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError) as error:
        pairs(tmp_path, {"prompt": "q", "chosen": "good", "rejected": "bad"}, row)
    assert message in str(error.value) and "rows.jsonl, line 2" in str(error.value)


def test_rows_with_an_empty_text_are_refused_or_left_out(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": " "},
        {"messages": [TWO[0], {"role": "assistant", "content": ""}]},
        {"instruction": "", "output": "a"},
        {"prompt": "", "completion": "a"},
        {"text": " "},
        {"messages": TWO},
    ]
    left_out: list[tuple[str, str]] = []
    rules = RowRules(empty="skip", leave_out=lambda reason, place: left_out.append((reason, place)))
    path = write(tmp_path, *rows)
    [found] = read_conversations(path, "train", "auto", (), rules)
    assert found.messages == TWO
    assert left_out == [
        ("their prompt, answer or text is empty", f"{tmp_path / 'rows.jsonl'}, line {n}") for n in range(1, 6)
    ]
    for row in rows[:5]:
        with pytest.raises(TaskError, match=r"line 1: .* is empty; correct this row, or .* --data.empty skip"):
            conversations(tmp_path, row)
    # A tool call without a text is no empty answer, and a broken order is no empty text.
    with pytest.raises(TaskError, match="the order is broken"):
        list(read_conversations(write(tmp_path, {"messages": [USER, USER, ASSISTANT]}), "train", "auto", (), rules))
