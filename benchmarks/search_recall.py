r"""How often the search of the task search_qa finds the passage that answers a question, and how quick it is.

    COHORT_DATA=FOLDER python benchmarks/search_recall.py [--json] [--limit 500] [--weights 0.3 0.2]

Every question is a query. For SQuAD, whose questions name their passage, recall@k is the share of questions whose
passage is among the first k. For both sets, answer@k is the share of questions of which an accepted answer is in the
first k passages, compared as the grader compares; questions with the answer yes or no are left out of all columns.
The table has one line per set of questions, split and collection of passages: those of the set alone, and all of both.
The index is made in an empty folder, so that its time is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from cohort.tasks.base import load_rows
from cohort.tasks.search import index as search_index
from cohort.tasks.search.grading import normalise
from cohort.tasks.search.index import Passage
from cohort.tasks.search.task import SearchQA
from cohort.types import Row

DEPTHS = (1, 3, 10)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table. Shares are by depth; `recall` is empty for questions that do not name their passage."""

    questions: str
    split: str
    passages: str
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
        f"| questions | split | passages | number | {' | '.join(heads)} | ms |",
        "|---|---|---|---:|" + "---:|" * (len(heads) + 1),
    ]
    for line in lines:
        shares = [*(line.recall.get(depth) for depth in DEPTHS), *line.answer.values()]
        cells = [f"{share:.3f}" if share is not None else "" for share in shares]
        head = f"| {line.questions} | {line.split} | {line.passages} | {line.num_questions} "
        table.append(f"{head}| {' | '.join(cells)} | {line.milliseconds:.1f} |")
    return "\n".join(table)


def main() -> None:
    """Makes the indexes, asks all questions, and prints the table or JSON."""
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
    options = parser.parse_args()
    search_index.SENTENCE_WEIGHT, search_index.PAIR_WEIGHT = options.weights
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COHORT_CACHE"] = folder
        start = time.perf_counter()
        num_passages = len(SearchQA(corpus="both").open_index())
        seconds = time.perf_counter() - start
        lines = [
            measure(SearchQA(corpus=corpus), collection, split, options.limit)
            for corpus in ("squad", "wiki2")
            for collection in (corpus, "both")
            for split in ("train", "test")
        ]
    versions = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    if options.json:
        about = {"versions": versions, "index_passages": num_passages, "index_seconds": seconds}
        print(json.dumps(about | {"lines": [asdict(line) for line in lines]}, indent=1))
    else:
        print(f"{versions}; an index of {num_passages} passages was made in {seconds:.2f} s\n\n{format_table(lines)}")


if __name__ == "__main__":
    main()
