"""Run directories: names, layout, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import re
from datetime import datetime

import pytest

from cohort.errors import ConfigError, RunError
from cohort.evaluation.records import Evaluation
from cohort.run import directory as directory_module
from cohort.run.directory import RunDirectory, load_evaluation, make_run_name
from cohort.run.store.rollouts import list_rollout_steps, make_rollout_path, save_rollouts
from tests.helpers.pretend_run import PretendJob, small_run


def test_create_and_open(tmp_path):
    config = small_run()
    created = RunDirectory.create(tmp_path / "runs", config)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-pretend-[a-z0-9]{4}", created.path.name)
    assert created.path.name.startswith(f"{datetime.now():%Y-}")
    names = {p.name for p in created.path.iterdir()}
    assert names == {"config.yaml", "run.db", "rollouts", "checkpoints", "eval", ".lock"}
    opened = RunDirectory.open(created.path)
    assert opened.config == config


def test_names_differ():
    assert len({make_run_name("a") for _ in range(50)}) > 45


def test_an_existing_name_is_refused(tmp_path):
    RunDirectory.create(tmp_path, small_run(), "a")
    with pytest.raises(RunError, match="a exists already, so no new run"):
        RunDirectory.create(tmp_path, small_run(), "a")


def test_a_config_that_cannot_be_written_makes_no_directory(tmp_path):
    with pytest.raises(ConfigError):
        RunDirectory.create(tmp_path, small_run(model="https://user:password@host/model"), "a")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_run(tmp_path):
    RunDirectory.create(tmp_path, small_run(), "countdown-k3f9")
    with pytest.raises(RunError, match=r"no run .*countdown-k3f8\..* Did you mean .*/countdown-k3f9\?"):
        RunDirectory.open(tmp_path / "countdown-k3f8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty has no runs"):
        RunDirectory.open(tmp_path / "empty" / "x")
    with pytest.raises(RunError, match=r"empty is not a run: it has no config.yaml"):
        RunDirectory.open(tmp_path / "empty")
    (tmp_path / "empty" / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"config.yaml"):
        RunDirectory.open(tmp_path / "empty")
    (tmp_path / "empty" / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="cannot be read"):
        RunDirectory.open(tmp_path / "empty")


def test_a_read_only_place(tmp_path, monkeypatch):
    """The system's refusal is simulated, because root may write anywhere."""

    def refuse(*_, **__):
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(directory_module.Path, "mkdir", refuse)
    with pytest.raises(
        RunError, match=r"cannot write .*a: read-only file system. Make the file and its directory writable"
    ):
        RunDirectory.create(tmp_path, small_run(), "a")


def test_extend_keeps_everything_else(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    directory.adopt(dataclasses.replace(directory.config, steps=50))
    assert RunDirectory.open(directory.path).config == dataclasses.replace(small_run(), steps=50)
    with pytest.raises(RunError, match="has 50 steps, and --steps is 6: a run can be extended"):
        directory.adopt(dataclasses.replace(directory.config, steps=6))


def test_a_changed_setting_is_named(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    directory.require_same_settings(small_run(steps=10))
    changed = dataclasses.replace(small_run(), optim=dataclasses.replace(small_run().optim, lr=0.5))
    with pytest.raises(RunError, match=r"started with optim.lr = 1e-06, not 0.5. A run keeps its settings"):
        directory.require_same_settings(changed)


def test_evaluations_round_trip(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    evaluation = PretendJob().evaluate(20)
    path = directory.save_evaluation(evaluation)
    assert path == directory.path / "eval" / "step-000020.json"
    directory.save_evaluation(PretendJob().evaluate(3))
    (directory.eval / "other.json").write_text("made by hand")
    found = directory.load_evaluations()
    assert list(found) == [3, 20] and found[20] == evaluation and isinstance(found[20], Evaluation)
    path.write_text("{}")
    with pytest.raises(RunError, match=r"step-000020.json is damaged"):
        directory.load_evaluations()


def test_an_evaluation_is_not_read_from_a_pipe(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "e.json")
    # Reading would wait for ever.
    monkeypatch.setattr(directory_module.Path, "read_text", lambda path: pytest.fail("the pipe was read"))
    with pytest.raises(RunError, match=r"e.json is not a regular file"):
        load_evaluation(tmp_path / "e.json")


def test_remove_after(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    for step in (1, 2, 3):
        save_rollouts(make_rollout_path(directory.rollouts, step), [])
        directory.save_evaluation(PretendJob().evaluate(step))
    half = directory.rollouts / ".step-000003.safetensors.123.tmp"
    half.write_bytes(b"half")
    directory.remove_after(2)
    assert list_rollout_steps(directory.rollouts) == [1, 2] and list(directory.load_evaluations()) == [1, 2]
    assert not half.exists()


def test_a_checkpoint_where_a_run_is_meant(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("")
    with pytest.raises(RunError, match=r"This command takes the run itself: write .*/a without the @"):
        RunDirectory.open(tmp_path / "a@2")
