"""Tests of the IFEval task: scores, rows from files, generated prompts, and the real data where COHORT_DATA has it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.scoring.pool import ScoringPool
from cohort.tasks.base import load_rows, make_plain_answer
from cohort.tasks.grading import grade
from cohort.tasks.ifeval.instructions import language
from cohort.tasks.ifeval.instructions.gold import write_text
from cohort.tasks.ifeval.instructions.registry import INSTRUCTIONS, read_arguments
from cohort.tasks.ifeval.prompts import CONFLICTS, QUESTIONS, REQUESTS, TEMPLATES, TOPICS, are_compatible, generate_row
from cohort.tasks.ifeval.task import LEVELS, MAX_CHARS, SYSTEM, IFEval
from cohort.tasks.ref import TaskRef
from cohort.tasks.self_check import run_self_check
from cohort.types import Outcome, Row

DATA = os.environ.get("COHORT_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="COHORT_DATA names no folder with ifeval.jsonl")
# generated rows for which a text must be found
NUM_PROVED = 1500
# ids of the rows of IFEval that ask to repeat a request which contains something forbidden
CONTRADICTIONS = {"1627", "3369", "3371", "3718", "374"}

ROW: Row = {
    "id": "7",
    "prompt": "Tell me about owls in a quotation, without commas.",
    "instruction_id_list": ["startend:quotation", "punctuation:no_comma", "keywords:existence"],
    "kwargs": [{}, {}, {"keywords": ["owl"]}],
}
NOTHING = dict.fromkeys(IFEval.parts, 0.0)


def score(text: str, row: Row = ROW, **settings: Any) -> Outcome:
    """Returns the outcome of a text as an answer to the row, with these settings of the task."""
    return grade(IFEval(**settings), row, make_plain_answer(text))


def test_all_followed() -> None:
    outcome = score('"The owl is awake."')
    assert outcome.parts == NOTHING | dict.fromkeys(LEVELS, 1.0)
    assert outcome.reason == ""


def test_some_followed() -> None:
    """Strictly only the keyword is there; without its first line the text follows everything."""
    outcome = score('Sure, here you are:\n"The owl is awake."')
    assert outcome.parts == NOTHING | {
        "prompt_strict": 0.0,
        "instruction_strict": 1 / 3,
        "prompt_loose": 1.0,
        "instruction_loose": 1.0,
    }
    assert outcome.reason == "not followed: startend:quotation, punctuation:no_comma"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("whole", ""),
        ("whole", " \n "),
        ("whole", "<think>a plan</think>\n"),
        ("whole", "\u200b"),
        ("whole", "\u200b\u2060\ufeff \x00\u034f"),
        ("whole", "\u115f\u1160\u3164\uffa0" * 4),
        ("tags", "<think>a plan</think><answer>\u200b</answer>"),
        ("tags", ""),
        ("tags", "<think>a plan</think>"),
        ("tags", "<think>a plan</think><answer> </answer>"),
    ],
)
def test_an_empty_answer_earns_nothing(answer: str, text: str) -> None:
    """Though it has no comma, which is one of the row's instructions."""
    outcome = score(text, answer=answer)
    assert outcome.parts == NOTHING
    assert outcome.reason


@pytest.mark.parametrize(
    ("text", "followed", "why"),
    [
        ('<think>an owl, hm</think>\n\n"The owl."', 3, "what was thought does not count"),
        ('an owl, hm</think>"The owl."', 3, "the beginning of the block was in the prompt"),
        ('<think>an owl, hm "The owl."', 1, "a block that never closes is all there is: only the owl is found"),
        ('"The owl </think', 2, "half a tag is text"),
    ],
)
def test_thinking_is_taken_off(text: str, followed: int, why: str) -> None:
    assert score(text).parts["instruction_strict"] == pytest.approx(followed / 3), why


