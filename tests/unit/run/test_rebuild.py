"""Repair of run.db: what is lost is written again from the other files, and nothing shrinks in silence."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from cohort.config.schema import SaveConfig
from cohort.errors import RunError
from cohort.logs.view import make_view
from cohort.run.directory import RunDirectory
from cohort.run.life import Run
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps
from cohort.types import Provenance
from tests.helpers.pretend_run import PretendJob, collect_remains, pretend_groups, run_to_end, small_run


def run_once(path: Path, **changes: object) -> RunDirectory:
    directory = RunDirectory.create(path, small_run(**changes), "a")
    run_to_end(directory, make_view("plain", io.StringIO()))
    return RunDirectory.open(directory.path)


def resume(directory: RunDirectory) -> str:
    """Resumes a run to its end, and returns what the terminal shows."""
    output = io.StringIO()
    run_to_end(RunDirectory.open(directory.path), make_view("plain", output))
    return output.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunDirectory:
    """A finished run, to be copied."""
    return run_once(tmp_path_factory.mktemp("finished"))


def read_lines(directory: RunDirectory) -> list[dict]:
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


def overwrite_pages(database: Path) -> None:
    data = bytearray(database.read_bytes())
    data[4096 : 4096 * 6] = b"\x00" * (4096 * 5)
    database.write_bytes(data)


def change_rows(statement: str) -> Callable[[Path], None]:
    """Returns a function that runs a statement on a database, which stays well-formed."""

    def change(database: Path) -> None:
        with closing(sqlite3.connect(database)) as db, db:
            db.execute("PRAGMA writable_schema=ON")
            db.execute(statement)

    return change


def change_bytes(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Returns a function that replaces bytes in the file of a database at their first place."""

    def change(database: Path) -> None:
        data = database.read_bytes()
        assert old in data
        database.write_bytes(data.replace(old, new, 1))

    return change


def change_header(offset: int, new: bytes) -> Callable[[Path], None]:
    """Returns a function that replaces bytes in the header of a database."""

    def change(database: Path) -> None:
        data = database.read_bytes()
        database.write_bytes(data[:offset] + new + data[offset + len(new) :])

    return change


DAMAGES = {
    "pages are overwritten": overwrite_pages,
    "it is no database": lambda database: database.write_bytes(b"this is not a database, " * 100),
    "it is cut off": lambda database: database.write_bytes(database.read_bytes()[:20_000]),
}

