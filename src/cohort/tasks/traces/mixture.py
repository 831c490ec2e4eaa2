"""Which conversations, in which shares: an endless training set as a function of a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice

from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.countdown import Countdown
from cohort.tasks.traces import styles
from cohort.tasks.traces.encode import Example, encode
from cohort.tasks.traces.styles import Mix, Trace
from cohort.text import Tokenizer
from cohort.types import Row

ARITHMETIC, COUNTDOWN = 0.76, 0.14  # shares of the tasks; the rest calls the calculator
PAIRS, SPACED = 0.4, 0.1  # shares of sums of two terms, and of sums with spaces around their operators
NUM_PAIRS = 6_000  # there are not many more
NUMBERS = Countdown()


@dataclass(frozen=True, slots=True)
class Rows:
    """Problems of the `traces` split: disjoint from those of `train` and `test`."""

    pairs: list[Row]
    triples: list[Row]
    spaced: list[Row]
    long: list[Row]
    numbers: list[Row]


def load(num_rows: int, keep: tuple[int, int] = Arithmetic().keep) -> Rows:
    """The first `num_rows` sums of three terms, those of two, and an eighth as many of each other kind."""
    few = max(1, num_rows // 8)
    pairs = min(num_rows, NUM_PAIRS)
    return Rows(
        pairs=_first(Arithmetic(max_terms=2, train_size=pairs, keep=keep), pairs),
        triples=_first(Arithmetic(min_terms=3, train_size=num_rows, keep=keep), num_rows),
        spaced=_first(Arithmetic(train_size=few, spaces=True, keep=keep), few),
        long=_first(Arithmetic(train_size=few, max_digits=4, keep=keep), few),
        numbers=_first(Countdown(train_size=few), few),
    )


def trace(rows: Rows, seed: int | str, index: int, mix: Mix) -> Trace:
    """Trace `index` of the endless stream named by the seed."""
    rng = random.Random(f"{seed}/{index}")
    u = rng.random()
    if u < ARITHMETIC:
        row = rng.choice(_sums(rows, rng.random()))
        return styles.arithmetic(rng, row["question"], row["expression"], mix)
    if u < ARITHMETIC + COUNTDOWN:
        row = rng.choice(rows.numbers)
        return styles.countdown(rng, NUMBERS.prompt(row)[0]["content"], row["nums"], row["target"], mix)
    row = rng.choice(_sums(rows, rng.random()) if rng.random() < 0.5 else rows.long)
    return styles.calculator(rng, row["question"], row["expression"], mix)


def examples(rows: Rows, tokenizer: Tokenizer, seed: int | str, step: int, size: int, mix: Mix) -> list[Example]:
    """The `size` examples of a step, counted from 0: a pure function of seed and step."""
    return [encode(tokenizer, trace(rows, seed, step * size + i, mix)) for i in range(size)]


def _sums(rows: Rows, u: float) -> list[Row]:
    return rows.pairs if u < PAIRS else rows.spaced if u < PAIRS + SPACED else rows.triples


def _first(task: Arithmetic | Countdown, size: int) -> list[Row]:
    return list(islice(task.rows("traces"), size))
