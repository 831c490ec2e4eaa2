"""The reader of run.db. It works while the run writes, and never blocks the writer, because every query is short."""

from __future__ import annotations

import math
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cohort.config.names import get_current_metric_name, list_metric_names
from cohort.errors import RunError
from cohort.evaluation.records import HELD_OUT_METRICS
from cohort.run.store.records import EventRow, GroupRow, MetricRow, Overview, PromptRow, SampleRow, TurnRow
from cohort.run.store.schema import MIGRATIONS, find_wrong_table, is_damage
from cohort.system.json_text import parse_json


class Reader:
    """Reads the rows of a run. Each list is in the order of ids; `after` selects rows with a larger id.

    A reader that stays open sees what is written later. With `once`, if no process has the database open, it creates no
    files in the run directory, but may not see what is written later. Raises RunError if the database does not exist,
    cannot be read, is damaged or has another schema version.
    """

    def __init__(self, path: Path, *, once: bool = False) -> None:
        if not path.is_file():
            raise RunError(
                f"there is no file {path}, the database that every run has. If it was lost, restore it from a copy, or "
                f"rebuild it from the other files of the run with `cohort resume {path.parent}`."
            )
        self.path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None  # of a database that cannot be read in its place
        self._db = self._open(once)
        version = self._query("PRAGMA user_version")[0]["user_version"]
        if version > len(MIGRATIONS):
            raise RunError(
                f"{path} has schema version {version}, but this version of Cohort reads {len(MIGRATIONS)}: upgrade "
                "Cohort. If no newer version has written this run, the file is damaged: rebuild it from the other "
                f"files of the run with `cohort resume {path.parent}`, which keeps the damaged file aside."
            )
        if version < 1:
            raise RunError(
                f"{path} has schema version {version}, but this version of Cohort reads 1 to {len(MIGRATIONS)}. Run "
                f"`cohort resume {path.parent}` once: it migrates the database."
            )
        self._version = version  # tables that later versions have are read as empty
        try:
            wrong_table = find_wrong_table(self._db, version)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise RunError(_describe_problem(path, error)) from error
        if wrong_table:
            raise RunError(_describe_damage(path, f"its table {wrong_table} does not have the columns that it must"))

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()

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
        return [PromptRow(**{**r, "messages": parse_json(r["messages"]), "row": parse_json(r["row"])}) for r in rows]

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
            row["parts"] = parse_json(row["parts"])
            row["advantage"] = math.nan if row["advantage"] is None else row["advantage"]
        return [SampleRow(**row) for row in rows]

    def read_turns(self, *, after: int = 0, step: int | None = None, sample: int | None = None) -> list[TurnRow]:
        """Returns the turns of samples with several; None = any step or sample. `sample` is a SampleRow.id.

        Steps that an earlier version of Cohort recorded have none.
        """
        if self._version < 2:
            return []
        rows = self._select_rows("turns", after, step=step, sample_id=sample)
        for row in rows:
            row["sample"] = row.pop("sample_id")
            row["calls"] = None if row["calls"] is None else parse_json(row["calls"])
        return [TurnRow(**row) for row in rows]

    def read_events(self, *, after: int = 0, kind: str | None = None) -> list[EventRow]:
        """Returns the event rows with an id above `after`, in the order of ids; only those of `kind` if it is given."""
        return [EventRow(**r) for r in self._select_rows("events", after, kind=kind)]

    def read_series(self, name: str) -> dict[int, float]:
        """Returns the values of the metric `name` as a dict from step to value; {} if there are none.

        If a step has several, the newest counts. A value may be NaN.
        """
        return {row.step: row.value for row in self.read_metrics(name=name)}

    def read_all_series(self) -> dict[str, dict[int, float]]:
        """Returns the values of all metrics as a dict from name to a dict from step to value, oldest first.

        If a step has several values of a metric, the newest counts. A value may be NaN.
        """
        series: dict[str, dict[int, float]] = {}
        try:
            # Row by row: a long run has millions of them, which as a list would take more memory than the result.
            for name, step, value in self._db.execute("SELECT name, step, value FROM metrics ORDER BY id"):
                values = series.setdefault(get_current_metric_name(name), {})
                values[step] = math.nan if value is None else value
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise RunError(_describe_problem(self.path, error)) from error
        return series

    def find_last_signal(self) -> int:
        """Returns the newest step in which a sample has an advantage other than 0; 0 if there is none."""
        return int(self._query("SELECT coalesce(max(step), 0) AS step FROM samples WHERE advantage != 0")[0]["step"])

    def find_last_step(self) -> int:
        """Returns the newest step that has metrics; 0 if there is none."""
        return int(self._query("SELECT coalesce(max(step), 0) AS step FROM metrics")[0]["step"])

    def read_overview(self, curve: str, num_points: int) -> Overview:
        """Returns what a table of runs shows of this one. It takes the same time for a run of any length.

        `curve` is the metric whose history is read: `num_points` values at most, evenly spaced. Raises RunError if a
        step in the database is not a number.
        """
        newest = "(SELECT max(step) FROM metrics)"
        rows = self._fetch(f"SELECT step, time, name, value FROM metrics WHERE step = {newest} ORDER BY id")
        step = rows[0][0] if rows else 0
        if type(step) is not int:
            raise RunError(_describe_damage(self.path, "a step in it is not a number"))
        metrics = {get_current_metric_name(str(name)): _make_number(value) for _, _, name, value in rows}
        found = {name: self._read_points(name, ()) for name in HELD_OUT_METRICS}
        measured = max(found, key=lambda name: max(found[name], default=-1))
        accuracies = found[measured]
        # Metrics of the newest evaluation, if that is older than the newest step.
        if accuracies and (evaluated := max(accuracies)) != step:
            older = self._fetch("SELECT name, value FROM metrics WHERE step = ? AND name LIKE 'eval/%'", (evaluated,))
            metrics |= {get_current_metric_name(str(name)): _make_number(value) for name, value in older}
        # Whole numbers, evenly spaced, the last step among them.
        spaced = {step - i * max(0, step - 1) // max(1, num_points - 1) for i in range(num_points)} - {0}
        # The first command, the newest event of the life of the run, and the newest event.
        chosen = ("WHERE kind = 'command' ORDER BY id", "WHERE kind = 'run' ORDER BY id DESC", "ORDER BY id DESC")
        ids = ", ".join(f"(SELECT id FROM events {which} LIMIT 1)" for which in chosen)
        events = [
            EventRow(id=id, time=_make_number(time), step=step if type(step) is int else 0, kind=kind, text=str(text))
            for id, time, step, kind, text in self._fetch(
                f"SELECT id, time, step, kind, text FROM events WHERE id IN ({ids}) ORDER BY id"
            )
        ]
        command = next((event for event in events if event.kind == "command"), None)
        times = [*(_make_number(row[1]) for row in rows[-1:]), *(event.time for event in events[-1:])]
        return Overview(
            step=step,
            metrics=metrics,
            accuracies=accuracies,
            measure=measured.removeprefix("eval/"),
            curve=self._read_points(curve, sorted(spaced)),
            command=command.text if command else "",
            started=command.time if command else math.nan,
            updated=max(times, default=math.nan),
            last_run_event=next((event for event in reversed(events) if event.kind == "run"), None),
        )

    def _read_points(self, name: str, steps: Sequence[int]) -> dict[int, float]:
        """Returns the values of a metric by step, in the order of steps; only those of `steps` if there are any."""
        found: dict[int, float] = {}
        among = f" AND step IN ({', '.join(map(str, steps))})" if steps else ""
        for stored in reversed(list_metric_names(name)):
            rows = self._fetch(f"SELECT step, value FROM metrics WHERE name = ?{among} ORDER BY step, id", (stored,))
            found |= {step: _make_number(value) for step, value in rows if type(step) is int}
        return dict(sorted(found.items()))

    def count_fates(self) -> dict[str, int]:
        """Returns the number of samples of all steps by their fate, the most frequent first; "" = trained on.

        The fate of a sample that could not be scored is "failed". That of one in an excluded group is the group's.
        """
        fate = "CASE WHEN s.failure != '' THEN 'failed' WHEN g.excluded != '' THEN g.excluded ELSE s.masked END"
        tables = "samples AS s JOIN groups AS g ON g.id = s.group_id"
        rows = self._query(
            f"SELECT {fate} AS fate, count(*) AS num FROM {tables} GROUP BY fate ORDER BY num DESC, fate"
        )
        return {str(row["fate"]): int(row["num"]) for row in rows}

    def _select_rows(self, table: str, after: int, **equal: int | str | None) -> list[dict[str, Any]]:
        """Returns the rows of `table` with an id above `after`, in the order of ids, as dicts from column to value.

        `equal` names columns and the values that they must have; None = any value.
        """
        # Names of tables and columns are constants of this module; only values are parameters of the query.
        wanted = {column: value for column, value in equal.items() if value is not None}
        conditions = " AND ".join(["id > ?", *(f"{column} = ?" for column in wanted)])
        return self._query(f"SELECT * FROM {table} WHERE {conditions} ORDER BY id", (after, *wanted.values()))

    def _query(self, sql: str, values: Sequence[int | str] = ()) -> list[dict[str, Any]]:
        """Runs a query, and returns its rows as dicts from column to value. Raises RunError if the file is damaged."""
        try:
            cursor = self._db.execute(sql, values)
            columns = [c[0] for c in cursor.description]
            return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
        # SQLite repeats damaged names in its messages, and they may not be valid text.
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise RunError(_describe_problem(self.path, error)) from error

    def _fetch(self, sql: str, values: Sequence[int | str] = ()) -> list[tuple[Any, ...]]:
        """Runs a query, and returns its rows as tuples, which is faster. Raises RunError if the file is damaged."""
        try:
            return self._db.execute(sql, values).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise RunError(_describe_problem(self.path, error)) from error

    def _open(self, once: bool) -> sqlite3.Connection:
        """Returns a connection to the database that only reads. Raises RunError if the file cannot be read.

        With `once` it creates no files, if no process has the database open; then it may not see what is written later.
        Nor may it if the directory cannot be written.
        """
        if once and _is_at_rest(self.path):
            return _connect(self.path, "&immutable=1")
        try:
            return _connect(self.path, "")
        except _OpenError as problem:
            # A WAL database in a directory that cannot be written opens only as immutable, and then without its log.
            log_file = _find_log(self.path)
            if log_file is None:
                return _connect(self.path, "&immutable=1")
            return self._connect_to_copy(log_file, problem)

    def _connect_to_copy(self, log_file: Path, problem: RunError) -> sqlite3.Connection:
        """Returns a connection to a temporary copy of the database and its log, which has the newest steps.

        `problem` is why the database cannot be read in its place. Raises RunError if it cannot be copied.
        """
        try:
            self._copy = tempfile.TemporaryDirectory(prefix="cohort-run-db-")
            for file in (self.path, log_file):
                shutil.copyfile(file, Path(self._copy.name, file.name))
        except OSError as error:
            raise RunError(
                f"{problem} The newest steps are in {log_file}, and no temporary copy of both files can be made "
                f"({error}). Copy the run to a folder that you can write to, or free space in {tempfile.gettempdir()}."
            ) from error
        return _connect(Path(self._copy.name, self.path.name), "")


class _OpenError(RunError):
    """SQLite cannot open the database, although it may be intact."""


def _connect(path: Path, options: str) -> sqlite3.Connection:
    """Returns a connection that only reads. `options` are added to SQLite's address of the file `path`.

    Raises _OpenError if the file cannot be opened, RunError if it is damaged or locked.
    """
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{options}", uri=True, timeout=10)
        # Connecting alone does not read the file.
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return db
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        is_closed = isinstance(error, sqlite3.OperationalError) and "locked" not in str(error) and not is_damage(error)
        raise (_OpenError if is_closed else RunError)(_describe_problem(path, error)) from error


def _make_number(value: Any) -> float:
    """Returns a value of a column of numbers; NaN for NULL, as which SQLite stores it, and for what is no number."""
    return float(value) if isinstance(value, float | int) else math.nan


def _describe_problem(path: Path, error: sqlite3.DatabaseError | UnicodeDecodeError) -> str:
    """Returns the message for an error of SQLite while it reads the database `path`, with the remedy."""
    if isinstance(error, UnicodeDecodeError) or is_damage(error):
        return _describe_damage(path, str(error))
    return (
        f"{path} cannot be read: {error}. Make sure that you may read the file and that no other program has locked "
        "it, then repeat the command."
    )


def _describe_damage(path: Path, problem: str) -> str:
    """Returns the message for a database `path` whose content is damaged, with the remedy."""
    return (
        f"{path} cannot be read: {problem}; it is damaged or not a run's database. Restore it from a copy, or "
        f"rebuild it from the other files of the run with `cohort resume {path.parent}`, which keeps the damaged "
        "file aside."
    )


def _find_log(path: Path) -> Path | None:
    """Returns the log file of the database `path`, which has what was written last; None if there is none."""
    log_file = path.with_name(f"{path.name}-wal")
    return log_file if log_file.exists() and log_file.stat().st_size else None


def _is_at_rest(path: Path) -> bool:
    """Returns whether `path` is a database in WAL mode without its log file, which means that no process has it open.

    Opening such a database in the usual way would create a log file, which then stays.
    """
    with path.open("rb") as file:
        header = file.read(20)
    # Bytes 18 and 19 are the file format versions for writing and reading; 2 means WAL.
    return header[18:20] == b"\x02\x02" and not path.with_name(f"{path.name}-wal").exists()
