"""The commands of docs/training.md run as they are printed, one after another in the same folder, with few steps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from cohort.run.directory import RunDirectory, load_evaluations
from tests.helpers.command_line import ROOT, cohort

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^cohort (.*)$", PAGE, re.MULTILINE)
# What makes a command short: nobody waits for a tested run to learn something.
SHORT = {
    "train quickstart": "--steps=1 --batch.prompts=4 --batch.samples=2 --eval.problems=4",
    "train tiny_countdown_sft": "--steps=2 --eval.problems=8 --eval.every=1",
}


def write_rows(folder: Path) -> None:
    """Writes the files that the page speaks of, with rows about sums."""
    rows: dict[str, list[object]] = {"talks.jsonl": [], "pairs.jsonl": [], "ratings.jsonl": []}
    for a in range(10, 22):
        for b in (13, 27, 31):
            question, right, wrong = f"What is {a}+{b}?", f"<answer>{a + b}</answer>", f"<answer>{a + b + 10}</answer>"
            rows["talks.jsonl"].append({"prompt": question, "completion": right})
            rows["pairs.jsonl"].append({"prompt": question, "chosen": right, "rejected": wrong})
            rows["ratings.jsonl"].append({"question": question, "answers": [right, wrong], "votes": [5, 1]})
    # The row that the page shows, and one without a better answer.
    [shown] = re.findall(r"^(\{\"question.*)$", PAGE, re.MULTILINE)
    assert json.loads(shown) == rows["ratings.jsonl"][0]
    rows["ratings.jsonl"].append({"question": "Which?", "answers": ["a", "b"], "votes": [2, 2]})
    for name, some in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    for name, source in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(source)


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_printed(tmp_path: Path) -> None:
    write_rows(tmp_path)
    words = [command.split()[0] for command in COMMANDS]
    assert words == ["train"] * 5 + ["eval", "data", "train", "train", "train", "check", "explain", "explain"]
    printed = {}
    for command in COMMANDS:
        short = next((flags for begin, flags in SHORT.items() if command.startswith(begin)), "")
        threads = "" if command.startswith(("data", "explain")) else "--threads=1"
        done = cohort(*shlex.split(f"{command} {short} {threads}"), at=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        printed[command.rpartition("--name ")[2].split()[0]] = done.stdout
    runs = tmp_path / "runs"
    # Each of the three first runs begins with the model of the one before.
    models = [RunDirectory.open(runs / name).config.model for name in ("imitate", "prefer", "practise")]
    assert models[0] == "tiny" and models[1].startswith(str(runs / "imitate@")), models
    assert models[2].startswith(str(runs / "prefer@"))
    assert load_evaluations(runs / "measured")[0].setting.task == "arithmetic"
    assert load_evaluations(runs / "solutions")[2].setting.task == "countdown"
    assert re.search(r"rows left out, because the function in --data.map returned None: 1 of 3\d \(", printed["rated"])
    for names in (("prefer@0", "prefer"), ("measured@0", "measured@best")):
        done = cohort("compare", *names, at=tmp_path)
        assert done.returncode == 0, done.stderr
