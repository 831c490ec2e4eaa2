"""Summaries of runs in every state and with every damage. Nothing is locked, and nothing is written."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.config.document import dump_config
from cohort.config.load import load_config
from cohort.errors import RunError
from cohort.run import activity, summary
from cohort.run.activity import LockMonitor, read_lock_holder
from cohort.run.directory import RunDirectory
from cohort.run.store.db import Store
from cohort.run.summary import RunSummary, find_runs, read_summaries, read_summary
from tests.helpers.many_runs import hold_lock, many_runs, write_lock_file, write_run_database
from tests.helpers.pretend_run import run_to_end, small_run

DATA = Path(__file__).resolve().parents[2] / "data"


def make_run(path: Path, ending: str = "finished", steps: int = 12, done: int = 12, recipe: str = "quickstart") -> Path:
    """Makes a run of `steps` steps of which so many are done."""
    path.mkdir(parents=True)
    write_run_database(path / "run.db", done, ending)
    (path / "config.yaml").write_text(dump_config(load_config(recipe, [f"--steps={steps}", "--seed=7"])))
    return path


def read(path: Path) -> RunSummary:
    return read_summary(path.name, path, LockMonitor())


def list_files(folder: Path) -> dict[str, bytes]:
    """Returns all files below a folder with their content, but not what SQLite keeps for readers."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.name.endswith("-shm")}


def test_everything_is_read(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "a", steps=20, done=15, ending="stopped by SIGTERM"))
    assert (run.state, run.note, run.step, run.num_steps) == ("stopped", "stopped by SIGTERM", 15, 20)
    assert (run.recipe, run.model, run.kind, run.name) == ("quickstart", "tiny", "rl", "a")
    assert run.differences.values == {"steps": 20, "seed": 7} and run.settings["optim.lr"] == 0.0003
    assert run.accuracy_step == 15 and run.accuracy == pytest.approx(0.2 + 0.6 * 15 / 16)
    assert run.best_step == 15 and list(run.values) == list(range(1, 16)) and run.metrics["entropy"] >= 0
    assert run.score == run.metrics["reward/mean"] == run.values[15]
    assert abs(time.time() - run.updated) < 600 and run.started <= run.updated and math.isnan(run.eta)
    assert run.command == "cohort train quickstart --seed 0"


def test_a_long_run_is_read_at_evenly_spaced_steps(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "a", steps=200, done=200))
    assert len(run.values) == summary.NUM_POINTS and {1, 200} <= run.values.keys()
    gaps = {b - a for a, b in zip(list(run.values), list(run.values)[1:], strict=False)}
    assert gaps == {6, 7}


