"""A task whose grader is wrong on purpose, in the way that its setting `fault` names."""

from __future__ import annotations

import os
import re
import time

from cohort.errors import TaskError
from cohort.tasks.base import task

last = [""]  # the answer before, for the fault "order"


@task("faulty")
class Faulty:
    """Sums of two numbers. The prompt also contains a word, which the fault "echo" takes for a right answer."""

    fault: str = ""

    parts = ("correct", "tags")

    def rows(self, split):
        base = 0 if split == "train" else 50
        for n in range(20):
            yield {"id": f"{split}-{n}", "a": n + base, "b": 2 * n + 1, "word": f"word{n + base}"}

    def prompt(self, row):
        return [{"role": "user", "content": f"What is {row['a']} + {row['b']}? {row['word']}"}]

    def gold(self, row):
        if self.fault == "no gold":
            raise TaskError("no right answer is known")
        return f"<answer>{row['a'] + row['b']}</answer>"

    def score(self, row, answer):
        text = answer.text
        right = f"<answer>{row['a'] + row['b']}</answer>"
        correct = float(right in text)
        tags = 0.0
        if self.fault == "constant":
            correct = 0.0
        elif self.fault == "key":
            correct = float(os.environ.get("A_KEY") == "secret")
        elif self.fault == "tokens":
            correct, tags = 0.0, float(sum(answer.tokens))
        elif self.fault == "crashing":
            correct = float(int(re.findall(r"\d+", text)[-1]) == row["a"] + row["b"])
        elif self.fault == "one wrong":
            correct *= row["id"] != "test-5"
        elif self.fault == "raising" or (self.fault == "raising on numbers" and re.search(r"\d", text)):
            raise ValueError("no")
        elif self.fault == "raising on samples" and answer.tokens:
            raise ValueError("a sample")
        elif self.fault == "slow to raise" and text:
            time.sleep(0.2)
            raise ValueError("no")
        elif self.fault == "slow":
            time.sleep(0.6)
        elif self.fault == "echo":
            correct = float(right in text or row["word"] in text)
        elif self.fault == "random":
            correct = float(right in text and os.urandom(1)[0] < 128)
        elif self.fault == "order":
            tags = float(last[0] == "empty")
            last[0] = text or "empty"
        elif self.fault == "skeleton":
            correct = float("<answer>" in text)
        elif self.fault == "paid tags":
            tags = 0.6 * ("<answer>" in text)
        elif self.fault == "empty":
            correct = float(not text or right in text)
        elif self.fault == "lenient":
            correct = float(bool(re.search(r"<answer>\d+</answer>", text)))
        elif self.fault == "counting":
            tags = 0.1 * text.count(right)
        elif self.fault == "wrong":
            correct = float(f"<answer>{row['a'] - row['b']}</answer>" in text)
        elif self.fault == "nan":
            tags = float("nan")
        return {"correct": correct, "tags": tags}
