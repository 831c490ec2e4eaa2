"""The IFEval task: its rows, what an answer earns, the prompts it trains on, and the real data where it is at hand."""

from __future__ import annotations

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
from cohort.tasks.base import grade, load_rows, plain_answer, self_check
from cohort.tasks.ifeval.instructions import language
from cohort.tasks.ifeval.instructions.gold import write
from cohort.tasks.ifeval.instructions.registry import INSTRUCTIONS, read_arguments
from cohort.tasks.ifeval.prompts import AGAINST, OFFERS, QUESTIONS, REQUESTS, TOPICS, are_compatible, make_prompt
from cohort.tasks.ifeval.task import LEVELS, MAX_CHARS, SYSTEM, IFEval
from cohort.tasks.ref import TaskRef
from cohort.types import Outcome, Row

DATA = os.environ.get("COHORT_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="COHORT_DATA names no folder with ifeval.jsonl")
NUM_PROVED = 1500  # generated rows
CONTRADICTIONS = {"1627", "3369", "3371", "3718", "374"}  # repeat a request that holds what is forbidden

ROW: Row = {
    "id": "7",
    "prompt": "Tell me about owls in a quotation, without commas.",
    "instruction_id_list": ["startend:quotation", "punctuation:no_comma", "keywords:existence"],
    "kwargs": [{}, {}, {"keywords": ["owl"]}],
}
NOTHING = dict.fromkeys(IFEval.parts, 0.0)


def scored(text: str, row: Row = ROW, **knobs: Any) -> Outcome:
    return grade(IFEval(**knobs), row, plain_answer(text))


def test_all_followed() -> None:
    outcome = scored('"The owl is awake."')
    assert outcome.parts == NOTHING | dict.fromkeys(LEVELS, 1.0)
    assert outcome.reason == ""


def test_some_followed() -> None:
    """Strictly only the keyword is there; without its first line the text follows everything."""
    outcome = scored('Sure, here you are:\n"The owl is awake."')
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
    outcome = scored(text, answer=answer)
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
    assert scored(text).parts["instruction_strict"] == pytest.approx(followed / 3), why


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
    parts = scored(text, answer="tags").parts
    assert (parts["prompt_strict"], parts["format"], parts["thinks"]) == (strict, form, thinks)


def test_blocks_are_not_paid_where_the_whole_is_read() -> None:
    parts = scored('<think>a</think><answer>"The owl."</answer>').parts
    assert (parts["format"], parts["thinks"]) == (0.0, 0.0)


def test_an_answer_that_is_too_long_is_wrong_at_once() -> None:
    begin = time.process_time()
    outcome = scored('"' + "owl " * MAX_CHARS + '"')
    assert outcome.parts == NOTHING
    assert outcome.reason == f"the answer is longer than {MAX_CHARS} characters"
    outcome = scored("<answer>" * 500_000 + "<think>" * 500_000, answer="tags")
    assert outcome.parts == NOTHING
    assert time.process_time() - begin < 1


def test_prompts() -> None:
    assert IFEval().prompt(ROW) == [{"role": "user", "content": ROW["prompt"]}]
    system, user = IFEval(answer="tags").prompt(ROW)
    assert system == {"role": "system", "content": SYSTEM}
    assert user == {"role": "user", "content": ROW["prompt"]}
    assert all(tag in SYSTEM for tag in ("<think>", "</think>", "<answer>", "</answer>"))


def test_summary_weighs_instructions_once() -> None:
    """One row with one instruction, followed; one with three, of which one is: 1/2 of the prompts, 2/4 of these."""
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


GIVEN = {
    "key": 12,
    "prompt": "Say it in five words.",
    "instruction_id_list": ["length_constraints:number_words"],
    "kwargs": [{"relation": "at least", "num_words": 5, "keywords": None}],
}


def test_rows_from_a_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GIVEN, {**GIVEN, "prompt": "Another", "key": None})
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
        ({"prompt": " "}, "prompt is not a text"),
        ({"prompt": 5}, "prompt is not a text"),
        ({"instruction_id_list": []}, "instruction_id_list is not a list of names"),
        ({"instruction_id_list": "punctuation:no_comma"}, "instruction_id_list is not a list of names"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, 'Did you mean "punctuation:no_comma"?'),
        ({"instruction_id_list": [["punctuation:no_comma"]]}, "there is no instruction"),
        ({"kwargs": []}, "kwargs is not a list of 1 objects"),
        ({"kwargs": [None]}, "not an object"),
        ({"kwargs": [{"relation": "at least"}]}, 'needs "num_words", a whole number from 0 to 10000, not None'),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GIVEN, {**GIVEN, "prompt": "Other", **change})
    with pytest.raises(TaskError) as caught:
        list(IFEval(data=path).rows("test"))
    assert "rows.jsonl, line 2: " in str(caught.value)
    assert message in str(caught.value)