@pytest.mark.parametrize(
    ("ending", "done", "state", "note"),
    [
        ("finished", 12, "done", ""),
        ("stopped by SIGINT", 5, "stopped", "stopped by SIGINT"),
        ("stopped by KeyboardInterrupt; go on with: cohort resume a", 5, "stopped", "stopped by KeyboardInterrupt"),
        ("stopped by a rule: worse than the median", 5, "stopped", "stopped by a rule: worse than the median"),
        ("finished", 5, "stopped", "extended to 12 steps"),
        ("stopped by RunError; go on with: cohort resume a", 5, "crashed", "stopped by RunError"),
        ("stopped by SIGINT", 12, "stopped", "stopped by SIGINT"),
        ("", 5, "crashed", "killed, or the machine went down"),
        ("", 12, "crashed", "killed, or the machine went down"),
        ("resumed after step 2", 5, "crashed", "killed, or the machine went down"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, ending: str, done: int, state: str, note: str) -> None:
    run = read(make_run(tmp_path / "a", ending, done=done))
    assert (run.state, run.note) == (state, note)


def test_runs_of_earlier_versions_have_no_event_of_their_end(tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", "")
    (done / "run.md").write_text("card")
    stopped = make_run(tmp_path / "stopped", "", done=5)
    (stopped / "run.md").write_text("card")
    # The card is of an earlier stop, before the resume that was killed.
    killed = make_run(tmp_path / "killed", "", done=5)
    (killed / "run.md").write_text("card")
    os.utime(killed / "run.md", (1e9, 1e9))
    assert [read(p).state for p in (done, stopped, killed)] == ["done", "stopped", "crashed"]
    assert read(DATA / "run-format-1" / "run").state == "done"


def test_a_real_run_records_how_it_ended(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    assert read(directory.path).state == "running"

    def interrupt(step: int) -> None:
        assert read(directory.path).state == "running"
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    run_to_end(directory, during=interrupt)
    stopped = read(directory.path)
    assert (stopped.state, stopped.note, stopped.step) == ("stopped", "stopped by SIGTERM", 3)

    def fail(step: int) -> None:
        if step == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_to_end(RunDirectory.open(directory.path), during=fail)
    crashed = read(directory.path)
    assert (crashed.state, crashed.note) == ("crashed", "stopped by ZeroDivisionError")
    run_to_end(RunDirectory.open(directory.path))
    done = read(directory.path)
    assert (done.state, done.step, done.num_steps) == ("done", 6, 6)
    extended = RunDirectory.open(directory.path)
    extended.lock()
    extended.adopt(replace(extended.config, steps=9))
    extended.unlock()
    # All steps that it had are done, but no longer all that it has.
    assert (read(directory.path).state, read(directory.path).note) == ("stopped", "extended to 9 steps")


def test_a_run_that_a_process_holds_is_running(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", "", done=5)
    with hold_lock(path):
        run = read(path)
        assert run.state == "running" and run.eta >= 0
    assert read(path).state == "crashed"
    # A run that is being extended was done before.
    done = make_run(tmp_path / "b")
    with hold_lock(done):
        assert read(done).state == "running"
    starting = tmp_path / "c"
    starting.mkdir()
    with hold_lock(starting):
        assert (read(starting).state, read(starting).note) == ("running", "it is being started")
    assert read(starting).state == "empty"


def test_where_the_system_lists_no_locks_the_named_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "list_file_locks", lambda: None)
    path = make_run(tmp_path / "a", "", done=5)
    write_lock_file(path)
    assert read(path).state == "running"
    # No process has such a number.
    write_lock_file(path, pid=(1 << 31) - 2)
    assert read(path).state == "crashed"
    # A finished run does not come back to life because its number was given to another process.
    done = make_run(tmp_path / "b")
    write_lock_file(done)
    assert read(done).state == "done"


def test_a_lock_is_found_where_device_numbers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "a", "", done=5)
    with hold_lock(path):
        inode = (path / ".lock").stat().st_ino
        entry = activity.FileLock(os.getpid(), 12345, inode)
        monkeypatch.setattr(activity, "list_file_locks", lambda: [entry])
        assert read(path).state == "running"
        # Another file on another device may have the same number.
        monkeypatch.setattr(activity, "list_file_locks", lambda: [activity.FileLock(1, 12345, inode)])
        assert read(path).state == "crashed"


def test_on_another_machine_a_run_may_be_running(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", "", done=5)
    write_lock_file(path, host="elsewhere")
    assert (read(path).state, read(path).note) == ("running?", "on another machine")
    os.utime(path / "run.db", (time.time() - 3600,) * 2)
    assert read(path).state == "crashed"
    # A step takes half an hour there.
    store = Store(path / "run.db")
    store.write_step(6, {"time/step": 1800.0})
    store.close()
    os.utime(path / "run.db", (time.time() - 3600,) * 2)
    assert read(path).state == "running?"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"pid": "1", "host": 2}', '{"pid": -1, "host": "a"}', "\x00"]
)
def test_a_damaged_lock_file_names_no_process(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    assert read_lock_holder(str(tmp_path / ".lock")) is None
    (tmp_path / ".lock").write_text(json.dumps({"pid": 5, "host": socket.gethostname()}))
    holder = read_lock_holder(str(tmp_path / ".lock"))
    assert holder is not None and holder.pid == 5


def test_many_runs_have_the_states_that_they_must_have(tmp_path: Path) -> None:
    with many_runs(tmp_path / "runs", 60) as made:
        before = list_files(tmp_path)
        found = {run.name: run.state for run in read_summaries([tmp_path / "runs"])}
        assert found == made.states
        assert list_files(tmp_path) == before


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        ("rm config.yaml", "config.yaml: it is missing"),
        ("rm run.db", "run.db: it is missing"),
        ("truncate run.db 0", "run.db: it has schema version 0, but this version of Cohort reads 1"),
        ("truncate run.db 9000", "run.db: database disk image is malformed"),
        ("write run.db garbage", "run.db: file is not a database"),
        ("write config.yaml steps: [", "config.yaml: it is not valid YAML in line 1: expected the node content"),
        ("write config.yaml ", "config.yaml: it is empty or has no keys"),
        ("write config.yaml kind: rl\n", "config.yaml: steps is missing or not a possible number"),
        ("write config.yaml steps: many\n", "config.yaml: steps is missing or not a possible number"),
        ("write config.yaml steps: 9999999999999999\nkind: [1]\n", "config.yaml: steps is missing or not a possible"),
        ("write config.yaml \udcff", "config.yaml: it is not text in UTF-8"),
        ("mkdir config.yaml", "config.yaml: it is not a file"),
        ("mkdir run.db", "run.db: there is no file"),
        ("pipe config.yaml", "config.yaml: it is not a file"),
        ("pipe run.db", "run.db: there is no file"),
        ("long config.yaml", "config.yaml: it has 2000000 bytes, more than a config can have"),
    ],
)
def test_a_broken_run_says_which_file_and_why(tmp_path: Path, damage: str, note: str) -> None:
    path = make_run(tmp_path / "a")
    action, _, rest = damage.partition(" ")
    name, _, value = rest.partition(" ")
    file = path / name
    if action == "truncate":
        os.truncate(file, int(value))
    elif action == "write":
        file.write_bytes(value.encode("utf-8", "surrogateescape"))
    elif action == "long":
        file.write_text("a" * 2_000_000)
    else:
        file.unlink()
    if action == "mkdir":
        file.mkdir()
    if action == "pipe":
        os.mkfifo(file)
    run = read(path)
    assert run.state == "broken" and run.note.startswith(note) and "\n" not in run.note and len(run.note) < 250


def test_a_broken_run_keeps_what_can_be_read(tmp_path: Path) -> None:
    without_config = make_run(tmp_path / "a")
    (without_config / "config.yaml").unlink()
    run = read(without_config)
    assert (run.state, run.step, run.num_steps) == ("broken", 12, 0) and run.accuracy > 0
    without_database = make_run(tmp_path / "b")
    (without_database / "run.db").unlink()
    run = read(without_database)
    assert (run.state, run.recipe, run.num_steps) == ("broken", "quickstart", 12) and math.isnan(run.accuracy)


def test_values_of_wrong_types_in_the_database(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    db = sqlite3.connect(path / "run.db")
    db.execute("UPDATE metrics SET value = 'text' WHERE name = 'reward/mean' AND step = 12")
    db.execute("UPDATE events SET time = 'noon', text = x'ff' WHERE kind = 'command'")
    db.commit()
    db.close()
    run = read(path)
    assert run.state == "done" and math.isnan(run.score) and math.isnan(run.started)
    db = sqlite3.connect(path / "run.db")
    db.execute("UPDATE events SET time = 'noon', step = 'one', text = x'ff' WHERE kind = 'run'")
    db.commit()
    db.close()
    (path / ".lock").write_text("")
    with hold_lock(path):
        assert read(path).state == "running"
    assert read(path).state == "crashed"
    db = sqlite3.connect(path / "run.db")
    db.execute("UPDATE metrics SET step = 'twelve' WHERE step = 12")
    db.commit()
    db.close()
    assert (read(path).state, read(path).note) == ("broken", "run.db: it cannot be read: a step in it is not a number")


def test_a_run_that_ended_before_its_first_step_is_empty(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    directory.unlock()
    assert (read(directory.path).state, read(directory.path).note) == ("empty", "it ended before its first step")
    (tmp_path / "b" / "rollouts").mkdir(parents=True)
    assert (read(tmp_path / "b").state, read(tmp_path / "b").note) == ("empty", "its start was interrupted")


def test_the_log_of_a_killed_run_is_read_and_stays(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", "", done=5)
    write_run_database(path / "run.db", 5, "", keep_log=True)
    (path / "run.db-shm").unlink(missing_ok=True)
    size = (path / "run.db-wal").stat().st_size
    assert size > 0 and read(path).step == 5
    assert (path / "run.db-wal").stat().st_size == size


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = make_run(tmp_path / "killed", "", done=5)
    write_run_database(killed / "run.db", 5, "", keep_log=True)
    (killed / "run.db-shm").unlink(missing_ok=True)
    at_rest = make_run(tmp_path / "rest")
    real = sqlite3.connect

    def connect(address: str, **options: Any) -> sqlite3.Connection:
        """Fails as SQLite does where it cannot create its files. Root may write everywhere, so it is pretended."""
        if str(tmp_path) in address and "immutable" not in address:
            raise sqlite3.OperationalError("unable to open database file")
        return real(address, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    assert (read(killed).state, read(killed).step) == ("crashed", 5)
    assert (read(at_rest).state, read(at_rest).step) == ("done", 12)
    assert {p.name for p in at_rest.iterdir()} == {"config.yaml", "run.db"}


def test_runs_are_found_two_levels_deep(tmp_path: Path) -> None:
    for name in ("a", "sweep/b", "sweep/c", "deep/er/d"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "todo.txt").write_text("x")
    (tmp_path / "runs" / "file").write_text("x")
    (tmp_path / "runs" / ".hidden").mkdir()
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / ".hidden" / "a")
    os.symlink(tmp_path / "runs" / "a", tmp_path / "runs" / "again")
    os.symlink(tmp_path / "nowhere", tmp_path / "runs" / "gone")
    assert [name for name, _ in find_runs(tmp_path / "runs")] == ["a", "again", "sweep/b", "sweep/c"]
    # A sweep has a lock and folders of its own.
    sweep = tmp_path / "runs" / "sweep"
    for name in ("sweep.yaml", ".lock"):
        (sweep / name).write_text("")
    for name in ("logs", "results"):
        (sweep / name).mkdir()
    assert [name for name, _ in find_runs(tmp_path / "runs")] == ["a", "again", "sweep/b", "sweep/c"]
    assert [name for name, _ in find_runs(sweep)] == ["b", "c"]
    # Each run once, whatever leads to it.
    runs = read_summaries([tmp_path / "runs", tmp_path / "runs" / "sweep"])
    assert [Path(run.name).name for run in runs] == ["a", "b", "c"]
    assert [run.name for run in read_summaries([tmp_path / "runs" / "a"])] == ["a"]
    with pytest.raises(RunError, match="there is no folder"):
        read_summaries([tmp_path / "runs" / "file"])


def test_nothing_is_locked_and_no_file_of_a_run_is_opened_for_writing(tmp_path: Path) -> None:
    for name, ending in (("a", "finished"), ("b", ""), ("c", "stopped by SIGINT")):
        write_lock_file(make_run(tmp_path / name, ending, done=5))
    seen: list[str] = []

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith("fcntl."):
            seen.append(event)
        if event == "open" and str(arguments[0]).startswith(str(tmp_path)) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            seen.append(str(arguments[0]))

    # A hook stays until the process ends, so it is told when to listen.
    is_listening = [True]
    sys.addaudithook(lambda event, arguments: listen(event, arguments) if is_listening[0] else None)
    runs = read_summaries([tmp_path])
    is_listening[0] = False
    assert len(runs) == 3 and seen == []


def test_a_pipe_in_place_of_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    assert read_lock_holder(str(tmp_path / ".lock")) is None
    assert not LockMonitor().is_held(tmp_path)
