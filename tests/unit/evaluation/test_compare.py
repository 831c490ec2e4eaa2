"""Comparison of evaluations: which are refused, which differences are noted, which problems are listed."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.cli.main import main
from cohort.errors import RunError
from cohort.evaluation.compare import compare, find_evaluation
from tests.helpers.evaluations import evaluation

BEFORE = {"a": [0.0], "b": [0.0], "c": [1.0], "d": [1.0], "e": [0.0]}
AFTER = {"e": [1.0], "d": [1.0], "c": [0.0], "b": [1.0], "a": [1.0]}


def test_problems_are_matched_by_id_not_by_place():
    found = compare(evaluation(BEFORE), evaluation(AFTER))
    assert [p.id for p in found.won] == ["a", "b", "e"] and [p.id for p in found.lost] == ["c"]
    assert (found.num_problems, found.difference.wins, found.difference.losses) == (5, 3, 1)
    assert found.difference.mean == pytest.approx(0.4, abs=1e-12)
    assert (found.won[0].question, found.won[0].first, found.won[0].second) == ("question a", 0.0, 1.0)
    assert found.notes == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grader": "g-2"}, "different graders, g-1 and g-2, and cannot be compared; the grader has changed"),
        ({"task": "countdown"}, "different tasks, arithmetic and countdown"),
        ({"split": "train"}, "different splits, test and train"),
    ],
)
def test_another_grader_task_or_split_is_refused(changes, words):
    with pytest.raises(RunError, match=words):
        compare(evaluation(BEFORE), evaluation(AFTER, **changes))


def test_another_setting_of_the_task_is_refused_unless_it_says_where_the_rows_are():
    a = {"find": "marked", "data": "here", "columns": [], "test_size": 5}
    compare(evaluation(BEFORE, knobs=a), evaluation(AFTER, knobs=a | {"data": "there", "test_size": 0}))
    for b in (a | {"find": "last"}, {k: v for k, v in a.items() if k != "find"}):
        with pytest.raises(
            RunError, match=r"settings of the task arithmetic: find = marked and (last|None). Evaluate both"
        ):
            compare(evaluation(BEFORE, knobs=a), evaluation(AFTER, knobs=b))


def test_other_problems_or_other_messages_are_refused():
    with pytest.raises(RunError, match="different problems, 5 and 4, of which 4 are in both"):
        compare(evaluation(BEFORE), evaluation({k: v for k, v in AFTER.items() if k != "a"}))
    with pytest.raises(RunError, match="different problems, 4 and 5"):
        compare(evaluation({k: v for k, v in AFTER.items() if k != "a"}), evaluation(BEFORE))
    other = evaluation(AFTER)
    items = [replace(item, messages=[{"role": "user", "content": "else"}]) for item in other.items]
    with pytest.raises(RunError, match='problem "a" has different messages'):
        compare(evaluation(BEFORE), replace(other, items=items))


def test_another_template_or_temperature_is_noted():
    sampling = {"max_tokens": 64, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": []}
    found = compare(evaluation(BEFORE), evaluation(AFTER, template="text", sampling=sampling, model="other"))
    assert found.notes == ["template is chat in A and text in B", "temperature is 1.0 in A and 0.0 in B"]


def test_problems_without_a_score_are_left_out_and_noted():
    found = compare(evaluation({**BEFORE, "f": [None]}), evaluation({**AFTER, "f": [1.0]}))
    assert found.num_problems == 5 and found.notes[0] == "1 problems without a score are left out"
    with pytest.raises(RunError, match="no problem has a score in both"):
        compare(evaluation({"f": [None]}), evaluation({"f": [1.0]}))


def test_the_command_prints_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, scores in (("a", BEFORE), ("b", AFTER)):
        (tmp_path / f"{name}.json").write_text(json.dumps(evaluation(scores, model=f"model {name}").to_json()))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["compare", *files, "--show", "2"]) == 0
    shown = capsys.readouterr().out
    assert "A           model a  0.400" in shown and "B           model b  0.800" in shown
    assert "B - A: +0.400" in shown and "p = 0.62 (exact McNemar): no significant difference" in shown
    assert "of 5 problems B wins 3, loses 1, and is equal on 1" in shown
    assert "won by B (3, the first 2):" in shown and "  0.00 -> 1.00  a: question a" in shown
    assert "lost by B (1):" in shown and "  1.00 -> 0.00  c: question c" in shown
    assert main(["compare", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["wins"] == 3 and [p["id"] for p in found["lost"]] == ["c"]
    assert found["first"]["setting"]["model"] == "model a"


def test_hostile_questions_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sides = []
    for score in (0.0, 1.0):
        made = evaluation({"x": [score]})
        item = replace(made.items[0], messages=[{"role": "user", "content": "\x1b[2Jboo"}])
        file = tmp_path / f"{score}.json"
        file.write_text(json.dumps(replace(made, items=[item]).to_json()))
        sides.append(str(file))
    assert main(["compare", *sides]) == 0
    assert "\\x1b[2Jboo" in capsys.readouterr().out


def test_a_file_that_is_not_an_evaluation_is_refused(tmp_path: Path):
    file = tmp_path / "x.json"
    for text in ("", "{}", "[1]", '{"setting": {}}'):
        file.write_text(text)
        with pytest.raises(RunError, match="damaged or not an evaluation"):
            find_evaluation(file)
    with pytest.raises(RunError, match="there is no evaluation or run"):
        find_evaluation(tmp_path / "none.json")


ODD_VALUES = [None, -1, 10**400, 1.5, math.nan, "x", "\x1b\ud800", [], [None], {}, {"a": None}, True]


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to every value in nested JSON data, and of each list only to its first item."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in inner:
        yield from list_places(item, (*place, key))


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Returns a copy of nested JSON data with another value in one place."""
    if not place:
        return new
    inner = put(value[place[0]], place[1:], new)
    return {**value, place[0]: inner} if isinstance(value, dict) else [inner, *value[1:]]


