"""Models as users name them: which folder a name means, and what is recorded of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cohort.errors import ModelError, RunError
from cohort.jobs.models import find_model, name_for_other_programs
from cohort.models.catalog import BUNDLED, resolve_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder `tiny` that is not the bundled model, and a run with one checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(BUNDLED["tiny"], "tiny")
    shutil.copytree(BUNDLED["tiny"], "run/checkpoints/step-000002/model")
    Path("run/config.yaml").write_text("")
    return tmp_path


def test_a_path_is_never_a_bundled_name(here: Path):
    assert find_model("tiny").folder == BUNDLED["tiny"]
    for name in ("./tiny", str(here / "tiny"), "run/../tiny"):
        assert find_model(name).folder == Path(name) != BUNDLED["tiny"]
        assert find_model(name).lasting_name == str(here / "tiny")
    shutil.rmtree("tiny")
    with pytest.raises(ModelError, match=r"\./tiny does not exist"):
        resolve_model("./tiny")


def test_a_cached_name_is_one_only_without_a_path(here: Path):
    shutil.copytree("tiny", here / "cache" / "models" / "some")
    assert find_model("some").folder == here / "cache" / "models" / "some" and find_model("some").lasting_name == "some"
    with pytest.raises(ModelError, match=r"\./some does not exist"):
        find_model("./some")
    shutil.copytree("tiny", "some")
    assert find_model("some").folder != Path("some") and find_model("./some").folder == Path("some")


def test_a_bundled_name_wins_over_a_run(here: Path):
    shutil.rmtree("tiny")
    shutil.copytree("run", "tiny")
    assert find_model("tiny").checkpoint is None and find_model("./tiny").checkpoint is not None


@pytest.mark.parametrize("name", ["run", "run@2", "./run", "run/checkpoints/step-000002"])
def test_a_run_is_recorded_with_its_step(name: str, here: Path):
    found = find_model(name)
    assert found.folder == Path("run/checkpoints/step-000002/model")
    assert found.name == "run@2" and found.lasting_name == f"{here}/run@2"
    assert find_model(found.lasting_name).folder == here / found.folder


def test_other_programs_get_a_name_that_they_can_load(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cohort.models.hub.find_cached", lambda name: here / "tiny")
    assert name_for_other_programs("owner/name") == "owner/name"
    assert name_for_other_programs("tiny") == str(BUNDLED["tiny"])
    assert name_for_other_programs("./tiny") == str(here / "tiny")
    assert name_for_other_programs("run@2") == str(here / "run/checkpoints/step-000002/model")
    # A folder wins over a model of the hub that has its name.
    shutil.copytree("tiny", "owner/name")
    assert name_for_other_programs("owner/name") == str(here / "owner/name")
    assert name_for_other_programs("gone") == "gone"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lr-hgih",
            'there is no folder, model or run "lr-hgih". Did you mean the run lr-high? `cohort runs` lists all',
        ),
        ("tini-y", 'there is no folder and no model "tini-y". Did you mean "tiny"? .* Did you mean the run tini-x?'),
        ("gird/002", "the model gird/002 is not here yet: .* Did you mean the run grid/002-b?"),
        ("owner/model", "the model owner/model is not here yet: .*: correct the path$"),
        ("smollm2-135m", "fetch it with `cohort pull smollm2-135m`$"),
        ("zzz", 'there is no folder and no model "zzz". Valid: .* is named owner/name.$'),
    ],
)
def test_a_mistyped_run_leads_to_the_nearest_one(name: str, message: str, here: Path):
    for run in ("lr-high", "tini-x", "smollm2-135m-run", "grid/002-b"):
        (here / "runs" / run).mkdir(parents=True)
        (here / "runs" / run / "config.yaml").touch()
    with pytest.raises(ModelError, match=message.replace("?", r"\?")):
        find_model(name)
    with pytest.raises(RunError, match=r"there is no run grid/zzz\. Name one of the 1 runs in the folder runs/grid"):
        find_model("grid/zzz")
    with pytest.raises(RunError, match=r"there is no run runs/lr-hihg\. Did you mean runs/lr-high\?"):
        find_model("runs/lr-hihg")
