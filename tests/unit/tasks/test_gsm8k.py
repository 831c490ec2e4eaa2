"""The task gsm8k: its grader on tables of completions, rewards, rows, prompts and the real data."""

from __future__ import annotations

import json
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.errors import TaskError
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import get_task, load_rows, make_plain_answer
from cohort.tasks.grading import grade
from cohort.tasks.gsm8k import GSM8K, Find, Reward, Style
from cohort.tasks.self_check import run_self_check
from cohort.types import Answer
from tests.unit.tasks.tables.gsm8k import HOSTILE, RIGHT, WRONG

STYLES, REWARDS, FINDS = get_args(Style), get_args(Reward), get_args(Find)
TRAIN = [
    {"question": "Half of 48?", "answer": "48 / 2 = <<48/2=24>>24, which is the half of it.\n#### 24"},
    {"question": "How much colder?", "answer": "From 3 to -7 it falls by ten degrees, so -10.\n#### -10"},
]
TEST = [
    {"question": "A hundred dozen?", "answer": "100 * 12 = <<100*12=1200>>1200 of them in all.\n#### 1,200"},
    {"question": "What {is} 9 * 2?", "answer": "Nine and nine again: 9 * 2 = <<9*2=18>>18.\n#### 18"},
    {"question": "And 5 halves?", "answer": "Two wholes and a half, which is 2.5 altogether.\n#### 2.5"},
]


def write(folder: Path, **splits: list[dict[str, object]]) -> str:
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / "{split}.jsonl")


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write(tmp_path, train=TRAIN, test=TEST)


def row(reference: str) -> dict[str, str]:
    return {"id": "0", "question": "How many?", "answer": reference, "solution": ""}


# ---- the grader


def test_the_tables_are_large_enough() -> None:
    assert len(RIGHT) + len(WRONG) >= 130
    assert len(HOSTILE) >= 25


@pytest.mark.parametrize(("text", "reference", "shows"), RIGHT)
def test_right_answers(text: str, reference: str, shows: str) -> None:
    outcome = grade(GSM8K(), row(reference), make_plain_answer(text))
    assert outcome.parts["correct"] == 1, f"{shows}: {outcome.reason}"
    assert outcome.reason == ""


@pytest.mark.parametrize(("text", "reference", "reason"), WRONG)
def test_wrong_answers(text: str, reference: str, reason: str) -> None:
    outcome = grade(GSM8K(), row(reference), make_plain_answer(text))
    assert outcome.parts["correct"] == 0
    assert reason in outcome.reason


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("find", FINDS)
def test_hostile_answers_are_a_verdict_at_once(name: str, find: str) -> None:
    start = time.process_time()
    outcome = grade(GSM8K(find=find), row("-1/3"), make_plain_answer(HOSTILE[name]))
    assert time.process_time() - start < 2  # a megabyte takes a tenth of it
    assert outcome.parts["correct"] == 0
    assert outcome.reason


