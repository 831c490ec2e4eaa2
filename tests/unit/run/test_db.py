"""run.db: a step is written completely or not at all, readers can read meanwhile, and ids only grow."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohort.errors import RunError
from cohort.run import filesystem
from cohort.run.filesystem import find_mount_type, is_on_network, read_mountinfo
from cohort.run.store import db, schema
from cohort.run.store import reader as reader_module
from cohort.run.store.db import Store
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import save_rollouts
from cohort.types import Finish, Provenance
from tests.helpers.pretend_run import pretend_groups

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.db"


def test_what_is_written_is_read(path):
    store = Store(path)
    groups = pretend_groups(3)
    groups[1].excluded = "constant reward"
    groups[0].samples[0].reward, groups[0].samples[0].failure = None, "worker died"
    groups[0].samples[1].text = "bad \ud800 \x00 text"
    begin = time.time()
    store.write_step(1, {"loss": 0.1 + 0.2, "bad": math.nan, "huge": math.inf}, groups, [("skip", "why")])
    with Reader(path) as reader:
        metrics = {m.name: m.value for m in reader.read_metrics(step=1)}
        assert metrics["loss"] == 0.1 + 0.2 and math.isnan(metrics["bad"]) and metrics["huge"] == math.inf
        [event] = reader.read_events()
        assert (event.step, event.kind, event.text) == (
            1,
            "skip",
            "why",
        ) and begin <= event.time <= time.time()
        rows = reader.read_groups(step=1)
        assert [g.position for g in rows] == [0, 1] and rows[1].excluded == "constant reward"
        assert rows[0].reward_mean == groups[0].samples[1].reward  # a failed sample does not count as 0
        [prompt] = reader.read_prompts(id=rows[0].prompt)
        assert (prompt.prompt_id, prompt.messages) == (groups[0].prompt.id, groups[0].prompt.messages)
        assert (prompt.row, prompt.num_tokens) == (groups[0].prompt.row, 3)
        samples = reader.read_samples(group=rows[0].id)
        assert samples[0].reward is None and samples[0].failure == "worker died"
        assert samples[1].text == "bad \\ud800 \x00 text"
        expected = groups[0].samples[1]
        found = samples[1]
        assert (found.finish, found.num_tokens, found.version) == (expected.finish, len(expected.tokens), 3)
        assert (found.reward, found.advantage, found.parts) == (
            expected.reward,
            expected.advantage,
            expected.parts,
        )
    store.close()


def test_rows_after_an_id_and_ids_that_are_never_used_again(path):
    store = Store(path)
    for step in (1, 2, 3):
        store.write_step(step, {"loss": float(step)}, pretend_groups(step))
    with Reader(path) as reader:
        seen = reader.read_metrics()[-1].id
        last_sample = reader.read_samples()[-1].id
        assert reader.read_metrics(after=seen) == []
        store.remove_after(1)
        assert [m.step for m in reader.read_metrics()] == [1]
        assert {g.step for g in reader.read_groups()} == {s.step for s in reader.read_samples()} == {1}
        store.write_step(2, {"loss": 20.0}, pretend_groups(2))
        [new] = reader.read_metrics(after=seen)
        assert (new.step, new.value) == (2, 20.0) and new.id > seen
        assert len(reader.read_samples(after=last_sample)) == 4
        assert reader.read_series("loss") == {1: 1.0, 2: 20.0}
    store.close()


def test_truncating_keeps_prompts_that_earlier_steps_use(path):
    store = Store(path)
    groups = pretend_groups(0)
    groups[0].prompt.id, groups[1].prompt.id = "a", "b"
    store.write_step(1, {}, groups[:1])
    store.write_step(2, {}, groups)
    store.remove_after(1)
    with Reader(path) as reader:
        assert [p.prompt_id for p in reader.read_prompts()] == ["a"]
        assert [g.step for g in reader.read_groups()] == [1]
    store.write_step(2, {}, groups)
    with Reader(path) as reader:
        assert [p.prompt_id for p in reader.read_prompts()] == ["a", "b"]
    store.close()


def test_a_step_that_fails_halfway_leaves_nothing(path):
    store = Store(path)
    groups = pretend_groups(0)
    groups[1].prompt.row = {"x": object()}  # cannot be written
    with pytest.raises(TypeError):
        store.write_step(1, {"loss": 1.0}, groups)
    with Reader(path) as reader:
        assert (reader.read_metrics(), reader.read_prompts(), reader.read_groups(), reader.read_samples()) == (
            [],
            [],
            [],
            [],
        )
    store.write_step(1, {"loss": 1.0}, pretend_groups(0))  # the store still works
    store.close()


def test_an_evaluation_done_again_replaces_its_numbers(path):
    store = Store(path)
    store.write_step(2, {"loss": 1.0})
    store.write_evaluation(2, {"eval/accuracy": 0.5})
    store.write_evaluation(2, {"eval/accuracy": 0.5, "eval/mean_tokens": 3.0})
    with Reader(path) as reader:
        assert [m.name for m in reader.read_metrics()] == ["loss", "eval/accuracy", "eval/mean_tokens"]
    store.close()


def test_a_full_disk_is_reported_and_loses_nothing(path):
    store = Store(path)
    store.write_step(1, {"loss": 1.0}, pretend_groups(1))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")  # makes SQLite behave as on a full disk
    with pytest.raises(RunError, match=r"the disk is full\. Free some space, then continue"):
        store.write_step(2, {"loss": 2.0}, pretend_groups(2, num_groups=200))
    with Reader(path) as reader:
        assert reader.find_last_step() == 1 and len(reader.read_samples()) == 4
    store._db.execute("PRAGMA max_page_count=1000000")
    store.write_step(2, {"loss": 2.0}, pretend_groups(2, num_groups=200))
    with Reader(path) as reader:
        assert reader.find_last_step() == 2 and len(reader.read_samples(step=2)) == 400
    store.close()


def test_read_while_another_process_writes(path):
    """The reader sees growing, always complete steps: as many samples as the step's metric says."""
    code = (
        "import sys; from pathlib import Path; from cohort.run.store.db import Store\n"
        "from cohort.run.store.rollouts import load_rollouts\n"
        "store, groups = Store(Path(sys.argv[1])), load_rollouts(Path(sys.argv[2]))\n"
        "for step in range(1, 41): store.write_step(step, {'num': 6.0}, groups)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    Store(path).close()
    rollouts = path.with_name("groups")
    save_rollouts(rollouts, pretend_groups(0, 3, 2))
    arguments = [sys.executable, "-c", code, str(path), str(rollouts)]
    seen: set[int] = set()
    with subprocess.Popen(arguments, env=env) as process, Reader(path) as reader:
        while process.poll() is None or reader.find_last_step() not in seen:
            step = reader.find_last_step()
            seen.add(step)
            if step:
                assert len(reader.read_samples(step=step)) == 6
                assert len(reader.read_groups(step=step)) == 3
    assert process.returncode == 0 and max(seen) == 40


def test_a_killed_writer_leaves_a_database_that_opens(path):
    code = (
        "import os, signal, sys; from pathlib import Path; from cohort.run.store.db import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "store.write_step(1, {'loss': 1.0})\n"
        "store._db.execute('BEGIN IMMEDIATE')\n"
        "store._insert_metrics(2, {'loss': 2.0}, 0.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code, str(path)], env=env)
    assert result.returncode == -9
    with Reader(path) as reader:
        assert reader.read_series("loss") == {1: 1.0}
    store = Store(path)
    store.write_step(2, {"loss": 2.0})
    store.close()


def test_migration_brings_an_old_database_up(path, monkeypatch):
    old = Store(path)
    old.write_step(1, {"loss": 1.0})
    old.close()
    added = (*schema.MIGRATIONS, ("ALTER TABLE events ADD COLUMN rank INTEGER NOT NULL DEFAULT 0",))
    monkeypatch.setattr(db, "MIGRATIONS", added)
    store = Store(path)
    assert store._db.execute("PRAGMA user_version").fetchone() == (3,)
    store.write_event(1, "x", "y")
    assert store._db.execute("SELECT step, kind, rank FROM events").fetchall() == [(1, "x", 0)]
    assert store._db.execute("SELECT value FROM metrics").fetchall() == [(1.0,)]
    store.close()
    with pytest.raises(RunError, match=r"schema version 3, but this version of Cohort reads 2: upgrade"):
        Reader(path)
    monkeypatch.undo()
    with pytest.raises(RunError, match=r"schema version 3.*upgrade Cohort"):
        Store(path)


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    Store(path).close()
    broken = ("ALTER TABLE events ADD COLUMN rank INTEGER", "ALTER TABLE absent ADD COLUMN x")
    monkeypatch.setattr(db, "MIGRATIONS", (*schema.MIGRATIONS, broken))
    with pytest.raises(RunError, match="no such table"):
        Store(path)
    monkeypatch.undo()
    store = Store(path)
    columns = [row[1] for row in store._db.execute("PRAGMA table_info(events)")]
    assert "rank" not in columns
    store.close()


def test_what_is_not_a_database_is_named(path):
    path.write_bytes(b"this is not a database, " * 100)
    with pytest.raises(RunError, match=r"run.db: file is not a database, so the file is damaged"):
        Store(path)
    with pytest.raises(RunError, match=r"run.db cannot be read"):
        Reader(path)
    with pytest.raises(RunError, match="there is no file"):
        Reader(path.with_name("other.db"))


def test_no_write_ahead_log_on_network_file_systems(path, monkeypatch):
    monkeypatch.setattr(db, "is_on_network", lambda folder: True)
    store = Store(path)
    assert store.journal_mode == "DELETE"
    store.write_step(1, {"loss": 1.0})
    with Reader(path) as reader:
        assert reader.read_series("loss") == {1: 1.0}
    store.close()
    monkeypatch.setattr(db, "is_on_network", lambda folder: False)
    store = Store(path)
    assert store.journal_mode == "WAL"
    store.close()


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /shared rw,relatime shared:2 - nfs4 server:/shared rw,vers=4.2
31 30 0:41 / /shared/local rw - xfs /dev/sdb rw
32 22 0:42 / /mnt/my\040share rw - cifs //host/share rw
33 22 0:43 / /data rw - ext4 /dev/sdc rw
34 22 0:44 / /data rw - fuse.sshfs host:/ rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", "ext4"),
        ("/shared", "nfs4"),
        ("/shared/ada/runs", "nfs4"),
        ("/shared/local/runs", "xfs"),
        ("/sharedness", "ext4"),
        ("/mnt/my share/a", "cifs"),
        ("/data/x", "fuse.sshfs"),
    ],
)
def test_the_mount_that_holds_a_path(path, kind):
    assert find_mount_type(path, read_mountinfo(MOUNTS)) == kind


