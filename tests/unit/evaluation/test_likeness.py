"""What `cohort eval` says of a checkpoint that it evaluates otherwise than the run did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.config.kinds import RL
from cohort.config.load import load_config
from cohort.config.options import EvalOptions
from cohort.config.schema import EvalConfig, SamplingConfig
from cohort.evaluation.likeness import describe_unlikeness
from cohort.run.directory import RunDirectory
from cohort.run.naming import NamedCheckpoint
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.gsm8k import GSM8K
from tests.helpers.pretend_run import small_run

OWN = """
import cohort

@cohort.task("loud")
class Loud:
    names: tuple[str, ...] = ("a",)

    def rows(self, split): yield {"id": split}
    def prompt(self, row): return [{"role": "user", "content": "x"}]
    def score(self, row, answer): return {"correct": 0.0}
"""
SAME = EvalOptions(max_tokens=128)


def describe(folder: Path, config: Any, task: Any, options: EvalOptions) -> list[str]:
    """Returns what is said of the checkpoint of a run with this config."""
    run = RunDirectory.create(folder, config, "run").path
    return describe_unlikeness(NamedCheckpoint(run=run, step=4), task, options)


def make_config(**changes: Any) -> RL:
    return small_run(**{"sampling": SamplingConfig(max_tokens=128), "task": Arithmetic(), **changes})


def test_other_settings_are_named_with_the_flags_that_make_them_equal(tmp_path: Path):
    config = make_config(template="text", system="Be brief.", task=Arithmetic(max_terms=2))
    [line] = describe(tmp_path, config, Arithmetic(), EvalOptions(max_tokens=64))
    assert line.startswith(f"the run of {tmp_path}/run@4 trained on arithmetic with other settings")
    default = Arithmetic().max_terms
    assert f"max_tokens 128 (here 64), task.max_terms 2 (here {default})" in line
    assert line.endswith("give --template=text '--system=Be brief.' --max-tokens=128 --task.max-terms=2")


def test_the_same_settings_and_other_tasks_are_no_matter(tmp_path: Path):
    config = make_config(eval=EvalConfig(temperature=0.5))
    same = replace(SAME, temperature=0.5)
    assert describe(tmp_path / "a", config, Arithmetic(), same) == []
    assert describe(tmp_path / "b", config, GSM8K(), EvalOptions()) == []
    # A temperature that the user gave is meant; the default one is not.
    assert describe(tmp_path / "c", config, Arithmetic(), replace(SAME, temperature=0.0)) == []
    assert "temperature 0.5 (here 1.0)" in describe(tmp_path / "d", config, Arithmetic(), SAME)[0]


def test_paths_are_compared_as_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("")
    config = make_config(task=GSM8K(data=f"{tmp_path}/{{split}}.jsonl"), template=f"{tmp_path}/t.jinja")
    assert describe(tmp_path, config, GSM8K(data="{split}.jsonl"), replace(SAME, template="t.jinja")) == []


def test_a_task_of_the_user_is_compared_as_recorded_and_its_code_is_not_run(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    given = {"task": f"{file}:loud", "task.names": ("b", "c"), "sampling.max_tokens": 128}
    config: Any = load_config("quickstart", given=given)
    task = config.task
    run = RunDirectory.create(tmp_path, config, "run").path
    file.write_text("raise SystemExit(3)")
    checkpoint = NamedCheckpoint(run=run, step=1)
    assert describe_unlikeness(checkpoint, task, SAME) == []
    [line] = describe_unlikeness(checkpoint, type(task)(), SAME)
    assert line.endswith("give --task.names b c")


@pytest.mark.parametrize(
    ("trained", "here", "words"),
    [
        (EvalConfig(), 0.1, "trained on all training rows, those of this validation split too"),
        (EvalConfig(split="validation"), 0.1, ""),
        (EvalConfig(split="validation"), 0.3, "has rows that it was trained on; give --validation-share 0.1"),
        (EvalConfig(split="validation", validation_share=0.3), 0.1, "only a part of them; give --validation-share 0.3"),
    ],
)
def test_a_validation_split_that_is_not_the_run_s(trained: EvalConfig, here: float, words: str, tmp_path: Path):
    options = replace(SAME, split="validation", validation_share=here)
    lines = describe(tmp_path, make_config(eval=trained), Arithmetic(), options)
    assert [words in line for line in lines] == [True] * bool(words)
