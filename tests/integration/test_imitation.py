"""SFT and DPO on rows of a user's own, from the command line: what a run writes, and that a kill changes nothing."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.algos.imitation import Imitation
from cohort.algos.preferences import PreferenceLoss
from cohort.config.imitation import DPO, SFT, ExampleRows
from cohort.data.pack import make_batch
from cohort.inspect.explain.given import compute_gradients
from cohort.inspect.explain.report import explain_step
from cohort.inspect.explain.step import read_step_files
from cohort.run.directory import RunDirectory, load_evaluations
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps
from cohort.types import Provenance
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
from tests.helpers.given_answers import MAP, Case, write_rows
from tests.helpers.struck_command import Strike

STORIES = {
    "checkpoint": [("creation", 1), ("checkpoint", 2), ("recovery", 1), ("prune", 1)],
    "step": [("update", 3), ("database", 4), ("held_out", 1), ("update", 2), ("finish", 1)],
}


@pytest.fixture(scope="module", params=["sft", "dpo", "sft with a task", "dpo with a task"])
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
        measured = reader.read_series("eval/accuracy" if case.name == "dpo" else "eval/loss")
        pairs, accuracies = reader.read_series("eval/pairs"), reader.read_series("eval/accuracy")
    assert list(losses) == [1, 2, 3, 4, 5, 6] and list(measured) == [0, 3, 6]
    shown = (run.parents[1] / "output.txt").read_text()
    found = load_evaluations(run)
    if case.has_task:
        # The accuracy of the task and the loss of the held-out examples stand beside each other.
        assert list(accuracies) == [0, 3, 6] and accuracies == {step: e.accuracy for step, e in found.items()}
        assert {(e.setting.task, e.setting.num_problems, e.setting.num_samples) for e in found.values()} == {
            ("arithmetic", 8, 2)
        }
        assert "held-out accuracy" in shown and "8 problems x 2" in shown
        assert list(pairs) == ([0, 3, 6] if case.recipe == "dpo" else [])
        assert isinstance(config.data, ExampleRows)
        function = "talk" if case.recipe == "sft" else "pair"
        assert config.data.map == f"{Path(config.data.path).parent / 'maps.py'}:{function}"
    if case.recipe == "sft":
        assert measured[6] < measured[0] and "step 6 · held-out · loss" in shown
    elif not case.has_task:
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
    flags = Case(case.name, tmp_path).flags
    assert cohort("train", case.recipe, *flags, "--passes=0.3", at=tmp_path).returncode == 0
    run = only_run(tmp_path)
    [file] = [flag.partition("=")[2] for flag in flags if flag.startswith("--data.path")]
    Path(file).write_text(Path(file).read_text().replace("What is 12+", "What was 12+"))
    done = cohort("resume", run, "--steps", 9, at=tmp_path)
    assert done.returncode == 2 and "cannot continue: the rows" in done.stderr, done


QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
BAD_ROWS = [
    ("sft", "", "has no rows"),
    ("sft", "[1]", "line 1 is [1]; correct it: a row must be a JSON object"),
    ("sft", "{", "line 1 cannot be read as JSON"),
    ("sft", json.dumps({"messages": [QUESTION]}), "line 1: it has no message of the assistant"),
    ("sft", json.dumps({"messages": [QUESTION, QUESTION, ANSWER]}), "line 1: message 2 is of the user and follows one"),
    ("sft", json.dumps({"prompt": "q", "completion": "a " * 3000}), "line 1 has"),
    ("sft", json.dumps({"prompt": "q", "completion": "a" * 10_000_000}), "line 1: it has 10,000,001 characters"),
    (
        "sft",
        json.dumps({"prompt": "q", "completion": " "}),
        "line 1: its completion is empty; correct this row, or leave",
    ),
    (
        "dpo",
        json.dumps({"prompt": "", "chosen": "a", "rejected": "b"}),
        "line 1: its prompt is empty; correct this row",
    ),
    ("dpo", json.dumps({"prompt": "q", "chosen": "a", "rejected": "a"}), "line 1: both answers are the same"),
    ("dpo", json.dumps({"prompt": "q", "chosen": "a"}), 'line 1 has no column "rejected"'),
    ("dpo", json.dumps({"prompt": "q " * 3000, "chosen": "a", "rejected": "b"}), "line 1 has"),
]


@pytest.mark.parametrize(("recipe", "rows", "message"), BAD_ROWS, ids=[message for *_, message in BAD_ROWS])
def test_bad_rows_are_one_line_and_leave_nothing(recipe: str, rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(rows + "\n" if rows else "")
    done = cohort("train", recipe, "--model=tiny", "--data.path=rows.jsonl", "--threads=1", at=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done
    assert "rows.jsonl" in done.stderr and not (tmp_path / "runs").exists()


def test_all_rows_too_long_is_one_line_with_the_number_and_the_first(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "q", "chosen": "a " * 3000, "rejected": "b"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 3)
    skip = ["--data.too-long=skip", "--data.held-out=0"]
    done = cohort("train", "dpo", "--model=tiny", "--data.path=rows.jsonl", "--threads=1", *skip, at=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists(), done
    assert "no row can be trained on: rows left out, because they have more than 1024 tokens: 3 of 3" in done.stderr
    assert f"(first: {tmp_path / 'rows.jsonl'}, line 1)" in done.stderr


def test_rows_that_are_left_out_are_counted_and_named(tmp_path: Path) -> None:
    pairs = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(6)]
    odd = [
        {"prompt": "empty", "chosen": "", "rejected": "b"},
        {"prompt": "equal", "chosen": "a", "rejected": "a"},
        {"prompt": "long", "chosen": "a " * 3000, "rejected": "b"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*odd, *pairs]))
    skip = ["--data.empty=skip", "--data.equal=skip", "--data.too-long=skip", "--data.held-out=0", "--batch.pairs=2"]
    flags = ["--model=tiny", "--data.path=rows.jsonl", "--threads=1", *skip, "--name=odd"]
    done = cohort("train", "dpo", *flags, at=tmp_path)
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "runs" / "odd" / "run.md").read_text()
    for line in (
        "rows left out, because their prompt, answer or text is empty: 1 of 9 (first: rows.jsonl, line 1)",
        "rows left out, because both answers are the same: 1 of 9 (first: rows.jsonl, line 2)",
        "rows left out, because they have more than 1024 tokens: 1 of 9 (first: rows.jsonl, line 3)",
    ):
        line = line.replace("rows.jsonl", str(tmp_path / "rows.jsonl"))
        assert line in done.stdout and line in card, done.stdout


def test_an_error_of_the_function_is_the_users_own(tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "maps.py").write_text(
        "def broken(row):\n    if '31' in row['prompt']:\n        return row['nothing']\n"
    )
    flags = ["--model=tiny", "--data.path=pairs.jsonl", "--data.map=maps.py:broken", "--threads=1"]
    done = cohort("train", "dpo", *flags, at=tmp_path)
    place = tmp_path / "pairs.jsonl"
    assert done.returncode == 2 and "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    message = f"the function broken (--data.map), for {place}, line 3, raised KeyError: 'nothing'"
    assert message in done.stderr and f"{tmp_path / 'maps.py'}, line 3, in broken" in done.stderr, done.stderr
    assert "return row['nothing']" in done.stderr


def test_the_function_runs_on_resume_and_for_no_command_that_only_looks(tmp_path: Path) -> None:
    write_rows(tmp_path)
    case = Case("dpo with a task", tmp_path)
    (tmp_path / "maps.py").write_text(f"print('HERE')\n{MAP}")
    done = cohort("train", "dpo", *case.flags, "--passes=0.3", "--name=mine", at=tmp_path)
    assert done.returncode == 0 and "HERE" in done.stdout + done.stderr, done
    for command in (["export", "mine", "out"], ["compare", "mine@0", "mine"], ["runs"], ["plot", "mine"]):
        done = cohort(*command, at=tmp_path)
        assert done.returncode == 0 and "HERE" not in done.stdout + done.stderr, done
    done = cohort("resume", "mine", "--steps", 4, at=tmp_path)
    assert done.returncode == 0 and "HERE" in done.stdout + done.stderr, done


def test_a_task_of_the_users_own_is_imitated_and_a_changed_grader_is_said(tmp_path: Path) -> None:
    source = """
