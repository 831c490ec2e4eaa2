"""The reader of run.db. It works while the run writes, and never blocks the writer, because every query is short."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any

from cohort.config.names import get_current_metric_name, list_metric_names
from cohort.errors import RunError
from cohort.run.store.records import EventRow, GroupRow, MetricRow, PromptRow, SampleRow
from cohort.run.store.schema import MIGRATIONS


class Reader:
    """Reads the rows of a run. Each list is in the order of ids; `after` selects rows with a larger id.

    A reader that stays open sees what is written later. With `once`, if no process has the database open, it creates no
    files in the run directory, but may not see what is written later. Raises RunError if the database does not exist,
    cannot be read or has another schema version.
    """

    def __init__(self, path: Path, *, once: bool = False) -> None:
        if not path.is_file():
            raise RunError(
                f"there is no file {path}, the database that every run has. Give the directory that `cohort train` "
                "printed, or restore the file from a copy."
            )
        self._db = _open_read_only(path, once)
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version > len(MIGRATIONS):
            raise RunError(
                f"{path} has schema version {version}, but this version of Cohort reads {len(MIGRATIONS)}: upgrade "
                "Cohort."
            )
        if version < len(MIGRATIONS):
            raise RunError(
                f"{path} has schema version {version}, but this version of Cohort reads {len(MIGRATIONS)}. Run `cohort "
                f"resume {path.parent}` once: it migrates the database."
            )

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self._db.close()

    def read_metrics(self, *, after: int = 0, step: int | None = None, name: str | None = None) -> list[MetricRow]:
        """Returns the metric rows with an id above `after`, in the order of ids; None = any step or name.

        `name` is a current name. Rows that were stored under an old name of that metric are found as well; the returned
        rows always have the current name. A value may be NaN.
        """
        names = [None] if name is None else list_metric_names(name)
        rows = sorted(
            (r for n in names for r in self._select_rows("metrics", after, step=step, name=n)), key=lambda r: r["id"]
        )
        for row in rows:
            row["name"] = get_current_metric_name(row["name"])
            # SQLite stores NaN as NULL.
            row["value"] = math.nan if row["value"] is None else row["value"]
        return [MetricRow(**row) for row in rows]

    def read_prompts(self, *, after: int = 0, id: int | None = None) -> list[PromptRow]:
        """Returns the prompt rows with an id above `after`, in the order of ids; only the row `id` if that is given."""
        rows = self._select_rows("prompts", after, id=id)
        return [PromptRow(**{**r, "messages": json.loads(r["messages"]), "row": json.loads(r["row"])}) for r in rows]

    def read_groups(self, *, after: int = 0, step: int | None = None) -> list[GroupRow]:
        """Returns the group rows with an id above `after`, in the order of ids; only those of `step` if it is given."""
        return [GroupRow(**r) for r in self._select_rows("groups", after, step=step)]

    def read_samples(self, *, after: int = 0, step: int | None = None, group: int | None = None) -> list[SampleRow]:
        """Returns the sample rows with an id above `after`, in the order of ids; None = any step or group.

        `group` is the row id of a group, `GroupRow.id`. An advantage may be NaN.
        """
        rows = self._select_rows("samples", after, step=step, group_id=group)
        for row in rows:
            row["group"] = row.pop("group_id")
            row["parts"] = json.loads(row["parts"])
            row["advantage"] = math.nan if row["advantage"] is None else row["advantage"]
        return [SampleRow(**row) for row in rows]

    def read_events(self, *, after: int = 0, kind: str | None = None) -> list[EventRow]:
        """Returns the event rows with an id above `after`, in the order of ids; only those of `kind` if it is given."""
        return [EventRow(**r) for r in self._select_rows("events", after, kind=kind)]

    def read_series(self, name: str) -> dict[int, float]:
        """Returns the values of the metric `name` as a dict from step to value; {} if there are none.

        If a step has several, the newest counts. A value may be NaN.
        """
        return {row.step: row.value for row in self.read_metrics(name=name)}

    def find_last_step(self) -> int:
        """Returns the newest step that has metrics; 0 if there is none."""
        return int(self._db.execute("SELECT coalesce(max(step), 0) FROM metrics").fetchone()[0])

    def _select_rows(self, table: str, after: int, **equal: int | str | None) -> list[dict[str, Any]]:
        """Returns the rows of `table` with an id above `after`, in the order of ids, as dicts from column to value.

        `equal` names columns and the values that they must have; None = any value.
        """
        # Names of tables and columns are constants of this module; only values are parameters of the query.
        wanted = {column: value for column, value in equal.items() if value is not None}
        conditions = " AND ".join(["id > ?", *(f"{column} = ?" for column in wanted)])
        cursor = self._db.execute(f"SELECT * FROM {table} WHERE {conditions} ORDER BY id", (after, *wanted.values()))
        columns = [c[0] for c in cursor.description]
        return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]


def _open_read_only(path: Path, once: bool) -> sqlite3.Connection:
    """Returns a connection to the database that only reads. Raises RunError if the file cannot be read.

    With `once` it creates no files, if no process has the database open; then it may not see what is written later. Nor
    may it if the directory cannot be written.
    """
    address = f"{path.resolve().as_uri()}?mode=ro"
    # A WAL database in a directory that cannot be written opens only as immutable, hence the second attempt.
    for suffix in ("&immutable=1",) if once and _is_at_rest(path) else ("", "&immutable=1"):
        try:
            db = sqlite3.connect(address + suffix, uri=True, timeout=10)
            # Connecting alone does not read the file.
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except sqlite3.OperationalError as error:
            problem = error
        except sqlite3.DatabaseError as error:
            raise RunError(
                f"{path} cannot be read: {error}; it is damaged or not a run's database. Restore it from a copy, or "
                "give another run."
            ) from error
    raise RunError(
        f"{path} cannot be read: {problem}. Make sure that you may read the file and that no other program has locked "
        "it, then repeat the command."
    ) from problem


def _is_at_rest(path: Path) -> bool:
    """Returns whether `path` is a database in WAL mode without its log file, which means that no process has it open.

    Opening such a database in the usual way would create a log file, which then stays.
    """
    with path.open("rb") as file:
        header = file.read(20)
    # Bytes 18 and 19 are the file format versions for writing and reading; 2 means WAL.
    return header[18:20] == b"\x02\x02" and not path.with_name(f"{path.name}-wal").exists()
