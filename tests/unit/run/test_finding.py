"""Runs by path, by name and by a part of the name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.errors import ConfigError, RunError
from cohort.run.finding import find_run, find_similar_run, list_runs, require_new_name, require_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory. It has runs in the folder runs, in a sweep in it, and one beside."""
    for name in ("runs/warm", "runs/warm-up", "runs/cold", "runs/tune/001-warm", "runs/tune/002-hot", "beside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "runs" / "half-made").mkdir()
    (tmp_path / "runs" / "tune" / "sweep.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("runs/cold", "runs/cold"),
        ("cold", "runs/cold"),
        ("ol", "runs/cold"),
        ("runs/ol", "runs/cold"),
        ("warm", "runs/warm"),  # exactly this name, although it is a part of others
        ("-up", "runs/warm-up"),
        ("hot", "runs/tune/002-hot"),
        ("tune/002", "runs/tune/002-hot"),  # there is no folder tune here, but one in runs
        ("tune/hot", "runs/tune/002-hot"),
        ("tun/002-hot", "runs/tune/002-hot"),
        ("runs/tun/002", "runs/tune/002-hot"),
        ("tune/003", "tune/003"),
        ("tune", "runs/tune"),
        ("tun", "runs/tune"),  # a sweep, if no run fits
        ("runs/tune/002", "runs/tune/002-hot"),
        ("besi", "beside"),
        ("half", "half"),  # a folder without config.yaml is no run
        ("gone", "gone"),
        ("runs", "runs"),  # what exists is never part of a name
    ],
)
def test_a_name_or_a_unique_part_of_it_means_a_run(name: str, found: str, folder: Path) -> None:
    assert find_run(name) == Path(found)
    if (folder / found / "config.yaml").exists() and name.startswith("runs/"):
        assert find_run(folder / name) == folder / found


def test_a_part_of_several_names_is_refused_with_all_of_them(folder: Path) -> None:
    with pytest.raises(RunError, match=r'"war" is part of the names of 3 runs: runs/tune/001-warm, runs/warm, .*-up\.'):
        find_run("war")
    for i in range(7):
        (folder / "runs" / f"many-{i}").mkdir()
        (folder / "runs" / f"many-{i}" / "config.yaml").touch()
    with pytest.raises(RunError, match=r"of 7 runs: .* and 2 more\. Give more of the name"):
        find_run("many")


def make_run(path: Path) -> None:
    """Makes a folder that counts as a run."""
    path.mkdir(parents=True)
    (path / "config.yaml").touch()


def test_a_number_means_a_run_of_a_sweep_whatever_its_settings(folder: Path) -> None:
    for name in ("001-optim.lr=0.001", "002-optim.lr=0.001", "003-optim.lr=0.002"):
        make_run(folder / "runs" / "grid" / name)
    assert find_run("grid/001") == Path("runs/grid/001-optim.lr=0.001")
    assert find_run("grid/002") == Path("runs/grid/002-optim.lr=0.001")
    with pytest.raises(RunError, match="is part of the names of 2 runs"):
        find_run("grid/0.001")


def test_a_folder_here_comes_before_one_in_runs(folder: Path) -> None:
    make_run(folder / "tune" / "002-other")
    assert find_run("tune/002") == Path("tune/002-other")


