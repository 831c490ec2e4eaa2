"""The commands that a finished run suggests: they work as printed, whatever the settings of the run look like."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from cohort.cli.eval import Options
from cohort.cli.tasks import read_tasks
from cohort.config.load import load_config
from cohort.jobs.rl import suggest_commands
from cohort.logs.escape import join_command

OWN_TASK = '''
import cohort

@cohort.task("odd-settings")
class Odd:
    """A task with settings of every type."""
    names: tuple[str, ...] = ("a",)
    pair: tuple[int, int] = (1, 2)
    on: bool = True
    text: str = ""
    rate: float = 0.5
    most: int | None = None

    def rows(self, split): yield {"id": split}
    def prompt(self, row): return [{"role": "user", "content": "x"}]
    def score(self, row, answer): return {"correct": 0.0}
'''


def read_as_shell(command: str) -> list[str]:
    """Returns the words that a shell makes of a line."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


CASES: dict[str, dict[str, Any]] = {
    "quickstart": {"scoring.env": ("KEY_A", "KEY_B")},
    "smollm2_arithmetic": {"eval.temperature": 0.123456789},
    "smollm2_gsm8k": {"task.data": "my rows {split}.jsonl", "task.columns": ("question=the Q", "answer=A")},
    "tiny_countdown": {"sampling.stop": ("\n", "--seed=7", "it's", "--", "-1"), "template": "text"},
    "own": {
        "task.names": ("--x", "y z", "-1"),
        "task.pair": (-3, 4),
        "task.on": False,
        "task.text": "--help\t\x1b[2J \\n 'q' \"",
        "task.rate": 1e-17,
        "task.most": 3,
    },
    "own empty": {"task.names": (), "system": "--be brief,\nor not"},
}


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "a file.py"
    path.write_text(OWN_TASK)
    return path


@pytest.mark.parametrize("case", CASES)
def test_the_printed_command_evaluates_as_the_run_did(case: str, tmp_path: Path, own_file: Path) -> None:
    own = {"task": f"{own_file}:odd-settings"} if case.startswith("own") else {}
    config: Any = load_config("quickstart" if own else case, given={**own, **CASES[case]})
    words = suggest_commands(config, tmp_path / "runs" / "my run", 3)[0]
    line = join_command(words)
    assert line.isprintable() and read_as_shell(line) == words
    assert words[:2] == ["cohort", "eval"]
    [task], options = read_tasks("eval", "", Options(), words[2:])
    assert task == config.task
    assert options.model == f"{tmp_path}/runs/my run@3"
    assert options.temperature == config.eval.temperature and options.template == config.template
    assert options.stop == config.sampling.stop and options.system == config.system
    assert options.scoring.env == config.scoring.env
    assert (options.max_tokens or task.max_tokens) == config.sampling.max_tokens
