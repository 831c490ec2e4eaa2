"""Each sink with its real package: a run that fails in its sixth step and is resumed has every row there, once."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorboard  # noqa: F401  (all three must be here: their absence is a failure of this environment)
import trackio  # noqa: F401
import wandb  # noqa: F401
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from tests.helpers.pretend_run import small_run

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[2]
WHOLE = [0, 1, 2, 3, 3, 4, 5, 6, 6]  # the steps of the lines of metrics.jsonl

# One life of a run: start or resume it with sinks; killed, or struck by a bug, inside the step of that number.
LIFE = """
import io, os, signal, sys
from pathlib import Path
from cohort.logs.sinks.registry import make_sinks
from cohort.logs.view import make_view
from cohort.run.directory import RunDirectory
from cohort.run.life import Run
from tests.helpers.pretend_run import PretendJob, pretend_groups
path, names, how, at = sys.argv[1:]
directory, job = RunDirectory.open(Path(path)), PretendJob()
with Run(directory, directory.config, job, make_view("json"), make_sinks(names.split(","))) as run:
    for step in run.steps():
        record = job.step(step, pretend_groups(step))
        if step + 1 == int(at):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("bug")
        run.end_step(step, record)
    run.finish()
"""


@pytest.fixture
def life(tmp_path: Path) -> Any:
    directory = RunDirectory.create(tmp_path / "runs", small_run(), "my-run")
    directory.unlock()
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_", "HF_"))},
        **{"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        **{"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"},
    }

    def live(names: str, how: str = "", at: int = 0, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LIFE, str(directory.path), names, how, str(at)]
        done = subprocess.run(
            command, cwd=tmp_path, env={**env, **changes}, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == {"": 0, "bug": 1, "kill": -9}[how], done.stderr
        for line in done.stdout.splitlines():
            json.loads(line)  # whatever a package prints, stdout is the progress view's
        return done

    live.directory = directory  # type: ignore[attr-defined]
    live.env = env  # type: ignore[attr-defined]
    return live


def lines_of(directory: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


def sink_events(directory: RunDirectory) -> list[str]:
    with Reader(directory.database) as reader:
        return [event.text for event in reader.read_events(kind="sink")]


def records(path: Path) -> Iterator[Any]:
    """Yields the records of a .wandb file: seven bytes, then protocol buffers in 32 KB blocks of LevelDB's log."""
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def items(updates: Any) -> dict[str, Any]:
    return {u.key or "/".join(u.nested_key): json.loads(u.value_json) for u in updates}


def offline_runs(directory: RunDirectory) -> list[list[Any]]:
    """Returns the records of each start, in order."""
    return [list(records(path)) for path in sorted(directory.path.glob("wandb/offline-run-*/*.wandb"))]


@pytest.mark.parametrize("how", ["bug", "kill"])
def test_wandb_offline(life: Any, how: str) -> None:
    directory = life.directory
    life("wandb", how, 6)
    life("wandb")
    *_, last = offline_runs(directory)
    kinds = {kind: [r for r in last if r.WhichOneof("record_type") == kind] for kind in ("run", "history", "exit")}
    run = kinds["run"][0].run
    assert (run.run_id, run.display_name, run.project) == ("my-run", "my-run", "cohort")
    config = items(run.config.update)
    assert config["recipe"] == "pretend" and config["batch"] == {"prompts": 2, "samples": 2, "too_long": "error"}
    assert kinds["exit"][0].exit.exit_code == 0
    # The folder of the newest start has the whole run, with the values of metrics.jsonl.
    history = [items(record.history.item) for record in kinds["history"]]
    assert [row["_step"] for row in history] == list(range(9))
    told = [{k: v for k, v in row.items() if not k.startswith("_")} for row in history]
    assert told == [{"step": line["step"], **line["metrics"]} for line in lines_of(directory)]
    assert [row["step"] for row in told] == WHOLE
    axes = [r.metric for r in last if r.WhichOneof("record_type") == "metric"]
    assert [(m.glob_name, m.step_metric) for m in axes if m.glob_name] == [("*", "step")]
    assert sink_events(directory) == []