@pytest.mark.parametrize(
    ("text", "strict", "form", "thinks"),
    [
        ('<think>owl, hm</think><answer>"The owl."</answer>', 1.0, 1.0, 1.0),
        ('<answer>\n"The owl."\n</answer>', 1.0, 1.0, 0.0),
        ('<think>a</think><think>b</think><answer>"The owl."</answer>', 1.0, 1.0, 0.0),
        ('<think>a<answer>"The owl."</answer>', 1.0, 0.0, 0.0),
        ('<think>a<answer>"The owl."</answer></think>', 1.0, 0.0, 0.0),
        ('<answer>"The owl."</answer><think>a</think>', 1.0, 0.0, 0.0),
        ('<think></think><answer>"The owl."</answer>', 1.0, 1.0, 0.0),
        ('<think> \u200b.</think><answer>"The owl."</answer>', 1.0, 1.0, 0.0),
        ("<think>a</think><answer>.</answer>", 0.0, 0.0, 0.0),
        ("<think>a</think><answer></answer>", 0.0, 0.0, 0.0),
        ('<answer>"An owl."</answer><answer>"The owl."</answer>', 0.0, 0.0, 0.0),
        ('<think>a</think>"The owl."', 0.0, 0.0, 0.0),
        ('</answer>"The owl."<answer>', 0.0, 0.0, 0.0),
        ("<think>a</think><answer>owls, say</answer>", 0.0, 1.0, 1.0),
    ],
)
def test_tags(text: str, strict: float, form: float, thinks: float) -> None:
    parts = score(text, answer="tags").parts
    assert (parts["prompt_strict"], parts["format"], parts["thinks"]) == (strict, form, thinks)


def test_blocks_earn_nothing_if_the_whole_answer_is_checked() -> None:
    parts = score('<think>a</think><answer>"The owl."</answer>').parts
    assert (parts["format"], parts["thinks"]) == (0.0, 0.0)


def test_an_answer_that_is_too_long_is_wrong_within_a_second() -> None:
    begin = time.process_time()
    outcome = score('"' + "owl " * MAX_CHARS + '"')
    assert outcome.parts == NOTHING
    assert outcome.reason == f"the answer is longer than {MAX_CHARS} characters"
    outcome = score("<answer>" * 500_000 + "<think>" * 500_000, answer="tags")
    assert outcome.parts == NOTHING
    assert time.process_time() - begin < 1


def test_prompts() -> None:
    assert IFEval().prompt(ROW) == [{"role": "user", "content": ROW["prompt"]}]
    system, user = IFEval(answer="tags").prompt(ROW)
    assert system == {"role": "system", "content": SYSTEM}
    assert user == {"role": "user", "content": ROW["prompt"]}
    assert all(tag in SYSTEM for tag in ("<think>", "</think>", "<answer>", "</answer>"))


def test_summary_counts_every_instruction_once() -> None:
    """One row has one instruction, which is followed; the other has three, of which one is followed.

    So strictly 1 of 2 prompts and 2 of 4 instructions are followed.
    """
    rows = [{"instruction_id_list": ["a"]}, {"instruction_id_list": ["a", "b", "c"]}]
    first = dict.fromkeys(LEVELS, 1.0)
    second = {"prompt_strict": 0.0, "instruction_strict": 1 / 3, "prompt_loose": 1.0, "instruction_loose": 1.0}
    assert IFEval().summary(rows, [first, second]) == pytest.approx(
        {"strict, prompts": 0.5, "strict, instructions": 0.5, "loose, prompts": 1.0, "loose, instructions": 1.0}
    )
    with pytest.raises(ValueError, match="shorter"):
        IFEval().summary(rows, [first])


# ---- rows from files


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


RAW_ROW = {
    "key": 12,
    "prompt": "Say it in five words.",
    "instruction_id_list": ["length_constraints:number_words"],
    "kwargs": [{"relation": "at least", "num_words": 5, "keywords": None}],
}