def test_training_on_a_file_of_ones_own(tmp_path: Path) -> None:
    write_rows(tmp_path / "own_test.jsonl", GIVEN)
    write_rows(tmp_path / "own_train.jsonl", GIVEN, {**GIVEN, "prompt": "Another", "key": 13})
    task = IFEval(train="keywords", data=str(tmp_path / "own_{split}.jsonl"))
    assert [row["prompt"] for row in task.rows("train")] == ["Another"], "what is tested is not trained on"
    assert self_check(task).num_rows == 2


def test_keywords_without_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, said in (("", "not set"), (str(tmp_path), str(tmp_path))):
        monkeypatch.setenv("COHORT_DATA", folder)
        with pytest.raises(TaskError) as caught:
            IFEval(train="keywords").rows("train")
        assert f"if_keywords_train.jsonl in the folder COHORT_DATA ({said})" in str(caught.value)
        assert "no hub has it" in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"train": "all"}, "train among generated, keywords, not 'all'"),
        ({"answer": "box"}, "answer among whole, tags, not 'box'"),
        ({"train_size": 0}, "train_size"),
        ({"data": "mine_{split}.jsonl"}, "train = keywords to train on rows of data"),
    ],
)
def test_wrong_knobs(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        IFEval(**knobs)


def test_a_split_that_is_none() -> None:
    with pytest.raises(TaskError, match='no split "traces"'):
        IFEval().rows("traces")


def test_langdetect_is_missed_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    monkeypatch.setitem(sys.modules, "langdetect.detector_factory", None)
    language._factory.cache_clear()
    try:
        with pytest.raises(TaskError, match=re.escape("pip install 'cohort[ifeval]'")):
            IFEval().rows("train")
    finally:
        language._factory.cache_clear()


def test_another_process_makes_the_same_task() -> None:
    task = IFEval(answer="tags", train_size=3)
    assert TaskRef.of(task).load() == task


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
    """The text that proves it is written from the instructions alone, so it proves that they go together."""
    task = IFEval(train_size=NUM_PROVED)
    rows = load_rows(task, "train")
    kinds = Counter(name for row in rows for name in row["instruction_id_list"])
    assert {*kinds} == {*INSTRUCTIONS} == {*OFFERS}
    assert min(kinds.values()) >= NUM_PROVED / 50
    assert {len(row["kwargs"]) for row in rows} == {1, 2, 3}
    for row in rows:
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            assert read_arguments(name, arguments) == arguments
        outcome = grade(task, row, plain_answer(task.gold(row)))
        assert outcome.parts["prompt_strict"] == 1, row


def test_every_allowed_pair_can_be_followed() -> None:
    """With arguments from generated rows, those pairs too that few prompts have."""
    drawn: dict[str, list[dict[str, Any]]] = {name: [] for name in OFFERS}
    for index in range(600):
        row = make_prompt(index)
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            drawn[name].append(arguments)
    names = sorted(OFFERS)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if are_compatible(a, b)]
    assert len(pairs) > 200
    for one, other in pairs:
        for first, second in zip(drawn[one][:3], drawn[other][-3:], strict=True):
            shared = {*_texts(first)} & {*_texts(second)}
            assert shared or write([one, other], [first, second]) is not None, (one, first, other, second)


def _texts(arguments: dict[str, Any]) -> list[str]:
    values = [v for v in arguments.values() if v not in ("at least", "less than")]
    return [w for v in values for w in (v if isinstance(v, list) else [v]) if isinstance(w, str)]


