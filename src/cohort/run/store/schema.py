"""The tables of run.db. A change is a new entry at the end of MIGRATIONS, never an edit of an old one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache

TABLES = ("metrics", "prompts", "groups", "samples", "turns", "events")
"""Referenced tables come before those that refer to them, so rows must be removed in reverse order."""

# AUTOINCREMENT never gives the id of a removed row again. So a reader that asks for rows after an id misses none when a
# resume removes rows and writes them anew.
_VERSION_1 = (
    """CREATE TABLE metrics (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, step INTEGER NOT NULL,
        name TEXT NOT NULL, value REAL)""",
    "CREATE INDEX metrics_by_name ON metrics (name, step)",
    "CREATE INDEX metrics_by_step ON metrics (step)",
    """CREATE TABLE prompts (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, step INTEGER NOT NULL,
        task TEXT NOT NULL, prompt_id TEXT NOT NULL, messages TEXT NOT NULL, row TEXT NOT NULL,
        num_tokens INTEGER NOT NULL, UNIQUE (task, prompt_id))""",
    """CREATE TABLE groups (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, step INTEGER NOT NULL,
        position INTEGER NOT NULL, prompt INTEGER NOT NULL REFERENCES prompts (id), visit INTEGER NOT NULL,
        num_samples INTEGER NOT NULL, reward_mean REAL, reward_min REAL, reward_max REAL,
        excluded TEXT NOT NULL, UNIQUE (step, position))""",
    "CREATE INDEX groups_by_prompt ON groups (prompt)",
    """CREATE TABLE samples (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, step INTEGER NOT NULL,
        group_id INTEGER NOT NULL REFERENCES groups (id), position INTEGER NOT NULL,
        text TEXT NOT NULL, finish TEXT NOT NULL, num_tokens INTEGER NOT NULL, version INTEGER NOT NULL,
        reward REAL, advantage REAL, parts TEXT NOT NULL, reason TEXT NOT NULL,
        failure TEXT NOT NULL, masked TEXT NOT NULL, UNIQUE (group_id, position))""",
    "CREATE INDEX samples_by_step ON samples (step)",
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, step INTEGER NOT NULL,
        kind TEXT NOT NULL, text TEXT NOT NULL)""",
)

# The turns of samples that have several. Runs of version 1 have none for the steps before the migration.
_VERSION_2 = (
    """CREATE TABLE turns (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, step INTEGER NOT NULL,
        sample_id INTEGER NOT NULL REFERENCES samples (id), number INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL, num_reply_tokens INTEGER NOT NULL, finish TEXT NOT NULL, calls TEXT,
        reward REAL, text TEXT NOT NULL, reply TEXT NOT NULL, UNIQUE (sample_id, number))""",
    "CREATE INDEX turns_by_step ON turns (step)",
)

# A new version needs a new FORMAT in config/document.py too: by it a resume knows a newer run.db from a damaged one.
MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1, _VERSION_2)

# Parts of messages of errors that have no kind of their own.
_SIGNS_OF_DAMAGE = ("no such table", "no such column", "has no column", "unsupported file format", "Could not decode")


def is_damage(error: sqlite3.Error) -> bool:
    """Returns whether an SQLite error means that the content of the database is damaged."""
    # The lowest byte is the kind of error.
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    text = str(error)
    return kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or any(sign in text for sign in _SIGNS_OF_DAMAGE)


def find_wrong_table(db: sqlite3.Connection, version: int) -> str:
    """Returns the first table whose columns are not those of the schema version; "" = all tables are as they must be.

    Raises errors of SQLite, and UnicodeDecodeError.
    """
    # Tables as they were created need no closer look, which takes several times as long.
    if _read_definitions(db) == _make_expected_definitions(version):
        return ""
    columns = read_columns(db)
    expected = _make_expected_columns(version)
    return next((table for table in TABLES if columns.get(table) != expected.get(table)), "")


def read_columns(db: sqlite3.Connection) -> dict[str, list[str]]:
    """Returns the names of the columns of each table of a run that the database has."""
    columns = {table: [row[1] for row in db.execute(f"PRAGMA table_info({table})")] for table in TABLES}
    return {table: names for table, names in columns.items() if names}


def _read_definitions(db: sqlite3.Connection) -> set[tuple[str, str]]:
    """Returns the name of each table of a run that the database has, with the statement that created it."""
    rows = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    return {(name, sql) for name, sql in rows if name in TABLES}


@cache
def _make_expected_columns(version: int) -> dict[str, list[str]]:
    """Returns the columns that each table has in a schema version."""
    with closing(_make_empty_database(version)) as db:
        return read_columns(db)


@cache
def _make_expected_definitions(version: int) -> set[tuple[str, str]]:
    """Returns the name of each table in a schema version, with the statement that creates it."""
    with closing(_make_empty_database(version)) as db:
        return _read_definitions(db)


def _make_empty_database(version: int) -> sqlite3.Connection:
    """Returns a new database in memory that has the tables of a schema version."""
    db = sqlite3.connect(":memory:")
    for statements in MIGRATIONS[:version]:
        for statement in statements:
            db.execute(statement)
    return db
