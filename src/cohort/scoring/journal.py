"""The journal of outcomes: what an outside service said of an answer is written down before it is used.

A judge may answer otherwise tomorrow. A run that is resumed repeats steps, and must then get the same scores. So the
outcomes of such tasks are kept in the file outcomes.jsonl of the run, by the content that was scored: task, row and
answers. The file only grows: a resume does not cut it. Failures are not kept, they are tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from cohort.errors import RunError, TaskError
from cohort.scoring.base import Pool, Ranks
from cohort.scoring.wire import answer_to_list
from cohort.system.json_text import make_record, parse_json
from cohort.tasks.environment import Past
from cohort.tasks.parts import PartRules, check_parts
from cohort.types import Answer, Outcome, Row

METRICS = "metrics.jsonl"  # the file beside it that has a line once a run has done anything

log = logging.getLogger(__name__)


class OutcomeJournal:
    """The outcomes of a run by the content that was scored, in memory and in a file.

    Without a path there is no file: another rank has it, and is told what is new.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, list[Outcome]] = {}
        self._new: list[tuple[str, list[Outcome]]] = []  # that other ranks have not been told
        self._file: int | None = None
        if path is not None:
            if path.is_dir():
                raise RunError(f"{path} is a folder, but it must be the file of outcomes: move it away, then resume")
            metrics = path.parent / METRICS
            if not path.exists() and metrics.is_file() and metrics.stat().st_size:
                log.warning(
                    "%s is missing, though the run has steps: their answers are scored again, and may get other "
                    "scores than before; put the file back if you have it",
                    path,
                )
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._read(path)

    def _read(self, path: Path) -> None:
        """Reads what is in the file. A line that was cut off by a kill, or is damaged, is left out and said."""
        assert self._file is not None
        num_bad = 0
        data = path.read_bytes()
        for line in data.split(b"\n"):
            if not line:
                continue
            try:
                key, outcomes = parse_json(line)
                self._known[str(key)] = [_read_outcome(fields) for fields in outcomes]
            except (ValueError, TypeError):
                num_bad += 1
        if num_bad:
            log.warning("%s: %d lines cannot be read; their answers are scored again", path, num_bad)
        # The next line must not continue one that was cut off.
        if data and not data.endswith(b"\n"):
            os.write(self._file, b"\n")

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: str) -> list[Outcome] | None:
        """Returns the outcomes of the content with this key; None if it was never scored."""
        return self._known.get(key)

    def add(self, new: Sequence[tuple[str, list[Outcome]]]) -> None:
        """Keeps outcomes by key. They are on the disk when this returns, if there is a file."""
        if self._file is None:
            self._new += new
            self._known.update(new)
            return
        lines = [json.dumps([key, [_outcome_to_dict(o) for o in outcomes]]) + "\n" for key, outcomes in new]
        data = "".join(lines).encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self._known.update(new)

    def share_known(self, world: Ranks) -> None:
        """Tells all ranks what the first one knows. Every rank must call it."""
        known = [[key, [_outcome_to_dict(o) for o in outcomes]] for key, outcomes in self._known.items()]
        for key, outcomes in world.share(known):
            self._known.setdefault(key, [_read_outcome(fields) for fields in outcomes])

    def send_new(self, world: Ranks) -> None:
        """Brings what is new on other ranks to the first one, which writes it to its file. Every rank must call it."""
        new = [[key, [_outcome_to_dict(o) for o in outcomes]] for key, outcomes in self._new]
        self._new = []
        parts = world.gather_on_first(new)
        found = [(key, [_read_outcome(fields) for fields in outcomes]) for part in parts for key, outcomes in part]
        unknown = {key: outcomes for key, outcomes in found if key not in self._known}
        if unknown:
            self.add(list(unknown.items()))

    def close(self) -> None:
        """Closes the file, if there is one."""
        if self._file is not None:
            os.close(self._file)


def _outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """Returns the fields of an outcome that differ from their defaults, as JSON values."""
    empty = asdict(Outcome())
    return {name: value for name, value in asdict(outcome).items() if value != empty[name]}


def _read_outcome(fields: Any) -> Outcome:
    """Returns the outcome that `_outcome_to_dict` wrote. Raises ValueError for anything else, and for a failure."""
    outcome: Outcome = make_record(Outcome, fields)
    numbers = [*outcome.parts.values(), outcome.cost, outcome.earned]
    if not all(type(number) is float and math.isfinite(number) for number in numbers):
        raise ValueError("a part is no number")
    if outcome.failure or outcome.crashed or not (outcome.parts or outcome.replies):
        raise ValueError("it is no score")
    return outcome


@dataclass(slots=True)
class _Content:
    """One content that is being scored: an answer or a group, and who waits for its outcomes."""

    key: str
    size: int  # answers of the group; 0 = a single answer
    ids: list[str]  # of the callers that wait; equal content may have been submitted several times
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by place in the group, as they arrive