import cohort

@cohort.task("reverse")
class Reverse:
    def rows(self, split):
        words = {"train": ["group", "reward", "token"], "test": ["cohort", "pair"]}
        yield from ({"id": word, "word": word} for word in words[split])

    def prompt(self, row):
        return [{"role": "user", "content": f"Spell {row['word']} backwards."}]

    def score(self, row, answer):
        return {"correct": float(answer.text.strip() == row["word"][::-1])}

    def gold(self, row):
        return row["word"][::-1]
"""
    (tmp_path / "reverse.py").write_text(source)
    flags = ["--data=task", "--task=reverse.py:reverse", "--model=tiny", "--passes=0", "--steps=1"]
    flags += ["--batch.examples=3", "--sampling.max-tokens=8", "--threads=1", "--name=mine", "--optim.warmup=0"]
    done = cohort("train", "sft", *flags, at=tmp_path)
    assert done.returncode == 0 and "2 problems x 1" in done.stdout, done
    (tmp_path / "reverse.py").write_text(f"{source}\n# changed\n")
    done = cohort("resume", "mine", "--steps", 2, at=tmp_path)
    assert done.returncode == 0 and "the code that scores reverse has changed since step 1" in done.stdout, done
    # Other problems are another run.
    (tmp_path / "reverse.py").write_text(source.replace('"cohort", "pair"', '"cohort", "pear"'))
    done = cohort("resume", "mine", "--steps", 3, at=tmp_path)
    assert done.returncode == 2 and "cannot continue: the rows of the task's test split" in done.stderr, done


def test_a_recipe_in_python_names_the_function_itself(tmp_path: Path) -> None:
    write_rows(tmp_path)
    recipe = """
