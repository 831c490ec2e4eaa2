"""Several tasks in one run, one of them with a tool: trained, killed, resumed, evaluated and explained."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

from cohort.run.store.reader import Reader
from cohort.scoring.start import start_scorer
from cohort.tasks.base import load_rows, make_plain_answer
from cohort.tasks.calls import get_gold
from cohort.tasks.mix import Mix
from tests.helpers.command_line import cohort, differences, next_args, only_run, prompts_are_accounted_for, remains
from tests.helpers.struck_command import Strike

SETTINGS = [
    *shlex.split(
        "--steps=4 --batch.prompts=6 --batch.samples=4 --sampling.max-tokens=24 --eval.problems=8 --eval.every=2"
        " --save.every=2 --threads=1 --turns.max-turns=2 --task.shares 1 2 --task.tasks"
    ),
    'arithmetic{"train_size": 6, "test_size": 12}',
    'calculator{"train_size": 24, "test_size": 12}',
]


def test_a_mixture_that_is_killed_and_resumed_ends_the_same(tmp_path: Path) -> None:
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    whole.mkdir()
    struck.mkdir()
    done = cohort(*next_args(whole, SETTINGS, "tiny_mix"), at=whole)
    assert done.returncode == 0, done.stderr
    assert re.search(r"held-out accuracy .* at step 4, 8 problems: arithmetic \d\.\d+, calculator \d", done.stdout)
    assert re.search(r"step 4/4  reward .*  arithmetic \S+  calculator \S+  .* tok/s", done.stdout)
    original = only_run(whole)
    assert original is not None
    for place, call in (("update", 2), ("scoring", 3)):
        kill = Strike(signal.SIGKILL, place, call, 2)
        ended = cohort(*next_args(struck, SETTINGS, "tiny_mix"), at=struck, orders=[kill])
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = cohort(*next_args(struck, SETTINGS, "tiny_mix"), at=struck)
    assert resumed.returncode == 0, resumed.stderr
    run = only_run(struck)
    assert run is not None and differences(remains(run), remains(original)) == []
    assert prompts_are_accounted_for(run)
    # Every step has the shares of 1 and 2. The smaller set of rows is visited again, the larger one is not through.
    with Reader(original / "run.db") as reader:
        metrics = {(row.step, row.name): row.value for row in reader.read_metrics()}
    for step in range(1, 5):
        assert [metrics[step, f"samples/of/{label}"] for label in ("arithmetic", "calculator")] == [8.0, 16.0]
        assert 0 <= metrics[step, "groups/dead/calculator"] <= 1 and metrics[step, "length/mean/arithmetic"] > 0
        parts = [metrics[step, f"reward/{name}/arithmetic"] for name in ("mean", "correct")]
        assert parts[0] == parts[1], "the format has the coefficient 0"
    evaluation = json.loads((original / "eval" / "step-000004.json").read_text())
    assert [evaluation["summary"][f"problems/{label}"] for label in ("arithmetic", "calculator")] == [4.0, 4.0]
    assert metrics[4, "eval/accuracy/calculator"] == evaluation["summary"]["accuracy/calculator"]
    asked = [item["id"].partition("/")[0] for item in evaluation["items"]]
    assert asked == ["arithmetic", "calculator"] * 4
    tools = [bool(item["tools"]) for item in evaluation["items"]]
    assert tools == [False, True] * 4, "only the prompts of the calculator offer the tool"
    _look_at_the_run(original, whole, evaluation)


def _look_at_the_run(run: Path, at: Path, evaluation: dict) -> None:
    """Commands around a run know a mixture."""
    shown = cohort("explain", run, at=at)
    assert shown.returncode == 0, shown.stderr
    assert "mean reward: arithmetic" in shown.stdout and "calculator/" in shown.stdout
    card = (run / "run.md").read_text(encoding="utf-8")
    assert "task `mix (arithmetic, calculator)`" in card and "| step | arithmetic | calculator |" in card
    flags = [
        *SETTINGS[SETTINGS.index("--task.shares") :],
        "--limit=8",
        "--max-tokens=24",
        "--max-turns=2",
        "--threads=1",
    ]
    done = cohort("eval", "mix", "--model", f"{run}@4", *flags, "--out=mix.json", at=at)
    assert done.returncode == 0, done.stderr
    assert "accuracy/calculator" in done.stdout and "problems/arithmetic" in done.stdout
    written = json.loads((at / "mix.json").read_text())
    assert written["setting"]["rows"] == evaluation["setting"]["rows"]
    assert written["setting"]["grader"] == evaluation["setting"]["grader"]
    wrong = cohort("train", "tiny_mix", "--task.tasks", "arithmetic", "countdowns", at=at)
    assert wrong.returncode == 2 and 'Did you mean "countdown"' in wrong.stderr and wrong.stderr.count("\n") == 1


OWN = """
import asyncio
import cohort

