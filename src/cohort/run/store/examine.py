"""Examination of run.db: whether it is damaged, and which steps it has."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from cohort.config.names import get_current_metric_name
from cohort.errors import RunError
from cohort.run.store.db import translate_errors
from cohort.run.store.schema import MIGRATIONS, find_wrong_table, is_damage, read_columns
from cohort.system.disk import explain_disk_errors

Metrics = dict[int, dict[str, float]]
"""Metrics by step, then by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatabaseState:
    """What was found in run.db."""

    damage: str = ""  # what is wrong with the file; "" = it can be read
    steps: Metrics = field(default_factory=dict)  # of the steps that have metrics
    evaluations: Metrics = field(default_factory=dict)  # of the steps whose evaluation has metrics
    without_samples: set[int] = field(default_factory=set)  # steps without groups, or with groups that lack samples
    has_events: bool = False


def examine_database(database: Path, step: int) -> DatabaseState:
    """Checks the structure of run.db, and returns what it has of the steps up to `step`. A missing file has nothing.

    Raises RunError if it cannot be read for another reason than damage, such as its permissions.
    """
    if not database.exists():
        return DatabaseState()
    if not database.is_file():
        kind = "a folder" if database.is_dir() else "not a regular file"
        raise RunError(
            f"{database} is {kind}, but must be the database of the run. Move it away, then continue the run with "
            f"`cohort resume {database.parent}`: it writes a new one from metrics.jsonl and the rollout files."
        )
    with translate_errors(database):
        try:
            if _has_unknown_header(database):
                return DatabaseState(damage="its header is not one that SQLite writes")
            with closing(sqlite3.connect(database, timeout=30)) as db:
                return _examine(db, step)
        except UnicodeDecodeError as error:
            return DatabaseState(damage=f"a name in it is not valid text: {error}")
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return DatabaseState(damage=str(error))


def _has_unknown_header(database: Path) -> bool:
    """Returns whether the header names a file format that SQLite would read, but take as protected from writing."""
    with explain_disk_errors(database), open(database, "rb") as file:
        header = file.read(20)
    # Byte 18 is the version of the format for writing: 1, or 2 with a log. An empty file is a new database.
    return len(header) == 20 and header[18] not in (1, 2)


def _examine(db: sqlite3.Connection, step: int) -> DatabaseState:
    """Returns what an open database has of the steps up to `step`. Raises errors of SQLite, and UnicodeDecodeError."""
    damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        return DatabaseState(damage=" ".join(str(damage).split()))
    version = db.execute("PRAGMA user_version").fetchone()[0]
    # A new file, or one whose log was lost before any of it was copied into the file.
    if not version and not read_columns(db):
        return DatabaseState()
    # A newer version of Cohort would have written a newer format into config.yaml, and such a run is not opened.
    if not 0 < version <= len(MIGRATIONS):
        return DatabaseState(damage=f"it has schema version {version}, which no version of this run's format has")
    if table := find_wrong_table(db, version):
        return DatabaseState(damage=f"its table {table} does not have the columns that it must have")
    rows = db.execute("SELECT step, name, value FROM metrics WHERE step <= ? ORDER BY id", (step,)).fetchall()
    if any(type(value) not in (float, int, type(None)) for _, _, value in rows):
        return DatabaseState(damage="a metric in it is not a number")
    # Every group says how many samples it has.
    counted = (
        "SELECT step, (SELECT sum(num_samples) FROM groups AS g WHERE g.step = m.step),"
        " (SELECT count(*) FROM samples AS s WHERE s.step = m.step)"
        " FROM (SELECT DISTINCT step FROM metrics WHERE step BETWEEN 1 AND ?) AS m"
    )
    return DatabaseState(
        steps=_group_by_step(row for row in rows if not row[1].startswith("eval/")),
        evaluations=_group_by_step(row for row in rows if row[1].startswith("eval/")),
        without_samples={s for s, expected, present in db.execute(counted, (step,)) if expected != present},
        has_events=db.execute("SELECT 1 FROM events LIMIT 1").fetchone() is not None,
    )


def _group_by_step(rows: Iterable[tuple[int, str, float | None]]) -> Metrics:
    """Returns rows of (step, name, value) as metrics by step, with current names, and NaN where SQLite has NULL."""
    metrics: Metrics = {}
    for step, name, value in rows:
        metrics.setdefault(step, {})[get_current_metric_name(name)] = math.nan if value is None else value
    return metrics
