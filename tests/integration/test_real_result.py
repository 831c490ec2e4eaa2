"""benchmarks/real_result.py, which makes docs/results.md, with the bundled model.

It trains for a given time, saves, and compares the model before and after.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_result_from_beginning_to_end(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "real_result.py"), "quickstart", "arithmetic"]
    options = ["--out", str(tmp_path), "--minutes", "0.001", "--samples", "2"]
    options += ["--eval-flags", "--limit 8 --max-tokens 16"]
    small = ["--batch.prompts", "2", "--batch.samples", "2", "--sampling.max-tokens", "16", "--eval.problems", "2"]
    done = subprocess.run([*script, "--model", "tiny", *options, *small], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]

    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    steps = result["training"]["steps"]
    assert 1 <= steps < 20, "the time limit ends it long before the recipe's last step"
    assert set(result["before"]) == set(result["after"]) == {"first", "sampled"}
    assert result["before"]["first"]["setting"]["num_problems"] == 8
    assert result["before"]["first"]["setting"]["weights"] != result["after"]["first"]["setting"]["weights"]
    assert result["difference-sampled"].keys() >= {"mean", "low", "high", "p", "wins", "losses"}

    assert done.stdout.splitlines()[-1].startswith("quickstart: 0.") and f"{steps} steps" in done.stdout

    with (tmp_path / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(steps + 1))
    assert rows[0]["eval/accuracy"] and not rows[0]["reward/mean"]
    assert all(row["reward/mean"] and float(row["time/step"]) > 0 for row in rows[1:])
    assert (tmp_path / "stretches.md").read_text(encoding="utf-8").splitlines()[2].startswith(f"| 1-{steps} |")
    assert "<svg" in (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert (tmp_path / "config.yaml").is_file()


def load_script() -> ModuleType:
    """Returns the script as a module."""
    spec = importlib.util.spec_from_file_location("real_result", ROOT / "benchmarks" / "real_result.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_conversations_that_called_a_tool_are_written_down(tmp_path: Path) -> None:
    def write(name: str, *answers: dict[str, object]) -> Path:
        """Writes an evaluation with an answer per problem."""
        items = [
            {"messages": [{"role": "user", "content": f"Sum {n}?"}], "answers": [a]} for n, a in enumerate(answers)
        ]
        (tmp_path / name).write_text(json.dumps({"items": items}))
        return tmp_path / name

    guess = {"text": "7", "correct": 0.0, "reason": "wrong value", "calls": {}, "messages": []}
    talk = [{"role": "assistant", "content": "CALL"}, {"role": "tool", "content": "8"}]
    called = {"text": "8", "correct": 1.0, "reason": "", "calls": {"ok": 1}, "messages": talk}
    out = tmp_path / "out.md"
    load_script().write_conversations(write("a", guess, guess), write("b", guess, called), out, 3)
    text = out.read_text()
    assert "Sum 0?" not in text and text.startswith("## Sum 1?\n")
    assert "Before: wrong value\n\n```\n[assistant] 7\n```" in text
    assert "After: right\n\n```\n[assistant] CALL\n[tool] 8\n```" in text
    load_script().write_conversations(tmp_path / "a", tmp_path / "a", out, 3)
    assert out.read_text() == "No tool was called after training.\n"


def test_mean_table_leaves_no_step_out(tmp_path: Path) -> None:
    module = load_script()
    for steps in (3, 10, 15, 20, 21, 47):
        rows = [
            ",".join(module.COLUMNS),
            *(",".join([str(i), *["1"] * (len(module.COLUMNS) - 1)]) for i in range(1, steps + 1)),
        ]
        (tmp_path / "a.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        module.write_mean_table(tmp_path / "a.csv", tmp_path / "a.md")
        lines = (tmp_path / "a.md").read_text(encoding="utf-8").splitlines()[2:]
        ends = [line.split("|")[1].strip().split("-") for line in lines]
        covered = [step for first, last in ends for step in range(int(first), int(last) + 1)]
        assert covered == list(range(1, steps + 1)), steps
