"""metrics.jsonl has what run.db has, wherever a run is killed. Sinks get the same rows; their failures end no run."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.cli.main import main
from cohort.errors import ConfigError, RunError
from cohort.logs.sinks.base import Sink, SinkRow
from cohort.logs.sinks.registry import SINKS, check_sinks, make_sinks
from cohort.logs.view import Header, View, make_view
from cohort.run.directory import RunDirectory
from cohort.run.job import StepRecord
from cohort.run.life import Run
from cohort.run.store.reader import Reader
from tests.helpers.pretend_run import PretendJob, pretend_groups, small_run

ROOT = Path(__file__).resolve().parents[3]
# Steps and evaluations (a second line of the step, or the line of step 0) in the order they happen.
WHOLE = [0, 1, 2, 3, 3, 4, 5, 6, 6]


class RecordingSink(Sink):
    """A sink that keeps its rows in memory, also from one start to the next."""

    def __init__(self, there: list[SinkRow] | None = None) -> None:
        self.rows: list[SinkRow] = there or []
        self.header: Header | None = None
        self.ends: list[bool] = []

    def connect(self, header: Header) -> None:
        self.header = header
        self.num_there = len(self.rows)

    def has_row(self, row: SinkRow) -> bool:
        return row.number < self.num_there

    def write_row(self, row: SinkRow) -> None:
        self.rows.append(row)

    def stop(self, ended_well: bool) -> None:
        self.ends.append(ended_well)


class FailingSink(RecordingSink):
    """A sink that raises `error` in "start", "step" or "finish", as `where` says."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def connect(self, header: Header) -> None:
        self._fail("start")
        super().connect(header)

    def write_row(self, row: SinkRow) -> None:
        if row.step == 3:
            self._fail("step")
        super().write_row(row)

    def stop(self, ended_well: bool) -> None:
        self._fail("finish")
        super().stop(ended_well)


class ErrorWithoutRepr(Exception):
    """An error whose repr raises another error."""

    def __repr__(self) -> str:
        raise ValueError("no words")


def start_run(
    directory: RunDirectory, sinks: dict[str, View] | None = None, fail_at: int = -1, view: View | None = None
) -> None:
    """Starts or resumes a run. A bug in step `fail_at` (from 1) ends the run before that step is recorded."""
    pretender = PretendJob()
    view = view or make_view("plain", io.StringIO())
    with Run(directory, directory.config, pretender, view, sinks) as run:
        for step in run.steps():
            record = pretender.step(step, pretend_groups(step))
            if step + 1 == fail_at:
                raise RuntimeError("bug")
            run.end_step(step, record)
        run.finish()


def lines_of(directory: RunDirectory) -> list[dict[str, Any]]:
    text = (directory.path / "metrics.jsonl").read_text(encoding="ascii")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def assert_mirrors_database(directory: RunDirectory) -> None:
    lines = lines_of(directory)
    with Reader(directory.database) as reader:
        rows = [(r.step, r.time, r.name, r.value) for r in reader.read_metrics()]
    assert [(n["step"], n["time"], k, v) for n in lines for k, v in n["metrics"].items()] == rows


