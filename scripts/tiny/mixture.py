"""Which traces, in which shares: the training set of the bundled model as a function of a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice

from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import Task
from cohort.tasks.countdown import Countdown
from cohort.types import Row
from scripts.tiny import traces
from scripts.tiny.traces import Mix, Trace

ARITHMETIC, COUNTDOWN = 0.76, 0.14  # shares of the tasks; the rest calls the calculator
SPACED = 0.1  # of the sums have spaces around their operators
NUMBERS = Countdown()


@dataclass(frozen=True, slots=True)
class Rows:
    """Problems of the `traces` split: disjoint from those of `train` and `test`."""

    sums: list[Row]
    spaced: list[Row]
    long: list[Row]
    numbers: list[Row]


def load(num_rows: int) -> Rows:
    """The first `num_rows` sums, and an eighth as many of each other kind."""
    few = max(1, num_rows // 8)
    return Rows(
        sums=_first(Arithmetic(train_size=num_rows), num_rows),
        spaced=_first(Arithmetic(train_size=few, spaces=True), few),
        long=_first(Arithmetic(train_size=few, max_digits=4), few),
        numbers=_first(Countdown(train_size=few), few),
    )


def trace(rows: Rows, seed: int | str, index: int, mix: Mix) -> Trace:
    """Trace `index` of the endless stream named by the seed."""
    rng = random.Random(f"{seed}/{index}")
    u = rng.random()
    if u < ARITHMETIC:
        row = rng.choice(rows.sums if rng.random() >= SPACED else rows.spaced)
        return traces.arithmetic(rng, row["question"], row["expression"], mix)
    if u < ARITHMETIC + COUNTDOWN:
        row = rng.choice(rows.numbers)
        return traces.countdown(rng, NUMBERS.prompt(row)[0]["content"], row["nums"], row["target"], mix)
    row = rng.choice(rows.sums if rng.random() < 0.5 else rows.long)
    return traces.calculator(rng, row["question"], row["expression"], mix)


def _first(task: Task, size: int) -> list[Row]:
    return list(islice(task.rows("traces"), size))
