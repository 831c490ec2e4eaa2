"""Small runs of SFT and DPO on rows of a file: the rows, and the settings of the runs."""

from __future__ import annotations

import json
from pathlib import Path

FLAGS = ["--model=tiny", "--save.every=2", "--optim.warmup=1", "--optim.lr=1e-4", "--threads=1", "--data.held-out=0.2"]


def write_rows(folder: Path) -> None:
    """Writes conversations and pairs about sums into a folder."""
    talks, pairs = [], []
    for a in range(10, 22):
        for b in (13, 27, 31):
            question, right = f"What is {a}+{b}?", f"<answer>{a + b}</answer>"
            talks.append({"prompt": question, "completion": right})
            pairs.append({"prompt": question, "chosen": right, "rejected": f"<answer>{a + b + 10}</answer>"})
    for name, rows in (("talks.jsonl", talks), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


MAP = """
import cohort

def talk(row):
    return cohort.Conversation(messages=[
        {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}
    ])

def pair(row):
    return cohort.Preference(prompt=row["prompt"], chosen=row["chosen"], rejected=row["rejected"])
"""
TASK = ["--task=arithmetic", "--eval.problems=8", "--eval.samples=2", "--sampling.max-tokens=24"]


class Case:
    """A recipe with its flags, whose data are in a folder of their own: a run records their absolute path.

    The cases with a task measure its accuracy, and read their rows through a function of the user.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.recipe = name.partition(" ")[0]
        file, size = (
            ("talks.jsonl", "--batch.examples=5") if self.recipe == "sft" else ("pairs.jsonl", "--batch.pairs=5")
        )
        # 36 rows, of which about a fifth is held out: six steps.
        self.flags = [*FLAGS, size, f"--data.path={folder / file}", "--eval.every=3"]
        if self.has_task:
            (folder / "maps.py").write_text(MAP)
            self.flags += [*TASK, f"--data.map={folder / 'maps.py'}:{'talk' if self.recipe == 'sft' else 'pair'}"]

    @property
    def has_task(self) -> bool:
        return self.name.endswith("task")