# SQLite reads most of these without an error.
QUIET_DAMAGES = {
    "a metric has another value": change_rows("UPDATE metrics SET value = 1.19e20 WHERE step = 2 AND name = 'loss'"),
    "a metric of an evaluation is gone": change_rows("DELETE FROM metrics WHERE step = 3 AND name = 'eval/accuracy'"),
    "a metric is a text": change_rows("UPDATE metrics SET value = 'x' WHERE step = 2 AND name = 'loss'"),
    "samples are gone": change_rows("DELETE FROM samples WHERE rowid < 4"),
    "a step has no groups and no samples": change_rows("UPDATE groups SET step = 1000 + step WHERE step = 2"),
    "a name is not valid text": change_bytes(b"CREATE TABLE samples", b"CREATE TABLE s\xce\xcemples"),
    "a column has another name": change_bytes(b"parts TEXT NOT NULL", b"pasts TEXT NOT NULL"),
    "a column is not valid text": change_bytes(b"parts TEXT NOT NULL", b"par\xces TEXT NOT NULL"),
    "it has no schema version": change_header(60, bytes(4)),
    "it has a newer schema version": change_header(60, b"\x55\x00\x00\x01"),
    "it has a negative schema version": change_header(60, b"\xf9\x00\x00\x01"),
    "SQLite does not support its format": change_header(44, b"\x00\x00\x00\x55"),
    "SQLite cannot write its format": change_header(18, b"\x55"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_database_is_kept_aside_and_rebuilt(tmp_path, damage):
    directory = run_once(tmp_path)
    before, lines = collect_remains(directory), read_lines(directory)
    DAMAGES[damage](directory.database)
    damaged = directory.database.read_bytes()
    output = resume(directory)
    assert "run.db was damaged" in output and "the file is kept as run.db.damaged." in output
    assert "the steps 1 to 6 and the evaluations after steps 0, 3, 6; they were written again" in " ".join(
        output.split()
    )
    assert "are lost" in output
    assert (directory.path / "run.db.damaged").read_bytes() == damaged
    assert collect_remains(directory) == before and read_lines(directory) == lines
    with Reader(directory.database) as reader:
        assert {event.kind for event in reader.read_events()} == {"repair", "run"}
    assert "lost with run.db" in directory.card.read_text()
    # Nothing is left to repair, and a second damaged file does not replace the first.
    assert "run.db" not in resume(directory)
    DAMAGES[damage](directory.database)
    assert "the file is kept as run.db.damaged-2." in resume(directory)
    assert (directory.path / "run.db.damaged").read_bytes() == damaged and collect_remains(directory) == before


@pytest.mark.parametrize("damage", QUIET_DAMAGES)
def test_damage_that_leaves_the_database_well_formed_is_found(finished, tmp_path, damage):
    directory = RunDirectory.open(shutil.copytree(finished.path, tmp_path / "a"))
    before, lines = collect_remains(directory), read_lines(directory)
    QUIET_DAMAGES[damage](directory.database)
    # A reader may not notice, but what it notices it says in words.
    with suppress(RunError), Reader(directory.database, once=True) as reader:
        reader.read_metrics(), reader.read_samples(), reader.read_events()
    output = resume(directory)
    assert "run.db was damaged" in output and "the file is kept as run.db.damaged." in output
    assert collect_remains(directory) == before and read_lines(directory) == lines


def test_a_lost_database_is_rebuilt(tmp_path):
    directory = run_once(tmp_path)
    before, lines = collect_remains(directory), read_lines(directory)
    directory.database.unlink()
    output = " ".join(resume(directory).split())
    assert "run.db lacked the steps 1 to 6" in output
    assert "All earlier events, the command among them, are lost." in output
    assert collect_remains(directory) == before and read_lines(directory) == lines


def test_a_log_that_is_lost_after_a_kill_is_written_again(tmp_path):
    """A kill leaves the newest rows in run.db-wal alone. Here a copy of run.db from step 1 takes the place of both."""
    directory = RunDirectory.create(tmp_path, small_run(), "a")

    def keep_copy(step: int) -> None:
        if step == 1:
            shutil.copy(directory.database, tmp_path / "early.db")

    run_to_end(directory, make_view("plain", io.StringIO()), keep_copy)
    before, lines = collect_remains(directory), read_lines(directory)
    shutil.copy(tmp_path / "early.db", directory.database)
    output = resume(directory)
    assert "run.db lacked the steps 1 to 6" in output and "The events of these steps are lost." in output
    assert collect_remains(directory) == before and read_lines(directory) == lines
    with Reader(directory.database) as reader:
        assert reader.read_events(kind="command")[0].text == "cohort train pretend"


def test_steps_that_nothing_knows_are_refused_and_no_file_changes(tmp_path):
    directory = run_once(tmp_path)
    overwrite_pages(directory.database)
    *_, last = directory.metrics.read_text().splitlines(keepends=True)
    directory.metrics.write_text(last)
    longer = RunDirectory.open(directory.path)
    longer.config = small_run(steps=8)
    files = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(RunError, match=r"has done 6 steps, but the record of steps 1 to 6 is lost: run.db is damaged"):
        run_to_end(longer, make_view("plain", io.StringIO()))
    left = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert left == files  # config.yaml among them: the run was not extended


def test_lost_samples_are_named(tmp_path):
    directory = run_once(tmp_path, save=SaveConfig(every=2, rollouts=2))
    directory.database.unlink()
    assert "The samples of the steps 1 to 4 are lost" in resume(directory)
    with Reader(directory.database) as reader:
        assert {row.step for row in reader.read_samples()} == {5, 6}
        assert list(reader.read_series("loss")) == [1, 2, 3, 4, 5, 6]


class GivenJob(PretendJob):
    """A job whose groups are given examples."""

    def step(self, step, groups):
        for sample in (s for g in groups for s in g.samples):
            sample.provenance = [int(Provenance.TARGET)] * len(sample.tokens)
        return dataclasses.replace(super().step(step, groups), showcase=None)


def run_given(directory: RunDirectory) -> str:
    output = io.StringIO()
    job = GivenJob(directory.config)
    with Run(directory, directory.config, job, make_view("plain", output)) as run:
        for step in run.steps():
            run.end_step(step, job.step(step, pretend_groups(step)))
        run.finish()
    return output.getvalue()


def test_given_examples_are_in_rollout_files_only(tmp_path):
    """They are the user's own rows: run.db has none of them, and misses none."""
    directory = RunDirectory.create(tmp_path, small_run(save=SaveConfig(every=2, rollouts=3)), "a")
    run_given(directory)
    assert list_rollout_steps(directory.rollouts) == [4, 5, 6]
    with Reader(directory.database) as reader:
        assert reader.read_groups() == [] and reader.read_prompts() == [] and reader.read_samples() == []
        assert list(reader.read_series("loss")) == [1, 2, 3, 4, 5, 6] and reader.read_series("rollouts/bytes") == {}
    before = collect_remains(directory)
    assert "run.db" not in run_given(RunDirectory.open(directory.path))
    directory.database.unlink()
    output = " ".join(run_given(RunDirectory.open(directory.path)).split())
    assert "run.db lacked the steps 1 to 6" in output and "samples of" not in output
    assert collect_remains(directory) == before


def test_evaluations_are_rebuilt_from_their_files_if_need_be(tmp_path):
    directory = run_once(tmp_path)
    lines = directory.metrics.read_text().splitlines(keepends=True)
    directory.metrics.write_text("".join(line for line in lines if "eval/" not in line))
    directory.database.unlink()
    resume(directory)
    with Reader(directory.database) as reader:
        assert list(reader.read_series("eval/accuracy")) == [0, 3, 6]


def test_lines_of_metrics_that_cannot_be_read_are_kept_aside(tmp_path):
    directory = run_once(tmp_path)
    before = read_lines(directory)
    damaged = directory.metrics.read_bytes().replace(b'"step": 2', b'"step"\x00 2', 1)
    directory.metrics.write_bytes(damaged)
    assert "1 lines that cannot be read; the file is kept as metrics.jsonl.damaged" in resume(directory)
    assert (directory.path / "metrics.jsonl.damaged").read_bytes() == damaged
    assert read_lines(directory) == before
    # An incomplete last line is what every kill may leave.
    directory.metrics.write_bytes(directory.metrics.read_bytes() + b'{"step": 7, "ti')
    assert "kept as" not in resume(directory) and read_lines(directory) == before


def run_other(path: Path) -> RunDirectory:
    """Does a run of the same config whose rewards, and so its metrics, are others."""
    directory = RunDirectory.create(path, small_run(), "b")
    job = PretendJob(small_run())
    with Run(directory, directory.config, job, make_view("plain", io.StringIO())) as run:
        for step in run.steps():
            run.end_step(step, job.step(step, pretend_groups(step + 100)))
        run.finish()
    return directory


def read_files(directory: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file() and path.name != ".lock"}


def test_the_database_of_another_run_does_not_overwrite_the_metrics(tmp_path):
    directory = run_once(tmp_path)
    before, lines = collect_remains(directory), read_lines(directory)
    shutil.copy(run_other(tmp_path).database, directory.database)
    output = " ".join(resume(directory).split())
    assert "the metrics of step 1 are not the same in run.db and metrics.jsonl" in output
    assert collect_remains(directory) == before and read_lines(directory) == lines


def test_the_metrics_file_of_another_run_is_kept_aside(tmp_path):
    directory = run_once(tmp_path)
    before, lines = collect_remains(directory), read_lines(directory)
    shutil.copy(run_other(tmp_path).metrics, directory.metrics)
    output = " ".join(resume(directory).split())
    assert "metrics.jsonl does not fit the newest checkpoint" in output
    assert "the file is kept as metrics.jsonl.damaged." in output
    assert collect_remains(directory) == before and read_lines(directory) == lines
    assert not (directory.path / "run.db.damaged").exists()


@pytest.mark.parametrize("foreign", [["metrics.jsonl"], ["run.db"], ["run.db", "metrics.jsonl"]])
def test_files_of_another_run_alone_are_refused_and_no_file_changes(tmp_path, foreign):
    directory = run_once(tmp_path)
    other = run_other(tmp_path)
    directory.database.unlink()
    directory.metrics.unlink()
    for name in foreign:
        shutil.copy(other.path / name, directory.path / name)
    files = read_files(directory)
    with pytest.raises(RunError, match="damaged or of another run") as caught:
        resume(directory)
    assert [name for name in ("run.db", "metrics.jsonl") if str(directory.path / name) in str(caught.value)] == foreign
    assert read_files(directory) == files


def test_a_checkpoint_without_a_checksum_resumes_as_before(tmp_path):
    directory = run_once(tmp_path)
    state_file = directory.checkpoints / "step-000006" / "state.json"
    state = json.loads(state_file.read_text())
    del state["numbers"]["metrics_crc32"], state["crc32"]
    state_file.write_text(json.dumps(state))
    lines = read_lines(directory)
    directory.database.unlink()
    resume(directory)
    assert read_lines(directory) == lines


def test_a_resumed_run_keeps_the_checksum_of_an_uninterrupted_one(tmp_path):
    whole, halved = run_once(tmp_path / "whole"), RunDirectory.create(tmp_path, small_run(), "a")

    def stop(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_end(halved, make_view("plain", io.StringIO()), stop)
    resume(halved)
    numbers = [json.loads((d.checkpoints / "step-000006" / "state.json").read_text()) for d in (whole, halved)]
    assert numbers[0]["numbers"]["metrics_crc32"] == numbers[1]["numbers"]["metrics_crc32"]


def test_doubled_lines_of_metrics_count_once(tmp_path):
    directory = run_once(tmp_path)
    before, lines = collect_remains(directory), read_lines(directory)
    directory.metrics.write_text(2 * directory.metrics.read_text())
    directory.database.unlink()
    resume(directory)
    assert collect_remains(directory) == before and read_lines(directory) == lines


def test_a_folder_in_place_of_the_database_is_named(tmp_path):
    directory = run_once(tmp_path)
    directory.database.unlink()
    directory.database.mkdir()
    with pytest.raises(RunError, match=r"run.db is a folder, but must be the database"):
        resume(directory)


def test_infinite_and_missing_numbers_do_not_count_as_a_difference(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    job = PretendJob(small_run())
    odd = {"a": math.inf, "b": math.nan, "c": -0.0, "d": -math.inf, "e": 5e-324}
    with Run(directory, directory.config, job, make_view("plain", io.StringIO())) as run:
        for step in run.steps():
            record = job.step(step, pretend_groups(step))
            run.end_step(step, dataclasses.replace(record, metrics={**record.metrics, **odd}))
        run.finish()
    directory.unlock()
    assert "damaged" not in resume(directory)
    directory.database.unlink()
    assert "run.db lacked the steps 1 to 6" in resume(directory)
