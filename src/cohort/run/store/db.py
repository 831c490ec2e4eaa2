"""The writer of run.db: one writer, one transaction per step, any number of readers at the same time.

The writer takes plain records only, so that other processes could send it theirs without conversion.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time as read_time

from cohort.errors import RunError
from cohort.run.filesystem import is_on_network
from cohort.run.store.schema import MIGRATIONS, TABLES, is_damage
from cohort.run.store.turns import SampleTurn, list_turns
from cohort.types import Group, Sample


class Store:
    """The writer of run.db. Only the process that holds the run's lock may have one.

    It creates the database, or migrates one of an earlier version. Errors of SQLite are raised as RunError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with translate_errors(self.path):
            # isolation_level=None: transactions begin and end only where `_transaction` says so.
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
            # WAL needs memory that all users of the database share, which machines on a network do not have.
            mode = "DELETE" if is_on_network(path.parent) else "WAL"
            self._db.execute(f"PRAGMA journal_mode={mode}")
            # A resume does not write the rows before its checkpoint again, so a committed row must survive a power cut.
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            migrate(self._db, path)

    @property
    def journal_mode(self) -> str:
        """The way SQLite makes transactions safe: "WAL" (a log file), or "DELETE" on a network file system."""
        return str(self._db.execute("PRAGMA journal_mode").fetchone()[0]).upper()

    def write_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group] = (),
        events: Iterable[tuple[str, str]] = (),
        time: float | None = None,
    ) -> None:
        """Adds the rows of a step in one transaction: metrics, groups, samples, events, and prompts without a row.

        `step` counts from 1; 0 = before training. Each event is (kind, text). Nothing is replaced. `time` is that of
        the rows, in seconds since 1970; None = now.
        """
        now = read_time() if time is None else time
        with self._transaction() as db:
            self._insert_metrics(step, metrics, now)
            for position, group in enumerate(groups):
                self._insert_group(step, position, group, now)
            db.executemany(
                "INSERT INTO events (time, step, kind, text) VALUES (?, ?, ?, ?)",
                [(now, step, kind, _escape_surrogates(text)) for kind, text in events],
            )

    def write_evaluation(self, step: int, metrics: Mapping[str, float], time: float | None = None) -> None:
        """Writes the metrics of an evaluation after `step` steps. They replace earlier ones of that step and name.

        Others of the step stay: held-out examples are measured beside the accuracy of a task. `time` is that of the
        rows, in seconds since 1970; None = now.
        """
        with self._transaction() as db:
            db.executemany("DELETE FROM metrics WHERE step = ? AND name = ?", [(step, name) for name in metrics])
            self._insert_metrics(step, metrics, read_time() if time is None else time)

    def write_event(self, step: int, kind: str, text: str) -> None:
        """Adds one event, for example of the kind "checkpoint", to run.db under the number of a step."""
        self.write_step(step, {}, events=[(kind, text)])

    def remove_after(self, step: int) -> None:
        """Removes the rows of all steps after `step` from all tables. The ids of removed rows are never used again."""
        with self._transaction() as db:
            # Rows that refer to others are removed before those they refer to.
            for table in reversed(TABLES):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def close(self) -> None:
        """Closes the database. Raises RunError if SQLite reports an error."""
        with translate_errors(self.path):
            self._db.close()

    def _insert_metrics(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Inserts one row per metric. Must be called inside a transaction. `now` is in seconds since 1970."""
        # SQLite has no NaN: it stores NULL, which `Reader` turns back into NaN.
        self._db.executemany(
            "INSERT INTO metrics (time, step, name, value) VALUES (?, ?, ?, ?)",
            [(now, step, name, float(value)) for name, value in metrics.items()],
        )

    def _insert_group(self, step: int, position: int, group: Group, now: float) -> None:
        """Inserts a row for the group, one per sample and, if the prompt is new, one for the prompt.

        Must be called inside a transaction. `position` is the group's place in the step, `now` in seconds since 1970.
        """
        # A sample that could not be scored has no reward, and does not count as 0.
        rewards = [s.reward for s in group.samples if s.reward is not None]
        cursor = self._db.execute(
            "INSERT INTO groups (time, step, position, prompt, visit, num_samples, reward_mean, reward_min,"
            " reward_max, excluded) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                now,
                step,
                position,
                self._find_or_insert_prompt(step, group, now),
                group.prompt.visit,
                len(group.samples),
                math.fsum(rewards) / len(rewards) if rewards else None,
                min(rewards, default=None),
                max(rewards, default=None),
                _escape_surrogates(group.excluded),
            ),
        )
        self._db.executemany(
            "INSERT INTO samples (time, step, group_id, position, text, finish, num_tokens, version, reward,"
            " advantage, parts, reason, failure, masked) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, step, cursor.lastrowid, *_make_sample_values(i, s)) for i, s in enumerate(group.samples)],
        )
        for place, sample in enumerate(group.samples):
            self._insert_turns(step, (cursor.lastrowid, place), sample, now)

    def _insert_turns(self, step: int, place: tuple[int | None, int], sample: Sample, now: float) -> None:
        """Inserts a row per turn of a sample that has several; other samples have none.

        `place` is the id of the sample's group and its position there. Must be called inside a transaction.
        """
        turns = list_turns(sample)
        if not turns:
            return
        found = self._db.execute("SELECT id FROM samples WHERE group_id = ? AND position = ?", place).fetchone()
        self._db.executemany(
            "INSERT INTO turns (time, step, sample_id, number, num_tokens, num_reply_tokens, finish, calls, reward,"
            " text, reply) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, step, found[0], number, *_make_turn_values(turn)) for number, turn in enumerate(turns, start=1)],
        )

    def _find_or_insert_prompt(self, step: int, group: Group, now: float) -> int:
        """Returns the row id of the group's prompt, found by task and prompt id.

        Inserts a row with `step` and `now` if the prompt has none yet. Must be called inside a transaction.
        """
        prompt = group.prompt
        key = (_escape_surrogates(prompt.task), _escape_surrogates(prompt.id))
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
        """Makes the `with` block one transaction: commits at its end, rolls back if it raises. Yields the database.

        Errors of SQLite are raised as RunError.
        """
        with translate_errors(self.path):
            # IMMEDIATE takes the write lock now, so that a second writer waits here and not in the middle.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # Some errors make SQLite roll back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turns an SQLite error inside the block into a RunError that names the database `path` and says what to do."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        text = str(error)
        resume = f"then continue the run with `cohort resume {path.parent}`, or repeat the command."
        if is_damage(error):
            raise RunError(
                f"cannot write {path}: {text}, so the file is damaged. Check the disk, then continue the run with "
                f"`cohort resume {path.parent}`: it keeps the damaged file aside, and writes a new one from "
                "metrics.jsonl and the rollout files."
            ) from error
        if "full" in text:
            raise RunError(f"cannot write {path}: the disk is full. Free some space, {resume}") from error
        if "readonly" in text or "unable to open" in text:
            raise RunError(
                f"cannot write {path}: {text}. Make the file and its directory writable, {resume}"
            ) from error
        if "locked" in text:
            raise RunError(f"cannot write {path}: {text}. Close the other program that uses it, {resume}") from error
        raise RunError(f"cannot write {path}: {text}. Remove this cause, {resume}") from error


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Brings the database in the file `path` from any earlier schema version to the current one, version by version.

    `db` is the connection to it. Each version is one transaction. Raises RunError if a newer version of Cohort wrote
    the database.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise RunError(
            f"{path} has schema version {version}, but this version of Cohort knows versions up to {len(MIGRATIONS)} "
            "only: upgrade Cohort."
        )
    # The version number is part of the transaction: a kill leaves the old version or the new one.
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


def _make_sample_values(position: int, sample: Sample) -> tuple[object, ...]:
    """Returns the values of a sample's row after group_id, in the order of the INSERT statement in `_insert_group`."""
    return (
        position,
        _escape_surrogates(sample.text),
        str(sample.finish),
        len(sample.tokens),
        sample.versions[0][1] if sample.versions else -1,
        sample.reward,
        sample.advantage,
        json.dumps(sample.parts),
        _escape_surrogates(sample.reason),
        _escape_surrogates(sample.failure),
        sample.masked,
    )


def _make_turn_values(turn: SampleTurn) -> tuple[object, ...]:
    """Returns the values of a turn's row after its number, in the order of the INSERT statement in `_insert_turns`."""
    return (
        turn.num_tokens,
        turn.num_reply_tokens,
        str(turn.finish),
        None if turn.calls is None else json.dumps(turn.calls),
        turn.reward,
        _escape_surrogates(turn.text),
        _escape_surrogates(turn.reply),
    )


def _escape_surrogates(text: str) -> str:
    """Returns the text with lone surrogates (halves of a UTF-16 pair) written as backslash escapes.

    SQLite takes valid UTF-8 only, and one such character would fail the whole step.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
