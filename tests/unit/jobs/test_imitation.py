"""What jobs of SFT and DPO read: splits of any name, what is held out, and the problems of their task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cohort.algos.imitation import Imitation
from cohort.config import load
from cohort.config.imitation import DPO, SFT
from cohort.errors import ConfigError, TaskError
from cohort.inspect.check.plan import check_warmup
from cohort.jobs.build import build_job
from cohort.jobs.dpo import DPOJob
from cohort.jobs.inputs import settle_inputs
from cohort.jobs.sft import SFTJob
from cohort.tasks.base import load_rows
from cohort.tasks.countdown import Countdown
from cohort.tasks.formats import RawRow
from cohort.tasks.splits import cut_validation

COUNTDOWN = ["--task", "countdown", "--task.train-size", "60", "--task.test-size", "12", "--task.max-numbers", "3"]


def write(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_pairs(word: str, num: int) -> list[RawRow]:
    return [{"prompt": f"{word} {n}", "chosen": "yes", "rejected": "no"} for n in range(num)]


def build(recipe: str, *args: str) -> Any:
    config = load.load_config(recipe, ["--model", "tiny", "--threads", "1", *args])
    return build_job(settle_inputs(config))


def questions(groups: Sequence[Any]) -> set[str]:
    return {group.prompt.messages[0]["content"] for group in groups}


def test_splits_of_files_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rows_train_prefs.jsonl", [*make_pairs("train", 6), *make_pairs("test", 2)])
    write(tmp_path / "rows_test_prefs.jsonl", make_pairs("test", 4))
    monkeypatch.chdir(tmp_path)
    flags = ["--data.train-split", "train_prefs", "--data.test-split", "test_prefs"]
    job = build("dpo", "--data.path", "rows_{split}.jsonl", *flags)
    assert isinstance(job, DPOJob) and isinstance(job.config, DPO)
    # A path that a run records does not depend on the working directory, and no held-out question is trained on.
    assert job.config.data.path == str(tmp_path / "rows_{split}.jsonl")  # type: ignore[union-attr]
    assert questions(job.encoded.groups) == {f"train {n}" for n in range(6)}
    assert questions(job.held_out) == {f"test {n}" for n in range(4)}
    with pytest.raises(ConfigError, match="is one file, which has no splits"):
        build("dpo", "--data.path", "rows_train_prefs.jsonl", *flags)


def test_a_warm_up_of_half_the_run_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The number of steps follows from the rows: it is known when they are read."""
    write(tmp_path / "rows.jsonl", make_pairs("train", 8))
    flags = ["--data.path", f"{tmp_path}/rows.jsonl", "--data.held-out", "0", "--batch.pairs", "2", "--passes", "1"]
    told = []
    for warmup in (0, 1, 2, 4):
        caplog.clear()
        job = build("dpo", *flags, f"--optim.warmup={warmup}")
        told.append([r.getMessage() for r in caplog.records if "optim.warmup" in r.getMessage()])
        assert [f.status for f in check_warmup(job.config)] == ["warn"] * len(told[-1])
    assert [len(lines) for lines in told] == [0, 0, 1, 1]
    assert told[2][0].startswith("optim.warmup is 2, and the run makes only 4 optimizer steps: ")


def test_splits_of_the_hub_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def open_hub(data_set: str, split: str, remedy: str, flags: str) -> Any:
        asked.append(f"{data_set} {split}")
        if split == "train":
            raise TaskError(f"its split{flags}")
        return enumerate(make_pairs(split, 5), start=1)

    monkeypatch.setattr("cohort.tasks.places._open_hub", open_hub)
    path = "HuggingFaceH4/ultrafeedback_binarized"
    job = build("smollm2_dpo")
    assert asked == [f"{path} train_prefs", f"{path} test_prefs"]
    assert questions(job.held_out) == {f"test_prefs {n}" for n in range(5)} and len(job.encoded.groups) == 5
    with pytest.raises(TaskError, match=r"its split \(--data.train-split, --data.test-split\)"):
        build("dpo", "--data.path", path)
    # Without a name of a test split, a share of the rows is held out.
    assert build("dpo", "--data.path", path, "--data.train-split", "t", "--data.held-out", "0").held_out == []


@pytest.mark.parametrize(
    ("split", "flags"), [("test", []), ("validation", ["--eval.split=validation", "--eval.validation-share=0.2"])]
)
def test_answers_of_a_task_are_imitated_but_not_those_that_it_is_tested_on(split: str, flags: list[str]) -> None:
    with build("sft", "--data", "task", *COUNTDOWN, *flags) as job:
        assert isinstance(job, SFTJob) and isinstance(job.config, SFT) and job.evaluator is not None
        task = Countdown(train_size=60, test_size=12, max_numbers=3)
        train, test = load_rows(task, "train"), load_rows(task, "test")
        if split == "validation":
            train, test = cut_validation(train, 0.2)
        assert [prompt.row for prompt in job.evaluator.problems.prompts] == test
        assert len(job.encoded.groups) == len(train) and len(job.held_out) == len(test)
        assert job.encoded.describe() == []
        found = job.evaluate(0)  # type: ignore[misc]
        assert (found.setting.split, found.setting.num_problems) == (split, len(test))


def test_rows_that_ask_a_problem_of_the_evaluations_are_left_out(tmp_path: Path) -> None:
    task = Countdown(train_size=60, test_size=12, max_numbers=3)
    rows = [*load_rows(task, "test")[:3], *load_rows(task, "train")[:5]]
    talks = [{"prompt": task.prompt(row)[0]["content"], "completion": task.gold(row)} for row in rows]
    write(tmp_path / "talks.jsonl", talks)
    with build("sft", "--data.path", str(tmp_path / "talks.jsonl"), *COUNTDOWN, "--data.held-out", "0") as job:
        assert len(job.encoded.groups) == 5
        [line] = job.describe().left_out
        place = f"{tmp_path / 'talks.jsonl'}, line 1"
        assert line == f"rows left out, because they ask a problem of the evaluations: 3 of 8 (first: {place})"


def test_the_evaluation_uses_the_weights_that_were_trained() -> None:
    """After an update, the accuracy is that of the changed weights: the engine shares the storage of the learner."""
    with build("sft", "--data", "task", *COUNTDOWN, "--optim.lr", "0.01", "--passes", "0", "--steps", "9") as job:
        before = job.evaluate(0)
        for step in range(2):
            job.learner.update(job.make_batch(step), Imitation())
        after = job.evaluate(2)
        texts = [[a.text for item in e.items for a in item.answers] for e in (before, after)]
        assert texts[0] != texts[1] and before.setting.rows == after.setting.rows
        assert after.setting.step == 2 and job.inputs.grader == after.setting.grader


def test_held_out_rows_that_are_left_out_are_counted_too(tmp_path: Path) -> None:
    write(tmp_path / "r_train.jsonl", make_pairs("a", 4))
    write(tmp_path / "r_test.jsonl", [*make_pairs("b", 2), {"prompt": "c", "chosen": "z " * 2000, "rejected": "no"}])
    job = build("dpo", "--data.path", str(tmp_path / "r_{split}.jsonl"), "--data.too-long", "skip")
    [line] = job.describe().left_out
    assert line.startswith("held-out rows left out, because they have more than 1024 tokens: 1 of 3 (first: ")
    assert len(job.held_out) == 2
