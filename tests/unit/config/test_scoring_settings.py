"""The settings of scoring: in config.yaml only if they are set, under their new names, and never with a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.config.document import dump_config, parse_config
from cohort.config.kinds import RL
from cohort.config.load import load_config
from cohort.config.scoring import ScoringConfig
from cohort.errors import ConfigError

SET = {
    "workers": ("3", 3),
    "concurrency": ("5", 5),
    "seconds": ("2.5", 2.5),
    "retries": ("0", 0),
    "env": ("OPENAI_API_KEY", ("OPENAI_API_KEY",)),
    "sandbox": ("none", "none"),
}


@pytest.mark.parametrize("recipe", ["quickstart", "tiny_sft", "tiny_dpo"])
def test_default_settings_are_not_written(recipe: str) -> None:
    config = load_config(recipe)
    text = dump_config(config)
    assert "scoring" not in yaml.safe_load(text) and parse_config(text) == config
    assert not config.scoring.is_on


@pytest.mark.parametrize("name", sorted(SET))
def test_settings_that_are_set_are_written_and_read(name: str) -> None:
    given, value = SET[name]
    config = load_config("quickstart", [f"--scoring.{name}={given}"])
    assert isinstance(config, RL) and getattr(config.scoring, name) == value and config.scoring.is_on
    text = dump_config(config)
    tree = yaml.safe_load(text)["scoring"]
    assert tree[name] == (list(value) if isinstance(value, tuple) else value)
    assert parse_config(text) == config


def test_a_default_that_is_given_is_a_default() -> None:
    assert load_config("quickstart", ["--scoring.retries=3", "--scoring.concurrency=64"]) == load_config("quickstart")


def test_several_variables_are_a_list() -> None:
    config = load_config("quickstart", ["--scoring.env", "KEY_A", "KEY_B"])
    assert config.scoring.env == ("KEY_A", "KEY_B") and parse_config(dump_config(config)) == config


def test_an_old_file_with_workers_of_turns_is_read() -> None:
    config = load_config("quickstart", ["--scoring.workers=3"])
    tree = yaml.safe_load(dump_config(config))
    del tree["scoring"]
    tree["turns"] = {**tree["turns"], "workers": 3}
    assert parse_config(yaml.safe_dump(tree)) == config


def test_an_old_file_whose_workers_have_the_default_is_read() -> None:
    config = load_config("quickstart")
    tree = yaml.safe_load(dump_config(config))
    tree["turns"] = {**tree["turns"], "workers": 0}
    assert parse_config(yaml.safe_dump(tree)) == config


@pytest.mark.parametrize("flag", ["--turns.workers=3", "--turns.workers=0"])
def test_the_old_flag_is_refused_with_the_new_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"--scoring\.workers") as caught:
        load_config("quickstart", [flag])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--scoring.workers=-1", "scoring.workers is -1"),
        ("--scoring.workers=257", "scoring.workers is 257"),
        ("--scoring.concurrency=0", "scoring.concurrency is 0"),
        ("--scoring.seconds=-1", "scoring.seconds is -1"),
        ("--scoring.seconds=nan", "scoring.seconds is nan"),
        ("--scoring.retries=-1", "scoring.retries is -1"),
        ("--scoring.sandbox=some", "scoring.sandbox"),
        ("--scoring.worker=1", "scoring.workers"),
    ],
)
def test_wrong_values_are_refused_in_one_line(flag: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [flag])
    assert said in str(caught.value).replace("--", "") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["sk-planted-1", "A=sk-planted-1", "1planted", "planted key", "plantéd", "planted\n"])
def test_what_is_no_name_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="no name of an environment variable") as caught:
        ScoringConfig(env=(text,)).check(())
    assert "plant" not in str(caught.value)
    with pytest.raises(ConfigError, match="no name of an environment variable") as caught:
        load_config("quickstart", ["--scoring.env", text])
    assert "plant" not in str(caught.value)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_or_is_empty_is_named(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    # Reading a config needs no variable: only scoring does.
    config = load_config("quickstart", ["--scoring.env=JUDGE_KEY"])
    with pytest.raises(ConfigError, match=r"scoring.env names JUDGE_KEY, which is not set. Set it before the command"):
        config.scoring.require_variables()
    monkeypatch.setenv("JUDGE_KEY", "x")
    config.scoring.require_variables()


def test_settings_without_a_task_have_no_effect_and_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scoring\.retries"):
        load_config("tiny_sft", ["--task=none", "--scoring.retries=1"])


JUDGED = """
import cohort

judge = cohort.Judge(url="http://localhost:1/v1", model="m", question="?", key="KEY_B")
class Own:
    "A task with a judge."
    accuracy = None
    def rows(self, split): yield {"id": split}
    def prompt(self, row): return "x"
    async def score(self, row, answer): return await judge.score("x", answer.text)
cohort.task("judged_by_KIND")(Own)
async def likes(completions, **kwargs):
    return [(await judge.score("x", text)).parts["score"] for text in completions]
"""


@pytest.mark.parametrize("kind", ["task", "functions"])
def test_a_judge_whose_key_graders_are_not_given_is_known_before_the_run(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "judged.py"
    file.write_text(JUDGED.replace("KIND", kind))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "x"}\n')
    rows = ["--task=rows", f"--task.data={tmp_path}/mine.jsonl", f"--task.rewards={file}:likes"]
    flags = [f"--task={file}:judged_by_task"] if kind == "task" else rows
    with pytest.raises(ConfigError, match=r"the variable KEY_B, .* --scoring.env KEY_A KEY_B\.$"):
        load_config("quickstart", [*flags, "--scoring.env=KEY_A"])
    config: Any = load_config("quickstart", [*flags, "--scoring.env", "KEY_A", "KEY_B"])
    assert config.scoring.env == ("KEY_A", "KEY_B")
