"""A task in a user's own file, and what happens when its grader fails."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cohort.run.directory import load_evaluations
from cohort.run.store.reader import Reader
from tests.helpers.command_line import Done, cohort, differences, next_args, only_run, remains

# A task as a user writes it: nothing of it is in the package.
FILE = '''
import cohort
from cohort.config.schema import BatchConfig, EvalConfig, SamplingConfig, SaveConfig


@cohort.task("sums")
class Sums:
    """Sums of two numbers."""

    size: int = 48

    def rows(self, split):
        for n in range(self.size if split == "train" else 10):
            yield {"id": f"{split}-{n}", "a": n % 7, "b": n // 7 + (10 if split == "test" else 0)}

    def prompt(self, row):
        return [{"role": "user", "content": f"What is {row['a']} + {row['b']}?"}]

    def score(self, row, answer):
        # a bug may be here
        return {"correct": float(f"<answer>{row['a'] + row['b']}</answer>" in answer.text)}


def recipe():
    return cohort.RL(
        model="tiny",
        task=Sums(),
        steps=2,
        threads=1,
        batch=BatchConfig(prompts=24, samples=4),
        sampling=SamplingConfig(max_tokens=16),
        eval=EvalConfig(problems=10),
        save=SaveConfig(every=1),
    )
'''
FLAGS = ["--optim.lr=1e-4", "--algo.scale=none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `my_task.py`. All tests share it, because a config contains the path of the file."""
    return tmp_path_factory.mktemp("own_task")


@pytest.fixture(scope="module")
def write(folder: Path) -> Callable[[str], Path]:
    """A function that writes `my_task.py` with a bug in its grader, or with none."""

    def write_file(bug: str) -> Path:
        path = folder / "my_task.py"
        path.write_text(FILE.replace("# a bug may be here", bug))
        return path

    return write_file


@pytest.fixture(scope="module")
def sound(write: Callable[[str], Path], folder: Path) -> Path:
    """The run of a grader without a bug. It is shared, so tests only read it."""
    file = write("pass")
    return trained(cohort("train", f"{file}:recipe", *FLAGS, at=folder), folder)


def trained(done: Done, folder: Path) -> Path:
    assert done.returncode == 0, done.stderr
    run = only_run(folder)
    assert run is not None
    return run


