"""Runs of earlier formats, in tests/data: this version opens them, shows them and resumes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cohort.cli.main import main
from cohort.config.document import FORMAT
from cohort.errors import CohortError
from cohort.models.files import load_folder
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts, make_rollout_path
from tests.helpers.small_runs import keep_torch_settings

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(params=range(1, FORMAT), ids=lambda n: f"format-{n}")
def old_run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run. The working directory is changed so that the model's path in its config is right."""
    shutil.copytree(DATA / f"run-format-{request.param}", tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return Path("run")


def test_its_settings_and_results_are_read(old_run: Path) -> None:
    directory = RunDirectory.open(old_run)
    config = directory.config
    assert (config.kind, config.steps, config.batch.prompts, config.algo.kl.weight) == ("rl", 2, 4, 0.1)
    assert not config.learner.lora.is_on and not config.replay.is_on and not config.algo.correction.is_on
    assert list(directory.load_evaluations()) == [0, 2]
    with Reader(directory.database, once=True) as reader:
        assert list(reader.read_series("loss")) == [1, 2] and list(reader.read_series("eval/accuracy")) == [0, 2]
        assert len(reader.read_samples(step=2)) == 16 and reader.read_turns() == []
    assert list_rollout_steps(directory.rollouts) == [1, 2]
    assert [len(g.samples) for g in load_rollouts(make_rollout_path(directory.rollouts, 2))] == [4, 4, 4, 4]


def test_its_steps_are_explained_and_reproduced(old_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(old_run), "--step", "1"]) == 0
    assert "arithmetic" in capsys.readouterr().out
    with keep_torch_settings():
        assert main(["replay", str(old_run), "--step", "2", "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    stored = replayed["metrics"]["grad_norm"]["stored"]
    assert replayed["reapplied"] == [1] and stored > 1e-4  # there was an update
    # Equal to the last bit on the machine that made the run. Another one may add numbers in another order.
    for name, found in replayed["metrics"].items():
        assert found["replayed"] == pytest.approx(found["stored"], rel=1e-4, abs=1e-6), name


def test_it_goes_on_and_becomes_a_run_of_this_format(old_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = RunDirectory.open(old_run)
    assert before.format < FORMAT
    with keep_torch_settings():
        assert main(["resume", str(old_run), "--steps", "4"]) == 0
    assert "from step 2 to step 4" in capsys.readouterr().out
    after = RunDirectory.open(old_run)
    assert after.format == FORMAT and after.config.steps == 4
    with Reader(after.database) as reader:
        assert list(reader.read_series("loss")) == [1, 2, 3, 4]
    with keep_torch_settings():
        assert (
            main(["resume", str(old_run)]) == 0
        )  # from a checkpoint of this version, in a directory with files of both versions
    assert "all 4 steps are done" in capsys.readouterr().out


def test_its_model_is_exported(old_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(old_run), str(tmp_path / "out")]) == 0
    saved = load_folder(old_run / "checkpoints" / "step-000002" / "model").decoder.state_dict()
    exported = load_folder(tmp_path / "out").decoder.state_dict()
    assert all(exported[name].equal(tensor) for name, tensor in saved.items())


def test_a_run_of_a_later_format_is_refused_in_one_line(old_run: Path) -> None:
    file = old_run / "config.yaml"
    rest = [line for line in file.read_text().splitlines(keepends=True) if not line.startswith(("format:", "kind:"))]
    file.write_text(f"format: {FORMAT + 1}\nkind: rl\n" + "".join(rest))
    words = f"has format {FORMAT + 1}, but this version of Cohort reads formats up to {FORMAT}; upgrade Cohort"
    with pytest.raises(CohortError, match=words):
        RunDirectory.open(old_run)
