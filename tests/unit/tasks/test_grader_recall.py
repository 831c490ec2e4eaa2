"""Gold answers as people write them are right, spoiled ones are wrong: `benchmarks/grader_recall.py` on a few."""

from __future__ import annotations

import pytest

from benchmarks.grader_recall import REWRITINGS, SPOILINGS, format_table, judge, read_gold
from cohort.tasks.mathematics.task import Math500

# one of each kind that the data sets have, with words of their problems
GOLDS = {
    "12345": "How many dollars?",
    "-7": "What is the angle in degrees?",
    "28\\%": "What percent is it?",
    "\\frac{14}{3}": "?",
    "-\\frac{33}{2}": "?",
    "0.35": "?",
    "3\\sqrt{13}": "?",
    "\\frac{9}{4}\\pi": "?",
    "6 - 5i": "?",
    "x^2+5x+6": "?",
    "2^{100} - 2": "?",
    "52_8": "?",
    "(3, \\frac{\\pi}{2})": "?",
    "(6,31,-1)": "?",
    "[-2,7)": "?",
    "(-\\infty, 3]": "?",
    "1,-2": "?",
    "(2,2),(6,2)": "?",
    "\\text{Evelyn}": "?",
    "\\text{(C)}": "?",
    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}": "?",
    "y = 2x + 3": "?",
}


@pytest.fixture(scope="module")
def judged() -> tuple:
    golds = [read_gold({"answer": answer, "problem": problem}) for answer, problem in GOLDS.items()]
    return judge(Math500(), golds, peer_share=0.0)


def test_every_way_of_writing_a_gold_answer_is_right_and_every_spoiled_one_is_wrong(judged: tuple) -> None:
    _, misjudged, _ = judged
    assert misjudged == []


def test_every_way_of_writing_was_tried(judged: tuple) -> None:
    counts, _, _ = judged
    assert {*counts} == {way.__name__ for way in (*REWRITINGS, *SPOILINGS)}
    assert sum(count.num_answers for count in counts.values()) > 500
    assert "| rewrite_plainly | right |" in format_table(counts)
