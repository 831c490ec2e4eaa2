"""Files and plugins of users: how they are imported, and how their exceptions are shown."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort import user_code
from cohort.cli.main import main
from cohort.config.algos import ALGOS, GRPO
from cohort.config.document import dump_config, keep_recorded, parse_config
from cohort.config.load import load_config
from cohort.errors import ConfigError, TaskError, UserCodeError
from cohort.recipes import RECIPES
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import TASKS, make_plain_answer
from cohort.tasks.ref import TaskRef
from cohort.user_code import load_file, report_errors, split_spec

PLUGIN = '''
import cohort

@cohort.task("plugged")
class Plugged:
    """A task of a package."""
    size: int = 4
    def rows(self, split):
        return [{"id": f"{split}-{n}", "n": n} for n in range(self.size)]
    def prompt(self, row):
        return [{"role": "user", "content": str(row["n"])}]
    def score(self, row, answer):
        return {"correct": float(answer.text == "right")}

@cohort.algorithm("plugged_loss")
class PluggedLoss(cohort.Policy):
    """A loss of a package."""
    width: float = 0.5
    def policy_loss(self, tokens):
        return -tokens.ratio * tokens.advantages * self.width

@cohort.recipe
def plugged_recipe():
    """A recipe of a package."""
    return cohort.RL(model="tiny", task=Plugged(), algo=PluggedLoss(width=0.25))
'''


def write_plugin(folder: Path, name: str, code: str) -> None:
    """Writes a package into a folder as pip installs it: a module, and the entry point that names it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "names.py").write_text(code)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[cohort.plugins]\n{name} = {name}.names\n")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the plugin, from which Python imports. What it registers is removed afterwards."""
    before = dict(TASKS), dict(ALGOS), dict(RECIPES)
    write_plugin(tmp_path, "plugged_package", PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(user_code, "_tried_plugins", {})
    importlib.invalidate_caches()
    yield tmp_path
    for table, names in zip((TASKS, ALGOS, RECIPES), before, strict=True):
        for name in set(table) - set(names):
            del table[name]
    for name in [n for n in sys.modules if n.startswith(("plugged_package", "broken_package"))]:
        del sys.modules[name]


def test_the_names_of_a_plugin_are_found_and_recorded_as_they_are(installed: Path) -> None:
    assert "plugged_package.names" not in sys.modules  # not before a name is asked for
    config = load_config("plugged_recipe", ["--task.size", "3"])
    assert config.recipe == "plugged_recipe"
    text = dump_config(config)
    assert "name: plugged\n" in text and "name: plugged_loss\n" in text
    assert parse_config(text) == config
    chosen = load_config("quickstart", ["--task", "plugged", "--algo", "plugged_loss", "--algo.width", "2"])
    assert chosen.task.size == 4 and chosen.algo.width == 2.0


def test_a_plugin_that_is_not_loaded_is_kept_as_recorded(installed: Path) -> None:
    text = dump_config(load_config("plugged_recipe"))
    for table, name in ((TASKS, "plugged"), (ALGOS, "plugged_loss")):
        del table[name]
    kept = parse_config(text, find=keep_recorded)
    assert kept.task.size == 4 and kept.algo.width == 0.25
    assert dump_config(kept) == text


def test_a_scoring_worker_finds_the_task_of_a_plugin(installed: Path) -> None:
    task = load_config("plugged_recipe").task
    ref = TaskRef.from_task(task)
    assert ref.path == ""
    with ScoringPool(ref) as pool:
        [right, wrong] = pool.score([({"id": "a"}, make_plain_answer(text)) for text in ("right", "no")])
    assert right.parts == {"correct": 1.0} and wrong.parts == {"correct": 0.0}


def test_a_plugin_that_cannot_be_imported_is_named_and_harms_no_other(
    installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_plugin(installed, "broken_package", "import cohort\nlost = undefined_name\n")
    importlib.invalidate_caches()
    assert load_config("plugged_recipe").task.size == 4
    assert "the plugin broken_package (broken_package.names) raised NameError" in caplog.text
    with pytest.raises(ConfigError, match=r'unknown task "lost"\..*the plugin broken_package .* raised NameError'):
        load_config("quickstart", ["--task", "lost"])
    caplog.clear()
    user_code.load_plugins()
    assert caplog.text == ""  # told once


def test_a_spec_without_a_name_is_refused() -> None:
    assert split_spec("countdown") is None
    with pytest.raises(ConfigError, match=r"write a/b.py:NAME"):
        split_spec("a/b.py")


def test_an_exception_is_shown_at_the_line_of_the_user_not_of_a_library(tmp_path: Path) -> None:
    file = tmp_path / "own_reader.py"
    file.write_text("import json\n\ndef read():\n    return json.loads('{')\n\ndef needs(argument):\n    pass\n")
    module = load_file(file)
    with pytest.raises(UserCodeError) as caught, report_errors("the function read", module.read):
        module.read()
    assert str(caught.value).startswith("the function read raised JSONDecodeError: Expecting property name")
    assert caught.value.place == (f"  {file}, line 4, in read", "    return json.loads('{')")
    # A call with wrong arguments does not get into the function: its definition is shown.
    with pytest.raises(UserCodeError, match=r"the recipe .*:needs raised TypeError: .*argument") as caught:
        load_config(f"{file}:needs")
    assert caught.value.place == (f"  {file}, line 6", "    def needs(argument):")


@pytest.mark.parametrize(
    ("code", "message", "lines"),
    [
        ("x = 1\ny = x / 0\n", "raised ZeroDivisionError: division by zero. Correct it here:", ", line 2, in <module>"),
        ("import sys\nsys.exit(3)\n", "raised SystemExit: 3. Correct it here:", ", line 2, in <module>"),
        ("def f(:\n", "line 1 is not valid Python", "def f(:"),
        ("import not_a_module_of_anyone\n", "raised ModuleNotFoundError: No module named", ", line 1, in <module>"),
    ],
)
def test_a_file_that_cannot_be_run_says_where(tmp_path: Path, code: str, message: str, lines: str) -> None:
    file = tmp_path / "broken_file.py"
    file.write_text(code)
    with pytest.raises(UserCodeError) as caught:
        load_file(file)
    assert message in caught.value.args[0] and lines in caught.value.place[0]
    assert str(caught.value).count("\n") <= 2
    assert not [m for m in sys.modules.values() if getattr(m, "__file__", None) == str(file)]


def test_errors_of_cohort_itself_pass_through() -> None:
    with pytest.raises(TaskError), report_errors("anything"):
        raise TaskError("it says what to do")
    # A bug of Cohort keeps its traceback: it is not the user's.
    with pytest.raises(ZeroDivisionError), report_errors("a built-in algorithm", GRPO):
        raise ZeroDivisionError
    with pytest.raises(MemoryError), report_errors("anything", passing=(MemoryError,)):
        raise MemoryError
    with pytest.raises(KeyboardInterrupt), report_errors("anything"):
        raise KeyboardInterrupt


def test_a_file_whose_name_is_not_utf8_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"own\xff.py")
    file.write_text("value = 3")
    assert load_file(file).value == 3


LEAKS = """
import base64, os, cohort

KEY = os.environ["OWN_KEY"]

@cohort.task("leaks")
class Leaks:
    def rows(self, split):
        yield {"id": split}

    def prompt(self, row):
        return "a"

    def score(self, row, answer):
        return 1.0
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@cohort", "raise ValueError('no access with ' + base64.b64encode(KEY.encode()).decode())\n@cohort"),
        ('yield {"id": split}', "raise ValueError('.' * 290 + KEY)"),
        ('return "a"', "raise KeyError(KEY)"),
        ('return "a"', "return {KEY: 1}"),
    ],
)
def test_keys_in_what_a_file_raises_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    monkeypatch.setattr("cohort.system.secrets._hidden", [])
    monkeypatch.setenv("OWN_KEY", "sk-0123456789-own")
    monkeypatch.chdir(tmp_path)
    assert old in LEAKS
    # A name of its own: what was registered stays.
    name = f"leaks-{abs(hash((old, new)))}"
    (tmp_path / "leaks.py").write_text(LEAKS.replace(old, new).replace('"leaks"', f'"{name}"'))
    assert (
        main(["train", "quickstart", "--task", f"leaks.py:{name}", "--scoring.env", "OWN_KEY", "--batch.prompts=1"])
        == 2
    )
    said = capsys.readouterr().err
    assert "[OWN_KEY]" in said, said
    everything = said + "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.md"))
    assert "sk-01234" not in everything and "c2stMDEyMzQ1" not in everything
