"""What travels between a scoring pool and its workers: JSON, one record a line.

To the worker: a hello (task, limits, import path), then one line per answer to score. An answer of an episode comes
with the episode's key and its earlier answers, so that any worker can go on with it.
To the pool: "ready" or "broken" once, then one line per answer, in the order they came.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.environment import AgainRules, Past
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Key, Message, Row

MAX_LINE = 1 << 20  # of a worker's reply; a longer one is not a reply
MAX_FAILURE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What scoring one answer may use. Over a limit is a failure of the grader, unless its task has a work limit."""

    seconds: float = 10.0
    """Wall clock for one answer; also its CPU time, rounded up. A task's work limit takes its place."""
    memory_mb: int = 1024
    """Address space beyond what the loaded task already takes."""
    output_bytes: int = 1 << 20
    """Largest file the grader can write; of what it prints per answer the rest is dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    task: TaskRef
    limits: Limits
    import_path: list[str]
    again: AgainRules | None = None  # how episodes go on; None = an episode is one answer

    def encode(self) -> bytes:
        return _line(dataclasses.asdict(self))

    @staticmethod
    def decode(line: bytes) -> Hello:
        given = json.loads(line)
        task, limits, again = TaskRef(**given["task"]), Limits(**given["limits"]), given["again"]
        rules = AgainRules(**{**again, "words": tuple(again["words"])}) if again else None
        return Hello(task=task, limits=limits, import_path=given["import_path"], again=rules)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One answer to score; of an episode if it has a `past`."""

    number: int
    row: Row
    answer: Answer
    past: Past | None = None

    @property
    def num_answers(self) -> int:
        """Those that a worker may have to be told: the newest and, of an episode, the earlier ones."""
        return 1 if self.past is None else 1 + len(self.past.answers)

    def encode(self) -> bytes:
        past = self.past
        fields = [self.number, self.row, *_listed(self.answer)]
        if past is not None:
            fields += [dataclasses.astuple(past.key), [_listed(a) for a in past.answers]]
        return _line(fields)

    @staticmethod
    def decode(line: bytes) -> Item:
        number, row, *rest = json.loads(line)
        answer, more = _answer(rest[:5]), rest[5:]
        if not more:
            return Item(number=number, row=row, answer=answer)
        names = [f.name for f in dataclasses.fields(Key)]
        key = Key(**dict(zip(names, more[0], strict=True)))
        return Item(number=number, row=row, answer=answer, past=Past(key=key, answers=tuple(map(_answer, more[1]))))


def _listed(a: Answer) -> list[Any]:
    return [a.text, a.full, a.finish, a.num_tokens, a.conversation]


def _answer(fields: list[Any]) -> Answer:
    text, full, finish, num_tokens, conversation = fields
    return Answer(text=text, full=full, finish=finish, num_tokens=num_tokens, conversation=conversation)


@dataclass(frozen=True, slots=True)
class Ready:
    """What the pool has to know of the task: it may never load it itself."""

    parts: tuple[str, ...]
    accuracy: str
    work_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a worker says. Exactly one of ready, broken, parts, failure, memory, contract is given."""

    ready: Ready | None = None
    broken: str = ""  # the task could not be loaded
    number: int = -1
    parts: dict[str, Any] | None = None
    reason: str = ""
    replies: list[Message] = field(default_factory=list)  # of an environment that goes on
    cost: float = 0.0
    failure: str = ""  # the grader raised
    memory: str = ""  # the grader ran out of memory
    contract: str = ""  # the grader returned something that is no score
    seconds: float = 0.0  # how long it took

    def encode(self) -> bytes:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.ready is not None:
            given["ready"] = dataclasses.astuple(self.ready)
        return _line({k: v for k, v in given.items() if v != _DEFAULTS[k]})

    @staticmethod
    def decode(line: bytes) -> Reply:
        """Raises ValueError for anything that is not a reply: foreign code shares the worker's process."""
        given = json.loads(line)
        if not isinstance(given, dict) or not given.keys() <= _DEFAULTS.keys():
            raise ValueError("not a reply")
        for key, value in given.items():
            expected: type = _TYPES.get(key, str)
            if type(value) is not expected:
                raise ValueError(f"{key} is not a {expected.__name__}")
        if "ready" in given:
            parts, accuracy, seconds = given["ready"]
            given["ready"] = Ready(tuple(map(str, parts)), str(accuracy), float(seconds))
        return Reply(**given)


_TYPES: dict[str, type] = {"ready": list, "number": int, "parts": dict, "replies": list}
_TYPES |= {"cost": float, "seconds": float}
_DEFAULTS: dict[str, Any] = {f.name: [] if f.name == "replies" else f.default for f in dataclasses.fields(Reply)}


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def check_step(name: str, row_id: str, reply: Reply) -> None:
    """Raise for replies that are no messages and a cost that is no number: foreign code shares the worker's process."""
    where = f'task "{name}", row "{row_id}": the environment'
    for said in reply.replies:
        if not isinstance(said, dict) or not all(isinstance(said.get(key), str) for key in ("role", "content")):
            raise TaskError(f"{where} replied {str(said)[:60]}, which is no message")
    if not math.isfinite(reply.cost):
        raise TaskError(f"{where} takes {reply.cost} from the reward; a cost is a finite number")
