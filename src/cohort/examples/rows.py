"""Rows as they are found in the wild become conversations or pairs: messages with known roles, in a sound order.

Nothing is guessed where rows contradict each other: every mistake is an error with the file and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal, TypeVar

from cohort.errors import TaskError
from cohort.system.json_text import parse_json
from cohort.tasks.formats import RawRow
from cohort.tasks.places import list_columns, locate_rows, parse_columns, rename_columns, shorten
from cohort.types import Message

ConversationFormat = Literal["auto", "messages", "sharegpt", "prompt", "alpaca", "text"]
DATA_FLAG, COLUMNS_FLAG, FORMAT_FLAG = "--data.path", "--data.columns", "--data.format"
MAX_CHARACTERS = 2_000_000  # in a row: more is a mistake in the file, and would take minutes to tokenise
# The columns by which a format is known, and all that it reads.
_FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("messages", "tools")),
    "sharegpt": (("conversations",), ("conversations", "system", "tools")),
    "prompt": (("prompt", "completion"), ("prompt", "completion", "system", "tools")),
    "alpaca": (("instruction", "output"), ("instruction", "input", "output", "system")),
    "text": (("text",), ("text",)),
}
_PAIR_COLUMNS = ("prompt", "chosen", "rejected", "system", "tools")
# Names of roles in other formats.
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}

T = TypeVar("T")
Doubtful = Literal["error", "skip"]
"""What becomes of rows that may be a mistake: error = the run does not start, skip = they are left out."""
MapFunction = Callable[[RawRow, str], RawRow | None]
"""(raw row, its place) -> a row in a format of ours; None = it is left out."""
LeaveOut = Callable[[str, str], None]
"""Called as leave_out(reason, place) for a row that is left out."""


class EmptyTextError(ValueError):
    """A row has an empty prompt, answer or text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRules:
    """What is done with raw rows before they are read, and with rows that have an empty text."""

    convert: MapFunction | None = None  # None = rows are read as they are
    empty: Doubtful = "error"
    leave_out: LeaveOut = lambda reason, place: None