def test_a_failed_run_is_a_failed_run_in_wandb(life: Any) -> None:
    life("wandb", "bug", 6)
    [run] = offline_runs(life.directory)
    assert [r.exit.exit_code for r in run if r.WhichOneof("record_type") == "exit"] == [1]


@pytest.mark.parametrize("how", ["bug", "kill"])
def test_tensorboard(life: Any, how: str) -> None:
    directory = life.directory
    life("tensorboard", how, 6)
    life("tensorboard")
    assert len(list(directory.path.glob("tensorboard/events.*"))) == 2
    found = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    lines = lines_of(directory)
    names = {name for line in lines for name in line["metrics"]}
    assert set(found.Tags()["scalars"]) == names and {"loss", "eval/accuracy"} <= names
    for name in names:
        expected = [(n["step"], n["metrics"][name]) for n in lines if name in n["metrics"]]
        assert [(e.step, e.value) for e in found.Scalars(name)] == [
            (s, pytest.approx(v, rel=1e-6)) for s, v in expected
        ]
    assert [e.step for e in found.Scalars("eval/accuracy")] == [0, 3, 6]
    times = [line["time"] for line in lines if "loss" in line["metrics"]]
    assert [e.wall_time for e in found.Scalars("loss")] == pytest.approx(times, abs=1.0)
    assert sink_events(directory) == []


STORED = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
[run] = trackio.Api().runs("cohort")
logs = SQLiteStorage.get_logs("cohort", run.name, run_id=run.id)
print(json.dumps([run.name, run.config, logs]))
"""


@pytest.mark.parametrize("how", ["bug", "kill"])
def test_trackio(life: Any, how: str) -> None:
    directory = life.directory
    life("trackio", how, 6)
    life("trackio")
    # In a process of its own: the package reads where its store is when it is imported.
    done = subprocess.run([sys.executable, "-c", STORED], env=life.env, capture_output=True, text=True, check=True)
    name, config, logs = json.loads(done.stdout)
    assert (
        name == "my-run"
        and config["recipe"] == "pretend"
        and config["batch"] == {"prompts": 2, "samples": 2, "too_long": "error"}
    )
    lines = lines_of(directory)
    order = {(n["step"], "eval/accuracy" in n["metrics"]): n["metrics"] for n in lines}
    assert sorted(log["step"] for log in logs) == WHOLE
    for log in logs:
        told = {k: v for k, v in log.items() if k not in ("step", "timestamp") and not k.startswith("time/")}
        expected = order[log["step"], "eval/accuracy" in log]
        assert told == {k: v for k, v in expected.items() if not k.startswith("time/")}
    assert sink_events(directory) == []


def test_all_sinks_together_and_one_that_is_added_late(life: Any) -> None:
    directory = life.directory
    life("trackio,tensorboard", "bug", 6)
    life("wandb,trackio,tensorboard")
    [run] = offline_runs(directory)
    history = [items(r.history.item) for r in run if r.WhichOneof("record_type") == "history"]
    assert [row["step"] for row in history] == WHOLE  # also the steps before it was asked for
    found = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    assert [e.step for e in found.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert sink_events(directory) == []


def test_a_package_that_raises_ends_only_its_sink(life: Any) -> None:
    """Online without an account, and a store that cannot be made: both raise inside their packages."""
    directory = life.directory
    (directory.path / "tensorboard").write_text("in the way")
    life("wandb,tensorboard,trackio", WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:9")
    told = sink_events(directory)
    assert [text.split(" ")[0] for text in told] == ["wandb", "tensorboard"]
    assert "API key" in told[0] and all(text.endswith("; the run goes on without it") for text in told)
    assert [line["step"] for line in lines_of(directory)] == WHOLE
