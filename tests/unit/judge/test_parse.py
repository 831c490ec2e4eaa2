"""Replies of judges: a score is read from the last line, and what is no score is never one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cohort.judge.parse import read_better, read_score, read_scores
from cohort.judge.prompt import Question
from cohort.judge.service import UnreadableReply

PLAIN = Question(text="", template="", low=0, high=10, json=False, max_characters=1000)
JSON = replace(PLAIN, json=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 7", 0.7),
        ("Fine.\n\nscore : 7.5  ", 0.75),
        ("**Score: 10**", 1.0),
        ("**Score:** 3", 0.3),
        ("### Score: 0.", 0.0),
        ("- Score: 4/10", 0.4),
        ('The answer says "Score: 10", which I ignore.\nScore: 10\nNo.\nScore: 1', 0.1),
        ("Score: 2\nThat is all.", 0.2),
        ("<think>\nScore: 9\n</think>\nScore: 1", 0.1),
    ],
)
def test_readable_scores(text: str, value: float) -> None:
    assert read_score(PLAIN, text)[0] == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "The score is 7.", "Score:", "Score: N", "Score: seven", "Score: 11", "Score: -1", "Score: 7 or 8"),
        *(
            "Score: 7\nScore: high",
            "Score: 7/5",
            "Score: nan",
            "Score: inf",
            "Score: 1e1",
            "Score: 0x7",
            "Score: \u0667",
            "Score: .5",
        ),
        *(
            "<think>Score: 7",
            "Score: 9</think>",
            "Score: 7\n</think>\nGood.",
            "Scores: 1=7",
            "Score: 7 8",
            "Score: 7,5",
        ),
        "Score: " + "9" * 400,
    ],
)
def test_what_is_no_score_is_an_error_and_not_0(text: str) -> None:
    with pytest.raises(UnreadableReply):
        read_score(PLAIN, text)


def test_the_reason_is_the_rest_and_bounded() -> None:
    assert read_score(PLAIN, "<think>hm</think>\nShort.\nScore: 3\nReally.\n")[1] == "Short.\nReally."
    assert len(read_score(PLAIN, "x" * 5000 + "\nScore: 3")[1]) == 500
    assert read_score(JSON, '{"score": 3, "reason": ["x"]}') == (0.3, "")


@pytest.mark.parametrize(
    "text",
    ['{"reason": "r", "score": 3}', '```json\n{"score": 3, "reason": "r"}\n```', '<think>{}</think> {"score": 3.0}'],
)
def test_readable_json(text: str) -> None:
    assert read_score(JSON, text)[0] == 0.3


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        3,
        {},
        *({"score": bad} for bad in (True, "3", None, 11, -0.5, float("nan"), float("inf"), 10**400, [3])),
    ],
)
def test_json_without_a_score(value: Any) -> None:
    with pytest.raises(UnreadableReply):
        read_score(JSON, json.dumps(value))
    with pytest.raises(UnreadableReply):
        read_score(JSON, "[" * 100_000)


@pytest.mark.parametrize(
    "line", ["Scores: 1=3, 2=0, 3=10", "**Scores:** 3=10, 1 = 3, 2: 0.", "Scores: 1=9\nScores: 2=0,3=10,1=3"]
)
def test_readable_scores_of_several(line: str) -> None:
    assert read_scores(PLAIN, line, 3) == [0.3, 0.0, 1.0]


@pytest.mark.parametrize(
    "line",
    [
        *("Scores: 1=3, 2=0", "Scores: 1=3, 2=0, 3=1, 4=1", "Scores: 1=3, 1=3, 2=0, 3=1", "Scores: 1=3, 2=0, 4=1"),
        *("Scores: 3, 0, 1", "Scores: 1=3, 2=0, 3=11", "Score: 3", "Scores: 1=3, 2=0, 3=1, all good"),
    ],
)
def test_scores_of_several_that_are_not_one_each(line: str) -> None:
    with pytest.raises(UnreadableReply):
        read_scores(PLAIN, line, 3)


@pytest.mark.parametrize("values", [None, {"1": 3}, [3], [3, 0, 1], [3, True]])
def test_json_scores_that_are_not_one_each(values: Any) -> None:
    with pytest.raises(UnreadableReply):
        read_scores(JSON, json.dumps({"scores": values}), 2)


def test_which_is_better() -> None:
    assert [read_better(PLAIN, f"Hm.\nBetter: {word}") for word in ("1", "2", "tie", "**Tie**.")] == [
        1.0,
        0.0,
        0.5,
        0.5,
    ]
    assert [read_better(JSON, json.dumps({"better": word})) for word in (1, "2", "tie")] == [1.0, 0.0, 0.5]
    for question, text in ((PLAIN, "Better: 3"), (PLAIN, "1"), (PLAIN, "Better: 1 or 2"), (JSON, "{}")):
        with pytest.raises(UnreadableReply):
            read_better(question, text)
