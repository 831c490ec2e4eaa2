"""The tables of run.db. A change is a new entry at the end of MIGRATIONS, never an edit of an old one."""

from __future__ import annotations

TABLES = ("metrics", "prompts", "groups", "samples", "events")
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

MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1,)
