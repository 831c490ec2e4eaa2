"""Code of a user's own from the command line: it trains and resumes, and nobody runs it who was not asked to."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.command_line import SMALL, cohort, differences, next_args, only_run, remains
from tests.helpers.struck_command import Strike

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loss.py"
TASK = '''

import pathlib

with pathlib.Path(__file__).with_suffix(".ran").open("a") as mark:
    mark.write("ran\\n")


@cohort.task("own_sums")
class OwnSums:
    """Sums of three numbers."""

    size: int = 24

    def rows(self, split):
        for n in range(self.size):
            first = 3 + 7 * n + (split == "test")
            yield {"id": f"{split}-{n}", "sum": f"{first}+{11 + 3 * n}+{n}", "total": first + 11 + 4 * n}

    def prompt(self, row):
        return [{"role": "user", "content": f"Compute {row['sum']}."}]

    def score(self, row, answer):
        return {"correct": float(f"<answer>{row['total']}</answer>" in answer.text)}
'''
FLAGS = [flag for flag in SMALL if not flag.startswith("--task")] + ["--learner.minibatches=2", "--algo.width=0.3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `own.py`: the example of a loss, and a task. The file writes a line beside it when it is run."""
    folder = tmp_path_factory.mktemp("own_code")
    (folder / "own.py").write_text(EXAMPLE.read_text(encoding="utf-8") + TASK)
    return folder


@pytest.fixture(scope="module")
def settings(folder: Path) -> list[str]:
    return [f"--algo={folder}/own.py:fading", f"--task={folder}/own.py:own_sums", *FLAGS]


@pytest.fixture(scope="module")
def undisturbed(folder: Path, settings: list[str]) -> Path:
    """A run with a loss and a task of one's own, which tests only read."""
    done = cohort("train", "quickstart", *settings, at=folder)
    assert done.returncode == 0, done.stderr
    run = only_run(folder)
    assert run is not None
    return run


@pytest.fixture
def count_runs(folder: Path) -> Callable[[], int]:
    """A function that tells how often the file was run since it was called last."""
    mark = folder / "own.ran"

    def count() -> int:
        number = len(mark.read_text().splitlines()) if mark.exists() else 0
        mark.unlink(missing_ok=True)
        return number

    count()
    return count


