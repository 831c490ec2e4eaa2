"""The page about rewards: its programs and commands run as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command_line import ENV, cohort
from tests.helpers.fake_server import serving
from tests.helpers.judge_server import grades

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
# Commands may go on after a backslash at the end of a line.
COMMANDS = re.findall(r"^cohort ([^#\n]*)", PAGE.replace("\\\n", " "), re.MULTILINE)


def write_programs(folder: Path) -> None:
    for name, text in PROGRAMS.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def get_command(*words: str) -> list[str]:
    """Returns the words of the only command of the page that has all of these."""
    [found] = [command for command in COMMANDS if all(word in command for word in words)]
    return shlex.split(found)


def test_every_program_is_short() -> None:
    assert list(PROGRAMS) == ["rewards", "essay", "haiku", "my_code"]
    assert all(len(text.splitlines()) <= 30 for text in PROGRAMS.values())


def test_functions_of_other_tools_and_rows_of_a_file(tmp_path: Path) -> None:
    write_programs(tmp_path)
    [line] = re.findall(r"^printf .*$", PAGE, re.MULTILINE)
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    assert len((tmp_path / "questions.jsonl").read_text().splitlines()) == 4
    done = cohort(*get_command("--task rows", "--task.rewards"), at=tmp_path)
    assert done.returncode == 0 and "step 3/3" in done.stdout, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    shown = cohort("explain", run.name, "--step", 1, at=tmp_path)
    assert "brief" in shown.stdout and "compute_score" in shown.stdout, shown.stdout


def test_data_without_a_test_set(tmp_path: Path) -> None:
    write_programs(tmp_path)
    done = cohort(*get_command("haiku.py"), at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no test rows: nothing is evaluated") == 1


def test_programs_as_answers(tmp_path: Path) -> None:
    write_programs(tmp_path)
    subprocess.run([sys.executable, "my_code.py"], cwd=tmp_path, check=True)
    done = cohort(*get_command("--task code"), at=tmp_path)
    assert done.returncode == 0 and "held-out accuracy" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_judge_with_a_key(command: str, tmp_path: Path) -> None:
    write_programs(tmp_path)
    words = get_command(f"{command} quickstart", "essay.py")
    with serving() as server:
        server.behaviours = [grades()]
        text = (tmp_path / "essay.py").read_text().replace("http://127.0.0.1:8000/v1", server.url)
        (tmp_path / "essay.py").write_text(text)
        env = {**ENV, "JUDGE_KEY": "a-secret-key-of-mine", "COHORT_CACHE": str(tmp_path / "cache")}
        done = cohort(*words, at=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("judge/injections" in done.stdout) == (command == "check")
    assert "a-secret-key-of-mine" not in done.stdout + done.stderr
    if command == "train":
        [run] = (tmp_path / "runs").iterdir()
        assert (run / "outcomes.jsonl").read_text().count("\n") > 2
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(b"a-secret-key-of-mine" in path.read_bytes() for path in files)