from cohort.config.imitation import Conversations, ExamplesConfig

def mine():
    \"\"\"Mine.\"\"\"
    data = Conversations(path="talks.jsonl", map=talk)
    return cohort.SFT(steps=1, data=data, batch=ExamplesConfig(examples=2))
"""
    (tmp_path / "maps.py").write_text(MAP + recipe.replace('\\"', '"'))
    done = cohort("train", "maps.py:mine", "--threads=1", "--name=mine", at=tmp_path)
    assert done.returncode == 0, done.stderr
    config = RunDirectory.open(tmp_path / "runs" / "mine").config
    assert isinstance(config, SFT) and isinstance(config.data, ExampleRows)
    assert config.data.map == f"{tmp_path / 'maps.py'}:talk"


def test_no_data_is_said(tmp_path: Path) -> None:
    for recipe in ("sft", "dpo"):
        done = cohort("train", recipe, "--model=tiny", at=tmp_path)
        assert done.returncode == 2 and "the run has no data. Name a file with --data.path" in done.stderr, done


def test_stored_log_probabilities_of_the_reference_train_the_same(tmp_path: Path) -> None:
    write_rows(tmp_path)
    flags = [*Case("dpo", tmp_path).flags, "--passes=0.5", "--learner.minibatches=2"]
    curves = []
    env = {**ENV, "COHORT_CACHE": str(tmp_path / "cache")}
    for reference_is in ("copy", "stored"):
        words = [*flags, f"--reference={reference_is}", f"--name={reference_is}"]
        done = cohort("train", "dpo", *words, at=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        with Reader(tmp_path / "runs" / reference_is / "run.db") as reader:
            curves.append([reader.read_series(name) for name in ("loss", "reward/margin", "kl/ref", "eval/accuracy")])
    # The reference is computed on other microbatches, so that the last bits differ.
    for one, other in zip(*curves, strict=True):
        assert len(one) > 1 and one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_killed_run_with_a_stored_reference_ends_the_same(tmp_path: Path) -> None:
    """The resumed process reads the run's file: the cache is emptied before it starts."""
    write_rows(tmp_path)
    flags = [*Case("dpo", tmp_path).flags, "--passes=0.8", "--reference=stored"]
    env = {**ENV, "COHORT_CACHE": str(tmp_path / "cache")}
    places = [tmp_path / "whole", tmp_path / "killed"]
    for place in places:
        place.mkdir()
    done = cohort("train", "dpo", *flags, at=places[0], env=env)
    assert done.returncode == 0 and "pairs were computed" in done.stdout, done
    shutil.rmtree(tmp_path / "cache")
    struck = cohort("train", "dpo", *flags, at=places[1], env=env, orders=[Strike(signal.SIGKILL, "update", 4, 2)])
    assert struck.returncode == -signal.SIGKILL, struck
    shutil.rmtree(tmp_path / "cache")
    done = cohort(*next_args(places[1], flags, "dpo"), at=places[1], env=env)
    assert done.returncode == 0 and "computed" not in done.stdout and "reference.safetensors" in done.stdout, done
    whole, killed = (only_run(place) for place in places)
    assert whole is not None and killed is not None and "reference.safetensors" in remains(whole)
    assert differences(remains(killed), remains(whole)) == []
