"""A user's function that makes examples of raw rows: what it may return, and whose error a mistake is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cohort
from cohort.config.imitation import Conversations
from cohort.errors import ConfigError, TaskError, UserCodeError
from cohort.examples.mapped import load_map
from cohort.examples.rows import Conversation, Pair, RowRules, read_conversations, read_pairs

USER = {"role": "user", "content": "q"}
GOOD, BAD = ({"role": "assistant", "content": word} for word in ("good", "bad"))
ROW = {"ask": "q", "answers": ["good", "bad"]}
RAISE = "raise ValueError('no')"


def read(folder: Path, body: str, *, kind: type = cohort.Preference, rows: Any = (ROW,)) -> tuple[list[Any], list[Any]]:
    """Reads rows through a function with this body, from a file of its own; returns them and what was left out."""
    code = folder / "maps.py"
    code.write_text(f"import cohort\n\ndef mine(row):\n    {body}\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    left_out: list[Any] = []
    rules = RowRules(
        convert=load_map(f"{code}:mine", kind), leave_out=lambda reason, place: left_out.append((reason, place))
    )
    if kind is cohort.Preference:
        return list(read_pairs(str(file), "train", (), rules)), left_out
    return list(read_conversations(str(file), "train", "auto", (), rules)), left_out


RESULTS = [
    "return cohort.Preference(prompt=row['ask'], chosen=row['answers'][0], rejected=row['answers'][1])",
    "return {'prompt': row['ask'], 'chosen': row['answers'][0], 'rejected': row['answers'][1]}",
    "return {'chosen': [*[{'role': 'user', 'content': 'q'}], {'role': 'assistant', 'content': 'good'}],"
    " 'rejected': [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'bad'}]}",
]


@pytest.mark.parametrize("body", RESULTS)
def test_a_function_returns_a_record_or_a_dict(body: str, tmp_path: Path) -> None:
    [found], left_out = read(tmp_path, body)
    assert isinstance(found, Pair) and left_out == []
    assert (found.prompt, found.chosen, found.rejected) == ([USER], [GOOD], [BAD])
    assert found.place == f"{tmp_path / 'rows.jsonl'}, line 1" and found.key


def test_a_prompt_may_be_a_conversation_with_a_system_message_and_tools(tmp_path: Path) -> None:
    body = (
        "return cohort.Preference(prompt=[{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes?'},"
        " {'role': 'user', 'content': 'q'}], chosen='good', rejected='bad', system='s', tools=[{'name': 't'}])"
    )
    [found], _ = read(tmp_path, body)
    assert [message["role"] for message in found.prompt] == ["system", "user", "assistant", "user"]
    assert found.tools == [{"name": "t"}] and found.chosen == [GOOD]


@pytest.mark.parametrize(
    "body",
    [
        "return cohort.Conversation(messages=[{'role': 'user', 'content': 'q'}, {'role': 'gpt', 'content': 'good'}])",
        "return {'prompt': row['ask'], 'completion': row['answers'][0]}",
    ],
)
def test_conversations_too(body: str, tmp_path: Path) -> None:
    [found], _ = read(tmp_path, body, kind=Conversation)
    assert isinstance(found, cohort.Conversation) and found.messages == [USER, GOOD]


def test_plain_text_too(tmp_path: Path) -> None:
    [found], _ = read(tmp_path, "return cohort.Conversation(text='a story')", kind=Conversation)
    assert (found.text, found.messages) == ("a story", [])


def test_none_leaves_a_row_out_and_is_counted(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "ask": "skip"}, ROW]
    found, left_out = read(tmp_path, f"return None if row['ask'] == 'skip' else {RESULTS[1][7:]}", rows=rows)
    place = f"{tmp_path / 'rows.jsonl'}, line 2"
    assert len(found) == 2 and left_out == [("the function in --data.map returned None", place)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'good'", r"line 1: the function mine \(--data.map\) returned a str; return cohort.Preference\(...\)"),
        ("return {'prompt': {1, 2}}", r"line 1: what the function mine .* cannot be written as JSON"),
        ("return {'prompt': chr(0xD800)}", r"line 1: what the function mine .* half a character"),
        ("return {'prompt': 'q', 'chosen': 'a'}", r'line 1, as .* returned it has no column "rejected".* Let the func'),
        ("return {'prompt': 'q', 'chosen': 'a', 'rejected': 3}", r"its rejected is 3, .* correct this row or the func"),
        ("return {'prompt': 'q', 'chosen': '', 'rejected': 'b'}", r"its chosen is empty; .* --data.empty skip"),
        ("return {'prompt': 'q' * 3_000_000}", r"line 1: it has 3,000,000 characters"),
    ],
)
def test_what_else_it_returns_is_refused_with_file_and_line(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        read(tmp_path, body)


def test_what_it_raises_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as caught:
        read(tmp_path, RAISE)
    place = f"{tmp_path / 'rows.jsonl'}, line 1"
    assert f"the function mine (--data.map), for {place}, raised ValueError: no" in str(caught.value)
    assert [*caught.value.place] == [f"  {tmp_path / 'maps.py'}, line 4, in mine", f"    {RAISE}"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("maps.py:mien", 'there is no function "mien" in .*Did you mean "mine"'),
        ("gone.py:mine", 'there is no file "'),
    ],
)
def test_a_function_that_is_not_there(spec: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "maps.py").write_text("def mine(row): return row\n")
    with pytest.raises(ConfigError, match=message):
        load_map(str(tmp_path / spec), cohort.Preference)


def make_talk(row: dict[str, Any]) -> dict[str, Any]:
    return row


def test_a_setting_takes_the_function_itself_if_another_process_can_find_it() -> None:
    assert Conversations(map=make_talk).map == f"{Path(__file__).resolve()}:make_talk"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not at the top level of a \.py file"):
        Conversations(map=lambda row: row)  # type: ignore[arg-type]
