"""The mixture of conversations: an endless training set that a seed decides."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice

from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.countdown import Countdown
from cohort.tasks.traces import styles
from cohort.tasks.traces.encode import Example, encode_trace
from cohort.tasks.traces.styles import Mix, Trace
from cohort.text import Tokenizer
from cohort.types import Row

# Shares of the tasks in all conversations. The remaining ones are calculator conversations.
ARITHMETIC_SHARE, COUNTDOWN_SHARE = 0.76, 0.14
# Shares in the sums: of those with two terms, and of those with spaces around some operators.
PAIRS_SHARE, SPACED_SHARE = 0.4, 0.1
NUM_PAIRS = 6_000  # sums of two terms; the settings allow not many more
COUNTDOWN_TASK = Countdown()


@dataclass(frozen=True, slots=True)
class TraceRows:
    """Problems of the split `traces`, by kind. None of them is in `train` or `test`."""

    pairs: list[Row]  # sums of two terms
    triples: list[Row]  # sums of three terms
    spaced: list[Row]  # sums with spaces around some operators
    long: list[Row]  # sums of numbers with up to four digits
    numbers: list[Row]  # Countdown


def load_trace_rows(num_rows: int, keep: tuple[int, int] = Arithmetic().keep) -> TraceRows:
    """Returns problems of the split traces, by kind.

    The number of three-term sums is `num_rows`, that of two-term sums the smaller of `num_rows` and NUM_PAIRS. Of each
    other kind there are num_rows / 8, but at least 1. `keep` are the smallest and largest absolute values of sums, as
    in `Arithmetic`; (0, 0) = all. Raises TaskError if there are not enough problems.
    """
    few = max(1, num_rows // 8)
    pairs = min(num_rows, NUM_PAIRS)
    return TraceRows(
        pairs=_take_first(Arithmetic(max_terms=2, train_size=pairs, keep=keep), pairs),
        triples=_take_first(Arithmetic(min_terms=3, train_size=num_rows, keep=keep), num_rows),
        spaced=_take_first(Arithmetic(train_size=few, spaces=True, keep=keep), few),
        long=_take_first(Arithmetic(train_size=few, max_digits=4, keep=keep), few),
        numbers=_take_first(Countdown(train_size=few), few),
    )


def make_trace(rows: TraceRows, seed: int | str, index: int, mix: Mix) -> Trace:
    """Returns trace number `index`, a conversation to imitate. It depends only on the arguments.

    The kind of problem is drawn by fixed shares and the style of the answer by the shares in `mix`.
    """
    rng = random.Random(f"{seed}/{index}")
    u = rng.random()
    if u < ARITHMETIC_SHARE:
        row = rng.choice(_pick_sums(rows, rng.random()))
        return styles.make_arithmetic_trace(rng, row["question"], row["expression"], mix)
    if u < ARITHMETIC_SHARE + COUNTDOWN_SHARE:
        row = rng.choice(rows.numbers)
        return styles.make_countdown_trace(
            rng, COUNTDOWN_TASK.prompt(row)[0]["content"], row["nums"], row["target"], mix
        )
    row = rng.choice(_pick_sums(rows, rng.random()) if rng.random() < 0.5 else rows.long)
    return styles.make_calculator_trace(rng, row["question"], row["expression"], mix)


def make_examples(
    rows: TraceRows, tokenizer: Tokenizer, seed: int | str, step: int, size: int, mix: Mix
) -> list[Example]:
    """Returns the `size` examples, as tokens with provenance, of training step number `step`, counted from 0.

    They depend only on the arguments.
    """
    return [encode_trace(tokenizer, make_trace(rows, seed, step * size + i, mix)) for i in range(size)]


def _pick_sums(rows: TraceRows, u: float) -> list[Row]:
    """Returns the two-term, spaced or three-term sums: which of them, a uniform random number `u` in [0, 1) chooses."""
    return rows.pairs if u < PAIRS_SHARE else rows.spaced if u < PAIRS_SHARE + SPACED_SHARE else rows.triples


def _take_first(task: Arithmetic | Countdown, size: int) -> list[Row]:
    """Returns the first `size` rows of the task's split `traces`, or all if its `train_size` is smaller."""
    return list(islice(task.rows("traces"), size))