def test_rows_from_a_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", RAW_ROW, {**RAW_ROW, "prompt": "Another", "key": None})
    first, second = IFEval(data=path).rows("test")
    assert first == {
        "id": "12",
        "prompt": "Say it in five words.",
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [{"relation": "at least", "num_words": 5}],
    }
    assert second["id"] not in ("", "None", "12")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": " "}, "column \"prompt\" has ' ', not a text"),
        ({"prompt": 5}, 'column "prompt" has 5, not a text'),
        ({"instruction_id_list": []}, 'column "instruction_id_list" has [], not a list of names'),
        ({"instruction_id_list": "punctuation:no_comma"}, "has 'punctuation:no_comma', not a list of names"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, 'Did you mean "punctuation:no_comma"?'),
        ({"instruction_id_list": [["punctuation:no_comma"]]}, "there is no instruction"),
        ({"kwargs": []}, 'column "kwargs" is not a list of 1 objects'),
        ({"kwargs": [None]}, "not an object"),
        ({"kwargs": [{"relation": "at least"}]}, 'needs "num_words", a whole number from 0 to 10000, not None'),
    ],
)
def test_the_error_names_the_line_of_a_bad_row(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", RAW_ROW, {**RAW_ROW, "prompt": "Other", **change})
    with pytest.raises(TaskError) as caught:
        list(IFEval(data=path).rows("test"))
    assert "rows.jsonl, line 2: " in str(caught.value)
    assert message in str(caught.value)


def test_training_on_a_file_of_the_user(tmp_path: Path) -> None:
    write_rows(tmp_path / "own_test.jsonl", RAW_ROW)
    write_rows(tmp_path / "own_train.jsonl", RAW_ROW, {**RAW_ROW, "prompt": "Another", "key": 13})
    task = IFEval(train="keywords", data=str(tmp_path / "own_{split}.jsonl"))
    assert [row["prompt"] for row in task.rows("train")] == ["Another"], "what is tested is not trained on"
    assert run_self_check(task).num_rows == 2


def test_keywords_without_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, shown in (("", "not set"), (str(tmp_path), str(tmp_path))):
        monkeypatch.setenv("COHORT_DATA", folder)
        with pytest.raises(TaskError) as caught:
            IFEval(train="keywords").rows("train")
        assert (
            f"if_keywords_train.jsonl in the folder that the environment variable COHORT_DATA names (now: {shown})"
            in str(caught.value)
        )
        assert "the hub does not have it" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "all"}, "train among generated, keywords, not 'all'"),
        ({"answer": "box"}, "answer among whole, tags, not 'box'"),
        ({"train_size": 0}, "train_size"),
        ({"data": "mine_{split}.jsonl"}, "train = keywords to train on rows of data"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        IFEval(**settings)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(TaskError, match='no split "traces"'):
        IFEval().rows("traces")


def test_missing_langdetect_is_an_error_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "langdetect" else find_spec(name))
    message = "scoring ifeval needs the module langdetect, which is not installed; run pip install 'cohort[ifeval]'"
    with pytest.raises(TaskError, match=re.escape(message)):
        ScoringPool(IFEval())
    assert next(iter(IFEval().rows("train"))), "rows need no package"


def test_missing_langdetect_is_named_by_the_check_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("langdetect", "langdetect.detector_factory"):
        monkeypatch.setitem(sys.modules, module, None)
    language._load_detector_factory.cache_clear()
    try:
        with pytest.raises(TaskError, match=re.escape("needs langdetect, which is not installed; run pip install")):
            language.detect_language("Guten Tag")
    finally:
        language._load_detector_factory.cache_clear()


def test_another_process_makes_the_same_task() -> None:
    task = IFEval(answer="tags", train_size=3)
    assert TaskRef.from_task(task).load() == task


# ---- generated prompts


def test_generated_rows_are_distinct_and_reproducible() -> None:
    rows = load_rows(IFEval(train_size=400), "train")
    assert rows == load_rows(IFEval(train_size=400), "train")
    assert load_rows(IFEval(train_size=100), "train") == rows[:100], "a longer set begins with the shorter one"
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 400
    assert rows[5]["prompt"] == (
        "Write a diary entry by someone who cannot stop thinking of learning the cello. "
        "The number of sentences should be fewer than 11."
    )
    assert rows[5]["kwargs"] == [{"relation": "less than", "num_sentences": 11}]


def test_generated_rows_have_every_kind_and_can_be_followed() -> None:
    """The gold text is written from the instructions alone, so it proves that they can be followed together."""
    task = IFEval(train_size=NUM_PROVED)
    rows = load_rows(task, "train")
    kinds = Counter(name for row in rows for name in row["instruction_id_list"])
    assert {*kinds} == {*INSTRUCTIONS} == {*TEMPLATES}
    assert min(kinds.values()) >= NUM_PROVED / 50
    assert {len(row["kwargs"]) for row in rows} == {1, 2, 3}
    for row in rows:
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            assert read_arguments(name, arguments) == arguments
        outcome = grade(task, row, make_plain_answer(task.gold(row)))
        assert outcome.parts["prompt_strict"] == 1, row


