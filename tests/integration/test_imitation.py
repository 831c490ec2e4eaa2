"""SFT and DPO on rows of a user's own, from the command line: what a run writes, and that a kill changes nothing."""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.config.imitation import DPO, SFT
from cohort.run.directory import RunDirectory, load_evaluations
from cohort.run.store.reader import Reader
from tests.helpers.command_line import (
    ENV,
    ROOT,
    Census,
    cohort,
    differences,
    next_args,
    only_run,
    reference,
    remains,
)
from tests.helpers.given_answers import Case, write_rows

STORIES = {
    "checkpoint": [("creation", 1), ("checkpoint", 2), ("recovery", 1), ("prune", 1)],
    "step": [("update", 3), ("database", 4), ("held_out", 1), ("update", 2), ("finish", 1)],
}


@pytest.fixture(scope="module", params=["sft", "dpo"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return Case(request.param, folder)


@pytest.fixture(scope="module")
def undisturbed(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Census]:
    return reference(tmp_path_factory.mktemp(case.recipe), case.flags, case.recipe)


def test_a_run_measures_what_is_held_out(case: Case, undisturbed: tuple[Path, Census]) -> None:
    run, _ = undisturbed
    directory = RunDirectory.open(run)
    config = directory.config
    assert isinstance(config, SFT | DPO) and config.passes == 0.0 and config.steps == 6
    with Reader(directory.database) as reader:
        losses = reader.read_series("loss")
        measured = reader.read_series("eval/loss" if case.recipe == "sft" else "eval/accuracy")
    assert list(losses) == [1, 2, 3, 4, 5, 6] and list(measured) == [0, 3, 6]
    shown = (run.parents[1] / "output.txt").read_text()
    if case.recipe == "sft":
        assert measured[6] < measured[0] and "step 6 · held-out · loss" in shown
    else:
        found = load_evaluations(run)
        # Before training the policy is its own reference: every pair is a tie.
        assert found[0].accuracy == 0.5 and found[6].accuracy > 0.5 and found[6].low < found[6].accuracy
        assert {answer.correct for item in found[0].items for answer in item.answers} == {0.5}
        assert "held-out accuracy 0.50 ->" in shown


@pytest.mark.parametrize("story", STORIES)
def test_killed_anywhere_and_resumed_it_ends_the_same(
    story: str, case: Case, undisturbed: tuple[Path, Census], tmp_path: Path
) -> None:
    original, census = undisturbed
    rng = random.Random(story)
    for place, call in STORIES[story]:
        strike = census.strike(place, call, rng)
        struck = cohort(*next_args(tmp_path, case.flags, case.recipe), at=tmp_path, orders=[strike])
        assert struck.returncode == -signal.SIGKILL, f"{strike} did not happen: {struck.stdout}{struck.stderr}"
    done = cohort(*next_args(tmp_path, case.flags, case.recipe), at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None
    assert differences(remains(run), remains(original)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_4_10_a_campaign_of_random_kills(kind: str, tmp_path: Path) -> None:
    """Kills at random places and moments: final weights, metrics and evaluations equal those of a quiet run."""
    script = [sys.executable, str(ROOT / "benchmarks" / "kill_campaign.py"), kind, "--kills", "15", "--seed", "1"]
    done = subprocess.run(script, env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 kills" in done.stdout and "identical: yes" in done.stdout


def test_a_changed_row_stops_a_resume(case: Case, tmp_path: Path) -> None:
    write_rows(tmp_path)
    flags = Case(case.recipe, tmp_path).flags
    assert cohort("train", case.recipe, *flags, "--passes=0.3", at=tmp_path).returncode == 0
    run = only_run(tmp_path)
    [file] = [flag.partition("=")[2] for flag in flags if flag.startswith("--data.path")]
    Path(file).write_text(Path(file).read_text().replace("What is 12+", "What was 12+"))
    done = cohort("resume", run, "--steps", 9, at=tmp_path)
    assert done.returncode == 2 and "cannot continue: the rows" in done.stderr, done


@pytest.mark.parametrize(
    ("recipe", "rows", "message"),
    [
        ("sft", "", "has no rows"),
        ("sft", "[1]", "line 1 is [1]; correct it: a row must be a JSON object"),
        ("sft", "{", "line 1 cannot be read as JSON"),
        ("sft", json.dumps({"messages": [{"role": "user", "content": "q"}]}), "it has no message of the assistant"),
        ("sft", json.dumps({"prompt": "q", "completion": "a " * 3000}), "line 1 has"),
        ("dpo", json.dumps({"prompt": "q", "chosen": "a", "rejected": "a"}), "both answers are the same"),
        ("dpo", json.dumps({"prompt": "q", "chosen": "a"}), 'has no column "rejected"'),
    ],
)
def test_bad_rows_are_one_line_and_leave_nothing(recipe: str, rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(rows + "\n" if rows else "")
    done = cohort("train", recipe, "--model=tiny", "--data.path=rows.jsonl", "--threads=1", at=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done
    assert not (tmp_path / "runs").exists()


def test_no_data_is_said(tmp_path: Path) -> None:
    for recipe in ("sft", "dpo"):
        done = cohort("train", recipe, "--model=tiny", at=tmp_path)
        assert done.returncode == 2 and "the run has no data. Name a file with --data.path" in done.stderr, done


def test_stored_log_probabilities_of_the_reference_train_the_same(tmp_path: Path) -> None:
    write_rows(tmp_path)
    flags = [*Case("dpo", tmp_path).flags, "--passes=0.5", "--learner.minibatches=2"]
    curves = []
    for reference_is in ("copy", "stored"):
        done = cohort("train", "dpo", *flags, f"--reference={reference_is}", f"--name={reference_is}", at=tmp_path)
        assert done.returncode == 0, done.stderr
        with Reader(tmp_path / "runs" / reference_is / "run.db") as reader:
            curves.append([reader.read_series(name) for name in ("loss", "reward/margin", "kl/ref", "eval/accuracy")])
    # The reference is computed on other microbatches, so that the last bits differ.
    for one, other in zip(*curves, strict=True):
        assert len(one) > 1 and one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_the_commands_of_the_page_run_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    write_rows(tmp_path)
    commands = re.findall(r"^cohort (.*)$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["train", "eval", "data", "train", "train"]
    for command in commands:
        threads = [] if command.startswith("data") else ["--threads=1"]
        done = cohort(*shlex.split(command), *threads, at=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    done = cohort("compare", "prefer@0", "prefer", at=tmp_path)
    assert done.returncode == 0 and re.search(r"0\.50 -> 1\.00 .*What is \d+\+\d+\?", done.stdout), done
