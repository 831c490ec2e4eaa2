"""What a table of runs calls different from the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cohort.config.differences import find_differences, flatten_settings
from cohort.config.document import dump_config
from cohort.config.load import load_config
from cohort.config.yaml_text import read_yaml
from tests.helpers.installed_recipes import CALLABLE as RECIPES


def settings_of(recipe: str, *flags: str) -> dict[str, Any]:
    """Returns the settings of a recipe with flags as a run records them."""
    return flatten_settings(read_yaml(dump_config(load_config(recipe, flags)), "it"))


@pytest.mark.parametrize("recipe", sorted(n for n, r in RECIPES.items() if r.__module__.startswith("cohort.")))
def test_a_recipe_does_not_differ_from_itself(recipe: str) -> None:
    found = find_differences(settings_of(recipe), f"cohort train {recipe}")
    assert found.values == {} and found.source == "recipe"


@pytest.mark.parametrize(
    ("recipe", "flags", "expected"),
    [
        ("quickstart", ["--seed=3", "--optim.lr=1e-5"], {"seed": 3, "optim.lr": 1e-5}),
        # A section that was off: the settings that have its defaults do not count.
        ("quickstart", ["--learner.lora.rank=4"], {"learner.lora.rank": 4}),
        ("tiny_lora", ["--learner.lora.rank=0"], {"learner.lora": None}),
        # Another algorithm has defaults of its own.
        ("quickstart", ["--algo=dr_grpo", "--algo.kl.weight=0.1"], {"algo": "dr_grpo", "algo.kl.weight": 0.1}),
        ("quickstart", ["--task=countdown"], {"task": "countdown"}),
        ("quickstart", ["--sampling.stop", "a", "b"], {"sampling.stop": ["a", "b"]}),
        ("tiny_sft", ["--batch.examples=8"], {"batch.examples": 8}),
    ],
)
def test_only_what_was_changed_differs(recipe: str, flags: list[str], expected: dict[str, Any]) -> None:
    assert find_differences(settings_of(recipe, *flags), f"cohort train {recipe}").values == expected


def test_a_choice_of_the_machine_counts_only_if_the_user_made_it() -> None:
    recorded = settings_of("quickstart") | {"device": "cpu", "learner.dtype": "float32", "date": "2026-01-31"}
    assert find_differences(recorded, "cohort train quickstart").values == {}
    assert find_differences(recorded, "cohort train quickstart --device cpu").values == {"device": "cpu"}
    chosen = "cohort train quickstart --learner.dtype=float32"
    assert find_differences(recorded, chosen).values == {"learner.dtype": "float32"}


@pytest.mark.parametrize(
    ("flags", "recorded", "expected"),
    [
        ("--passes 3", {"passes": 0.0, "steps": 11}, {"passes": 3}),
        ("", {"passes": 0.0, "steps": 4}, {}),
        ("--passes 0 --steps 7", {"passes": 0.0, "steps": 7}, {"steps": 7}),
        ("--seed 2", {"passes": 0.0, "steps": 4, "seed": 2}, {"seed": 2}),
    ],
)
def test_passes_are_shown_as_the_user_gave_them(flags: str, recorded: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = settings_of("sft", "--data.path=rows.jsonl") | recorded
    found = find_differences(settings, f"cohort train sft --data.path rows.jsonl {flags}").values
    assert {name: value for name, value in found.items() if name != "data.path"} == expected


def test_settings_of_a_users_class_are_shown_if_the_user_gave_them() -> None:
    own = {"task": "mine.py:own", "task.size": 3, "task.word": "a", "reward.score": 1.0}
    settings = {k: v for k, v in settings_of("quickstart").items() if not k.startswith(("task", "reward"))} | own
    command = "cohort train quickstart --task mine.py:own"
    assert find_differences(settings, command).values == {"task": "mine.py:own"}
    given = find_differences(settings, f"{command} --task.size 3 --reward.score=1").values
    assert given == {"task": "mine.py:own", "task.size": 3, "reward.score": 1.0}


def test_a_foreign_recipe_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    recorded = settings_of("quickstart", "--seed=5") | {"recipe": f"{file}:mine"}
    command = f"cohort train {file}:mine --seed 5 --out elsewhere --log plain --optim.clip-norm=2"
    found = find_differences(recorded, command)
    assert found.values == {"seed": 5, "optim.clip_norm": recorded["optim.clip_norm"]} and found.source == "command"
    assert not (tmp_path / "ran").exists()
    from_python = find_differences(recorded, "# started from Python: the settings are below")
    assert from_python.values == {} and from_python.source == ""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recipe": ["quickstart"], "steps": 3},
        {"recipe": "quickstart", "algo": "no such", "task": None},
        {"recipe": "quickstart", "algo": "/a/b.py:mine", "algo.x": 1},
        {"recipe": "unknown", "1": 2},
    ],
)
def test_settings_that_no_run_has_are_no_error(settings: dict[str, Any]) -> None:
    found = find_differences(settings, "cohort train 'unclosed")
    assert found.values.keys() <= settings.keys() | {"learner.lora"}
