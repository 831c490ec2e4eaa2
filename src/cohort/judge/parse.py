"""Reading of a judge's reply: a number at the end, in the form that was asked for, or an UnreadableReply.

Nothing is guessed. A reply without a readable score is a failure and never a score of 0.
"""

from __future__ import annotations

import re
from typing import Any

from cohort.judge.prompt import Question
from cohort.judge.service import UnreadableReply
from cohort.system.json_text import parse_json, show_value
from cohort.tasks.base import MAX_REASON

_NUMBER = r"[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_DECORATION = " \t*_#>`"


def read_score(question: Question, text: str) -> tuple[float, str]:
    """Returns the score of a reply, from 0 to 1, and its reason. Raises UnreadableReply if it has none.

    >>> read_score(Question(text="", template="", low=0, high=10, json=False, max_characters=9), "Good.\\nScore: 7")
    (0.7, 'Good.')
    """
    if question.json:
        found = read_object(text)
        return normalise(question, found.get("score")), shorten_reason(found.get("reason"))
    value, rest = find_last_line(text, "score")
    number = re.fullmatch(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?", value)
    if number is None or (number[2] is not None and float(number[2]) != question.high):
        raise UnreadableReply(f'the judge\'s last line with a score is "Score: {value[:60]}", which is no number')
    return normalise(question, float(number[1])), shorten_reason(rest)


def read_scores(question: Question, text: str, num: int) -> list[float]:
    """Returns the scores of `num` answers in a reply, from 0 to 1, in the order shown. Raises UnreadableReply."""
    if question.json:
        values = read_object(text).get("scores")
        if not isinstance(values, list) or len(values) != num:
            raise UnreadableReply(f"the judge gave the scores {show_value(values)} for {num} answers")
        return [normalise(question, value) for value in values]
    line, _ = find_last_line(text, "scores")
    found = [re.fullmatch(rf"([0-9]{{1,4}})\s*[=:]\s*({_NUMBER})", part.strip(_DECORATION)) for part in line.split(",")]
    given = {int(pair[1]): float(pair[2]) for pair in found if pair is not None}
    # Repeated numbers, missing ones and pieces that are no pair all make these differ.
    if len(found) != num or sorted(given) != list(range(1, num + 1)):
        raise UnreadableReply(f'the judge\'s last line with scores is "Scores: {line[:60]}", for {num} answers')
    return [normalise(question, given[n]) for n in range(1, num + 1)]


def read_better(question: Question, text: str) -> float:
    """Returns 1 if the first of two answers is better, 0 if the second is, 0.5 for a tie. Raises UnreadableReply."""
    value = str(read_object(text).get("better")) if question.json else find_last_line(text, "better")[0]
    points = {"1": 1.0, "2": 0.0, "tie": 0.5}.get(value.strip().lower())
    if points is None:
        raise UnreadableReply(f'the judge says "Better: {value[:60]}", which is not 1, 2 or tie')
    return points


def find_last_line(text: str, word: str) -> tuple[str, str]:
    """Returns what the last line "word: ..." has after its colon, and the text without that line.

    Thoughts before the reply are left out. Raises UnreadableReply if there is no such line.
    """
    lines = text.rpartition("</think>")[2].splitlines()
    for n in range(len(lines) - 1, -1, -1):
        found = re.fullmatch(rf"{word}[*_`]*\s*[:=](.*)", lines[n].strip(_DECORATION + "-"), re.IGNORECASE)
        if found:
            return found[1].lstrip(_DECORATION).rstrip(_DECORATION + "."), "\n".join(lines[:n] + lines[n + 1 :])
    raise UnreadableReply(f'the judge\'s reply has no line "{word.capitalize()}: ..."')


def read_object(text: str) -> dict[str, Any]:
    """Returns the JSON object of a reply, also from a code block. Raises UnreadableReply if it is none."""
    text = text.rpartition("</think>")[2].strip()
    block = re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", text, re.DOTALL | re.IGNORECASE)
    try:
        value = parse_json(block[1] if block else text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UnreadableReply("the judge's reply is no JSON object")
    return value


def normalise(question: Question, value: Any) -> float:
    """Returns a number of the judge's scale as one from 0 to 1. Raises UnreadableReply if it is none or outside."""
    # True is a number to Python. A comparison with NaN is false.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not question.low <= value <= question.high:
        raise UnreadableReply(
            f"the judge's score {show_value(value)} is no number from {question.low:g} to {question.high:g}"
        )
    return float((value - question.low) / (question.high - question.low))


def shorten_reason(reason: Any) -> str:
    """Returns a judge's reason as text of bounded length; "" if it is no text."""
    return reason.strip()[:MAX_REASON] if isinstance(reason, str) else ""
