"""benchmarks/small_recipes.py: its table of small recipes fits the recipes, and docs/results.md has what it prints."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cohort.config.kinds import RL
from cohort.config.load import load_config
from cohort.recipes import RECIPES
from cohort.tasks.base import make_plain_answer
from cohort.tasks.grading import grade
from cohort.tasks.search.task import SearchQA
from cohort.tools.formats import FORMATS
from cohort.tools.schema import make_tool

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = ("miniseq", "RL-GRPO", "re-grpo", "gsm8k-grpo", "TorchRL")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield import_module("small_recipes")


def make_result(low: float, mean: float, high: float, device: str = "AMD EPYC, 2 cores") -> dict[str, Any]:
    side = {"accuracy": 0.25, "low": 0.2, "high": 0.3}
    difference = {"mean": mean, "low": low, "high": high}
    times = {"steps": 7, "seconds": 60.0, "imitation_seconds": 30.0}
    return {"before": side, "after": side, "difference": difference, "device": device, **times}


def test_the_examples(script: ModuleType) -> None:
    assert doctest.testmod(script).attempted > 0 == doctest.testmod(script).failed


def test_every_recipe_of_the_five_projects_has_a_small_one(script: ModuleType) -> None:
    first_lines = {name: (recipe.__doc__ or "").splitlines()[0] for name, recipe in RECIPES.items()}
    named = {
        (name, project)
        for name, line in first_lines.items()
        for project in PROJECTS
        if re.search(rf"\([^()]*(?<![\w-]){re.escape(project)}(?![\w-])[^()]*\)", line)
    }
    # miniseq has a recipe for Dr. GRPO too, but the settings are those of the paper, which the first line names.
    rows = {(small.whole, small.project) for small in script.SMALL}
    assert rows == named | {("dr_grpo_math", "miniseq")}
    assert {project for _, project in named} == set(PROJECTS)
    names = [small.recipe for small in script.SMALL]
    assert len(names) == len(set(names)), "a result lies in the folder of its recipe"


def test_the_settings_are_those_of_the_recipes_and_the_words_are_true(script: ModuleType) -> None:
    for small in script.SMALL:
        whole = load_config(small.whole)
        config = load_config(small.recipe, script.make_flags(small.recipe, small.settings))
        quick = load_config(small.recipe, script.make_flags(small.recipe, small.settings, threads=1, quick=True))
        assert (quick.steps, quick.threads, quick.eval.problems) == (1, 1, 4)
        for fast in (False, True) if small.first else ():
            first = load_config(script.IMITATION, script.make_flags(script.IMITATION, small.first, quick=fast))
            assert first.steps == (1 if fast else 60) and "after 60 steps of imitation" in small.changed
        assert config.model == ("tiny" if small.device == "cpu" else "smollm2-135m") and config.kind == whole.kind
        assert ("tiny" if small.device == "cpu" else "SmolLM2-135M") in small.changed
        assert whole.model.rpartition("/")[2].removesuffix("-Instruct") in small.changed
        assert config.eval.every == 0 or config.steps % config.eval.every == 0
        # The recipe for SFT makes two passes over the training rows of GSM8K.
        whole_steps = whole.steps if isinstance(whole, RL) else round(7473 * 2 / 64)
        for steps, of in re.findall(r"(\d+) steps of (\d+)", small.changed):
            assert (int(steps), int(of)) == (config.steps, whole_steps)
        if isinstance(config, RL) and isinstance(whole, RL):
            tokens = (config.sampling.max_tokens, whole.sampling.max_tokens)
            prompts = (config.batch.prompts, whole.batch.prompts)
            samples = (config.batch.samples, whole.batch.samples)
            said = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) tokens, not (\d+)", small.changed)]
            assert said == [tokens] or "turns of" in small.changed
            said = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) prompts, not (\d+)", small.changed)]
            found = re.findall(r"(\d+) x (\d+) samples.*?not (\d+) x (\d+)", small.changed)
            both = [tuple(map(int, four)) for four in found]
            assert both in ([], [(prompts[0], samples[0], prompts[1], samples[1])])
            assert bool(both) == (samples[0] != samples[1])
            assert both or said == [prompts] * (prompts[0] != prompts[1])


def test_a_trace_of_a_search_ends_with_the_right_answer_to_passages_that_have_it(
    script: ModuleType, tmp_path: Path
) -> None:
    task = SearchQA(corpus="small", context="tool", max_chars=400)
    script.write_search_traces(task, tmp_path / "traces.jsonl")
    talks = [json.loads(line)["messages"] for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    rows = {task.prompt(row)[0]["content"]: row for row in task.rows("train")}
    assert len(rows) * 0.8 <= len(talks) <= len(rows)
    for system, user, call, found, answer in talks:
        row = rows[user["content"]]
        assert system["content"].startswith("You can use tools.") and "<tool:search>" in system["content"]
        [read] = FORMATS["tags"].find_calls(call["content"], {"search": make_tool(task.search)})
        assert read.arguments == {"query": row["question"]} and read.problem == ""
        assert found["content"] == f"<result:search>{task.search(row['question'])}</result>"
        assert any(right.lower() in found["content"].lower() for right in row["answers"])
        assert grade(task, row, make_plain_answer(answer["content"])).parts["correct"] == 1


def test_a_row_says_what_was_measured(script: ModuleType) -> None:
    small = next(small for small in script.SMALL if small.recipe == "tiny_again")
    first, *rest = script.format_rows(small, make_result(0.1, 0.125, 0.15))
    assert first == "| `gsm8k_again` | [`tiny_again`] | CPU | 7 | 1.5 | 25.0% | 25.0% | +12.5 |"
    assert rest[0].startswith("| TorchRL | ") and rest[0].endswith(
        "; | | | | 20.0 to 30.0 | 20.0 to 30.0 | 10.0 to 15.0 |"
    )
    words = "; ".join(line.split("|")[2].strip().removesuffix(";") for line in rest)
    assert words == small.changed


@pytest.mark.parametrize(
    ("interval", "cell"),
    [((-0.01, 0.02, 0.05), "no rise: +2.0"), ((-0.05, -0.03, -0.01), "falls: -3.0"), ((0.01, 0.03, 0.05), "+3.0")],
)
def test_a_row_says_so_if_nothing_rose(script: ModuleType, interval: tuple[float, float, float], cell: str) -> None:
    first = script.format_rows(script.SMALL[0], make_result(*interval))[0]
    assert first.endswith(f"| {cell} |")


def test_the_table_has_short_lines_and_equally_many_cells(script: ModuleType) -> None:
    results = {small.recipe: make_result(-0.123, 0.123, 0.234, "NVIDIA H200") for small in script.SMALL}
    for table in (script.format_table(results), script.format_table({})):
        lines = table.partition("\n\n")[0].splitlines()
        assert {line.count("|") for line in lines} == {9} and max(map(len, lines)) <= 120
        assert ("not run yet (needs a GPU)" in table) == ("| H200 |" not in table)
        place = "\n[`tiny_again`]: results/small/tiny_again/curves.svg\n"
        assert (place in table) == ("[`tiny_again`] |" in table)


def test_the_document_has_the_table_of_the_results(script: ModuleType) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert script.format_table(script.read_results(script.RESULTS)) in page
    for name, result in script.read_results(script.RESULTS).items():
        folder = script.RESULTS / name
        assert "<svg" in (folder / "curves.svg").read_text(encoding="utf-8")
        lines = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
        assert lines[-1].startswith(f"{result['steps']},")
