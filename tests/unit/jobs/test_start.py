"""Resuming a run: what config.yaml must hold before anything is built from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.jobs.start import resume_run, start_run
from cohort.run.directory import RunDirectory
from cohort.world import World
from tests.helpers.pretend_run import small_run

EDITS = {
    "lr: 1.0e-06": "lr: -1.0",
    "prompts: 2": "prompts: 0",
    "samples: 2": "samples: 0",
    "keep_last: 2": "keep_last: -3",
    "steps: 6": "steps: 0",
}


def refuse_to_build(config: RunConfig, world: World) -> Any:
    raise AssertionError("the job was built")


@pytest.mark.parametrize(("old", "new"), EDITS.items())
def test_values_that_no_run_may_have_are_refused_before_the_first_checkpoint(tmp_path: Path, old: str, new: str):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    directory.unlock()
    text = directory.config_file.read_text()
    assert f" {old}\n" in text or f"\n{old}\n" in text
    directory.config_file.write_text(text.replace(old, new))
    name = new.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"config.yaml: [a-z.]*{name} is .*correct the value there"):
        resume_run(directory.path, refuse_to_build, None, "plain", ())


def test_settings_that_contradict_each_other_are_refused_too(tmp_path: Path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    directory.unlock()
    text = directory.config_file.read_text()
    assert "  baseline: mean\n" in text and "  scale: std\n" in text
    directory.config_file.write_text(text.replace("  baseline: mean\n", "  baseline: none\n"))
    with pytest.raises(ConfigError, match=r"contradict each other: .*baseline.*Change them in this file"):
        resume_run(directory.path, refuse_to_build, None, "plain", ())


def test_the_config_of_a_run_is_accepted(tmp_path: Path):
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    directory.unlock()
    with pytest.raises(AssertionError, match="the job was built"):
        resume_run(directory.path, refuse_to_build, None, "plain", ())


def test_the_start_of_engines_is_shown_before_there_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def build(config: RunConfig, world: World) -> Any:
        logging.getLogger("cohort.engines.fleet.server").info("server 1 starts")
        raise ConfigError("built")

    with pytest.raises(ConfigError, match="built"):
        start_run(small_run(), build, tmp_path, "plain", ())
    assert capsys.readouterr().err == "server 1 starts\n"
    # Afterwards the logger is as before.
    logging.getLogger("cohort.engines.fleet.server").info("server 1 starts")
    assert capsys.readouterr().err == ""
