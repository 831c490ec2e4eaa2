"""run.db: one writer, one transaction a step, any number of readers meanwhile.

The writer takes plain records only, so that records of other processes can be queued to it as they are.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cohort.errors import RunError
from cohort.run.filesystem import is_network
from cohort.run.store.schema import MIGRATIONS, TABLES
from cohort.types import Group, Sample


class Store:
    """The writer. Only the holder of the run's lock may have one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._errors():
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
            # WAL needs shared memory between its users, which a network file system cannot give them.
            mode = "DELETE" if is_network(path.parent) else "WAL"
            self._db.execute(f"PRAGMA journal_mode={mode}")
            # A checkpoint vouches for the rows before it, so a committed row must survive a power cut.
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            migrate(self._db, path)

    @property
    def journal_mode(self) -> str:
        return str(self._db.execute("PRAGMA journal_mode").fetchone()[0]).upper()

    def write_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        events: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Everything about a step, or nothing of it."""
        now = time.time()
        with self._transaction() as db:
            self._insert_metrics(step, metrics, now)
            for position, group in enumerate(groups):
                self._insert_group(step, position, group, now)
            db.executemany(
                "INSERT INTO events (time, step, kind, text) VALUES (?, ?, ?, ?)",
                [(now, step, kind, _storable(text)) for kind, text in events],
            )

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of an evaluation; done again after a kill, they replace the former ones."""
        with self._transaction() as db:
            db.execute("DELETE FROM metrics WHERE step = ? AND name LIKE 'eval/%'", (step,))
            self._insert_metrics(step, metrics, time.time())

    def write_event(self, step: int, kind: str, text: str) -> None:
        self.write_step(step, {}, events=[(kind, text)])

    def truncate_after(self, step: int) -> None:
        """Forget the steps after `step`: they will be redone. Ids are never used again."""
        with self._transaction() as db:
            for table in reversed(TABLES):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def close(self) -> None:
        with self._errors():
            self._db.close()

    def _insert_metrics(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        # SQLite has no NaN: it stores NULL, which the reader turns back.
        self._db.executemany(
            "INSERT INTO metrics (time, step, name, value) VALUES (?, ?, ?, ?)",
            [(now, step, name, float(value)) for name, value in metrics.items()],
        )

    def _insert_group(self, step: int, position: int, group: Group, now: float) -> None:
        rewards = [s.reward for s in group.samples if s.reward is not None]
        cursor = self._db.execute(
            "INSERT INTO groups (time, step, position, prompt, visit, num_samples, reward_mean, reward_min,"
            " reward_max, excluded) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                now,
                step,
                position,
                self._prompt_id(step, group, now),
                group.prompt.visit,
                len(group.samples),
                math.fsum(rewards) / len(rewards) if rewards else None,
                min(rewards, default=None),
                max(rewards, default=None),
                _storable(group.excluded),
            ),
        )
        self._db.executemany(
            "INSERT INTO samples (time, step, group_id, position, text, finish, num_tokens, version, reward,"
            " advantage, parts, reason, failure, masked) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, step, cursor.lastrowid, *_sample_values(i, s)) for i, s in enumerate(group.samples)],
        )

    def _prompt_id(self, step: int, group: Group, now: float) -> int:
        prompt = group.prompt
        key = (_storable(prompt.task), _storable(prompt.id))
        row = self._db.execute("SELECT id FROM prompts WHERE task = ? AND prompt_id = ?", key).fetchone()
        if row is not None:
            return int(row[0])
        cursor = self._db.execute(
            "INSERT INTO prompts (time, step, task, prompt_id, messages, row, num_tokens) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (now, step, *key, json.dumps(prompt.messages), json.dumps(prompt.row), len(prompt.tokens)),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise RunError(f"cannot write {self.path}: {_explain(error)}.") from error


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Bring a database of any earlier version to the current schema, each version in one transaction."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise RunError(f"{path} has schema version {version}, this Cohort knows {len(MIGRATIONS)}: upgrade Cohort.")
    for number, statements in enumerate(MIGRATIONS[version:], start=version + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                db.execute(statement)
            db.execute(f"PRAGMA user_version={number}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _sample_values(position: int, sample: Sample) -> tuple[object, ...]:
    return (
        position,
        _storable(sample.text),
        str(sample.finish),
        len(sample.tokens),
        sample.versions[0][1] if sample.versions else -1,
        sample.reward,
        sample.advantage,
        json.dumps(sample.parts),
        _storable(sample.reason),
        _storable(sample.failure),
        sample.masked,
    )


def _storable(text: str) -> str:
    """SQLite takes UTF-8 only; a lone surrogate (from a JSON escape) would fail the whole step."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _explain(error: sqlite3.DatabaseError) -> str:
    text = str(error)
    if "full" in text:
        return "the disk is full: free some space, then resume; everything written before is intact"
    if "readonly" in text or "unable to open" in text:
        return f"{text}: make the directory writable or use another one"
    if "not a database" in text or "malformed" in text:
        return f"{text}: it is damaged; restore it from a copy, or move it away to go on with an empty one"
    return text
