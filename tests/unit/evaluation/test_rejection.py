"""Answers of an evaluation as conversations to imitate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.cli.main import main
from cohort.evaluation.records import EvalAnswer, EvalItem, Evaluation
from cohort.evaluation.rejection import select_answers
from cohort.examples.rows import read_conversations
from tests.helpers.evaluations import evaluation

ASK = [{"role": "user", "content": "1+1?"}]


def answer(text: str, correct: float | None, finish: str = "stop") -> EvalAnswer:
    return EvalAnswer(text=text, finish=finish, num_tokens=3, correct=correct)


def make_evaluation(*answers: EvalAnswer, messages: list[Any] | None = None, system: str = "") -> Evaluation:
    """Returns an evaluation of two problems. The first has these answers, the second a wrong one."""
    found = evaluation({"a": [1.0], "b": [0.0]})
    items = [
        EvalItem(id="a", messages=messages or ASK, prompt="", answers=list(answers)),
        EvalItem(id="b", messages=ASK, prompt="", answers=[answer("no", 0.0)]),
    ]
    return replace(found, items=items, setting=replace(found.setting, system=system))


ANSWERS = (
    answer("2", 1.0),
    answer("2", 1.0),
    answer("two", 1.0),
    answer("3", 0.0),
    answer("2 2 2", 1.0, "length"),
    answer("?", None),
)


@pytest.mark.parametrize(
    ("keep", "per_problem", "texts"),
    [
        ("correct", 0, ["2", "two"]),
        ("correct", 1, ["2"]),
        ("wrong", 0, ["3", "no"]),
        ("all", 0, ["2", "two", "3", "no"]),
    ],
)
def test_answers_are_chosen_by_their_verdict(keep: Any, per_problem: int, texts: list[str]) -> None:
    chosen = select_answers(make_evaluation(*ANSWERS), keep, per_problem)
    assert [row["messages"][-1] for row in chosen.rows] == [{"role": "assistant", "content": t} for t in texts]
    assert chosen.num_other + chosen.num_cut + chosen.num_repeated + len(texts) == 7


def test_system_prompt_and_begun_message_are_part_of_the_conversation() -> None:
    begun = [*ASK, {"role": "assistant", "content": "<think>"}]
    [row] = select_answers(
        make_evaluation(answer("so</think>2", 1.0), messages=begun, system="Be brief."), "correct", 0
    ).rows
    assert row["messages"] == [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "<think>so</think>2"},
    ]


def test_the_command_writes_rows_that_sft_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "eval.json", tmp_path / "rows.jsonl"
    source.write_text(json.dumps(make_evaluation(*ANSWERS).to_json()))
    assert main(["data", "--from", str(source), "--keep", "correct", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(
        "wrote 2 conversations (problems: 1, left out: other verdicts 3, cut off 1"
    )
    rows = list(read_conversations(str(out), "train", "auto", ()))
    assert [row.messages[-1]["content"] for row in rows] == ["2", "two"]
    for words, message in (
        (["--from"], "--from needs the file of an evaluation"),
        (["--from", str(source)], "--out is missing"),
        (["--from", str(source), "--out", str(out), "--keep", "best"], "--keep"),
        (["--from", str(tmp_path / "gone.json"), "--out", str(out)], "gone.json"),
    ):
        assert main(["data", *words]) == 2
        assert message in capsys.readouterr().err
    nothing = make_evaluation(answer("3", 0.0))
    source.write_text(json.dumps(nothing.to_json()))
    assert main(["data", f"--from={source}", "--out", str(out)]) == 2
    assert "has no such answers" in capsys.readouterr().err


def test_a_conversation_is_kept_whole_with_its_tools() -> None:
    talk = [
        {"role": "assistant", "content": "<tool_call>...</tool_call>"},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = make_evaluation(replace(answer("... [2] 2", 1.0), messages=talk), system="Be brief.")
    found = replace(found, items=[replace(found.items[0], tools=tools), found.items[1]])
    (row,) = select_answers(found, "correct", 0).rows
    assert row == {"id": "a", "messages": [{"role": "system", "content": "Be brief."}, *ASK, *talk], "tools": tools}


def test_a_begun_message_is_not_repeated_before_a_conversation() -> None:
    begun = [*ASK, {"role": "assistant", "content": "<think>"}]
    talk = [{"role": "assistant", "content": "<think>so</think>"}, {"role": "user", "content": "Sure?"}]
    talk.append({"role": "assistant", "content": "2"})
    found = make_evaluation(replace(answer("so [Sure?] 2", 1.0), messages=talk), messages=begun)
    (row,) = select_answers(found, "correct", 0).rows
    assert row["messages"] == [*ASK, *talk]