def test_network_kinds(monkeypatch):
    monkeypatch.setattr(filesystem.Path, "read_text", lambda self: MOUNTS)
    found = {p: is_on_network(Path(p)) for p in ("/shared", "/shared/local", "/mnt/my share", "/data", "/var")}
    assert found == {
        "/shared": True,
        "/shared/local": False,
        "/mnt/my share": True,
        "/data": True,
        "/var": False,
    }


def test_two_writers_wait_for_each_other(path):
    """The lock of the run forbids two writers. If there are two nevertheless, no row is lost."""
    a, b = Store(path), Store(path)
    for step in range(1, 11):
        (a if step % 2 else b).write_step(step, {"loss": float(step)})
    with Reader(path) as reader:
        assert list(reader.read_series("loss")) == list(range(1, 11))
    a.close()
    b.close()


def test_read_from_a_directory_that_cannot_be_written(tmp_path, path, monkeypatch):
    """SQLite creates files beside a WAL database. Where it cannot, the reader opens the database as immutable."""
    store = Store(path)
    store.write_step(1, {"loss": 1.0})
    store.close()
    real, asked = sqlite3.connect, []

    def connect(address, **options):
        asked.append(address)
        if "immutable" not in address:
            raise sqlite3.OperationalError("unable to open database file")
        return real(address, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    with Reader(path) as reader:
        assert reader.read_series("loss") == {1: 1.0}
    assert len(asked) == 2


def copy_killed_database(path: Path, folder: Path) -> Path:
    """Writes three steps to `path`, and copies the database and its log as a kill would leave them."""
    store = Store(path)
    for step in (1, 2, 3):
        store.write_step(step, {"loss": float(step)})
    folder.mkdir()
    for name in ("run.db", "run.db-wal"):
        shutil.copy(path.with_name(name), folder)
    store.close()
    return folder / "run.db"


@pytest.mark.parametrize("once", [False, True])
def test_the_newest_steps_of_a_killed_run_are_read_where_nothing_can_be_written(tmp_path, path, monkeypatch, once):
    killed = copy_killed_database(path, tmp_path / "killed")
    real, temporary = sqlite3.connect, []

    def connect(address, **options):
        if str(killed.parent) in address and "immutable" not in address:
            raise sqlite3.OperationalError("unable to open database file")
        temporary.append(address.partition("?")[0].removeprefix("file://"))
        return real(address, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    with Reader(killed, once=once) as reader:
        assert reader.read_series("loss") == {1: 1.0, 2: 2.0, 3: 3.0} and reader.find_last_step() == 3
    assert {file.name for file in killed.parent.iterdir()} == {"run.db", "run.db-wal"}
    assert not Path(temporary[0]).parent.exists()

    def refuse(*_, **__):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(reader_module.shutil, "copyfile", refuse)
    with pytest.raises(
        RunError, match=r"newest steps are in .*run.db-wal.*Copy the run to a folder that you can write"
    ):
        Reader(killed, once=once)


def test_damage_inside_the_database_is_told_with_the_remedy(path):
    store = Store(path)
    for step in range(1, 100):
        store.write_step(step, {"loss": float(step)}, pretend_groups(step))
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    path.write_bytes(data)
    with Reader(path) as reader, pytest.raises(RunError, match=r"damaged.*rebuild it .* with `cohort resume"):
        reader.read_metrics()


def test_turns_of_conversations_have_rows(path):
    words = [("assistant", "call"), ("tool", "one\ud800"), ("tool", "two"), ("assistant", "y" * 3000)]
    drawn, added = int(Provenance.SAMPLED), int(Provenance.ENVIRONMENT)
    [group] = pretend_groups(3, num_groups=1)
    first, second = group.samples
    first.tokens, first.provenance = [5] * 7, [drawn, drawn, added, added, added, drawn, drawn]
    first.messages = [{"role": role, "content": text} for role, text in words]
    first.turn_calls, first.calls = [{"ok": 1, "error": 1}, {}], {"ok": 1, "error": 1}
    first.turn_rewards, first.finish = [0.25, 1.0], Finish.LENGTH
    second.messages, second.turn_calls = [], []
    store = Store(path)
    store.write_step(1, {"loss": 0.0}, [group])
    store.write_step(2, {"loss": 0.0}, pretend_groups(4))
    with Reader(path) as reader:
        samples = reader.read_samples(step=1)
        call, answer = reader.read_turns(step=1)
        assert reader.read_turns(sample=samples[0].id) == [call, answer] and not reader.read_turns(sample=samples[1].id)
        assert (call.number, call.num_tokens, call.num_reply_tokens, call.finish) == (1, 2, 3, "stop")
        assert (call.calls, call.reward, call.text, call.reply) == (
            {"ok": 1, "error": 1},
            0.25,
            "call",
            "one\\ud800\n\ntwo",
        )
        assert (answer.number, answer.num_tokens, answer.num_reply_tokens, answer.finish) == (2, 2, 0, "length")
        assert (answer.calls, answer.reward, answer.reply, len(answer.text)) == ({}, 1.0, "", 2000)
        assert [turn.number for turn in reader.read_turns(step=2)] == [1, 2, 1, 2]
        assert {turn.reward for turn in reader.read_turns(step=2)} == {None}
    store.remove_after(1)
    store.close()
    with Reader(path) as reader:
        assert {turn.step for turn in reader.read_turns()} == {1}


def test_a_database_without_turns_is_read_and_migrated(path, monkeypatch):
    monkeypatch.setattr(db, "MIGRATIONS", schema.MIGRATIONS[:1])
    monkeypatch.setattr(Store, "_insert_turns", lambda *_: None)
    old = Store(path)
    old.write_step(1, {"loss": 1.0}, pretend_groups(1))
    old.close()
    with Reader(path) as reader:
        assert len(reader.read_samples(step=1)) == 4 and reader.read_turns() == []
    monkeypatch.undo()
    store = Store(path)
    store.write_step(2, {"loss": 1.0}, pretend_groups(2))
    store.close()
    with Reader(path) as reader:
        assert {turn.step for turn in reader.read_turns()} == {2} and len(reader.read_samples()) == 8
