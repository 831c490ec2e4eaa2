"""Synthetic pairs about sums, for the bundled model: a worked and right answer is better than a wrong one."""

from __future__ import annotations

import random
from itertools import islice

from cohort.examples.rows import Pair, hash_question
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.traces import scratchpad
from cohort.tasks.traces.styles import make_slip, write_answer


def make_sum_pairs(split: str, num: int) -> list[Pair]:
    """Returns `num` pairs about sums of a split ("train" or "test"), always the same ones.

    The better answer works step by step and is right. Half of the worse ones do too, but write another number in the
    end; the others answer at once, and wrong.
    """
    task = Arithmetic(train_size=num, test_size=num)
    pairs = []
    for row in islice(task.rows(split), num):
        rng = random.Random(f"pairs/{row['id']}")
        steps, value = scratchpad.solve(row["expression"])
        work, slip = ", ".join(steps), str(make_slip(rng, value))
        prompt = [{"role": "user", "content": row["question"]}]
        pairs.append(
            Pair(
                prompt=prompt,
                chosen=write_answer(rng, "think", work, str(value)),
                rejected=write_answer(rng, rng.choice(("think", "direct")), work, slip),
                place=f"{split} sum {row['expression']}",
                key=hash_question(prompt),
            )
        )
    return pairs
