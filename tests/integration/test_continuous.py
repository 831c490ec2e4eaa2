"""A continuous reward on data without test rows, from the first step to a comparison, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cohort.run.store.reader import Reader
from tests.helpers.command_line import cohort

# The part "brief" applies only to answers of two words or more.
FILE = """
import cohort
from cohort.config.schema import BatchConfig, OptimConfig, SamplingConfig, SaveConfig


@cohort.task("words")
class Words:
    parts = ("length", "brief")
    optional_parts = True
    max_tokens = 16

    def rows(self, split):
        return [{"n": n} for n in range(40)] if split == "train" else []

    def prompt(self, row):
        return [{"role": "user", "content": f"What is {row['n']} + {row['n'] % 7}?"}]

    def score(self, row, answer):
        words = len(answer.text.split())
        return {"length": -abs(words - 3) / 3, "brief": 0.5 if words > 1 else None}


def recipe():
    return cohort.RL(
        task=Words(),
        steps=3,
        threads=1,
        reward={"brief": 0.1},
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=16),
        optim=OptimConfig(lr=1e-4),
        save=SaveConfig(every=1),
    )
"""
LINE = "no test rows: nothing is evaluated"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the file and two runs: plain, and measured, which has a validation split."""
    path = tmp_path_factory.mktemp("continuous")
    (path / "own.py").write_text(FILE)
    assert cohort("train", "own.py:recipe", "--name=plain", "--eval.every=2", at=path).returncode == 0
    flags = ["--eval.split=validation", "--eval.validation-share=0.3", "--eval.every=1"]
    assert cohort("train", "own.py:recipe", "--name=measured", *flags, at=path).returncode == 0
    return path


def read_series(run: Path, name: str) -> dict[int, float]:
    """Returns the values of a metric by step."""
    with Reader(run / "run.db") as reader:
        return reader.read_series(name)


def test_a_run_without_test_rows_trains_and_says_once_that_it_is_not_evaluated(folder: Path) -> None:
    again = cohort("train", "own.py:recipe", "--name=again", "--steps=1", "--eval.every=1", at=folder)
    assert again.returncode == 0 and again.stdout.count(LINE) == 1
    assert "so eval.every = 1 has no effect; --eval.split validation cuts some" in again.stdout
    assert "cohort eval" not in again.stdout
    card = (folder / "runs/plain/run.md").read_text()
    assert "No test rows: nothing is evaluated, so eval.every = 2 has no effect." in card
    assert len(read_series(folder / "runs/plain", "reward/length")) == 3
    assert not (folder / "runs/plain/eval").exists() or not list((folder / "runs/plain/eval").iterdir())


def test_means_of_a_part_are_over_the_samples_that_have_it(folder: Path) -> None:
    run = folder / "runs/plain"
    # Every sample that has the part has the value 0.5.
    found = read_series(run, "reward/brief")
    assert found and set(found.values()) == {0.5}
    with Reader(run / "run.db") as reader:
        samples = [sample for step in (1, 2, 3) for sample in reader.read_samples(step=step)]
    assert any("brief" not in sample.parts for sample in samples if sample.reward is not None)
    for sample in samples:
        if sample.reward is not None:
            expected = sample.parts["length"] + 0.1 * sample.parts.get("brief", 0.0)
            assert sample.reward == pytest.approx(expected, abs=1e-6)
    done = cohort("explain", "plain", at=folder)
    assert done.returncode == 0 and "parts on average" in done.stdout


def test_a_run_is_resumed_to_the_same_numbers(folder: Path) -> None:
    assert cohort("resume", "plain", "--steps=4", at=folder).returncode == 0
    whole = cohort("train", "own.py:recipe", "--name=whole", "--steps=4", at=folder)
    assert whole.returncode == 0
    one, two = (read_series(folder / "runs" / name, "reward/mean") for name in ("plain", "whole"))
    assert len(one) == 4 and {s: one[s] for s in (1, 2, 3)} == {s: two[s] for s in (1, 2, 3)}


def test_a_validation_split_is_evaluated_by_the_mean_reward(folder: Path) -> None:
    run = folder / "runs/measured"
    found = read_series(run, "eval/reward")
    assert set(found) == {0, 1, 2, 3} and not read_series(run, "eval/accuracy")
    assert "held-out reward" in (run / "run.md").read_text().lower()
    listed = json.loads(cohort("runs", "--json", at=folder).stdout)
    record = next(r for r in (listed["runs"] if isinstance(listed, dict) else listed) if r["name"] == "measured")
    assert record["eval_reward"] == found[3] and record["accuracy"] is None
    best = max((s for s in found if s), key=lambda s: (found[s], -s))
    assert (record["best_eval_reward"], record["best_step"]) == (found[best], best)
    assert (run / "checkpoints" / f"step-{best:06}").is_dir()
    assert cohort("plot", "measured", at=folder).returncode == 0
    assert "held-out reward" in (run / "curves.svg").read_text()


def test_evaluations_are_made_and_compared_by_hand(folder: Path) -> None:
    flags = ["--split=validation", "--validation-share=0.3", "--reward=brief=0.1"]
    for name, model in (("before", "tiny"), ("after", "measured")):
        done = cohort("eval", "own.py:words", "--model", model, *flags, "--out", f"{name}.json", at=folder)
        assert done.returncode == 0, done.stderr
        assert "reward" in done.stdout and "accuracy" not in done.stdout and "pass@" not in done.stdout
    stored = json.loads((folder / "after.json").read_text())
    assert stored["accuracy"] is None and stored["setting"]["reward"] == {"length": 1.0, "brief": 0.1}
    # Weights, problems, coefficients and random numbers are those of the run.
    assert stored["reward"] == pytest.approx(read_series(folder / "runs/measured", "eval/reward")[3], abs=1e-9)
    done = cohort("compare", "before.json", "after.json", at=folder)
    assert done.returncode == 0 and "B - A:" in done.stdout and "sign flips" in done.stdout
    within = cohort("compare", "measured@0", "measured", "--json", at=folder)
    assert "reward" in json.loads(within.stdout)["second"]


def test_what_needs_right_answers_or_test_rows_is_refused_in_one_line(folder: Path) -> None:
    done = cohort("eval", "own.py:words", "--model", "tiny", at=folder)
    assert done.returncode == 2 and "nothing to evaluate; --split validation" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    cohort("eval", "own.py:words", "--model", "tiny", "--split=validation", "--out=some.json", at=folder)
    done = cohort("data", "--from", "some.json", "--out", "rows.jsonl", at=folder)
    assert done.returncode == 2 and "--keep correct cannot choose. Give --least REWARD" in done.stderr
    assert cohort("data", "--from", "some.json", "--least=-9", "--out", "rows.jsonl", at=folder).returncode == 0


def test_the_check_refuses_nothing(folder: Path) -> None:
    done = cohort("check", "own.py:recipe", at=folder)
    assert done.returncode == 0 and "FAIL" not in done.stdout and LINE in done.stdout, done.stdout


def test_the_example_trains(folder: Path) -> None:
    file = Path(__file__).parents[2] / "examples" / "brief_answers.py"
    assert len(file.read_text().splitlines()) < 30
    done = cohort("train", f"{file}:recipe", "--steps=1", "--name=example", at=folder)
    assert done.returncode == 0 and LINE in done.stdout, done.stderr
