"""A config that names somebody's own code, opened without running that code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cohort.config.document import diff_configs, dump_config, keep_recorded, parse_config, reuse_variants
from cohort.config.kinds import RL
from cohort.config.load import load_config
from cohort.errors import ConfigError
from cohort.run.directory import RunDirectory
from cohort.tasks.arithmetic import Arithmetic

CODE = """
import pathlib
import cohort

pathlib.Path(__file__).with_suffix(".ran").touch()

@cohort.task("kept_{tag}")
class Kept:
    words: tuple[str, ...] = ("a", "b")
    size: int = 3
    def rows(self, split): yield {{"id": split}}
    def prompt(self, row): return [{{"role": "user", "content": "x"}}]
    def score(self, row, answer): return {{"correct": 0.0}}

@cohort.algorithm("kept_loss_{tag}")
class KeptLoss(cohort.Policy):
    width: float = 0.5
    def policy_loss(self, tokens): return -tokens.ratio * tokens.advantages
"""


def write_code(folder: Path, tag: str) -> Path:
    """Writes a file with a task and an algorithm, which leaves a mark beside it when it is run."""
    file = folder / f"{tag}.py"
    file.write_text(CODE.format(tag=tag))
    return file


def make_text(file: Path) -> str:
    """Returns a config.yaml that names task and algorithm of the file, without running it in this process."""
    tag = file.stem
    text = dump_config(RL(task=Arithmetic()))
    head, _, rest = text.partition("task:\n")
    tail = rest[rest.index("reward:") :]
    text = f"{head}task:\n  name: {file}:kept_{tag}\n  words: [a, c]\n  size: 7\n{tail}"
    text = text.replace("  correct: 1.0\n  format: 1.0\n", "  correct: 1.0\n")
    before, _, after = text.partition("algo:\n  name: grpo\n")
    kept = "".join(line + "\n" for line in after.splitlines() if "clip" not in line)
    return f"{before}algo:\n  name: {file}:kept_loss_{tag}\n  width: 0.25\n{kept}"


def test_the_code_is_not_run_and_need_not_exist(tmp_path: Path) -> None:
    file = write_code(tmp_path, "one")
    (tmp_path / "config.yaml").write_text(make_text(file))
    config = RunDirectory.open(tmp_path).config
    assert isinstance(config, RL)
    assert (config.task.name, config.task.words, config.task.size) == ("kept_one", ["a", "c"], 7)
    assert config.algo.width == 0.25 and config.algo.kl.weight == 0 and config.algo.baseline == "mean"
    assert f"name: {file}:kept_one\n" in dump_config(config) and f"name: {file}:kept_loss_one\n" in dump_config(config)
    assert not file.with_suffix(".ran").exists()
    file.unlink()
    again = parse_config(dump_config(config), find=keep_recorded)
    assert diff_configs(config, again) == {}
    assert diff_configs(config, replace(again, seed=5)) == {"seed": (0, 5)}
    with pytest.raises(ConfigError, match="there is no file"):
        parse_config(make_text(file))


def test_a_moved_file_is_the_same_code_and_nothing_else_is_run(tmp_path: Path) -> None:
    """A checkpoint has the settings of its run as text. The code of the run itself stands for what they name."""
    old = write_code(tmp_path, "two")
    text = make_text(old)
    (tmp_path / "new").mkdir()
    new = old.rename(tmp_path / "new" / "two.py")
    config = parse_config(text.replace(str(old), str(new)))
    assert diff_configs(config, parse_config(text, find=reuse_variants(config))) == {}
    # Another name is not the same code, and its file is not run.
    other = write_code(tmp_path, "three")
    hostile = parse_config(make_text(other), find=reuse_variants(config))
    assert diff_configs(config, hostile)["algo"] == (f"{new}:kept_loss_two", f"{other}:kept_loss_three")
    assert not other.with_suffix(".ran").exists()


def test_settings_that_cannot_be_names_are_refused(tmp_path: Path) -> None:
    text = make_text(tmp_path / "four.py")
    for key in ("a b", "class", "__init__", "_recorded_name", "5"):
        with pytest.raises(ConfigError, match="which is no name"):
            parse_config(text.replace("  size: 7", f"  {key}: 7"), find=keep_recorded)


def test_a_flag_names_an_algorithm_in_a_file_from_the_folder_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_code(tmp_path, "five")
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart", ["--algo", "five.py:kept_loss_five", "--task", "five.py:kept_five"])
    assert f"name: {tmp_path}/five.py:kept_loss_five\n" in dump_config(config)
    with pytest.raises(ConfigError, match="--algo takes one value"):
        load_config("quickstart", ["--algo", "five.py:kept_loss_five", "more"])


def test_what_a_run_recorded_is_not_refused_because_a_flag_took_its_effect(tmp_path: Path) -> None:
    """The run was started with a flag that left a setting of its recipe without effect. Its config has no such flag."""
    (tmp_path / "clips.py").write_text(
        "import cohort\nfrom cohort.config.algos import GRPO\nfrom cohort.config.schema import LearnerConfig\n"
        "from cohort.tasks.arithmetic import Arithmetic\n\ndef clips():\n"
        "    return cohort.RL(task=Arithmetic(), algo=GRPO(clip_high=0.3), learner=LearnerConfig(minibatches=2))\n"
    )
    config = load_config(f"{tmp_path}/clips.py:clips", ["--learner.minibatches", "1"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file), ["--seed", "2"]) == replace(config, seed=2)
    with pytest.raises(ConfigError, match=r"--algo\.clip-high has no effect"):
        load_config(str(file), ["--algo.clip-high", "0.4"])