class JournaledPool(Pool):
    """A scoring pool whose outcomes are looked up in a journal first, and written to it before they are returned.

    Equal content is scored once, also while it is under way: otherwise the order in which a service replies would
    decide which of two scores an answer gets.
    """

    def __init__(self, pool: Pool, identity: str, rules: PartRules | None = None) -> None:
        self.pool = pool
        self.rules = rules  # what the parts of a score are; None = any
        self.scores_groups = pool.scores_groups
        self.conversation = pool.conversation
        # What decides a score besides row and answers: the grader's code and the task's settings.
        self.identity = identity
        self.journal: OutcomeJournal | None = None  # None = there is no run, and nothing is kept
        self._done: list[tuple[str, Outcome]] = []
        # What the pool works on, by the id that it was given, which is never used again.
        self._under_way: dict[str, _Content] = {}
        self._by_key: dict[str, str] = {}  # the same ids by key
        self._by_id: dict[str, str] = {}  # the same ids by those of the callers that wait
        self._next_id = 0
        self._is_closed = False

    def keep_outcomes(self, path: Path | None, world: Ranks | None = None) -> None:
        """Reads the journal at `path`, which is made if it does not exist, and keeps all outcomes there from now on.

        Of several ranks only the first has a path. The others learn what it has read.
        """
        self.journal = OutcomeJournal(path)
        if world is not None and world.size > 1:
            self.journal.share_known(world)

    def share_outcomes(self, world: Ranks) -> None:
        """Brings the outcomes of all ranks to the journal of the first. Every rank must call it."""
        if self.journal is not None and world.size > 1:
            self.journal.send_new(world)

    @property
    def num_pending(self) -> int:
        """The number of submitted answers and groups whose outcome `poll` still has to return."""
        return len(self._by_id) + len(self._done)

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        """Queues an answer, or finds its outcome in the journal. See `Pool.submit`."""
        content: list[Any] = [row, answer_to_list(answer)]
        if past is not None:
            content += [astuple(past.key), [answer_to_list(a) for a in past.answers], closing]
        if inner := self._register(id, content, 0):
            self.pool.submit(inner, row, answer, past, closing)

    def submit_group(self, id: str, row: Row, answers: Sequence[Answer]) -> None:
        """Queues the answers of a group, or finds their outcomes in the journal. See `Pool.submit_group`."""
        if inner := self._register(id, [row, [answer_to_list(a) for a in answers], "group"], len(answers)):
            self.pool.submit_group(inner, row, answers)

    def _register(self, id: str, content: list[Any], size: int) -> str:
        """Returns the id under which the pool must score the content; "" if its outcome is or will be at hand."""
        if self._is_closed:
            raise ValueError("the scoring pool is closed; make a new one")
        text = json.dumps([self.identity, content], sort_keys=True)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        known = self.journal.find(key) if self.journal is not None else None
        # A damaged line may have another number of outcomes, or other parts.
        if known is not None and len(known) == max(1, size) and all(map(self._fits, known)):
            self._done += _name_outcomes(id, size, known)
            return ""
        if id in self._by_id:
            raise ValueError(f'an answer with the id "{id}" is being scored already; use another id')
        if (inner := self._by_key.get(key)) is not None:
            self._under_way[inner].ids.append(id)
            self._by_id[id] = inner
            return ""
        inner = str(self._next_id)
        self._next_id += 1
        self._under_way[inner] = _Content(key=key, size=size, ids=[id])
        self._by_key[key] = inner
        self._by_id[id] = inner
        return inner

    def _fits(self, outcome: Outcome) -> bool:
        """Returns whether an outcome of the journal has parts that the task declares, or goes on without any."""
        if self.rules is None or (outcome.replies and not outcome.parts):
            return True
        try:
            check_parts("", "", self.rules.parts, self.rules.accuracy, outcome.parts, self.rules.optional)
        except TaskError:
            return False
        return True

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """Returns the outcomes that have finished. They are in the journal by then. See `Pool.poll`."""
        finished: list[_Content] = []
        for name, outcome in self.pool.poll(0.0 if self._done else timeout):
            inner, _, place = name.partition("/")
            content = self._under_way[inner]
            content.outcomes[int(place or 0)] = outcome
            if len(content.outcomes) == max(1, content.size):
                self._forget(inner)
                finished.append(content)
        # Only whole results are kept: what failed is tried again after a resume.
        new = [c for c in finished if not any(outcome.failure for outcome in c.outcomes.values())]
        if self.journal is not None and new:
            self.journal.add([(c.key, _list_outcomes(c)) for c in new])
        for content in finished:
            outcomes = _list_outcomes(content)
            self.num_failures += len(content.ids) * sum(bool(outcome.failure) for outcome in outcomes)
            for id in content.ids:
                self._done += _name_outcomes(id, content.size, outcomes)
        self.last_failure = self.pool.last_failure
        done, self._done = self._done, []
        return done

    def drop(self, id: str) -> None:
        """Forgets the answer or group with this id. It is still scored if another one waits for the same outcome."""
        self._done = [(other, outcome) for other, outcome in self._done if id not in (other, other.rpartition("/")[0])]
        inner = self._by_id.pop(id, None)
        if inner is None:
            return
        content = self._under_way[inner]
        content.ids.remove(id)
        if not content.ids:
            self._forget(inner)
            self.pool.drop(inner)

    def _forget(self, inner: str) -> None:
        """Removes what the pool has finished, or need not finish."""
        content = self._under_way.pop(inner)
        del self._by_key[content.key]
        for id in content.ids:
            del self._by_id[id]

    def close(self) -> None:
        """Closes the pool and the journal, and forgets what is not finished."""
        self._is_closed = True
        self.pool.close()
        self._under_way.clear()
        self._by_key.clear()
        self._by_id.clear()
        if self.journal is not None:
            self.journal.close()
            self.journal = None


def _list_outcomes(content: _Content) -> list[Outcome]:
    """Returns the outcomes of a content in the order of its answers."""
    return [content.outcomes[place] for place in range(len(content.outcomes))]


def _name_outcomes(id: str, size: int, outcomes: Sequence[Outcome]) -> list[tuple[str, Outcome]]:
    """Returns outcomes with the ids that `poll` gives them: that of the answer, or "ID/i" in a group of `size`."""
    return [(f"{id}/{i}" if size else id, outcome) for i, outcome in enumerate(outcomes)]