def test_every_step_and_evaluation_is_one_line_with_the_values_of_the_database(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    start_run(directory)
    lines = lines_of(directory)
    assert [line["step"] for line in lines] == WHOLE
    assert [i for i, line in enumerate(lines) if "eval/accuracy" in line["metrics"]] == [0, 4, 8]
    assert all("loss" in lines[i]["metrics"] and "time/step" in lines[i]["metrics"] for i in (1, 2, 3, 5, 6, 7))
    assert_mirrors_database(directory)


def test_a_number_that_json_lacks_is_null(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(steps=1), "a")
    with Run(directory, directory.config, PretendJob(), make_view("plain", io.StringIO())) as run:
        for step in run.steps():
            metrics = {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5}
            run.end_step(step, StepRecord(metrics=metrics))
        run.finish()
    line = next(line["metrics"] for line in lines_of(directory) if "lr" in line["metrics"])
    assert (line["loss"], line["grad_norm"], line["lr"]) == (None, None, 0.5)


def test_resume_removes_the_lines_after_its_checkpoint_and_half_a_line(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    with pytest.raises(RuntimeError, match="bug"):
        start_run(directory, fail_at=6)  # checkpoints after 2 and 4, so step 5 will be done again
    before = lines_of(directory)
    assert [line["step"] for line in before] == WHOLE[:7]
    with open(directory.metrics, "a") as file:
        file.write('{"step": 6, "time": 17')
    start_run(RunDirectory.open(directory.path))
    after = lines_of(directory)
    assert [line["step"] for line in after] == WHOLE
    assert after[:6] == before[:6] and after[6]["time"] > before[6]["time"]
    assert_mirrors_database(directory)


def test_a_run_without_the_file_gets_it_on_resume(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    start_run(directory)
    before = directory.metrics.read_bytes()
    directory.metrics.unlink()
    start_run(RunDirectory.open(directory.path))
    assert directory.metrics.read_bytes() == before


def test_an_evaluation_made_again_has_one_line(tmp_path, monkeypatch):
    """Rows are written before the evaluation's file; killed in between, the evaluation is repeated."""
    directory = RunDirectory.create(tmp_path, small_run(), "a")

    def fail(self, evaluation):
        raise RunError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_evaluation", fail)
        with pytest.raises(RunError):
            start_run(directory)
    assert [line["step"] for line in lines_of(directory)] == [0]
    start_run(RunDirectory.open(directory.path))
    assert sorted(line["step"] for line in lines_of(directory)) == WHOLE
    assert_mirrors_database(directory)


CAMPAIGN = """
import io, os, sys
from pathlib import Path
import torch
from cohort.logs.view import make_view
from cohort.run.directory import RunDirectory
from tests.helpers.pretend_run import LineCounter, run_in_child, run_to_end, small_run
from tests.unit.logs.test_sinks import WHOLE, assert_mirrors_database, lines_of
torch.set_num_threads(1)
root, num = Path(sys.argv[1]), int(sys.argv[2])

with LineCounter() as lines:
    run_to_end(RunDirectory.create(root, small_run(), "reference"), make_view("plain", io.StringIO()))
for trial in range(num):
    directory = RunDirectory.create(root, small_run(), f"run{trial}")
    directory.unlock()
    first = lines.count // 10 + trial * (lines.count * 8 // 10) // num
    assert os.WIFSIGNALED(run_in_child(directory.path, first)), first
    assert run_in_child(directory.path, -1) == 0, first
    assert sorted(line["step"] for line in lines_of(directory)) == WHOLE, first
    assert_mirrors_database(directory)
print("killed", num)
"""


def test_killed_anywhere_the_file_has_one_line_per_step(tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CAMPAIGN, str(tmp_path), "12"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "killed 12"


def test_a_sink_gets_every_row_the_name_and_the_config(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    sink = RecordingSink()
    start_run(directory, {"memory": sink})
    assert [row.step for row in sink.rows] == WHOLE
    assert [row.metrics for row in sink.rows] == [line["metrics"] for line in lines_of(directory)]
    assert [row.is_evaluation for row in sink.rows].count(True) == 3
    assert sink.header is not None and sink.header.name == "a"
    assert (
        sink.header.config["batch"] == {"prompts": 2, "samples": 2, "too_long": "error"}
        and sink.header.config["task"]["name"] == "arithmetic"
    )
    assert sink.ends[0] is True


def test_a_resumed_run_is_in_its_sink_once(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    sink = RecordingSink()
    with pytest.raises(RuntimeError):
        start_run(directory, {"memory": sink}, fail_at=6)
    assert [row.step for row in sink.rows] == WHOLE[:7] and sink.ends == [False]
    late = RecordingSink()
    lossy = RecordingSink(sink.rows[:2])  # the rest was lost on its way when the run was killed
    again = RecordingSink(list(sink.rows))
    start_run(RunDirectory.open(directory.path), {"again": again, "lossy": lossy, "late": late})
    for found in (again, lossy, late):
        assert [row.step for row in found.rows] == WHOLE
        assert [row.number for row in found.rows] == list(range(9))
    assert [row.metrics for row in late.rows] == [line["metrics"] for line in lines_of(directory)]


def test_the_name_is_that_of_the_folder_also_from_within(tmp_path, monkeypatch):
    RunDirectory.create(tmp_path, small_run(steps=1), "inside").unlock()
    monkeypatch.chdir(tmp_path / "inside")
    sink = RecordingSink()
    start_run(RunDirectory.open(Path(".")), {"memory": sink})
    assert sink.header is not None and sink.header.name == "inside"


@pytest.mark.parametrize("where", ["start", "step", "finish"])
@pytest.mark.parametrize(
    "error", [OSError("no network"), SystemExit(3), ErrorWithoutRepr()], ids=lambda e: type(e).__name__
)
def test_a_sink_that_fails_is_reported_once_and_switched_off(tmp_path, capsys, where, error):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    failing, healthy, shown = FailingSink(where, error), RecordingSink(), io.StringIO()
    start_run(directory, {"failing": failing, "healthy": healthy}, view=make_view("plain", shown))
    assert [line["step"] for line in lines_of(directory)] == WHOLE
    assert [row.step for row in healthy.rows] == WHOLE and healthy.ends[0] is True
    assert len(failing.rows) == {"start": 0, "step": 3, "finish": 9}[where]
    with Reader(directory.database) as reader:
        [event] = reader.read_events(kind="sink")
    word = {OSError: "no network", SystemExit: "SystemExit(3)", ErrorWithoutRepr: "ErrorWithoutRepr"}[type(error)]
    assert event.text.startswith("failing failed (") and word in event.text
    assert event.text.endswith("; the run goes on without it")
    assert shown.getvalue().count(event.text) == 1 and "step 6/6" in shown.getvalue()
    assert capsys.readouterr().err == ""


def test_ctrl_c_in_a_sink_still_stops_the_run(tmp_path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    with pytest.raises(KeyboardInterrupt):
        start_run(directory, {"failing": FailingSink("step", KeyboardInterrupt())})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Returns the packages of sinks that look installed; a test can change the set."""
    names = set(SINKS)
    find = importlib.util.find_spec

    def pretend(name: str, package: str | None = None) -> Any:
        if name not in SINKS:
            return find(name, package)
        return SimpleNamespace(origin=f"{name}/__init__.py") if name in names else None

    monkeypatch.setattr(importlib.util, "find_spec", pretend)
    return names


def test_every_sink_is_a_view_and_imports_its_package_only_when_it_starts(installed, monkeypatch):
    for name in SINKS:
        monkeypatch.setitem(sys.modules, name, None)  # importing it would fail
    made = make_sinks(tuple(SINKS))
    assert list(made) == list(SINKS)
    for name, sink in made.items():
        assert isinstance(sink, Sink)
        sink.close()  # never started, as when a resume is refused
        with pytest.raises(ImportError, match=name):
            sink.start(Header(path=".", recipe="", model="", task="", algo="", num_steps=1, first_step=0, batch=""))


def test_unknown_and_repeated_names(installed):
    with pytest.raises(ConfigError, match=r'unknown sink "wanbd"\. Did you mean "wandb"\?'):
        check_sinks(["tensorboard", "wanbd"])
    with pytest.raises(ConfigError, match=r'unknown sink "x"\. Valid: tensorboard, trackio, wandb\.'):
        check_sinks(["x"])
    with pytest.raises(ConfigError, match="given twice"):
        check_sinks(["wandb", "wandb"])


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_named_with_its_extra(installed, name):
    check_sinks([name])
    installed.remove(name)
    with pytest.raises(ConfigError) as told:
        check_sinks([name])
    assert (
        str(told.value)
        == f'sink "{name}" needs the package {name}, which is not installed. Install it: pip install "cohort[{name}]"'
    )


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    assert importlib.util.find_spec("wandb") is not None
    with pytest.raises(ConfigError, match="needs the package wandb"):
        check_sinks(["wandb"])


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    calls: list[tuple[Any, ...]] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda *args, **options: calls.append((name, *args))

    module = SimpleNamespace(train=keep("train"), resume=keep("resume"), calls=calls)
    monkeypatch.setitem(sys.modules, "cohort.jobs.build", module)
    monkeypatch.setattr("cohort.jobs.build", module, raising=False)
    return module


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A working directory with the run runs/a."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)


def test_the_flag_reaches_train_and_resume(build, installed, run_folder):
    assert main(["train", "quickstart", "--sinks", "wandb,tensorboard", "--steps", "3"]) == 0
    assert main(["resume", "runs/a", "--sinks=trackio"]) == 0
    (_, config, _, _, *first), (_, _, steps, _, *second) = build.calls
    assert (config.steps, first, steps, second) == (3, ["wandb", "tensorboard"], None, ["trackio"])


@pytest.mark.parametrize("command", ["train quickstart", "resume runs/a"])
def test_a_wrong_flag_is_refused_before_anything_is_loaded(build, installed, capsys, command, run_folder):
    installed.remove("trackio")
    wrong = {
        "tensorbord": 'Did you mean "tensorboard"?',
        "wandb,trackio": 'pip install "cohort[trackio]"',
        "": "Valid:",
    }
    for names, answer in wrong.items():
        assert main([*command.split(), "--sinks", names]) == 2
        told = capsys.readouterr()
        assert answer in told.err and told.err.count("\n") == 1
    assert build.calls == []


def test_help_names_the_flag(capsys):
    assert main(["train", "--help"]) == 0
    assert "--sinks NAME,...        Send metrics to wandb, tensorboard, trackio" in capsys.readouterr().out


class PretendTrackio:
    """A Trackio package whose server keeps every row that it is sent, also from one start to the next."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bool]] = []

    def init(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(id="x", log=lambda m, step: self.sent.append((step, "eval/accuracy" in m)))

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("fail_at", [-1, 4])
def test_a_trackio_server_gets_every_row_once_that_of_step_0_included(tmp_path, monkeypatch, fail_at):
    trackio = PretendTrackio()
    storage = SimpleNamespace(SQLiteStorage=SimpleNamespace(get_logs=lambda *args, **options: []))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "trackio.sqlite_storage", storage)
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://localhost:1")
    from cohort.logs.sinks.trackio_sink import TrackioSink

    directory = RunDirectory.create(tmp_path, small_run(), "a")
    if fail_at > 0:
        with pytest.raises(RuntimeError, match="bug"):
            start_run(directory, {"trackio": TrackioSink()}, fail_at=fail_at)
        directory = RunDirectory.open(directory.path)
    start_run(directory, {"trackio": TrackioSink()})
    # After the failure in step 4 the run goes back to the checkpoint of step 3, the best one, and repeats nothing.
    assert trackio.sent == [(line["step"], "eval/accuracy" in line["metrics"]) for line in lines_of(directory)]
    assert [step for step, _ in trackio.sent] == WHOLE and trackio.sent[0] == (0, True)