def test_every_allowed_pair_can_be_followed() -> None:
    """Tests all compatible pairs with arguments from generated rows, also pairs that few prompts have."""
    drawn: dict[str, list[dict[str, Any]]] = {name: [] for name in TEMPLATES}
    for index in range(600):
        row = generate_row(index)
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            drawn[name].append(arguments)
    names = sorted(TEMPLATES)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if are_compatible(a, b)]
    assert len(pairs) > 200
    for one, other in pairs:
        for first, second in zip(drawn[one][:3], drawn[other][-3:], strict=True):
            shared = {*_collect_words(first)} & {*_collect_words(second)}
            assert shared or write_text([one, other], [first, second]) is not None, (one, first, other, second)


def _collect_words(arguments: dict[str, Any]) -> list[str]:
    """Returns all words and phrases among the arguments; two instructions with the same word may contradict."""
    values = [v for v in arguments.values() if v not in ("at least", "less than")]
    return [w for v in values for w in (v if isinstance(v, list) else [v]) if isinstance(w, str)]


def test_conflicting_instructions_never_stand_in_one_prompt() -> None:
    impossible = [
        ("change_case:english_capital", "change_case:english_lowercase"),
        ("detectable_format:json_format", "startend:end_checker"),
        ("combination:two_responses", "length_constraints:number_paragraphs"),
        ("language:response_language", "change_case:english_lowercase"),
        ("combination:repeat_prompt", "startend:quotation"),
    ]
    for one, other in impossible:
        assert not are_compatible(one, other)
        assert not are_compatible(other, one)
    for index in range(2000):
        names = generate_row(index)["instruction_id_list"]
        for name in names:
            assert not CONFLICTS.get(name, frozenset()) & {*names}


def test_a_prompt_says_what_is_checked() -> None:
    """Every number, word and phrase of the arguments stands in the prompt."""
    for index in range(500):
        row = generate_row(index)
        for arguments in row["kwargs"]:
            for key, value in arguments.items():
                if key.endswith("relation"):
                    assert {"at least": "at least", "less than": "fewer than"}[value] in row["prompt"]
                elif key != "language":
                    for each in value if isinstance(value, list) else [value]:
                        assert str(each) in row["prompt"], row


def test_the_words_of_a_topic_stand_in_no_request() -> None:
    """Otherwise a request that has to be repeated could contain a forbidden word."""
    for topic, words in TOPICS.items():
        for request in (*REQUESTS, *QUESTIONS):
            text = request.format(topic).lower()
            assert not [word for word in words if word in text], text
        assert len({*words}) == len(words) >= 6, "three instructions may take two each"


# ---- the real data


@needs_data
def test_the_test_set_is_whole() -> None:
    rows = load_rows(IFEval(), "test")
    assert len(rows) == 541
    kinds = Counter(name for row in rows for name in row["instruction_id_list"])
    assert kinds.total() == 834
    assert {*kinds} == {*INSTRUCTIONS}
    assert len({row["id"] for row in rows}) == 541


@needs_data
def test_five_prompts_of_ifeval_contradict_themselves_and_all_others_can_be_followed() -> None:
    task = IFEval()
    failed = set()
    for row in load_rows(task, "test"):
        try:
            gold = task.gold(row)
        except TaskError:
            failed.add(row["id"])
        else:
            assert grade(task, row, make_plain_answer(gold)).parts["prompt_strict"] == 1, row["id"]
    assert failed == CONTRADICTIONS


def _normalise(text: str) -> str:
    """Returns the words of a text in lower case with single spaces between them."""
    return " ".join(re.findall(r"\w+", text.lower()))