_NO_RULES = RowRules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A conversation to imitate, or a plain text.

    A user's function (`--data.map`) returns it with messages and tools, or with a text. `place` and `key` are set when
    rows are read. `key` names what it asks: equal keys are never in two splits.
    """

    messages: list[Message] = field(default_factory=list)  # ends with the assistant's; [] if it is a plain text
    place: str = ""  # where it comes from, such as "rows.jsonl, line 7"
    key: str = ""
    text: str = ""  # the plain text; "" if it is a conversation
    tools: list[Any] | None = field(default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two answers to one prompt, of which one is better. An answer may be several messages, such as calls of tools."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    place: str
    key: str
    tools: list[Any] | None = field(default=None)


def read_conversations(
    path: str, split: str, format: ConversationFormat, columns: Sequence[str], rules: RowRules = _NO_RULES
) -> Iterator[Conversation]:
    """Yields the conversations of a file or hub data set, in their order.

    `path` may contain {split}. `format` "auto" decides row by row, by the columns. `columns` has an entry "ours=theirs"
    for every column with another name. Raises TaskError, with file and line, for a row that is no conversation.
    """
    known = {name for _, names in _FORMATS.values() for name in names}
    names = _FORMATS[format][1] if format != "auto" else sorted(known)
    return _read(path, split, columns, names, rules, lambda row, place: _make_conversation(row, place, format))


def read_pairs(path: str, split: str, columns: Sequence[str], rules: RowRules = _NO_RULES) -> Iterator[Pair]:
    """Yields the pairs of a file or hub data set, in their order. The parameters are as in `read_conversations`.

    Raises TaskError, with file and line, for a row that is no pair.
    """
    return _read(path, split, columns, _PAIR_COLUMNS, rules, _make_pair)


def _read(
    path: str,
    split: str,
    columns: Sequence[str],
    names: Sequence[str],
    rules: RowRules,
    make: Callable[[RawRow, str], T],
) -> Iterator[T]:
    """Yields what `make` makes of every raw row. A ValueError of it becomes a TaskError that names file and line."""
    source = locate_rows(path, split, DATA_FLAG)
    ours_to_theirs = parse_columns("data", columns, names, COLUMNS_FLAG)
    is_empty = True
    for number, raw in source.open():
        is_empty = False
        place = source.describe_row(number)
        if not isinstance(raw, dict):
            raise TaskError(
                f"{place} is {shorten(raw)}; correct it: a row must be a JSON object with the columns as keys"
            )
        row: RawRow | None = rename_columns(place, raw, ours_to_theirs, COLUMNS_FLAG)
        assert row is not None
        _check_size(row, place)
        if rules.convert is not None:
            row = rules.convert(row, place)
            if row is None:
                rules.leave_out("the function in --data.map returned None", place)
                continue
            _check_size(row, place)
        made = _make_one(row, place, rules, make)
        if made is not None:
            yield made
    if is_empty:
        raise TaskError(f"{source.name} has no rows; add rows, or name another source with {DATA_FLAG}")


def _make_one(row: RawRow, place: str, rules: RowRules, make: Callable[[RawRow, str], T]) -> T | None:
    """Returns what `make` makes of a row; None if the row has an empty text and such rows are left out.

    Raises TaskError, with file and line, for a row that cannot be used.
    """
    is_mapped = rules.convert is not None
    where = f"{place}, as the function in --data.map returned it" if is_mapped else place
    try:
        return make(row, place)
    except EmptyTextError as error:
        if rules.empty == "error":
            raise TaskError(
                f"{where}: {error}; correct this row, or leave such rows out with --data.empty skip"
            ) from error
        rules.leave_out("their prompt, answer or text is empty", place)
        return None
    except KeyError as error:
        name = error.args[0]
        remedy = (
            "Let the function return it"
            if is_mapped
            else f"Add it, or set {COLUMNS_FLAG} {name}=COLUMN if it has another name there"
        )
        raise TaskError(f'{where} has no column "{name}"; it has {list_columns(row)}. {remedy}') from error
    except ValueError as error:
        raise TaskError(f"{where}: {error}; correct this row{' or the function' if is_mapped else ''}") from error


def _check_size(row: RawRow, place: str) -> None:
    """Raises TaskError if a row has more text than any model can read."""
    size = _count_characters(row)
    if size > MAX_CHARACTERS:
        raise TaskError(f"{place}: it has {size:,} characters, and a row may have {MAX_CHARACTERS:,}; correct this row")


def _count_characters(value: Any) -> int:
    """Returns the number of characters in all texts of a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_count_characters, value.values()))
    return sum(map(_count_characters, value)) if isinstance(value, list | tuple) else 0


# ---- conversations ---------------------------------------------------------------------------------------------------


def _make_conversation(row: RawRow, place: str, format: ConversationFormat) -> Conversation:
    """Returns a raw row as a conversation. Raises ValueError with what is wrong, or KeyError with a missing column."""
    found = _detect_format(row) if format == "auto" else format
    if found == "text":
        text = _require_text(row["text"], "text")
        if not text.strip():
            raise EmptyTextError("its text is empty")
        return Conversation(messages=[], text=text, place=place, key=_hash(text))
    if found == "messages":
        messages = read_messages(row["messages"], "messages")
    elif found == "sharegpt":
        messages = _read_sharegpt(row["conversations"])
    elif found == "prompt":
        messages = [*read_prompt(row["prompt"]), *read_answer(row["completion"], "completion")]
    else:
        messages = _read_alpaca(row)
    messages = _add_system(messages, row)
    check_order(messages)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"its last message is of the {messages[-1]['role']}, so nothing follows that could be learnt")
    return Conversation(messages=messages, tools=_read_tools(row), place=place, key=hash_question(messages))


