"""The messages between a scoring pool and its workers: JSON, one record per line.

To the worker: a hello (task, limits, import path), then one line per answer to score. An answer of an episode comes
with the episode's key and its earlier answers, so that any worker can continue the episode. The answers of a group that
are scored together are one line.
To the pool: "ready" or "broken" once, then one line per answer or group, in the order in which they came. A worker that
scores several at once replies in any order.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from cohort.errors import TaskError
from cohort.system.json_text import parse_json, show_value
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.environment import AgainRules, Past
from cohort.tasks.parts import MAX_NUMBER, NO_PART, check_parts
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Finish, Key, Message, Outcome, Row

MAX_LINE = 1 << 20  # bytes of a worker's reply; a longer line is not accepted as one
# Wall-clock seconds per CPU second of a work limit: an answer is not wrong because the machine is busy.
WALL_PER_CPU_SECOND = 6.0
MAX_FAILURE = 1000  # characters of a failure's description that are kept
MAX_PRINTED = 2000  # characters of what a grader prints per answer that are sent to the pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The resources for scoring one answer. A grader that needs more fails, unless its task has `work_seconds`."""

    seconds: float = 10.0
    """Wall-clock time for one answer, and also its CPU time, rounded up. `work_seconds` replaces the CPU time. Where
    several answers are scored at once it is the wall-clock time alone."""
    memory_mb: int = 1024
    """Address space beyond what the loaded task already uses."""
    output_bytes: int = 1 << 20
    """Size of the largest file that the grader can write. What it prints beyond this per answer is dropped."""

    def advise_on_time(self, work_seconds: float) -> str:
        """Returns the end of a message about a grader that took too long: how to give it more time.

        `work_seconds` is that of the task; 0 = it has none.
        """
        if work_seconds:
            return f"; make it quicker, or raise `work_seconds = {work_seconds:g}` in the task's class"
        return (
            "; make it quicker, raise --scoring.seconds, or, if its work depends on the answer, set "
            f"`work_seconds = {self.seconds:g}` in the task's class: an answer that needs more is then wrong"
        )

    def advise_on_memory(self) -> str:
        """Returns the end of a message about a grader that ran out of memory: what it may use, and how to need less."""
        return (
            f"; scoring one answer may use {self.memory_mb} MB more than the loaded task: use less, or load large "
            "data when the module is imported"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message to a worker: which task it scores, under which limits, and where its modules are."""

    task: TaskRef
    limits: Limits
    import_path: list[str]  # the pool's sys.path
    again: AgainRules | None = None  # when an episode gets another attempt; None = never
    conversation: ConversationRules | None = None  # for tools and environments; None = the task has none
    concurrency: int = 0  # answers that are scored at once in threads or coroutines; 0 = one after the other
    env: tuple[str, ...] = ()  # names of the environment variables that were handed over
    sandbox: str = "auto"  # how programs of the model are confined, if the task runs any

    def encode(self) -> bytes:
        """Returns the message as a line of JSON."""
        return _encode_line(dataclasses.asdict(self))

    @staticmethod
    def decode(line: bytes) -> Hello:
        """Returns the message that `encode` wrote as `line`."""
        message = parse_json(line)
        again = message["again"]
        talk = message["conversation"]
        records = {
            "task": TaskRef(**message["task"]),
            "limits": Limits(**message["limits"]),
            # JSON made the tuples of words and names lists.
            "again": AgainRules(**{**again, "words": tuple(again["words"])}) if again else None,
            "conversation": ConversationRules(**talk) if talk else None,
            "env": tuple(message["env"]),
        }
        return Hello(**{**message, **records})


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One answer to score, or the answers of a group that are scored together (`siblings`).

    With a `past` it is the newest answer of an episode. With `closing` the answer was stepped already, and the episode
    must end because of that limit (a Finish).
    """

    number: int  # given by the pool; the reply has the same
    row: Row
    answer: Answer  # of a group the first
    past: Past | None = None
    closing: str = ""
    siblings: tuple[Answer, ...] = ()  # all answers of a group; () = the answer is scored alone

    @property
    def num_answers(self) -> int:
        """How many answers a worker may have to score: the newest and, to replay an episode, all earlier ones."""
        if self.siblings:
            return len(self.siblings)
        return 1 if self.past is None else 1 + len(self.past.answers)

    @property
    def row_id(self) -> str:
        """The id of the row, for messages."""
        return str(self.row.get("id", "?"))

    def encode(self) -> bytes:
        """Returns the item as a line of JSON: a list of number, row and the fields of the answer.

        For an answer of an episode, the episode's key and its earlier answers follow; for a group, all its answers.
        """
        past = self.past
        fields: list[Any] = [self.number, self.row, answer_to_list(self.answer)]
        if self.siblings:
            fields += [[answer_to_list(a) for a in self.siblings]]
        elif past is not None:
            fields += [dataclasses.astuple(past.key), [answer_to_list(a) for a in past.answers], self.closing]
        return _encode_line(fields)

    @staticmethod
    def decode(line: bytes) -> Item:
        """Returns the item that `encode` wrote as `line`."""
        number, row, fields, *episode = parse_json(line)
        answer = _answer_from_list(fields)
        if not episode:
            return Item(number=number, row=row, answer=answer)
        if len(episode) == 1:
            return Item(number=number, row=row, answer=answer, siblings=tuple(map(_answer_from_list, episode[0])))
        names = [f.name for f in dataclasses.fields(Key)]
        key = Key(**dict(zip(names, episode[0], strict=True)))
        past = Past(key=key, answers=tuple(map(_answer_from_list, episode[1])))
        return Item(number=number, row=row, answer=answer, past=past, closing=episode[2])


def answer_to_list(a: Answer) -> list[Any]:
    """Returns the fields of an answer as a list: text, full, finish, num_tokens, conversation, tokens."""
    return [a.text, a.full, a.finish, a.num_tokens, a.conversation, a.tokens]


def _answer_from_list(fields: list[Any]) -> Answer:
    """Returns the answer whose fields `answer_to_list` wrote."""
    text, full, finish, num_tokens, conversation, tokens = fields
    return Answer(text=text, full=full, finish=finish, num_tokens=num_tokens, conversation=conversation, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker says of its task once it has loaded it. The pool needs it, because it may never load the task."""

    parts: tuple[str, ...]
    accuracy: str | None
    work_seconds: float = 0.0
    optional_parts: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A message of a worker. Exactly one of ready, broken, parts, group, failure, memory and contract is set.

    An exception is the step of an environment that has no reward yet: it has `replies` instead of parts.
    """

    ready: Ready | None = None
    broken: str = ""  # why the task could not be loaded
    number: int = -1  # of the item
    parts: dict[str, Any] | None = None
    reason: str = ""  # the grader's, for its parts
    group: list[Any] = field(default_factory=list)  # [parts, reason] per answer, if a group was scored together
    replies: list[Message] = field(default_factory=list)  # messages before the policy's next turn
    cost: float = 0.0  # subtracted from the reward
    earned: float = 0.0  # a reward of this turn alone
    calls: dict[str, Any] = field(default_factory=dict)  # calls of tools in this turn, by outcome
    ending: str = ""  # the limit that ended the conversation
    failure: str = ""  # what the grader raised
    memory: str = ""  # how the grader ran out of memory
    contract: str = ""  # what is wrong with the grader's result
    seconds: float = 0.0  # how long scoring took, by the worker's clock
    printed: str = ""  # the beginning of what the grader printed
    num_lines: int = 0  # how many lines it printed
    lasting: bool = False  # whether another try cannot help, such as with a key that is refused
    num_stuck: int = 0  # threads of the worker that are over their time and cannot be stopped

    def encode(self) -> bytes:
        """Returns the reply as a line of JSON: an object without the fields that have their defaults."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.ready is not None:
            fields["ready"] = dataclasses.astuple(self.ready)
        return _encode_line({k: v for k, v in fields.items() if v != _DEFAULTS[k]})

    def to_outcome(self, parts: dict[str, float]) -> Outcome:
        """Returns the outcome of a scored answer. `parts` are those of the reply, checked.

        It is a failure if no part applies to the last answer of an episode.
        """
        return Outcome(
            parts=parts,
            reason=self.reason,
            failure="" if parts or self.replies else NO_PART,
            replies=self.replies,
            cost=self.cost,
            earned=self.earned,
            calls=self.calls,
            ending=self.ending,
        )

    @staticmethod
    def decode(line: bytes) -> Reply:
        """Returns the reply that `encode` wrote as `line`. Missing fields have their defaults.

        Checks names and JSON types of the fields, not which of them are set together. Raises ValueError for a line that
        is not a reply.
        """
        # Foreign code shares the worker's process and may write anything into the pipe, so every type is checked.
        fields = parse_json(line)
        if not isinstance(fields, dict) or not fields.keys() <= _DEFAULTS.keys():
            raise ValueError("not a reply")
        for key, value in fields.items():
            expected: type = _TYPES.get(key, str)
            if type(value) is not expected:
                raise ValueError(f"{key} is not a {expected.__name__}")
        if "ready" in fields:
            fields["ready"] = _read_ready(fields["ready"])
        return Reply(**fields)


def _read_ready(fields: list[Any]) -> Ready:
    """Returns what a worker says of its task, from the list in its reply. Raises ValueError if that is another list."""
    accuracy = type(None) if fields[1:2] == [None] else str
    kinds = [list, accuracy, float, bool]
    if [type(value) for value in fields] != kinds or not all(isinstance(part, str) for part in fields[0]):
        raise ValueError("ready is not a list of parts, accuracy, seconds and whether parts are optional")
    if not 0 <= fields[2] < math.inf:
        raise ValueError(f"ready has {fields[2]} seconds")
    return Ready(tuple(fields[0]), *fields[1:])


# JSON types of the fields of a reply; all others are strings.
_TYPES: dict[str, type] = {"ready": list, "number": int, "parts": dict, "replies": list}
_TYPES |= {"cost": float, "seconds": float, "num_lines": int, "earned": float, "calls": dict}
_TYPES |= {"group": list, "num_stuck": int, "lasting": bool}
_EMPTY: dict[str, Any] = {"replies": [], "calls": {}, "group": []}
_DEFAULTS: dict[str, Any] = {f.name: _EMPTY.get(f.name, f.default) for f in dataclasses.fields(Reply)}


def _encode_line(value: Any) -> bytes:
    """Returns a value as one line of JSON in bytes, with the line break."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def read_outcomes(name: str, item: Item, ready: Ready, reply: Reply) -> list[Outcome]:
    """Returns the outcomes in a reply that has scores: one, or one per answer of a group.

    `name` is the task, and `ready` what the worker said of it. Raises TaskError for parts, or a step of an environment,
    that are not valid.
    """
    if item.siblings:
        pairs = [pair for pair in reply.group if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) != len(reply.group) or len(pairs) != len(item.siblings):
            raise TaskError(f'task "{name}", row "{item.row_id}": {len(item.siblings)} answers got {len(pairs)} scores')
        outcomes: list[Outcome] = []
        for given, reason in pairs:
            checked = check_parts(name, item.row_id, ready.parts, ready.accuracy, given, ready.optional_parts)
            outcomes.append(Outcome(parts=checked, reason=str(reason), failure="" if checked else NO_PART))
        return outcomes
    parts: dict[str, float] = {}
    # Only the step of an episode that continues may lack parts.
    if reply.parts is not None or not reply.replies:
        parts = check_parts(name, item.row_id, ready.parts, ready.accuracy, reply.parts, ready.optional_parts)
    check_environment_reply(name, item.row_id, reply)
    return [reply.to_outcome(parts)]


def check_environment_reply(name: str, row_id: str, reply: Reply) -> None:
    """Raises TaskError unless all `replies` are texts of a user or a tool, and numbers and limits are sound.

    `name` is the task and `row_id` the row, for the error message. Other fields of the reply are not checked.
    """
    where = f'task "{name}", row "{row_id}": the environment'
    for message in reply.replies:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TaskError(
                f"{where} returned the message {show_value(message)} in `replies`; its method `step` must return dicts "
                "whose role and content are both strings"
            )
        if message["role"] not in ("user", "tool"):
            raise TaskError(
                f"{where} replied as {show_value(message['role'])}; the messages in `replies` must be of the role "
                '"user" or "tool"'
            )
    for what, value in (("cost", reply.cost), ("earned", reply.earned)):
        if not abs(value) <= MAX_NUMBER:
            raise TaskError(
                f"{where} returned {value:g} as {what}; the {what} of what its method `step` returns must be a finite "
                f"number between {-MAX_NUMBER:g} and {MAX_NUMBER:g}"
            )
    if not all(type(count) is int and count >= 0 for count in reply.calls.values()):
        raise TaskError(f"{where} returned the calls {show_value(reply.calls)}, which are no numbers")
    if reply.ending and reply.ending not in set(Finish):
        raise TaskError(f"{where} ended by {show_value(reply.ending)}, which is no known limit")
