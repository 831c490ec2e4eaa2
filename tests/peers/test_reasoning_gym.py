"""The task reasoning_gym with the package reasoning-gym itself: every data set, the recipe, and a short run.

tests/unit/tasks/test_reasoning_gym.py has the adapter's own logic, on a stand-in for the package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cohort.config.load import dump_config, load_config, parse_config
from cohort.errors import TaskError
from cohort.tasks.base import load_rows, make_plain_answer
from cohort.tasks.grading import grade
from cohort.tasks.self_check import run_self_check

if not os.environ.get("COHORT_REQUIRE_PEERS"):
    pytest.importorskip("reasoning_gym")

from benchmarks.reasoning_gym_check import check_dataset, compare_tables, format_table, read_digests
from cohort.config.differences import find_differences
from cohort.evaluation.compare import compare
from cohort.run.directory import RunDirectory
from cohort.tasks.reasoning_gym import package
from cohort.tasks.reasoning_gym.faults import HASHED, REFUSED, TRIED
from cohort.tasks.reasoning_gym.task import make_task
from cohort.tasks.ref import TaskRef

pytestmark = pytest.mark.peers

SLOW = {"acre", "futoshiki", "knight_swap", "quantum_lock", "sokoban", "sudoku", "zebra_puzzles"}


@pytest.fixture(autouse=True)
def random_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def list_usable() -> list[str]:
    """Returns the data sets that can be used without a fixed hash seed."""
    return [i.name for i in package.list_datasets() if i.name not in REFUSED and i.name not in HASHED]


def test_the_version_is_the_one_that_was_tried() -> None:
    assert package.get_version() == TRIED
    assert len(package.list_datasets()) == 106 and len(list_usable()) == 95


def test_every_data_set_is_as_the_tables_of_faults_say() -> None:
    infos = [info for info in package.list_datasets() if info.name != "composite"]
    others = read_digests([info.name for info in infos], 20)
    results = [check_dataset(info, 20, others) for info in infos]
    assert compare_tables(results) == []
    assert format_table(results).count("| refused") == len(REFUSED) - 1  # without "composite"


@pytest.mark.parametrize("name", list_usable())
def test_the_self_check_passes_and_rows_survive_as_plain_values(name: str) -> None:
    made: Any = make_task(dataset=name, train_size=3, test_size=2)
    assert run_self_check(made, 3).num_rows == 5
    assert TaskRef.from_task(made).load() == made
    rows = load_rows(made, "train") + load_rows(made, "test")
    assert len({row["question"] for row in rows}) == 5
    for text in ("", "banana", "<answer>banana</answer>", "<answer>0</answer><answer> </answer>"):
        assert grade(made, rows[0], make_plain_answer(text)).parts["correct"] == 0


@pytest.mark.parametrize("name", sorted(set(list_usable()) - SLOW))
def test_its_settings_survive_a_file(name: str) -> None:
    config = load_config("quickstart", ["--task", "reasoning_gym", "--task.dataset", name])
    assert parse_config(dump_config(config)) == config


def test_another_process_makes_the_same_rows() -> None:
    args = ["data", "reasoning_gym", "--task.dataset", "chain_sum:2,leg_counting,gcd", "--out", "-", "--n", "30"]
    texts = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-m", "cohort", *args], env=environment, capture_output=True, check=True)
        texts.add(done.stdout)
    assert len(texts) == 1


def test_the_recipe_and_its_files() -> None:
    config = load_config("tiny_reasoning_gym")
    assert parse_config(dump_config(config)) == config
    assert config.reward == {"correct": 1.0, "score": 0.0}
    made: Any = config.task
    assert made.operators == ("+", "-") and run_self_check(made).num_gold == 40
    assert find_differences({"recipe": "tiny_reasoning_gym"}, "cohort train tiny_reasoning_gym").source == "recipe"


def test_the_right_answers_of_the_recipe_are_right() -> None:
    rows = load_rows(load_config("tiny_reasoning_gym").task, "test")  # type: ignore[attr-defined]
    for row in rows:
        words = row["question"].removeprefix("Calculate ").removesuffix(".").split()
        value = int(words[0]) + sum(int(a + b) for a, b in zip(words[1::2], words[2::2], strict=True))
        assert value == int(row["answer"])
    # With products the package computes from left to right, so these settings are refused.
    with pytest.raises(TaskError, match="computed from left to right"):
        make_task(dataset="basic_arithmetic", operators=("+", "*"), allow_parentheses=False)
    assert make_task(dataset="basic_arithmetic", operators=("*", "/"), allow_parentheses=False)


def test_the_commands_in_the_documents_load() -> None:
    pages = (Path(__file__).resolve().parents[2] / "docs").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    commands = re.findall(r"^cohort train (quickstart --task reasoning_gym.*?)(?: +#.*)?$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        recipe, *args = command.split()
        assert load_config(recipe, args).task.dataset  # type: ignore[attr-defined]


def test_levels_change_the_rows_and_those_that_the_package_refuses_are_named() -> None:
    easy, hard = (next(iter(make_task(dataset="chain_sum", level=n).rows("train")))["question"] for n in (0, 8))
    assert len(easy) < len(hard)
    with pytest.raises(TaskError, match="refuses its settings: rotation must be in range"):
        make_task(dataset="caesar_cipher", level=3)


def test_a_short_run_scores_in_worker_processes(tmp_path: Path) -> None:
    flags = (
        "--steps 2 --batch.prompts 4 --batch.samples 4 --eval.problems 20 --eval.every 2 --optim.warmup 0 --threads 1"
    )
    command = [sys.executable, "-m", "cohort", "train", "tiny_reasoning_gym", *flags.split(), "--out", str(tmp_path)]
    done = subprocess.run([*command, "--log", "plain"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (directory,) = tmp_path.iterdir()
    evaluations = RunDirectory.open(directory).load_evaluations()
    assert compare(evaluations[0], evaluations[2]).num_problems == 20
    assert evaluations[0].num_failed == 0 and 0 < evaluations[0].accuracy < 1
    more = [sys.executable, "-m", "cohort", "resume", str(directory), "--steps", "3", "--log", "plain"]
    done = subprocess.run(more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_answer_that_is_a_program_is_not_run() -> None:
    made: Any = make_task(dataset="countdown", train_size=1)
    (row,) = load_rows(made, "train")
    mark = "__import__('sys').modules.__setitem__('cohort_mark', 1)"
    assert grade(made, row, make_plain_answer(f"<answer>{mark}</answer>")).parts == {"correct": 0.0, "score": 0.0}
    assert "cohort_mark" not in sys.modules
    # The package's own grader runs it.
    entry = package.make_entry(made.make_key("countdown"), 0, row["index"])
    package.score_text(made.make_key("countdown"), 0, entry, mark)
    assert sys.modules.pop("cohort_mark", None) == 1


def test_the_commands_of_the_page_about_tasks_have_enough_problems() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    commands = re.findall(r"^cohort train (\w+) (--task reasoning_gym .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for recipe, flags in commands:
        made: Any = load_config(recipe, flags.split()).task
        assert len(load_rows(made, "train")) == made.train_size and len(load_rows(made, "test")) == made.test_size
