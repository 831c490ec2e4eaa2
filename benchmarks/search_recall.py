r"""How often the search of the task search_qa finds the passage that answers a question, and how quick it is.

    COHORT_DATA=FOLDER python benchmarks/search_recall.py [--json] [--limit 500] [--weights 0.3 0.2]
    COHORT_DATA=FOLDER python benchmarks/search_recall.py --match words dense both --alone [--dense-weight 1.25]

Every question is a query. For SQuAD, whose questions name their passage, recall@k is the share of questions whose
passage is among the first k. For both sets, answer@k is the share of questions of which an accepted answer is in the
first k passages, compared as the grader compares; questions with the answer yes or no are left out of all columns.
The table has one line per set of questions, split, collection of passages (those of the set alone, and all of both) and
value of the task's setting `match`. Indexes and vectors are made in an empty folder, so that their time is measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import get_args

import numpy

from cohort.tasks.base import load_rows
from cohort.tasks.search import index as search_index
from cohort.tasks.search.dense import index as dense_index
from cohort.tasks.search.grading import normalise
from cohort.tasks.search.index import Passage
from cohort.tasks.search.task import Match, SearchQA
from cohort.types import Row

DEPTHS = (1, 3, 10)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table. Shares are by depth; `recall` is empty for questions that do not name their passage."""

    questions: str
    split: str
    passages: str
    match: str
    num_questions: int
    recall: dict[int, float]
    answer: dict[int, float]
    milliseconds: float  # per search of the deepest depth


def has_answer(passages: Sequence[Passage], answers: Sequence[str]) -> bool:
    """Returns whether the words of an accepted answer follow each other in the title or text of a passage."""
    texts = [f" {normalise(f'{passage.title} . {passage.text}')} " for passage in passages]
    return any(f" {normalise(answer)} " in text for answer in answers for text in texts)


def measure(task: SearchQA, collection: str, split: str, limit: int) -> Line:
    """Returns the line for a split of the task's questions and the passages of the corpus `collection`."""
    rows = [row for row in load_rows(task, split) if not {"yes", "no"} & {a.lower() for a in row["answers"]}]
    rows = rows[: limit or None]
    index = replace(task, corpus=collection).open_index()
    # A first query loads the sentence model.
    index.search("warm up", 1)
    start = time.perf_counter()
    found = [index.search(row["question"], max(DEPTHS)) for row in rows]
    seconds = time.perf_counter() - start

    def share(depth: int, is_passage: bool) -> float:
        """Returns the share of questions whose passage, or answer, is among the first `depth` results."""
        hits = (count_hit(row, passages[:depth], is_passage) for row, passages in zip(rows, found, strict=True))
        return sum(hits) / len(rows)

    names_passage = all("passage_id" in row for row in rows)
    return Line(
        questions=task.corpus,
        split=split,
        passages=f"{collection}, {len(index)}",
        match=task.match,
        num_questions=len(rows),
        recall={depth: share(depth, True) for depth in DEPTHS} if names_passage else {},
        answer={depth: share(depth, False) for depth in DEPTHS},
        milliseconds=1000 * seconds / len(rows),
    )


def count_hit(row: Row, passages: Sequence[Passage], is_passage: bool) -> bool:
    """Returns whether the passages have the one that the question names, or else an accepted answer."""
    if is_passage:
        return any(passage.id == row["passage_id"] for passage in passages)
    return has_answer(passages, row["answers"])


def format_table(lines: Sequence[Line]) -> str:
    """Returns the lines as a table in Markdown."""
    heads = [f"{name}@{depth}" for name in ("recall", "answer") for depth in DEPTHS]
    table = [
        f"| set | split | passages | match | number | {' | '.join(heads)} | ms |",
        "|---|---|---|---|---:|" + "---:|" * (len(heads) + 1),
    ]
    for line in lines:
        shares = [*(line.recall.get(depth) for depth in DEPTHS), *line.answer.values()]
        cells = [f"{share:.3f}" if share is not None else "" for share in shares]
        head = f"| {line.questions} | {line.split} | {line.passages} | {line.match} | {line.num_questions} "
        table.append(f"{head}| {' | '.join(cells)} | {line.milliseconds:.1f} |")
    return "\n".join(table)


def main() -> None:
    """Reads the arguments, measures, and prints the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--limit", type=int, default=0, help="questions per line; 0 = all")
    parser.add_argument(
        *("--weights", "-w"),
        type=float,
        nargs=2,
        default=(search_index.SENTENCE_WEIGHT, search_index.PAIR_WEIGHT),
        help="what the best sentence and pairs of words count; 0 0 = words alone",
    )
    parser.add_argument("--match", nargs="+", choices=get_args(Match), default=["words"], help="what is compared")
    parser.add_argument("--embedder", default="", help="folder of a sentence model; all-MiniLM-L6-v2 if it is left out")
    parser.add_argument("--dense-weight", type=float, help="what vectors count beside words")
    parser.add_argument("--alone", action="store_true", help="only search the passages of the questions' own set")
    options = parser.parse_args()
    search_index.SENTENCE_WEIGHT, search_index.PAIR_WEIGHT = options.weights
    if options.dense_weight is not None:
        dense_index.WEIGHT = options.dense_weight
    # Shows how the vectors get on.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COHORT_CACHE"] = folder
        seconds, lines = run(options)
    versions = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, NumPy {numpy.__version__}"
    if options.json:
        about = {"versions": versions, "seconds": seconds}
        print(json.dumps(about | {"lines": [asdict(line) for line in lines]}, indent=1))
    else:
        made = "\n".join(
            f"{what} in {took:.1f} s, {work:.1f} s of processors" for what, (took, work) in seconds.items()
        )
        print(f"{versions}\n{made}\n\n{format_table(lines)}")


def measure_work() -> float:
    """Returns the seconds that processors have worked for this process and for its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run(options: argparse.Namespace) -> tuple[dict[str, tuple[float, float]], list[Line]]:
    """Returns the seconds in which indexes and vectors were made, with those of processors, and the lines of the table.

    The seconds have the name of what was made.
    """
    seconds: dict[str, tuple[float, float]] = {}
    lines = []
    for match in options.match:
        # Without a search there would be nothing to match.
        embedder = "" if match == "words" else options.embedder
        task = SearchQA(context="search", match=match, embedder=embedder)
        for collection in ("squad", "wiki2") if options.alone else ("squad", "wiki2", "both"):
            start, work = time.perf_counter(), measure_work()
            size = len(replace(task, corpus=collection).open_index())
            took = time.perf_counter() - start, measure_work() - work
            seconds[f"{match}: {collection}, {size} passages"] = took
        lines += [
            measure(replace(task, corpus=corpus), collection, split, options.limit)
            for corpus in ("squad", "wiki2")
            for collection in ((corpus,) if options.alone else (corpus, "both"))
            for split in ("train", "test")
        ]
    return seconds, lines


if __name__ == "__main__":
    main()