@cohort.task("mix-judged")
class Judged:
    accuracy = None

    def rows(self, split):
        yield {"id": "0"}

    def prompt(self, row):
        return "write"

    async def score(self, row, answer):
        await asyncio.sleep(0.01)
        return len(answer.text) / 10


@cohort.task("mix-grouped")
class Grouped(Judged):
    parts = ("rank",)
    score = None

    async def score_group(self, row, answers):
        await asyncio.sleep(0.01)
        return [sorted(a.text for a in answers).index(a.text) for a in answers]
"""


def test_graders_that_wait_groups_and_plain_graders_score_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    names = [f"{tmp_path}/own.py:mix-judged", "arithmetic", f"{tmp_path}/own.py:mix-grouped"]
    answers = [make_plain_answer(text) for text in ("b", "cc", "a")]
    mix: Any = Mix(tasks=tuple(names[:2]))
    assert (mix.service, mix.parts, mix.accuracy) == (True, ("score", "correct", "format"), None)
    rows = load_rows(mix, "test", limit=2)
    with start_scorer(mix) as scorer:
        outcomes = scorer.score([(rows[0], answers[1]), (rows[1], make_plain_answer(get_gold(mix, rows[1]) or ""))])
        assert [outcome.parts for outcome in outcomes] == [{"score": 0.2}, {"correct": 1.0, "format": 1.0}]
    mix = Mix(tasks=tuple(names))
    rows = load_rows(mix, "test", limit=3)
    with start_scorer(mix) as scorer:
        for row in rows:
            scorer.submit_group(row["id"], row, answers)
        outcomes_by_id: dict[str, Any] = {}
        while scorer.num_pending:
            outcomes_by_id.update(scorer.poll(timeout=1.0))
    parts = [[outcomes_by_id[f"{row['id']}/{number}"].parts for number in range(3)] for row in rows]
    assert parts[0] == [{"score": 0.1}, {"score": 0.2}, {"score": 0.1}]
    assert parts[1] == [{"correct": 0.0, "format": 0.0}] * 3
    assert parts[2] == [{"rank": 1.0}, {"rank": 2.0}, {"rank": 0.0}]


def test_rows_of_a_file_train_and_are_evaluated_beside_another_task(tmp_path: Path) -> None:
    (tmp_path / "fs.py").write_text("def brief(row, answer):\n    return -len(answer.text) / 100\n")
    for split in ("train", "test"):
        lines = [json.dumps({"prompt": f"{n}+{n}=? ({split})"}) for n in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"data": f"{tmp_path}/{{split}}.jsonl", "rewards": [f"{tmp_path}/fs.py:brief"]}
    tasks = ["--task.tasks", "arithmetic", "rows" + json.dumps(settings), "--threads=1"]
    small = ["--batch.prompts=4", "--batch.samples=2", "--sampling.max-tokens=8", "--eval.problems=8", "--steps=1"]
    done = cohort("train", "quickstart", "--task=mix", *tasks, *small, at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"held-out reward \S+ \(.*\) at step 1, 8 problems: arithmetic accuracy \d\S+, rows reward -0", done.stdout
    )
    done = cohort("eval", "mix", *tasks, "--limit=8", "--max-tokens=8", at=tmp_path)
    assert done.returncode == 0 and re.search(r"reward/rows +-0\.", done.stdout), done.stdout + done.stderr