def test_what_cannot_be_followed_together_is_never_asked_together() -> None:
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
        names = make_prompt(index)["instruction_id_list"]
        for name in names:
            assert not AGAINST.get(name, frozenset()) & {*names}


def test_a_prompt_says_what_is_checked() -> None:
    """Every number, word and phrase of the arguments can be read in the prompt."""
    for index in range(500):
        row = make_prompt(index)
        for arguments in row["kwargs"]:
            for key, value in arguments.items():
                if key.endswith("relation"):
                    assert {"at least": "at least", "less than": "fewer than"}[value] in row["prompt"]
                elif key != "language":
                    for each in value if isinstance(value, list) else [value]:
                        assert str(each) in row["prompt"], row


def test_the_words_of_a_topic_stand_in_no_request() -> None:
    """Or a request that is to be repeated could hold a forbidden word."""
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
            assert grade(task, row, plain_answer(gold)).parts["prompt_strict"] == 1, row["id"]
    assert failed == CONTRADICTIONS


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


@needs_data
def test_nothing_of_ifeval_is_trained_on() -> None:
    """No prompt and no request of ours is, holds or stands in one of IFEval, whatever its case, signs and spaces."""
    tested = [_plain(row["prompt"]) for row in load_rows(IFEval(), "test")]
    requests = [request.format(topic) for topic in TOPICS for request in (*REQUESTS, *QUESTIONS)]
    assert len(requests) == len({*requests}) >= 400
    ours = {_plain(text) for text in requests}
    ours |= {_plain(row["prompt"]) for row in load_rows(IFEval(train_size=3000), "train")}
    ours |= {_plain(row["prompt"]) for row in load_rows(IFEval(train="keywords"), "train")}
    assert not ours & {*tested}
    everything = "\n".join(tested)
    assert not [text for text in ours if text in everything]
    mine = "\n".join(ours)
    assert not [text for text in tested if text in mine]


@needs_data
def test_generated_prompts_share_no_wording_with_ifeval() -> None:
    """Not 30 characters in a row, whatever their case."""
    size = 30
    lines = (row["prompt"].lower() for row in load_rows(IFEval(), "test"))
    tested = {text[i : i + size] for text in lines for i in range(len(text) - size + 1)}
    for index in range(3000):
        text = make_prompt(index)["prompt"].lower()
        assert not [part for i in range(len(text) - size + 1) if (part := text[i : i + size]) in tested], index


@needs_data
@pytest.mark.parametrize("train", ["generated", "keywords"])
@pytest.mark.parametrize("answer", ["whole", "tags"])
def test_self_check(train: Any, answer: Any) -> None:
    checked = self_check(IFEval(train=train, answer=answer), num_rows=40)
    assert checked.num_rows == checked.num_gold == 80


MARKS = "<<A>> " + "[1] " * 6 + "*1* " * 5 + "P.S. P.P.S " + " ".join(f"Section {n}" for n in range(1, 6))


@pytest.mark.parametrize(
    ("text", "hollow"),
    [
        (".", True),
        ("{}", True),
        ("<answer></answer>", True),
        ("a b a b a b a b a b", True),
        ("Write a poem about rain, in capitals.", True),  # the prompt
        ("Write a poem about rain, in capitals. Yes.", True),  # and hardly more
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
def test_text_that_says_nothing_is_no_effort(text: str, hollow: bool) -> None:
    row = {"id": "0", "prompt": "Write a poem about rain, in capitals.", "instruction_id_list": [], "kwargs": []}
    row |= {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    parts = grade(IFEval(), row, plain_answer(text)).parts
    assert parts["effort"] == (-1.0 if hollow else 0.0)
    assert parts["prompt_strict"] == float("," not in text)  # the published verdict stays


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
    assert scored(text, answer="tags").parts["effort"] == effort


def test_a_keyword_that_is_one_letter_is_no_effort() -> None:
    row = {**ROW, "instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["x"]}]}
    parts = scored("x", row, train="keywords").parts
    assert (parts["prompt_strict"], parts["effort"]) == (1.0, -1.0)