def test_a_part_of_a_sweep_and_a_run_is_refused_where_both_can_be_meant(folder: Path) -> None:
    make_run(folder / "runs" / "fortune")
    assert find_run("tun") == Path("runs/fortune") and find_run("tune") == Path("runs/tune")
    assert find_run("tune", or_sweep=True) == Path("runs/tune")
    with pytest.raises(RunError, match=r'"tun" is part of the names of 2 runs and sweeps: runs/fortune, runs/tune\.'):
        find_run("tun", or_sweep=True)


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("cnold", "cold"),
        ("runs/clod", "runs/cold"),
        ("quickstrat", "2026-11-15-quickstart-k3f9"),  # a part of a name
        ("tnue", "tune"),
        ("tune/002-hto", "tune/002-hot"),
        ("tnue/002", "tune/002-hot"),
        ("zzz", ""),
        ("tune/zzz", ""),
        ("owner/model", ""),
    ],
)
def test_a_mistyped_name_leads_to_the_nearest_one(name: str, similar: str, folder: Path) -> None:
    make_run(folder / "runs" / "2026-11-15-quickstart-k3f9")
    assert find_similar_run(Path(name)) == similar
    if similar:
        with pytest.raises(RunError) as caught:
            require_run(Path(name))
        assert str(caught.value) == f"there is no run {name}. Did you mean {similar}? `cohort runs` lists all."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zzz", "there is no run zzz. Name one of the 5 runs in the folder runs: `cohort runs` lists all."),
        ("tune/zzz", "there is no run tune/zzz. Name one of the 2 runs in the folder runs/tune: `cohort runs tune`"),
        ("other/zzz", "there is no run other/zzz. Name one of the 5 runs in the folder runs: `cohort runs` lists all."),
        ("col@3", "there is no run col@3. This command takes the run itself: write col without the @."),
        ("runs/tune", "tune is a sweep: name one of its 2 runs, such as tune/001, tune/002. `cohort runs tune` lists"),
        ("runs", "runs is a folder of runs: name one of its 5 runs, such as cold, tune/001, tune/002. `cohort runs`"),
        ("runs/half-made", "runs/half-made is not a run: it has no config.yaml. Give the directory"),
        ("runs/begun", "begun is a sweep, and none of its runs has begun: `cohort resume begun` continues it."),
    ],
)
def test_what_is_no_run_is_refused_with_what_is(name: str, message: str, folder: Path) -> None:
    (folder / "runs" / "begun").mkdir()
    (folder / "runs" / "begun" / "sweep.yaml").touch()
    with pytest.raises(RunError) as caught:
        require_run(Path(name))
    assert str(caught.value).startswith(message)


def test_a_sweep_names_a_run_with_its_best_settings(folder: Path) -> None:
    file = folder / "runs" / "tune" / "sweep.json"
    rows = [{"name": "001-warm", "settings": {"heat": "1"}}, {"name": "002-hot", "settings": {"heat": "2"}}]
    combinations = [{"settings": row["settings"], "is_best": row["name"] == "002-hot"} for row in rows]
    file.write_text(json.dumps({"combinations": combinations, "runs": rows}))
    with pytest.raises(RunError, match=r"tune/001, tune/002 \(with the best settings: tune/002\)\. `cohort runs tune`"):
        require_run(Path("runs/tune"))
    for text in ("", "[]", '{"combinations": 3}', '{"combinations": []}', "\x00"):
        file.write_text(text)
        with pytest.raises(RunError, match=r"such as tune/001, tune/002\. `cohort runs tune` lists all"):
            require_run(Path("runs/tune"))


def test_names_are_found_without_torch() -> None:
    """A wrong name is an error at once, because the import of torch takes seconds."""
    code = "import sys, cohort.jobs.models, cohort.evaluation.compare; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_runs_are_listed_two_levels_deep(folder: Path) -> None:
    listed = [str(run.relative_to("runs")) for run in list_runs(Path("runs"))]
    assert listed == ["cold", "tune/001-warm", "tune/002-hot", "warm", "warm-up"]
    assert list_runs(folder / "gone") == []


def test_names_for_new_runs(folder: Path) -> None:
    for name in ("a", "3", "Größe_2", "003-optim.lr=1e-4,seed=1+2"):
        require_new_name(Path("runs"), name)
    for name in ("", "a/b", "..", ".hidden", "-flag", "a b", "run@4", "a\n", "a\x1b[31m", "x" * 101, "_x", "世" * 80):
        with pytest.raises(ConfigError, match="cannot be the name of a run"):
            require_new_name(Path("runs"), name)
    with pytest.raises(
        ConfigError, match=r"runs/cold exists already.* continue that run with `cohort resume runs/cold`"
    ):
        require_new_name(Path("runs"), "cold")
    (folder / "runs" / "link").symlink_to("nowhere")
    for name in ("half-made", "link"):
        with pytest.raises(ConfigError, match="choose another --name, or move it away"):
            require_new_name(Path("runs"), name)


def test_a_folder_that_is_no_run_does_not_hide_the_run_of_its_name(folder: Path) -> None:
    for name in ("cold", "other", "model"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").touch()
    (folder / "runs" / "model").mkdir()
    (folder / "runs" / "model" / "config.yaml").touch()
    assert (find_run("cold"), find_run("other"), find_run("model")) == (Path("runs/cold"), Path("other"), Path("model"))
    assert find_run("./runs/cold") == Path("runs/cold")


def test_a_home_folder_that_is_not_there_is_an_ordinary_wrong_name(folder: Path) -> None:
    assert find_run("~unknown-user/x") == Path("~unknown-user/x")