def _detect_format(row: RawRow) -> str:
    """Returns the format that a row's columns show. Raises ValueError if they show none."""
    for name, (columns, _) in _FORMATS.items():
        if all(column in row for column in columns):
            return name
    raise ValueError(
        f"its columns {list_columns(row)} show no format; a row has messages, conversations, prompt and completion, "
        f"instruction and output, or text. Name its columns with {COLUMNS_FLAG}"
    )


def read_messages(value: Any, column: str) -> list[Message]:
    """Returns a column's messages with roles that templates know. Raises ValueError if they are no messages."""
    value = _parse_cell(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"its {column} is {shorten(value)}, not a list of messages")
    return [_read_message(message, number, column) for number, message in enumerate(value, start=1)]


def _read_message(message: Any, number: int, column: str) -> Message:
    """Returns one message with a known role. Raises ValueError if it has no text and no calls of tools."""
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(
            f'message {number} of its {column} is {shorten(message)}, not an object with "role" and "content"'
        )
    role = _ROLES.get(str(message["role"]).lower())
    if role is None:
        raise ValueError(f"message {number} of its {column} has the unknown role {shorten(message['role'])}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of message {number} of its {column} is {shorten(content)}, not a text")
    if role == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise EmptyTextError(f"message {number} of its {column}, of the assistant, is empty")
    return {**message, "role": role, "content": content}


def _read_sharegpt(value: Any) -> list[Message]:
    """Returns the messages of the ShareGPT format, whose turns have "from" and "value"."""
    if not isinstance(value, list):
        raise ValueError(f"its conversations are {shorten(value)}, not a list of turns")
    turns = []
    for number, turn in enumerate(value, start=1):
        if isinstance(turn, dict) and "role" in turn:
            turns.append(turn)
        elif isinstance(turn, dict) and "from" in turn and "value" in turn:
            turns.append({"role": turn["from"], "content": turn["value"]})
        else:
            raise ValueError(f'turn {number} of its conversations is {shorten(turn)}; it must have "from" and "value"')
    return read_messages(turns, "conversations")


def _read_alpaca(row: RawRow) -> list[Message]:
    """Returns an instruction, perhaps with an input, and its output as two messages."""
    question = _require_text(row["instruction"], "instruction")
    extra = _require_text(row.get("input") or "", "input")
    if not question.strip():
        raise EmptyTextError("its instruction is empty")
    user = f"{question}\n\n{extra}" if extra.strip() else question
    return [{"role": "user", "content": user}, *read_answer(row["output"], "output")]


def read_prompt(value: Any) -> list[Message]:
    """Returns a prompt, a text or messages, as messages. Raises ValueError if it is empty or ends with an answer."""
    value = _parse_cell(value)
    if isinstance(value, str):
        if not value.strip():
            raise EmptyTextError("its prompt is empty")
        return [{"role": "user", "content": value}]
    messages = read_messages(value, "prompt")
    if messages[-1]["role"] == "assistant":
        raise ValueError("its prompt ends with a message of the assistant")
    return messages


def read_answer(value: Any, column: str) -> list[Message]:
    """Returns an answer, a text or messages, as messages of which the last is the assistant's. Raises ValueError."""
    value = _parse_cell(value)
    if isinstance(value, str):
        if not value.strip():
            raise EmptyTextError(f"its {column} is empty")
        return [{"role": "assistant", "content": value}]
    messages = read_messages(value, column)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"its {column} does not end with a message of the assistant")
    return messages


def _parse_cell(value: Any) -> Any:
    """Returns the messages of a text that is a JSON list of messages, as CSV files have them; else the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        parsed = parse_json(value)
    except (ValueError, RecursionError):
        return value
    is_messages = isinstance(parsed, list) and all(isinstance(m, dict) and "role" in m for m in parsed)
    return parsed if is_messages else value


def _require_text(value: Any, column: str) -> str:
    """Returns the value of a column that must be a text. Raises ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f"its {column} is {shorten(value)}, not a text")
    return value


