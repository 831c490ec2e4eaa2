"""The inputs of a run: settled paths, and a resume that refuses when model, adapters or rows are no longer the same."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from cohort.config.algo_sections import KLConfig
from cohort.config.kinds import RL
from cohort.config.options import EvalOptions
from cohort.config.schema import GRPO, BatchConfig, EvalConfig, LearnerConfig, LoraConfig
from cohort.errors import ConfigError, RunError
from cohort.evaluation.standalone import ModelEvaluator
from cohort.jobs.build import RLJob
from cohort.jobs.inputs import settle_inputs
from cohort.logs.view import make_view
from cohort.models.catalog import BUNDLED
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder
from cohort.models.lora import Adapters
from cohort.models.peft import save_adapters
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.life import Run
from cohort.tasks.gsm8k import GSM8K
from tests.helpers.small_runs import built_job, small_run


def write_rows(file: Path, numbers: list[int], word: str = "apples") -> None:
    """Writes one question per number."""
    rows = [{"question": f"{n} {word} and 1 more?", "answer": f"#### {n + 1}"} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def flip_bit(file: Path) -> None:
    """Changes the last bit of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rows, a model `m`, adapters of it, and a cache of its own."""
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "here"
    shutil.copytree(BUNDLED["tiny"], folder / "m")
    write_rows(folder / "train.jsonl", list(range(8)))
    write_rows(folder / "test.jsonl", [90, 91, 92])
    (folder / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %} ")
    decoder = load_folder(BUNDLED["tiny"]).decoder
    assert isinstance(decoder, Decoder)
    lora = LoraConfig(rank=2)
    save_adapters(Adapters(decoder, lora, 0).tensors(), lora, "tiny", folder / "adapters")
    monkeypatch.chdir(folder)
    return folder


def relative_config(lora: str = "") -> RL:
    """Returns the config of a run whose paths are relative."""
    return small_run(
        model="./m",
        task=GSM8K(data="{split}.jsonl"),
        batch=BatchConfig(prompts=2, samples=2),
        eval=EvalConfig(problems=2),
        algo=GRPO(kl=KLConfig(weight=0.1)),
        learner=LearnerConfig(lora=LoraConfig(load=lora)),
    )


def test_a_run_reads_the_same_files_in_every_working_directory(here: Path, monkeypatch: pytest.MonkeyPatch):
    settled = settle_inputs(relative_config("adapters"))
    monkeypatch.chdir("/")
    assert settle_inputs(settled) == settled
    assert settled.model == f"{here}/m" and settled.task.data == f"{here}/{{split}}.jsonl"
    assert settled.learner.lora.load == f"{here}/adapters"
    assert settle_inputs(replace(settled, model="tiny")).model == "tiny"


CHANGES: dict[str, tuple[Callable[[], None], str]] = {
    "nothing": (lambda: None, ""),
    "rows": (
        lambda: write_rows(Path("train.jsonl"), list(range(1, 9))),
        "the rows of the task's train split, or their prompts, have changed since it was started. Put back what was",
    ),
    "order": (
        lambda: write_rows(Path("train.jsonl"), list(range(8))[::-1]),
        "are those of its start, but in another order. Let the task's method `rows` yield them in an order that is the "
        "same in every process (if it goes through a set or lists a folder: through sorted(...)), then start a new run",
    ),
    "test rows": (
        lambda: write_rows(Path("test.jsonl"), [90, 91], "pears"),
        "the rows of the task's test split, ",
    ),
    "model": (lambda: flip_bit(Path("m/model.safetensors")), "the files of the model"),
    "template": (lambda: flip_bit(Path("m/chat_template.jinja")), "the files of the model"),
    "template file": (lambda: flip_bit(Path("mine.jinja")), "the lines of the template file"),
    "adapters": (lambda: flip_bit(Path("adapters/adapter_model.safetensors")), "adapters (learner.lora.load) have"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_resume_refuses_inputs_that_have_changed(name: str, here: Path):
    change, words = CHANGES[name]
    config = relative_config("adapters" if name == "adapters" else "")
    config = settle_inputs(replace(config, template="mine.jinja") if name == "template file" else config)
    with built_job(config) as job:
        path = checkpoint.save(here / "run" / "checkpoints", job.make_checkpoint(1), job.write_model)
    change()
    with built_job(config) as other:
        state = checkpoint.load(path)
        if not words:
            other.restore(state)
            return
        with pytest.raises(RunError) as refusal:
            other.restore(state)
        assert words in str(refusal.value) and f"cohort train RECIPE --model {here}/run" in str(refusal.value)
        # A checkpoint of an earlier version has no digests.
        del state.numbers["inputs"]
        other.restore(state)


def drop_grader(state: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """Returns a checkpoint as earlier versions wrote it, without the digest of the grader."""
    del state.numbers["inputs"]["grader"]
    return state


@pytest.mark.parametrize("has_digest", [True, False])
def test_a_resume_says_that_the_grader_has_changed_and_goes_on(
    has_digest: bool, here: Path, monkeypatch: pytest.MonkeyPatch
):
    config = small_run(steps=2, batch=BatchConfig(prompts=1, samples=2), eval=EvalConfig(problems=1))
    with built_job(replace(config, steps=1)) as job:
        directory = RunDirectory.create(here, replace(config, steps=1), "run")
        # Another process scored the first step with another grader.
        job.inputs = replace(job.inputs, grader="arithmetic-old")
        if not has_digest:
            monkeypatch.setattr(job, "make_checkpoint", lambda step: drop_grader(RLJob.make_checkpoint(job, step)))
        with Run(directory, replace(config, steps=1), job, make_view("plain", io.StringIO())) as run:
            job.run_loop(run)
            run.finish()
    printed = []
    for _ in range(2):
        output = io.StringIO()
        with built_job(config) as job, Run(directory, config, job, make_view("plain", output)) as run:
            job.run_loop(run)
            run.finish()
        printed.append(output.getvalue())
    notice = "grader · the code that scores arithmetic has changed since step 1 (arithmetic-old is now arithmetic-"
    assert notice in printed[0] and notice not in printed[1]
    assert (
        "cannot be compared" in (here / "run/run.md").read_text() and "- grader: 1" in (here / "run/run.md").read_text()
    )


def test_the_date_in_prompts_is_that_of_the_start(here: Path):
    config = relative_config()
    assert settle_inputs(config).date == ""
    with pytest.raises(ConfigError, match="--date 2026-01-31 has no effect"):
        settle_inputs(replace(config, date="2026-01-31"))
    template = Path("m/chat_template.jinja").read_text()
    Path("m/chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}" + template)
    assert settle_inputs(config).date == f"{date.today():%Y-%m-%d}"
    assert settle_inputs(replace(config, template="text")).date == ""
    settled = settle_inputs(replace(config, date="2026-01-31"))
    with built_job(settled) as job:
        prompts = [*job.problems, *job.producer.stream.next_prompts(2)]
        assert all(job.tokenizer.spell(p.tokens).startswith("2026-01-31") for p in prompts)
        assert job.evaluate(0).setting.date == "2026-01-31"


def test_a_template_file_and_a_system_prompt_reach_every_prompt_and_evaluation(here: Path):
    """Training, evaluations in the run and `cohort eval` render alike, and record it."""
    config = replace(relative_config(), template="mine.jinja", system="Be brief.")
    settled = settle_inputs(config)
    assert settled.template == f"{here}/mine.jinja"
    with built_job(settled) as job:
        prompts = [*job.problems, *job.producer.stream.next_prompts(2)]
        assert all(job.tokenizer.spell(p.tokens).startswith("Be brief.") for p in prompts)
        within = job.evaluate(0)
    options = EvalOptions(template="mine.jinja", system="Be brief.", limit=2, max_tokens=8, threads=1)
    with closing(ModelEvaluator("./m", options)) as evaluator:
        prepared = evaluator.prepare(config.task)
        assert [p.tokens for p in prepared.prompts] == [p.tokens for p in job.problems]
    for setting in (within.setting, prepared.setting):
        assert setting.system == "Be brief." and re.fullmatch(r"mine\.jinja [0-9a-f]{16}", setting.template)
        assert setting.rows == within.setting.rows
