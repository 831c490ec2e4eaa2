"""`cohort sweep` in processes of its own: failing runs, stop rules, interruption, and sweeps that are repeated."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest

from cohort.run.checkpoint import list_steps
from tests.helpers.command_line import cohort, start
from tests.integration.test_sweep_kill import require_no_workers

SFT = shlex.split("--data.rows 20 --batch.examples 4 --threads 1")


def sweep(at: Path, line: str, **options: object) -> tuple[int, str, str]:
    """Runs `cohort sweep LINE` in the folder `at`. Returns exit code, standard output and standard error."""
    done = cohort("sweep", *shlex.split(line), at=at, timeout=300, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, str]:
    """A sweep of two models of which one does not exist, run two at once, and what the command printed."""
    at = tmp_path_factory.mktemp("failed")
    line = "quickstart --model ./missing,tiny --steps 2 --batch.prompts 4 --batch.samples 4 --sampling.max-tokens 16"
    return at, *sweep(at, f"{line} --eval.problems 20 --task.train-size 300 --jobs 2 --name s")


def test_a_failing_run_does_not_end_the_sweep_and_is_shown(failed: tuple[Path, int, str, str]) -> None:
    at, code, out, err = failed
    assert code == 1, err
    assert "001-model=missing  failed: " in err and "002-model=tiny  done after step 2" in err
    assert "2 runs at once" in err and "evaluated on the validation split" in err
    assert "failed: 001-model=missing: " in out and "its log: runs/s/logs/001-model=missing.log" in out
    assert "1 of 2 runs have no result and are left out: 001-model=missing." in out
    assert "best: model=tiny" in out and re.search(r"\n  \S*cohort eval arithmetic --model (runs/)?s/002@2 ", out)
    assert out.count(" eval arithmetic ") == 1 and re.search(r"see it again with: \S*cohort sweep s\n", out)
    table = json.loads((at / "runs/s/sweep.json").read_text())
    assert [run["state"] for run in table["runs"]] == ["failed", "done"] and "missing" in table["runs"][0]["why"]
    assert str(at) not in (at / "runs/s/sweep.md").read_text() + (at / "runs/s/sweep.json").read_text()


def test_a_resume_tries_only_failed_runs_again(failed: tuple[Path, int, str, str]) -> None:
    at = failed[0]
    before = {path: path.stat().st_mtime_ns for path in at.glob("runs/s/002*/**/*")}
    table = (at / "runs/s/sweep.json").read_bytes()
    done = cohort("resume", "s", at=at, timeout=300)
    assert done.returncode == 1 and "1 of them done" in done.stderr and "002-" not in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in at.glob("runs/s/002*/**/*")}
    assert (at / "runs/s/sweep.json").read_bytes() == table


def test_the_name_of_a_sweep_prints_its_table_again_and_changes_nothing(failed: tuple[Path, int, str, str]) -> None:
    at, _, out, _ = failed
    before = {path: path.stat().st_mtime_ns for path in at.glob("runs/s/**/*")}
    for name in ("s", "runs/s"):
        assert sweep(at, name) == (0, out, "")
    code, data, _ = sweep(at, "s --json")
    assert code == 0 and data == (at / "runs/s/sweep.json").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in at.glob("runs/s/**/*")}
    code, _, err = sweep(at, "s --optim.lr 1,2")
    assert code == 2 and "s is a sweep, not a recipe. See its table with: cohort sweep s." in err
    # Of an unfinished sweep: what there is, and how to go on.
    shutil.copytree(at / "runs/s", at / "runs/half")
    (at / "runs/half/results/001.json").unlink()
    code, out, err = sweep(at, "half")
    assert code == 0 and "best: model=tiny" in out and " eval " not in out
    assert err.startswith("1 of 2 runs have no result yet; go on with: ") and err.endswith(" resume half\n")


def test_a_dry_run_refuses_a_name_that_is_taken(failed: tuple[Path, int, str, str]) -> None:
    at = failed[0]
    for line, message in (
        ("--name s", "is a sweep with another plan"),
        ("--name sweep.md --out runs/s", "is a file"),
        ("--name 002-model=tiny --out runs/s", "exists already and is no sweep"),
    ):
        code, out, err = sweep(at, f"quickstart --optim.lr 1e-4,1e-3 --dry-run {line}")
        assert code == 2 and not out and message in err and err.count("\n") == 1


def test_another_plan_under_the_same_name_is_refused(failed: tuple[Path, int, str, str]) -> None:
    at = failed[0]
    code, _, err = sweep(at, "quickstart --optim.lr 1e-4,1e-3 --name s")
    assert code == 2 and "is a sweep with another plan" in err and err.count("\n") == 1
    code, _, err = sweep(at, "quickstart --optim.lr 1e-4,1e-3 --name logs --out runs/s")
    assert code == 2 and "exists already and is no sweep" in err and err.count("\n") == 1
    done = cohort("resume", "runs/s", "--steps", "5", at=at, timeout=60)
    assert done.returncode == 2 and "keeps its plan" in done.stderr


def test_rules_stop_runs_that_are_not_evaluated_too(tmp_path: Path) -> None:
    line = "tiny_sft --optim.lr 1e-4,1e-3 --steps 3 --stop-above los 0 at 1 --stop-above loss 0 at 2 --name s --json"
    code, out, err = sweep(tmp_path, f"{line} {shlex.join(SFT)}")
    assert code == 0, err
    table = json.loads(out)
    assert table == json.loads((tmp_path / "runs/s/sweep.json").read_text())
    assert [(run["state"], run["step"]) for run in table["runs"]] == [("stopped", 2), ("stopped", 2)]
    assert table["runs"][0]["why"].startswith("--stop-above loss 0 at 2: it is ")
    assert '--stop-above los 0 at 1: the first step has no such metric. Did you mean "loss"?' in err
    assert "The rule --stop-above los 0 at 1 decided nothing in 2 of 2 runs" in table["notes"][-1]
    assert table["combinations"][0]["loss"] > 0 and table["split"] == ""
    assert (
        "ended after step 2 of 3: --stop-above loss 0 at 2"
        in (next(tmp_path.glob("runs/s/001*")) / "run.md").read_text()
    )
    code, out, err = sweep(tmp_path, f"{line} {shlex.join(SFT)}")
    assert code == 0 and json.loads(out) == table and "2 of them done" in err


def test_ctrl_c_saves_the_run_under_way_and_says_how_to_go_on(tmp_path: Path) -> None:
    args = ["sweep", "tiny_sft", "--optim.lr", "1e-4,1e-3", "--steps", "5000", "--name", "s", *SFT]
    process = start(*args, at=tmp_path)
    run = tmp_path / "runs/s/001-optim.lr=1e-4"
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    second = cohort("resume", "runs/s", at=tmp_path, timeout=60)
    assert second.returncode == 2 and "is being written by process" in second.stderr
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "001-optim.lr=1e-4  interrupted, saved" in err and "go on with: " in err and " resume runs/s" in err
    assert list_steps(run / "checkpoints") and not list(tmp_path.glob("runs/s/002*"))
    require_no_workers(tmp_path)


def test_a_run_that_was_extended_or_deleted_does_not_spoil_the_table(tmp_path: Path) -> None:
    line = "quickstart --optim.lr 1e-4,1e-3,1e-2 --steps 1 --batch.prompts 4 --batch.samples 4 --sampling.max-tokens 16"
    code, out, err = sweep(tmp_path, f"{line} --eval.problems 20 --task.train-size 300 --threads 1 --name s")
    assert code == 0 and "best: " in out, err
    folder = tmp_path / "runs/s"
    # As after a kill during the first run, which was then extended by hand.
    (folder / "results/001.json").unlink()
    done = cohort("resume", "runs/s/001-optim.lr=1e-4", "--steps", "2", at=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "002-optim.lr=1e-3")
    code, out, err = sweep(tmp_path, "s")
    assert code == 0 and "missing: 002-optim.lr=1e-3: its folder" in out and "best: optim.lr=1e-2" in out
    assert "2 of 3 runs have no result yet" in err
    done = cohort("resume", "s", at=tmp_path, timeout=300)
    assert done.returncode == 1 and "002-optim.lr=1e-3  is tried again: its folder" in done.stderr
    table = json.loads((folder / "sweep.json").read_text())
    assert [(run["state"], run["step"]) for run in table["runs"]] == [("failed", 0), ("done", 1), ("done", 1)]
    assert "its config.yaml has steps = 2, and the sweep 1." in table["runs"][0]["why"]
    assert list_steps(folder / "001-optim.lr=1e-4/checkpoints")[-1] == 2


def test_the_recipe_is_no_flag(tmp_path: Path) -> None:
    code, _, err = sweep(tmp_path, "quickstart --recipe a,b")
    assert code == 2 and "the recipe is the first word" in err and not (tmp_path / "runs").exists()