def test_hostile_answers_are_not_read_as_what_they_hide() -> None:
    for name, text in HOSTILE.items():
        outcome = grade(GSM8K(), row("18"), make_plain_answer(text))
        assert outcome.parts["correct"] == 0, name


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(st.text(max_size=200), st.sampled_from(STYLES), st.sampled_from(REWARDS), st.sampled_from(FINDS))
def test_any_text_gets_a_verdict(text: str, style: Style, reward: Reward, find: str) -> None:
    task = GSM8K(style=style, reward=reward, find=find)
    for shown in (text, f"#### {text}", f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        outcome = grade(task, row("18"), make_plain_answer(shown))
        assert bool(outcome.reason) == (outcome.parts["correct"] == 0)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(st.fractions(max_denominator=8), st.integers(-50, 50))
def test_right_means_equal(reference: Fraction, said: int) -> None:
    outcome = grade(GSM8K(), row(str(reference)), make_plain_answer(f"#### {said}.00"))
    assert outcome.parts["correct"] == float(said == reference)


# completion, and the number that it states; None if it states none
STATED = [
    ("So the answer is 18.", 18),
    ("The answer is: $18$.", 18),
    ("**Final Answer:** 18", 18),
    ("The final answer is **18**.\nI checked it twice.", 18),
    ("Answer: 5 + 13 = 18 dollars. That is 3 more than 15.", 18),
    ("The answer is $1,200.50.", Fraction(2401, 2)),
    ("The answer is\n18", 18),
    ("The answer is 7. No, the answer is 18.", 18),
    ("The answer is 18. No, the answer is 7.", 7),
    ("The answer is 18</s>", 18),
    ("The answer is 18. #### 7", 7),
    ("The answer is 18, so \\boxed{7}.", 7),
    ("<think>The answer is 18.</think> It is so.", None),
    ("The answer is not 18.", None),
    ("The answer is 18 or 20.", None),
    ("The answer is 9 * 2.", None),
    ("The answer is clear. It is 18.", None),
    ("It is 18.", None),
    ("These answers: 18", None),
]


@pytest.mark.parametrize(("text", "value"), STATED, ids=range(len(STATED)))
def test_a_stated_answer_counts_only_if_asked_for_and_nothing_is_marked(text: str, value: Fraction | None) -> None:
    for gold in (18, 7, 20, Fraction(2401, 2)):
        outcome = grade(GSM8K(find="stated"), row(str(gold)), make_plain_answer(text))
        assert outcome.parts["correct"] == float(gold == value)
    if "####" not in text and "boxed" not in text:
        assert grade(GSM8K(), row(str(value)), make_plain_answer(text)).parts["correct"] == 0


def test_without_a_marker_the_last_number_counts_only_if_asked_for() -> None:
    text = "She makes 9 * 2 = 18 dollars."
    assert grade(GSM8K(), row("18"), make_plain_answer(text)).parts["correct"] == 0
    assert grade(GSM8K(find="last"), row("18"), make_plain_answer(text)).parts["correct"] == 1
    assert grade(GSM8K(find="last"), row("18"), make_plain_answer("#### 7, not 18")).reason == "more than one number"
    assert grade(GSM8K(find="last"), row("18"), make_plain_answer(r"\boxed{7} rather than 18")).reason == "wrong value"


def test_the_prompt_is_not_searched_for_the_answer() -> None:
    """Nor is the text before the completion."""
    asked = [{"role": "user", "content": "For example: #### 18"}]
    answer = Answer(
        text="I do not know.", full="#### 18 I do not know.", finish="stop", num_tokens=4, conversation=asked
    )
    assert grade(GSM8K(find="last"), row("18"), answer).parts["correct"] == 0


LONG = "Nine eggs at two dollars each. "
# reward, style, text, (correct, penalty, format, length); the reference is 18
EARNED = [
    ("plain", "boxed", r"\boxed{18}", (1, 0, 0, 0)),
    ("plain", "boxed", r"\boxed{7}", (0, 0, 0, 0)),
    ("plain", "boxed", "", (0, 0, 0, 0)),
    ("verl", "hashes", "#### 18", (1, 0, 0, 0)),  # not 1.1
    ("verl", "hashes", "#### 7", (0, 0, 0.1, 0)),
    ("verl", "hashes", "#### 18 or 7", (0, 0, 0.1, 0)),
    ("verl", "hashes", "18", (0, 0, 0, 0)),
    ("verl", "hashes", "#### ", (0, 0, 0, 0)),
    ("verl", "hashes", "#### eighteen", (0, 0, 0, 0)),
    ("verl", "hashes", r"\boxed{18}", (1, 0, 0, 0)),
    ("verl", "hashes", r"\boxed{7}", (0, 0, 0, 0)),  # not the marker that was asked for
    ("verl", "boxed", r"\boxed{7}", (0, 0, 0.1, 0)),
    ("verl", "boxed", r"\boxed{}", (0, 0, 0, 0)),
    ("verl", "tags", "<answer>7</answer>", (0, 0, 0.1, 0)),
    ("verl", "tags", r"<answer>\boxed{7}</answer>", (0, 0, 0.1, 0)),
    ("verl", "tags", "<think><answer>7</answer></think>", (0, 0, 0, 0)),
    ("tutor", "tutor", LONG + "#### 18", (1, 0, 0.2, 0)),
    ("tutor", "tutor", LONG + "#### 7", (0, -1, 0.2, 0)),
    ("tutor", "tutor", LONG + r"\boxed{18}", (1, 0, -0.2, 0)),
    ("tutor", "tutor", LONG, (0, -1, -0.2, 0)),
    ("tutor", "tutor", "#### 18", (1, 0, 0.2, -0.5)),
    ("tutor", "tutor", "#### 18" + " " * 30, (1, 0, 0.2, -0.5)),  # spaces are no reasoning
    ("tutor", "tutor", "It is so. So it has to be: #### 18"[-29:], (1, 0, 0.2, -0.5)),
    ("tutor", "tutor", "It is so. So it has to be: #### 18"[-30:], (1, 0, 0.2, 0)),
    ("tutor", "tutor", "", (0, -1, -0.2, -0.5)),
    ("tutor", "boxed", LONG + r"\boxed{18}", (1, 0, 0.2, 0)),
]


@pytest.mark.parametrize(("reward", "style", "text", "earned"), EARNED)
def test_the_parts_of_every_reward(reward: Reward, style: Style, text: str, earned: tuple[float, ...]) -> None:
    outcome = grade(GSM8K(reward=reward, style=style), row("18"), make_plain_answer(text))
    assert tuple(outcome.parts.values()) == earned
    assert tuple(outcome.parts) == ("correct", "penalty", "format", "length")


def test_the_totals_are_those_the_docstring_states() -> None:
    totals = {
        reward: sorted({round(sum(earned), 6) for name, _, _, earned in EARNED if name == reward}) for reward in REWARDS
    }
    assert totals["plain"] == [0, 1]
    assert totals["verl"] == [0, 0.1, 1]
    assert (min(totals["tutor"]), max(totals["tutor"])) == (-1.7, 1.2)


# ---- rows and prompts


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("reward", REWARDS)
def test_a_gold_answer_scores_full_marks_and_an_empty_one_nothing(data: str, style: Style, reward: Reward) -> None:
    task = GSM8K(data=data, style=style, reward=reward)
    assert run_self_check(task).num_gold == len(TRAIN) + len(TEST)
    best = 1.2 if reward == "tutor" else 1.0
    for item in load_rows(task, "train"):
        assert sum(grade(task, item, make_plain_answer(task.gold(item))).parts.values()) == pytest.approx(best)


def test_rows(data: str) -> None:
    rows = load_rows(GSM8K(data=data), "test")
    assert [item["answer"] for item in rows] == ["1200", "18", "5/2"]
    assert rows[1]["question"] == "What {is} 9 * 2?"
    assert rows[1]["solution"] == "Nine and nine again: 9 * 2 = 18."
    assert [item["answer"] for item in load_rows(GSM8K(data=data), "train")] == ["24", "-10"]


@pytest.mark.parametrize(
    ("style", "instruction", "gold"),
    [
        ("boxed", "\\boxed{}", "The answer is \\boxed{18}."),
        ("hashes", '"####"', "#### 18"),
        ("tags", "<answer> and </answer>", "<answer>18</answer>"),
        ("tutor", "#### and the number", "#### 18"),
    ],
)
def test_every_style_asks_for_what_its_gold_answer_does(data: str, style: Style, instruction: str, gold: str) -> None:
    task = GSM8K(data=data, style=style)
    item = load_rows(task, "test")[1]
    [message] = task.prompt(item)
    assert message["role"] == "user"
    assert item["question"] in message["content"] and instruction in message["content"]
    assert task.gold(item).endswith(gold)
    assert item["solution"] in task.gold(item)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("reward", REWARDS)
def test_repeating_the_prompt_earns_nothing(data: str, style: Style, reward: Reward) -> None:
    task = GSM8K(data=data, style=style, reward=reward)
    item = load_rows(task, "test")[1]
    parts = grade(task, item, make_plain_answer(task.prompt(item)[0]["content"])).parts
    assert max(parts.values()) == 0


def test_an_answer_may_be_a_bare_number(tmp_path: Path) -> None:
    bare = [{"q": "one", "a": "18"}, {"q": "two", "a": -7}, {"q": "three", "a": 2.5}, {"q": "four", "a": "$1,200"}]
    task = GSM8K(data=write(tmp_path, train=[{"q": "zero", "a": 0}], test=bare), columns=("question=q", "answer=a"))
    assert [item["answer"] for item in load_rows(task, "test")] == ["18", "-7", "5/2", "1200"]
    assert task.gold(load_rows(task, "test")[0]) == "The answer is \\boxed{18}."
    assert run_self_check(task).num_gold == 5


def test_the_first_test_questions(data: str) -> None:
    assert [item["answer"] for item in load_rows(GSM8K(data=data, test_size=2), "test")] == ["1200", "18"]
    assert len(load_rows(GSM8K(data=data, test_size=1), "train")) == len(TRAIN)
    with pytest.raises(TaskError, match="test_size is 4, but there are only 3 test rows"):
        GSM8K(data=data, test_size=4).rows("test")


def test_the_rows_beyond_test_size_are_checked_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path, train=TRAIN, test=[*TEST, TEST[0]])
    assert len(load_rows(GSM8K(data=data, test_size=1), "test")) == 1
    assert "repeated rows left out: 1 (first: line 4 repeats 1)" in caplog.text


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question": "How many?", "answer": "many\n#### many"}, "answer ends with 'many', .*: not a number"),
        ({"question": "How many?", "answer": "5 + 13"}, "answer ends with '5 \\+ 13', .*: more than one number"),
        ({"question": "How many?", "answer": ""}, "answer ends with '', .*: the answer is empty"),
        ({"question": "How many?", "answer": True}, "neither a number nor a solution"),
        ({"question": "How many?", "answer": None}, "neither a number nor a solution"),
        ({"question": "How many?", "answer": [18]}, "neither a number nor a solution"),
        ({"question": " ", "answer": "18"}, 'column "question" has .*, not a text'),
        ({"question": 18, "answer": "18"}, 'column "question" has .*, not a text'),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, bad: dict[str, object], message: str) -> None:
    task = GSM8K(data=write(tmp_path, train=TRAIN, test=[TEST[0], bad]))
    with pytest.raises(TaskError, match=message) as caught:
        load_rows(task, "test")
    assert "test.jsonl" in str(caught.value) and "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "latex"}, "style among boxed, hashes, tags, tutor, not 'latex'"),
        ({"reward": "trl"}, "reward among plain, verl, tutor, not 'trl'"),
        ({"find": "first"}, "find among marked, stated, last, not 'first'"),
        ({"test_size": -1}, "test_size from 0 to 10000000, not -1"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        GSM8K(**settings)


def test_it_is_registered_and_scored_by_a_pool(data: str) -> None:
    task = get_task("gsm8k")(data=data, style="hashes", reward="tutor")
    item = load_rows(task, "test")[0]
    with ScoringPool(task) as pool:
        [right, hostile] = pool.score(
            [(item, make_plain_answer(LONG + "#### $1,200")), (item, make_plain_answer(HOSTILE["surrogates"]))]
        )
    assert right.parts == {"correct": 1, "penalty": 0, "format": 0.2, "length": 0}
    assert hostile.parts["correct"] == 0 and not hostile.failure


# ---- the real data

real = pytest.mark.skipif("COHORT_DATA" not in os.environ, reason="COHORT_DATA names no folder")


@real
def test_every_reference_of_the_real_data_is_read() -> None:
    """Compared with the raw file: all are whole numbers, and so many of them have commas or a sign."""
    counts = {}
    for split in ("train", "test"):
        with Path(os.environ["COHORT_DATA"], f"gsm8k_{split}.jsonl").open(encoding="utf-8") as lines:
            raw = [json.loads(line)["answer"].split("#### ")[1] for line in lines]
        rows = load_rows(GSM8K(), split)
        assert [int(item["answer"]) for item in rows] == [int(text.replace(",", "")) for text in raw]
        counts[split] = len(raw), sum("," in text for text in raw), sum("-" in text for text in raw)
    assert counts == {"train": (7473, 79, 3), "test": (1319, 14, 2)}


@real
@pytest.mark.parametrize("style", STYLES)
def test_every_gold_answer_of_the_real_data_is_right(style: Style) -> None:
    task = GSM8K(style=style, reward="tutor")
    wrong = [
        item["id"]
        for split in ("train", "test")
        for item in load_rows(task, split)
        if sum(grade(task, item, make_plain_answer(task.gold(item))).parts.values()) != 1.2
    ]
    assert not wrong
    assert run_self_check(task).num_gold == 40


@real
def test_the_subset_is_the_first_of_the_real_test_questions() -> None:
    rows = load_rows(GSM8K(test_size=500), "test")
    assert len(rows) == 500
    assert rows == load_rows(GSM8K(), "test")[:500]
    assert sum(abs(int(item["answer"])) >= 1000 for item in rows) == 52
