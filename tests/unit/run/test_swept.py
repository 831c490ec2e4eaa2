"""What the plan of a sweep tells about its runs, whole or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from cohort.config.differences import SettingsDifference
from cohort.run.swept import SweptSettings, adjust_differences, read_swept_settings

PLAN = "format: 1\naxes:\n- optim.lr\n- batch.samples\nseeds:\n- 0\n- 1\nthreads: 2\nsplit: validation\n"


def test_swept_settings_come_first_and_what_the_sweep_set_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(PLAN)
    swept = read_swept_settings(tmp_path)
    assert swept == SweptSettings(axes=("optim.lr", "batch.samples", "seed"), own=("threads", "eval.split"))
    settings = {"optim.lr": 3e-4, "seed": 0, "threads": 2, "steps": 5, "eval.split": "validation", "batch.samples": 8}
    found = SettingsDifference(values={"steps": 5, "threads": 2, "eval.split": "validation"}, source="recipe")
    # The learning rate and the seed are those of the recipe, but they are swept.
    assert list(adjust_differences(found, settings, swept).values.items()) == [
        *(("optim.lr", 3e-4), ("batch.samples", 8), ("seed", 0), ("steps", 5)),
    ]


def test_one_seed_is_not_swept_and_threads_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("axes:\n- optim.lr\nseeds:\n- 0\nthreads: 0\nsplit: ''\n")
    assert read_swept_settings(tmp_path) == SweptSettings(axes=("optim.lr",))


@pytest.mark.parametrize("text", ["", "[", "- 1\n", "axes: 3\nseeds: x\n", "axes: [{a: 1}, 2]\n", "\x00"])
def test_a_damaged_plan_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    assert read_swept_settings(tmp_path) == SweptSettings()


def test_what_is_no_sweep(tmp_path: Path) -> None:
    assert read_swept_settings(tmp_path) is None
    (tmp_path / "sweep.yaml").mkdir()
    assert read_swept_settings(tmp_path) == SweptSettings()
