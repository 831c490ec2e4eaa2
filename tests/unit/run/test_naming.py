"""The names of a run's checkpoints: the newest, that of a step, and the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cohort.errors import RunError
from cohort.run.naming import find_checkpoint, split_name
from tests.helpers.evaluations import evaluation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 2, 4 and 6, evaluated at 0, 2, 4 and 6. It is best after 2 and 4."""
    path = tmp_path / "some@run"
    (path / "eval").mkdir(parents=True)
    # The file of the task is gone: no name may depend on it.
    (path / "config.yaml").write_text("task:\n  name: /gone/sums.py:sums\n")
    for step, score in ((0, 1.0), (2, 1.0), (4, 1.0), (6, 0.0)):
        file = path / "eval" / f"step-{step:06d}.json"
        file.write_text(json.dumps(evaluation({"a": [score]}, step=step, split="validation").to_json()))
        if step:
            (path / "checkpoints" / f"step-{step:06d}" / "model").mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("name", "step", "chosen_on"),
    [
        ("{run}", 6, ""),
        ("{run}@last", 6, ""),
        ("{run}@4", 4, ""),
        ("{run}@0004", 4, ""),
        # The earliest of equally good steps. The untrained model has no checkpoint, however good it is.
        ("{run}@best", 2, "arithmetic/validation"),
        ("{run}/checkpoints/step-000004", 4, ""),
    ],
)
def test_a_name_means_one_checkpoint(name: str, step: int, chosen_on: str, run: Path):
    found = find_checkpoint(name.format(run=run))
    assert found is not None and (found.run, found.step, found.chosen_on) == (run, step, chosen_on)
    assert found.folder == run / "checkpoints" / f"step-{step:06d}" and found.name == f"{run}@{step}"


def test_what_is_not_there_is_refused_with_what_is(run: Path):
    for which in ("0", "3", "5x", "-1", "²", "٤"):
        with pytest.raises(RunError, match=rf"has no checkpoint {which}\. .* these steps: 2, 4, 6\. Name one as .*@6"):
            find_checkpoint(f"{run}@{which}")
    with pytest.raises(RunError, match="after the @ a step, best or last is missing"):
        find_checkpoint(f"{run}@")
    with pytest.raises(RunError, match="The model before training has none: give the name of that model itself"):
        find_checkpoint(f"{run}@0")
    with pytest.raises(
        RunError,
        match=r"there is no run .*/elsewhere\. Name one of the 1 runs",
    ):
        find_checkpoint(f"{run.parent}/elsewhere@4")
    (run / "checkpoints" / "step-000002" / "model").rmdir()
    (run / "checkpoints" / "step-000002").rmdir()
    with pytest.raises(RunError, match=r"is best after step 2, but has no checkpoint of that step\. .*: 4, 6"):
        find_checkpoint(f"{run}@best")
    for file in (run / "eval").glob("*"):
        file.unlink()
    with pytest.raises(RunError, match="no evaluation of a trained model"):
        find_checkpoint(f"{run}@best")


def test_a_run_without_checkpoints_says_how_to_get_one(run: Path, tmp_path: Path):
    (run / "checkpoints").rename(tmp_path / "away")
    with pytest.raises(RunError, match=r"has no checkpoint\. .* `cohort resume"):
        find_checkpoint(str(run))


def test_other_names_are_not_of_a_run(run: Path, tmp_path: Path):
    (tmp_path / "model@2").mkdir()
    for name in ("tiny", "owner/name", str(tmp_path / "model@2"), str(run / "checkpoints" / "step-000004" / "model")):
        assert find_checkpoint(name) is None
    assert split_name(str(tmp_path / "model@2")) == (tmp_path / "model@2", "")


def test_a_run_of_a_sweep_and_a_sweep(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "grid").mkdir(parents=True)
    (tmp_path / "runs" / "grid" / "sweep.yaml").touch()
    run.rename("runs/grid/001-optim.lr=0.1")
    for name, step in (("grid/001", 6), ("grid/001@4", 4), ("grid/001@best", 2), ("grid/0.1@last", 6)):
        found = find_checkpoint(name)
        assert found is not None and found.name == f"runs/grid/001-optim.lr=0.1@{step}"
    for name in ("grid", "gri", "grid@3", "runs/grid"):
        with pytest.raises(RunError, match="grid is a sweep: name one of its 1 runs, such as grid/001"):
            find_checkpoint(name)
    with pytest.raises(RunError, match=r"there is no run gird/001\. Did you mean grid/001-optim\.lr=0\.1\?"):
        find_checkpoint("gird/001@3")
