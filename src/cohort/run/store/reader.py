"""Reading run.db, also while the run writes it. Every query is short: a reader never holds the writer up."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any

from cohort.config.names import current_metric, former_metrics
from cohort.errors import RunError
from cohort.run.store.records import EventRow, GroupRow, MetricRow, PromptRow, SampleRow
from cohort.run.store.schema import MIGRATIONS


class Reader:
    """Rows of a run, each list in the order of its ids. `after` asks for rows with a larger id only.

    A reader that stays open sees what is written meanwhile. With `once` it need not, and leaves no trace in the run.
    """

    def __init__(self, path: Path, *, once: bool = False) -> None:
        if not path.is_file():
            raise RunError(f"{path} does not exist: this run has not started yet, or it is not a run.")
        self._db = _connect(path, once)
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version != len(MIGRATIONS):
            remedy = "upgrade Cohort" if version > len(MIGRATIONS) else "resume the run once to migrate it"
            raise RunError(f"{path} has schema version {version}, this Cohort reads {len(MIGRATIONS)}: {remedy}.")

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def metrics(self, *, after: int = 0, step: int | None = None, name: str | None = None) -> list[MetricRow]:
        """Under the names that metrics have now, whatever the version that wrote them called them."""
        names = [None] if name is None else former_metrics(name)
        rows = sorted(
            (r for n in names for r in self._rows("metrics", after, step=step, name=n)), key=lambda r: r["id"]
        )
        for row in rows:
            row["name"] = current_metric(row["name"])
            row["value"] = math.nan if row["value"] is None else row["value"]
        return [MetricRow(**row) for row in rows]

    def prompts(self, *, after: int = 0, id: int | None = None) -> list[PromptRow]:
        rows = self._rows("prompts", after, id=id)
        return [PromptRow(**{**r, "messages": json.loads(r["messages"]), "row": json.loads(r["row"])}) for r in rows]

    def groups(self, *, after: int = 0, step: int | None = None) -> list[GroupRow]:
        return [GroupRow(**r) for r in self._rows("groups", after, step=step)]

    def samples(self, *, after: int = 0, step: int | None = None, group: int | None = None) -> list[SampleRow]:
        rows = self._rows("samples", after, step=step, group_id=group)
        for row in rows:
            row["group"] = row.pop("group_id")
            row["parts"] = json.loads(row["parts"])
            row["advantage"] = math.nan if row["advantage"] is None else row["advantage"]
        return [SampleRow(**row) for row in rows]

    def events(self, *, after: int = 0, kind: str | None = None) -> list[EventRow]:
        return [EventRow(**r) for r in self._rows("events", after, kind=kind)]

    def series(self, name: str) -> dict[int, float]:
        """One metric over the steps."""
        return {row.step: row.value for row in self.metrics(name=name)}

    def last_step(self) -> int:
        """The newest step that is complete; 0 before the first."""
        return int(self._db.execute("SELECT coalesce(max(step), 0) FROM metrics").fetchone()[0])

    def _rows(self, table: str, after: int, **equal: int | str | None) -> list[dict[str, Any]]:
        wanted = {column: value for column, value in equal.items() if value is not None}
        conditions = " AND ".join(["id > ?", *(f"{column} = ?" for column in wanted)])
        cursor = self._db.execute(f"SELECT * FROM {table} WHERE {conditions} ORDER BY id", (after, *wanted.values()))
        columns = [c[0] for c in cursor.description]
        return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]


def _connect(path: Path, once: bool) -> sqlite3.Connection:
    address = f"{path.resolve().as_uri()}?mode=ro"
    # In a directory that cannot be written a WAL database opens only as one that nobody changes.
    for suffix in ("&immutable=1",) if once and _is_at_rest(path) else ("", "&immutable=1"):
        try:
            db = sqlite3.connect(address + suffix, uri=True, timeout=10)
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except sqlite3.OperationalError as error:
            problem = error
        except sqlite3.DatabaseError as error:
            raise RunError(f"{path} cannot be read: {error}; it is damaged or not a run's database.") from error
    raise RunError(f"{path} cannot be read: {problem}.") from problem


def _is_at_rest(path: Path) -> bool:
    """A WAL database without its log: nobody has it open. To open it as usual makes a log, which then stays."""
    with path.open("rb") as file:
        header = file.read(20)
    return header[18:20] == b"\x02\x02" and not path.with_name(f"{path.name}-wal").exists()