def test_odd_values_in_a_file_are_compared_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "x.json", tmp_path / "y.json"
    data = evaluation(BEFORE).to_json()
    other.write_text(json.dumps(evaluation(AFTER).to_json()))
    codes: Counter[int] = Counter()
    changes = [(place, new) for place in list_places(data) for new in ODD_VALUES]
    for place, new in random.Random(0).sample(changes, 150):
        file.write_text(json.dumps(put(data, place, new)))
        codes[main(["compare", str(other), str(file), "--show=-1"])] += 1
    assert codes.keys() == {0, 2} and min(codes.values()) > 10
    assert not set("\x1b\x07") & set("".join(capsys.readouterr()))


def test_other_answers_to_the_same_questions_are_refused():
    with pytest.raises(RunError, match="same ids, but their rows, prompts or order differ"):
        compare(evaluation(BEFORE), evaluation(AFTER, rows="other"))


def test_a_difference_is_significant_only_if_interval_and_test_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Five wins of twenty: the normal interval excludes zero, but the exact test has p = 1/16."""
    sides = []
    for score in (0.0, 1.0):
        file = tmp_path / f"{score}.json"
        rows = {str(i): [score if i < 5 else 1.0] for i in range(20)}
        file.write_text(json.dumps(evaluation(rows).to_json()))
        sides.append(str(file))
    assert main(["compare", *sides]) == 0
    assert "p = 0.062 (exact McNemar): no significant difference" in capsys.readouterr().out


def test_a_runs_evaluations_are_found_without_its_tasks_file(tmp_path: Path):
    (tmp_path / "run" / "eval").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("task:\n  name: /gone/sums.py:sums\n")
    for step, scores in ((0, BEFORE), (4, AFTER)):
        file = tmp_path / "run" / "eval" / f"step-{step:06d}.json"
        file.write_text(json.dumps(evaluation(scores, step=step).to_json()))
    assert find_evaluation(tmp_path / "run").step == 4 and find_evaluation(tmp_path / "run@0").step == 0
    with pytest.raises(RunError, match="has no evaluation of step 2; it has evaluations of the steps 0, 4"):
        find_evaluation(tmp_path / "run@2")


def test_runs_are_called_as_the_user_calls_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for run, scores, template in (("lr-low", BEFORE, "chat"), ("grid/002-hot", AFTER, "text")):
        (tmp_path / "runs" / run / "eval").mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").touch()
        for step in (0, 3, 5):
            made = evaluation(scores, step=step, template=template, model="tiny")
            (tmp_path / "runs" / run / "eval" / f"step-{step:06d}.json").write_text(json.dumps(made.to_json()))
    shown = {}
    for sides in ("lr-low grid/002", "lr-low@3 grid/002@best", "lr-low@0 lr-low", "lr-low lr-low"):
        assert main(["compare", *sides.split()]) == 0
        shown[sides] = capsys.readouterr().out
    assert "A           lr-low step 5  " in shown["lr-low grid/002"]
    assert "B           grid/002 step 5  " in shown["lr-low grid/002"]
    assert "note: template is chat in lr-low and text in grid/002" in shown["lr-low grid/002"]
    assert "A           lr-low step 3  " in shown["lr-low@3 grid/002@best"]
    assert "B           grid/002@best (step 3)  " in shown["lr-low@3 grid/002@best"]
    assert "A           lr-low step 0  " in shown["lr-low@0 lr-low"]
    assert "B           lr-low step 5  " in shown["lr-low lr-low"]
    with pytest.raises(RunError, match=r"there is no evaluation or run lr-lwo@3\. Did you mean lr-low\?"):
        find_evaluation(Path("lr-lwo@3"))
    (tmp_path / "runs" / "grid" / "sweep.yaml").touch()
    with pytest.raises(RunError, match=r"grid is a sweep: name one of its 1 runs, such as grid/002\."):
        find_evaluation(Path("grid"))


def test_the_step_of_a_checkpoint_stands_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    models = {"a": "runs/one@3", "b": "tiny"}
    for name, model in models.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(evaluation(BEFORE, model=model, step=3).to_json()))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    shown = capsys.readouterr().out
    assert "A           runs/one@3   0" in shown and "B           tiny step 3  0" in shown