def test_a_task_of_ones_own_is_trained_resumed_and_evaluated(
    sound: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write("pass")
    run = Path(shutil.copytree(sound, tmp_path / "runs" / sound.name))
    assert f"name: {file}:sums" in (run / "config.yaml").read_text()
    with Reader(run / "run.db") as reader:
        rewards = [row.reward for row in reader.read_samples()]
        assert len({row.prompt_id for row in reader.read_prompts()}) == 48
    assert set(rewards) == {0.0, 1.0}  # something to learn from
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = cohort("resume", run, "--steps", "3", at=elsewhere)
    assert done.returncode == 0, done.stderr
    assert (run / "checkpoints" / "step-000003").is_dir()
    again = f"next cohort eval {file}:sums --model {run}@3 --max-tokens 16"
    assert again in done.stdout.splitlines()
    flags = shlex.split("--max-tokens 16 --threads 1 --out e.json")
    model = run / "checkpoints" / "step-000003" / "model"
    done = cohort("eval", "my_task.py:sums", "--model", model, *flags, at=file.parent)
    assert done.returncode == 0, done.stderr
    written = file.with_name("e.json"), run / "eval" / "step-000003.json"
    found, known = (json.loads(path.read_text()) for path in written)
    assert found["setting"]["task"] == "sums" and found["items"] == known["items"]


def find_lone_answer(run: Path) -> tuple[str, str]:
    """Returns (row id, text) of an answer that one sample of step 1 gave alone, in a group of right and wrong ones."""
    with Reader(run / "run.db") as reader:
        names = {prompt.id: prompt.prompt_id for prompt in reader.read_prompts()}
        for group in reader.read_groups(step=1):
            samples = reader.read_samples(group=group.id)
            for sample in samples:
                others = [other for other in samples if other is not sample]
                if {o.reward for o in others} == {0.0, 1.0} and sample.text not in {o.text for o in others}:
                    return names[group.prompt], sample.text
    raise AssertionError("no such group")


def test_4_9_a_sample_that_cannot_be_scored_leaves_its_group(
    sound: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """The grader raises at one answer, less than 5% of a step: it gets no reward, and the others make the baseline."""
    row, text = find_lone_answer(sound)
    file = write(f'if row["id"] == {row!r} and answer.text == {text!r}: raise ZeroDivisionError("my own bug")')
    done = cohort("train", "my_task.py:recipe", *FLAGS, "--steps=1", "--out", tmp_path / "runs", at=file.parent)
    run = trained(done, tmp_path)
    assert (
        f"name: {file}:sums" in (run / "config.yaml").read_text()
    )  # absolute, so that the run can be resumed from any folder
    with Reader(run / "run.db") as reader:
        [failed] = [sample for sample in reader.read_samples() if sample.failure]
        [group] = [group for group in reader.read_groups() if group.id == failed.group]
        others = [sample for sample in reader.read_samples(group=group.id) if not sample.failure]
        metrics = {metric.name: metric.value for metric in reader.read_metrics(step=1)}
        [event] = [event for event in reader.read_events() if event.kind == "failure"]
    assert "ZeroDivisionError: my own bug" in failed.failure and failed.text == text
    assert failed.reward is None and failed.advantage == 0 and not group.excluded
    mean = math.fsum(sample.reward or 0.0 for sample in others) / 3
    assert len(others) == 3 and group.reward_mean == mean
    assert [sample.advantage for sample in others] == pytest.approx([(s.reward or 0.0) - mean for s in others])
    assert metrics["samples/failed"] == 1
    assert event.text.startswith("1 sample could not be scored and left")
    assert f"step 1 · failure · {event.text}"[:120] in done.stdout
    assert "- samples that could not be scored: 1" in (run / "run.md").read_text()


def test_4_9_above_five_percent_the_run_stops_and_is_resumed_when_the_grader_is_mended(
    sound: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    with Reader(sound / "run.db") as reader:
        names = {prompt.id: prompt.prompt_id for prompt in reader.read_prompts()}
        second = [names[group.prompt] for group in reader.read_groups(step=2)]
    file = write(f'if row["id"] in {tuple(second[:2])}: raise ZeroDivisionError("my own bug")')
    done = cohort("train", f"{file}:recipe", *FLAGS, at=tmp_path)  # two rows of 24: 8 samples of 96
    assert done.returncode == 2 and "step 1/2" in done.stdout and "step 2/2" not in done.stdout
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert "(8 of 96 samples could not be scored, and at most 5% may fail" in done.stderr
    assert "ZeroDivisionError: my own bug" in done.stderr and "Repair that, then resume" in done.stderr
    assert "go on with: cohort resume runs/" in done.stdout
    write("pass")
    run = trained(cohort(*next_args(tmp_path), at=tmp_path), tmp_path)
    # The grader with the bug scored what came before, and that is recorded.
    state, evaluation = "checkpoints/step-000001/state.json", "eval/step-000000.json"
    assert differences(remains(run), remains(sound)) == [state, "curves.svg", evaluation, "events", "run.md"]
    with Reader(run / "run.db") as reader:
        [event] = reader.read_events(kind="grader")
    assert event.step == 2 and "the code that scores sums has changed since step 1" in event.text
    first, expected = (json.loads((r / evaluation).read_text()) for r in (run, sound))
    assert first["setting"].pop("grader") != expected["setting"].pop("grader")
    assert first == expected
    before, expected = (json.loads((r / state).read_text()) for r in (run, sound))
    assert before.pop("crc32") != expected.pop("crc32")
    assert before["numbers"]["inputs"].pop("grader") != expected["numbers"]["inputs"].pop("grader")
    assert before == expected


def test_the_example_in_the_readme_checks_and_trains(tmp_path):
    """The code of the README with fewer steps: the reward is sound, the update is right, and the policy learns."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for name in ("make_rows.py", "sums.py"):
        [code] = re.findall(rf"```python\n(# {name}\n.*?)```", text, re.DOTALL)
        (tmp_path / name).write_text(code, encoding="utf-8")
    subprocess.run([sys.executable, "make_rows.py"], cwd=tmp_path, check=True)
    done = cohort("check", "sums.py:sums", "--threads=1", at=tmp_path)
    assert done.returncode == 0 and ": 0 failed, 0 with a warning" in done.stdout, done
    done = cohort("train", "sums.py:sums", "--steps=5", "--eval.problems=200", "--threads=1", at=tmp_path)
    assert done.returncode == 0, done
    run = only_run(tmp_path)
    assert run is not None
    found = load_evaluations(str(run))
    assert found[5].accuracy > found[0].accuracy + 0.1


def test_the_page_about_tasks_has_one_that_works(tmp_path: Path) -> None:
    """Copies the file and runs the commands of docs/tasks.md."""
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(# capitals.py.*?)```", page, re.DOTALL)
    commands = re.findall(r"^cohort (\w+ capitals\.py.*?)(?: +#.*)?$", page, re.MULTILINE)
    assert [c.split()[0] for c in commands] == ["check", "train", "eval"]
    (tmp_path / "capitals.py").write_text(code)
    for command in commands:
        done = cohort(*shlex.split(command), at=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    [file] = (tmp_path / "evals").glob("capitals-tiny-*.json")
    found = json.loads(file.read_text())
    assert {answer["reason"] for item in found["items"] for answer in item["answers"]} <= {"", "not in capitals"}
    assert found["setting"]["knobs"] == {"shortest": 3}


def test_rows_named_by_a_relative_path_are_found_from_another_folder(tmp_path: Path) -> None:
    for split, names in (("train", "abcd"), ("test", "z")):
        rows = [json.dumps({"question": f"{name}?", "answer": "#### 1"}) for name in names]
        (tmp_path / f"rows_{split}.jsonl").write_text("\n".join(rows))
    flags = shlex.split("--model tiny --steps 1 --eval.problems 1 --sampling.max-tokens 8 --threads 1")
    done = cohort("train", "smollm2_gsm8k", "--task.data", "rows_{split}.jsonl", *flags, at=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    done = cohort("resume", run, "--steps", "2", at=tmp_path / "elsewhere")
    assert done.returncode == 0 and run is not None and (run / "checkpoints" / "step-000002").is_dir(), done.stderr