def _read_tools(row: RawRow) -> list[Any] | None:
    """Returns the descriptions of tools in a row, a list or JSON text; None if there are none."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except (ValueError, RecursionError):
            raise ValueError(f"its tools are no JSON: {shorten(tools)}") from None
    if tools and not isinstance(tools, list):
        raise ValueError(f"its tools are {shorten(tools)}, not a list")
    return tools or None


def _add_system(messages: list[Message], row: RawRow) -> list[Message]:
    """Returns the messages after the text of the column "system", if there is one and no system message yet."""
    text = row.get("system")
    if not isinstance(text, str) or not text.strip() or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": text}, *messages]


def check_order(messages: Sequence[Message]) -> None:
    """Raises ValueError unless a user speaks first and a user or a tool before every turn of the assistant.

    System messages come only at the beginning. There must be a turn of the assistant.
    """
    roles = [message["role"] for message in messages]
    talk = roles[1:] if roles[0] == "system" else roles
    if "assistant" not in talk:
        raise ValueError("it has no message of the assistant")
    if talk[0] != "user":
        raise ValueError(f"its first message is of the {talk[0]}, not of the user")
    for number, (before, here) in enumerate(pairwise(talk), start=2 + len(roles) - len(talk)):
        if here == "system" or (here == before and here != "tool") or (here == "tool" and before == "user"):
            raise ValueError(f"message {number} is of the {here} and follows one of the {before}: the order is broken")


# ---- pairs -----------------------------------------------------------------------------------------------------------


def _make_pair(row: RawRow, place: str) -> Pair:
    """Returns a raw row as a pair. Raises ValueError with what is wrong, or KeyError with a missing column.

    Where the answers repeat the prompt, as whole conversations, the prompt may be missing.
    """
    chosen, rejected = (read_answer(row[name], name) for name in ("chosen", "rejected"))
    if "prompt" in row:
        prompt = read_prompt(row["prompt"])
        chosen, rejected = (_remove_prompt(answer, prompt) for answer in (chosen, rejected))
    else:
        prompt, chosen, rejected = _split_common(chosen, rejected)
    prompt = _add_system(prompt, row)
    for answer in (chosen, rejected):
        check_order([*prompt, *answer])
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=_read_tools(row),
        place=place,
        key=hash_question(prompt),
    )


def _remove_prompt(answer: list[Message], prompt: Sequence[Message]) -> list[Message]:
    """Returns the answer without the messages of the prompt, if it begins with them: some data sets repeat them."""
    size = len(prompt)
    starts = [(m["role"], m["content"]) for m in answer[:size]] == [(m["role"], m["content"]) for m in prompt]
    return answer[size:] if starts and len(answer) > size else answer


def _split_common(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """Returns (prompt, chosen, rejected) of two whole conversations: what both begin with is the prompt.

    Raises ValueError if they have no common beginning that ends before a turn of the assistant.
    """
    size = 0
    while size < min(len(chosen), len(rejected)) and chosen[size] == rejected[size]:
        size += 1
    # Equal answers: the last one is not part of the prompt.
    while size and (size == min(len(chosen), len(rejected)) or chosen[size - 1]["role"] == "assistant"):
        size -= 1
    if not size:
        raise ValueError("it has no prompt, and its answers have no common beginning that could be one")
    return chosen[:size], chosen[size:], rejected[size:]


# ---- keys ------------------------------------------------------------------------------------------------------------


def hash_question(messages: Sequence[Message]) -> str:
    """Returns a hash of the first message of the user: the same question is never in two splits."""
    return _hash(next(m["content"] for m in messages if m["role"] == "user"))


def _hash(text: str) -> str:
    """Returns a hash of a text as 32 hexadecimal digits. It does not depend on case and spacing."""
    return blake2b(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