def test_4_10_a_loss_of_ones_own_killed_and_resumed_ends_the_same(
    undisturbed: Path, settings: list[str], folder: Path, tmp_path: Path
) -> None:
    text = (undisturbed / "config.yaml").read_text()
    assert f"name: {folder}/own.py:fading\n" in text and f"name: {folder}/own.py:own_sums\n" in text
    for strike in (Strike(signal.SIGKILL, "update", 3, 5), Strike(signal.SIGKILL, "checkpoint", 1, 9)):
        struck = cohort(*next_args(tmp_path, settings), at=tmp_path, orders=[strike])
        assert struck.returncode == -signal.SIGKILL, f"{strike} did not happen: {struck.stdout}{struck.stderr}"
    done = cohort(*next_args(tmp_path, settings), at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None
    assert differences(remains(run), remains(undisturbed)) == []


def test_explain_export_and_compare_never_run_the_file(
    undisturbed: Path, folder: Path, tmp_path: Path, count_runs: Callable[[], int]
) -> None:
    shown = cohort("explain", undisturbed, at=tmp_path)
    assert shown.returncode == 0, shown.stderr
    title, *lines = shown.stdout.splitlines()
    assert title.endswith(f"{folder}/own.py:own_sums · {folder}/own.py:fading")
    [note] = [line for line in lines if line.startswith("  ! ")]
    assert "which explain never runs: pushes, ratios and shares of the signal are not known" in note
    assert "% of the signal" not in shown.stdout and "advantage       +" in shown.stdout
    for command in (
        ["explain", undisturbed, "--html", "page.html"],
        ["export", undisturbed, "model"],
        ["compare", f"{undisturbed}@0", f"{undisturbed}@6"],
        ["eval", "arithmetic", "--model", undisturbed, "--limit", "2", "--max-tokens", "4"],
    ):
        done = cohort(*command, at=tmp_path)
        assert done.returncode == 0, done.stderr
    assert count_runs() == 0
    # The same without the file: what was recorded is shown.
    gone = Path(shutil.copytree(undisturbed, tmp_path / "gone"))
    for file in (gone / "config.yaml", *gone.glob("checkpoints/*/state.json")):
        file.write_text(file.read_text().replace(str(folder), "/nowhere"))
    again = cohort("explain", gone, at=tmp_path)
    assert again.returncode == 0 and again.stdout.replace("/nowhere", str(folder)) == shown.stdout
    done = cohort("resume", gone, "--steps", "7", at=tmp_path)
    assert done.returncode == 2 and 'there is no file "/nowhere/own.py"; put it back' in done.stderr


def test_replay_needs_trust_or_the_files_by_name(
    undisturbed: Path, folder: Path, tmp_path: Path, count_runs: Callable[[], int]
) -> None:
    done = cohort("replay", undisturbed, "--step", "6", at=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"add --trust, or name it yourself: --task {folder}/own.py:own_sums." in done.stderr
    half = cohort("replay", undisturbed, "--step", "6", "--task", f"{folder}/own.py:own_sums", at=tmp_path)
    assert half.returncode == 2 and f"--algo {folder}/own.py:fading." in half.stderr
    # Another algorithm for the step is no permission to run the run's own.
    other = cohort("replay", undisturbed, "--step", "6", "--algo", "grpo", at=tmp_path)
    assert other.returncode == 2 and "add --trust" in other.stderr
    count_runs()
    trusted = cohort("replay", undisturbed, "--step", "6", "--trust", "--json", at=tmp_path)
    assert trusted.returncode == 0 and json.loads(trusted.stdout)["exact"], trusted.stderr
    assert count_runs() >= 1
    # From the folder of the file; a copy of it will do, because files are moved.
    moved = tmp_path / "moved.py"
    shutil.copy(folder / "own.py", moved)
    named = ["--task", "moved.py:own_sums", "--algo", "moved.py:fading", "--algo.width", "0.9"]
    done = cohort("replay", undisturbed, "--step", "6", *named, "--json", at=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["changed"] == {"algo.width": {"run": 0.3, "replay": 0.9}}
    assert found["metrics"]["loss"]["difference"] != 0


def test_a_run_whose_file_has_moved_is_resumed_from_its_new_path(
    undisturbed: Path, folder: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "runs" / undisturbed.name))
    shutil.copy(folder / "own.py", tmp_path / "renamed.py")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"{folder}/own.py", f"{tmp_path}/renamed.py"))
    done = cohort("resume", run, "--steps", "7", at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (run / "checkpoints" / "step-000007").is_dir()


def test_a_config_file_is_trained_from_with_flags_on_top(undisturbed: Path, folder: Path, tmp_path: Path) -> None:
    done = cohort("train", f"{undisturbed}/config.yaml", "--steps=2", "--eval.problems=4", at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run is not None and "-quickstart-" in run.name
    old, new = ((r / "config.yaml").read_text().splitlines() for r in (undisturbed, run))
    assert set(new) - set(old) == {"steps: 2", "  problems: 4"}
    assert "recipe: quickstart" in new
    # The same rollouts: the settings are those of the run.
    first = [json.loads((r / "metrics.jsonl").read_text().splitlines()[1]) for r in (undisturbed, run)]
    assert first[0]["metrics"]["loss"] == first[1]["metrics"]["loss"]
    for word, message in (
        (undisturbed, f"is a run, not a recipe. Continue it with cohort resume {undisturbed}"),
        ("nowhere.yaml", 'there is no file "nowhere.yaml"; name the config.yaml of a run, or a recipe.'),
    ):
        done = cohort("train", word, at=tmp_path)
        assert done.returncode == 2 and message in done.stderr
    bad = tmp_path / "bad.yaml"
    bad.write_text((undisturbed / "config.yaml").read_text().replace("  prompts: 6", "  prompts: 0"))
    done = cohort("train", bad, at=tmp_path)
    assert done.returncode == 2 and "batch.prompts is 0; it must be at least 1" in done.stderr


BROKEN = """
import cohort

class Base:
    def rows(self, split):
        return [{"id": str(n), "q": f"{split} {n}"} for n in range(4)]
    def prompt(self, row):
        return [{"role": "user", "content": row["q"]}]
    def score(self, row, answer):
        return {"correct": 0.0}

@cohort.task("bad_rows")
class BadRows(Base):
    def rows(self, split):
        yield {"id": "0"}["di"]

@cohort.task("bad_prompt")
class BadPrompt(Base):
    def prompt(self, row):
        return [{"role": "user", "content": row["question"]}]

@cohort.task("bad_summary")
class BadSummary(Base):
    def summary(self, rows, parts):
        return "good"

@cohort.task("endless")
class Endless(Base):
    def rows(self, split):
        number = 0
        while True:
            yield {"id": str(number), "q": f"{split} {number}"}
            number += 1

@cohort.task("bad_settings")
class BadSettings(Base):
    size: int = 3
    def __post_init__(self):
        if self.size > 3:
            raise ValueError("the size is too large")

@cohort.task("bad_gold")
class BadGold(Base):
    def gold(self, row):
        return row["gold"]

def recipe():
    return cohort.RL(model="tiny", task=BadRows(), stpes=3)
"""
EVAL = ["--limit=2", "--max-tokens=2", "--threads=1"]


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            ["train", "broken.py:recipe"],
            [
                "cohort: the recipe broken.py:recipe raised TypeError: RL.__init__() got an unexpected keyword "
                "argument 'stpes'. Correct it here:",
                "  {file}, line 48, in recipe",
                '    return cohort.RL(model="tiny", task=BadRows(), stpes=3)',
            ],
        ),
        (
            ["train", "quickstart", "--task", "broken.py:bad_rows"],
            [
                "cohort: the method rows of the task \"bad_rows\" raised KeyError: 'di'. Correct it here:",
                "  {file}, line 15, in rows",
                '    yield {"id": "0"}["di"]',
            ],
        ),
        (
            ["eval", "broken.py:bad_prompt", *EVAL],
            [
                'cohort: the method prompt of the task "bad_prompt", for row "0" (row 0 of test, counted from 0; '
                "columns: id, q), raised KeyError: 'question'. Correct it here:",
                "  {file}, line 20, in prompt",
                '    return [{"role": "user", "content": row["question"]}]',
            ],
        ),
        (
            ["eval", "broken.py:bad_settings", "--task.size", "5"],
            [
                "cohort: the class BadSettings, made with these settings, raised ValueError: the size is too large. "
                "Correct it here:",
                "  {file}, line 40, in __post_init__",
                '    raise ValueError("the size is too large")',
            ],
        ),
        (
            ["check", "quickstart", "--task", "broken.py:bad_gold", "--batch.prompts=4", "--eval.problems=4"],
            [
                'cohort: the method gold of the task "bad_gold", for row "0" (columns: id, q), raised '
                "KeyError: 'gold'. Correct it here:",
                "  {file}, line 45, in gold",
                '    return row["gold"]',
            ],
        ),
    ],
    ids=["recipe", "rows", "prompt", "settings", "gold"],
)
def test_an_exception_of_the_users_code_is_shown_as_theirs(
    tmp_path: Path, command: list[str], lines: list[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    done = cohort(*command, at=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-3:] == [line.replace("{file}", str(file)) for line in lines]
    assert "Traceback" not in done.stderr


def test_rows_without_end_and_a_summary_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = cohort("eval", "broken.py:endless", *EVAL, at=tmp_path)
    assert done.returncode == 0, done.stderr
    done = cohort("data", "broken.py:endless", "--out", "-", "--n", "3", at=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3
    done = cohort("eval", "broken.py:bad_summary", *EVAL, at=tmp_path)
    message = "its method `summary` returned 'good'; return a dict of finite numbers by name"
    assert done.returncode == 2 and message in done.stderr


def test_the_page_about_tasks_shows_the_example() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")
    code = page.partition("```python\n# own_loss.py\n")[2].partition("```")[0]
    example = EXAMPLE.read_text(encoding="utf-8")
    assert code and example.endswith(code.removeprefix("import cohort\n").lstrip("\n"))
