"""The options of a chat, and how the command line reads them with a task."""

from __future__ import annotations

import pytest

from cohort.chat.options import ChatOptions
from cohort.cli.chat import run
from cohort.cli.tasks import read_task_flag
from cohort.errors import ConfigError


def read(*args):
    return read_task_flag("chat", ["M", "..."], "about", ChatOptions(), args)


def test_models_stand_before_and_after_flags():
    names, task, options = read("tiny", "--temperature", "0.3", "./other", "--plain", "runs/r@best")
    assert names == ["tiny", "./other", "runs/r@best"] and task is None
    assert options == ChatOptions(temperature=0.3, plain=True)


@pytest.mark.parametrize("words", [["--task", "countdown"], ["--task=countdown"]])
def test_a_task_has_settings(words):
    names, task, options = read("tiny", *words, "other", "--task.test-size", "7", "--split", "train")
    assert names == ["tiny", "other"]
    assert (type(task).__name__, task.test_size) == ("Countdown", 7)
    assert (options.task, options.split) == ("countdown", "train")


def test_a_task_of_the_users_own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import cohort\n\n@cohort.task('repeated')\nclass Echo:\n    word: str = 'a'\n"
        "    def rows(self, split): yield {'id': '1'}\n"
        "    def prompt(self, row): return [{'role': 'user', 'content': self.word}]\n"
        "    def score(self, row, answer): return {'correct': float(answer.text == self.word)}\n"
    )
    names, task, _ = read("tiny", "--task", "mine.py:repeated", "--task.word", "hi")
    assert names == ["tiny"] and task.word == "hi"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the argument M is missing"),
        (["tiny", "--task"], "--task takes one value"),
        (["tiny", "--task", "countdown", "--task", "gsm8k"], "--task is given twice"),
        (["tiny", "--split", "train"], "--split has no effect without --task"),
        (
            ["tiny", "--task", "countdown", "--validation-share", "0.2"],
            "--validation-share has no effect without --split validation",
        ),
        (["tiny", "--scoring.retries", "0"], "--scoring has no effect without --task"),
        (["tiny", "--task", "countdown", "--scoring.env", "NOT_SET_HERE"], "NOT_SET_HERE, which is not set"),
        (["tiny", "--temperature", "0", "--top-p", "0.5"], "--top-p has no effect"),
        (["tiny", "--task", "countdwn"], "unknown task"),
        (["--model", "tiny"], "models are named without a flag"),
        (["tiny", "--max-tokens", "-3"], "--max-tokens is -3"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(words, message):
    with pytest.raises(ConfigError, match=message):
        run(words)