@needs_data
def test_nothing_of_ifeval_is_trained_on() -> None:
    """No prompt and no request of ours equals, contains or stands in one of IFEval, whatever case and signs."""
    tested = [_normalise(row["prompt"]) for row in load_rows(IFEval(), "test")]
    requests = [request.format(topic) for topic in TOPICS for request in (*REQUESTS, *QUESTIONS)]
    assert len(requests) == len({*requests}) >= 400
    ours = {_normalise(text) for text in requests}
    ours |= {_normalise(row["prompt"]) for row in load_rows(IFEval(train_size=3000), "train")}
    ours |= {_normalise(row["prompt"]) for row in load_rows(IFEval(train="keywords"), "train")}
    assert not ours & {*tested}
    everything = "\n".join(tested)
    assert not [text for text in ours if text in everything]
    mine = "\n".join(ours)
    assert not [text for text in tested if text in mine]


@needs_data
def test_generated_prompts_share_no_wording_with_ifeval() -> None:
    """No 30 characters in a row are the same; case is ignored."""
    size = 30
    lines = (row["prompt"].lower() for row in load_rows(IFEval(), "test"))
    tested = {text[i : i + size] for text in lines for i in range(len(text) - size + 1)}
    for index in range(3000):
        text = generate_row(index)["prompt"].lower()
        assert not [part for i in range(len(text) - size + 1) if (part := text[i : i + size]) in tested], index


@needs_data
@pytest.mark.parametrize("train", ["generated", "keywords"])
@pytest.mark.parametrize("answer", ["whole", "tags"])
def test_self_check(train: Any, answer: Any) -> None:
    checked = run_self_check(IFEval(train=train, answer=answer), num_rows=40)
    assert checked.num_rows == checked.num_gold == 80


MARKS = "<<A>> " + "[1] " * 6 + "*1* " * 5 + "P.S. P.P.S " + " ".join(f"Section {n}" for n in range(1, 6))


@pytest.mark.parametrize(
    ("text", "lacks_content"),
    [
        (".", True),
        ("{}", True),
        ("<answer></answer>", True),
        ("a b a b a b a b a b", True),
        # a copy of the prompt, and one with hardly anything added
        ("Write a poem about rain, in capitals.", True),
        ("Write a poem about rain, in capitals. Yes.", True),
        ("1", True),
        ('"1"', True),
        ("x", True),
        (MARKS, True),
        ("<think>RAIN FALLS ON THE ROOF ALL NIGHT", True),  # thoughts that never end
        ("<think>a</think><think>RAIN FALLS ON THE ROOF ALL NIGHT", True),
        ("RAIN CAPITALS POEM ABOUT WRITE", True),  # words of the prompt in another order
        ("RAIN FALLS ON THE ROOF ALL NIGHT", False),
        ("RAIN FALLS ON THE ROOF ALL NIGHT <think>good?", False),
        ("<think>a plan</think>RAIN FALLS ON THE ROOF ALL NIGHT", False),
        ("Write a poem about rain, in capitals. RAIN FALLS ALL NIGHT", False),
        ("My answer is no.", False),
        ("雨が屋根に降り続ける静かな夜だ", False),
        ("बारिश पूरी रात छत पर गिरती रही", False),
    ],
)
def test_text_that_says_nothing_is_no_effort(text: str, lacks_content: bool) -> None:
    row = {"id": "0", "prompt": "Write a poem about rain, in capitals.", "instruction_id_list": [], "kwargs": []}
    row |= {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    parts = grade(IFEval(), row, make_plain_answer(text)).parts
    assert parts["effort"] == (-1.0 if lacks_content else 0.0)
    # The verdict of the published checker stays.
    assert parts["prompt_strict"] == float("," not in text)


@pytest.mark.parametrize(
    ("text", "effort"),
    [
        ('<think>a</think><answer>"The owl is awake."</answer>', 0.0),
        ('<think>a<answer>"The owl is awake."</answer>', -1.0),
        ('<think>a<answer>"The owl is awake."</answer></think>', -1.0),
        ("<think>a</think><answer>owl</answer>", -1.0),
    ],
)
def test_an_answer_among_thoughts_is_no_effort(text: str, effort: float) -> None:
    assert score(text, answer="tags").parts["effort"] == effort


def test_a_keyword_that_is_one_letter_is_no_effort() -> None:
    row = {**ROW, "instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["x"]}]}
    parts = score("x", row, train="keywords").parts
    assert (parts["prompt_strict"], parts["effort"]) == (1.0, -1.0)
