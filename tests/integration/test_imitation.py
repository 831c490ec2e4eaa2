"""SFT and DPO on rows of a user's own, from the command line: what a run writes, and that a kill changes nothing."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import signal
from pathlib import Path

import pytest

from cohort.algos.imitation import Imitation
from cohort.algos.preferences import PreferenceLoss
from cohort.config.imitation import DPO, SFT
from cohort.data.pack import make_batch
from cohort.inspect.explain.given import compute_gradients
from cohort.inspect.explain.report import explain_step
from cohort.inspect.explain.step import read_step_files
from cohort.run.directory import RunDirectory, load_evaluations
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps
from cohort.types import Provenance
from tests.helpers.command_line import Census, cohort, differences, next_args, only_run, reference, remains

FLAGS = ["--model=tiny", "--save.every=2", "--optim.warmup=1", "--optim.lr=1e-4", "--threads=1", "--data.held-out=0.2"]
STORIES = {
    "checkpoint": [("creation", 1), ("checkpoint", 2), ("recovery", 1), ("prune", 1)],
    "step": [("update", 3), ("database", 4), ("update", 2), ("finish", 1)],
}


def write_rows(folder: Path) -> None:
    """Writes conversations and pairs about sums into a folder."""
    talks, pairs = [], []
    for a in range(10, 22):
        for b in (13, 27, 31):
            question, right = f"What is {a}+{b}?", f"<answer>{a + b}</answer>"
            talks.append({"prompt": question, "completion": right})
            pairs.append({"prompt": question, "chosen": right, "rejected": f"<answer>{a + b + 10}</answer>"})
    for name, rows in (("talks.jsonl", talks), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


class Case:
    """A recipe with its flags, whose data are in a folder of their own: a run records their absolute path."""

    def __init__(self, recipe: str, folder: Path) -> None:
        self.recipe = recipe
        name, size = ("talks.jsonl", "--batch.examples=5") if recipe == "sft" else ("pairs.jsonl", "--batch.pairs=5")
        # 36 rows, of which about a fifth is held out: six steps.
        self.flags = [*FLAGS, size, f"--data.path={folder / name}", "--eval.every=3"]


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


def test_a_run_records_what_it_trained_on_and_explains_it(
    case: Case, undisturbed: tuple[Path, Census], tmp_path: Path
) -> None:
    run, _ = undisturbed
    directory = RunDirectory.open(run)
    assert list_rollout_steps(directory.rollouts) == [1, 2, 3, 4, 5, 6] and directory.config.save.rollouts == 10
    with Reader(directory.database) as reader:
        loss, signal = (reader.read_series(name)[4] for name in ("loss", "signal"))
        assert list(reader.read_series("time/tokens_per_s")) == [1, 2, 3, 4, 5, 6]
        assert list(reader.read_series("eval/loss")) == [0, 3, 6] and reader.read_samples() == []
    files = read_step_files(run, 4)
    whole = case.recipe == "dpo"
    batch = make_batch(files.groups, 1, Provenance.TARGET, whole_groups=whole)
    algo = PreferenceLoss(files.config.loss) if isinstance(files.config, DPO) else Imitation()
    gradients = compute_gradients(files.groups, batch, algo)
    assert math.fsum(abs(x) for g in gradients for row in g for x in row) == pytest.approx(signal, rel=1e-6)
    report = explain_step(run, 4)
    assert float(dict(report.facts)["loss"].split(" ")[0]) == pytest.approx(loss, rel=0.1)
    # Files and lines are named, because the rows are the user's own.
    shown = cohort("explain", run, "--step", 4, at=tmp_path)
    assert shown.returncode == 0 and re.search(r"^  row  +/.*s\.jsonl, line \d+$", shown.stdout, re.MULTILINE)
    card = (run / "run.md").read_text()
    assert "Measured on the held-out examples:\n\n| step | loss | " in card


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
    names = ["train", "eval", "data", "train", "train", "check", "explain", "explain"]
    assert [command.split()[0] for command in commands] == names
    for command in commands:
        threads = [] if command.startswith(("data", "explain")) else ["--threads=1"]
        done = cohort(*shlex.split(command), *threads, at=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    done = cohort("compare", "prefer@0", "prefer", at=tmp_path)
    assert done.returncode == 0 and re.search(r"0\.50 -> 1\.00 .*What is \d+\+\d+\?", done.stdout), done
