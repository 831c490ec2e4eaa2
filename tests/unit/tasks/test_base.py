"""The definition of tasks: registration, rows, scores, self-checks and references."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import ConfigError, TaskError
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import (
    SelfCheck,
    Verdict,
    check_parts,
    get_task,
    grade,
    list_task_names,
    load_rows,
    make_plain_answer,
    run_self_check,
    task,
)
from cohort.tasks.ref import TaskRef, load_file


@task("spelling")
class Spelling:
    words: tuple[str, ...] = ("group", "cohort")
    parts = ("correct", "brief")

    def rows(self, split: str) -> Iterator[dict]:
        for word in self.words:
            yield {"word": word}

    def prompt(self, row: dict) -> list[dict]:
        return [{"role": "user", "content": f"Spell {row['word']} backwards."}]

    def score(self, row: dict, answer: Any) -> Verdict:
        right = answer.text == row["word"][::-1]
        return Verdict({"correct": right, "brief": -0.5}, "" if right else "not its mirror image")

    def gold(self, row: dict) -> str:
        return row["word"][::-1]


def test_the_decorator_makes_a_frozen_dataclass_with_settings() -> None:
    made = get_task("spelling")(words=("abc",))
    assert [f.name for f in fields(made)] == ["words"]
    assert (made.name, made.accuracy, made.parts) == ("spelling", "correct", ("correct", "brief"))
    assert made == Spelling(words=("abc",))
    with pytest.raises(FrozenInstanceError):
        made.words = ()
    assert "spelling" in list_task_names()
    assert {"arithmetic", "countdown"} <= set(list_task_names())


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'unknown task "arithmetics".*Did you mean "arithmetic"'):
        get_task("arithmetics")


def rows(self: Any, split: str) -> list:
    return []


def test_bad_classes_are_refused() -> None:
    with pytest.raises(TaskError, match="has no method score"):
        task("half")(type("Half", (), {"rows": rows, "prompt": rows}))
    body = {"rows": rows, "prompt": rows, "score": rows}
    with pytest.raises(TaskError, match="lower-case"):
        task("Bad Name")
    with pytest.raises(TaskError, match="is not frozen"):
        task("thawed")(dataclass(type("Thawed", (), dict(body))))
    with pytest.raises(TaskError, match="not among its parts"):
        task("mute")(type("Mute", (), {**body, "parts": ("style",)}))
    with pytest.raises(TaskError, match="already registered"):
        task("spelling")(type("Other", (), dict(body)))
    with pytest.raises(TaskError, match="already registered"):
        task("arithmetic")(type("Fake", (), dict(body)))


def with_rows(*rows: Any) -> Any:
    """Returns a task with these rows in every split."""

    class Given(Spelling):
        def rows(self, split: str) -> Iterator[Any]:
            yield from rows

    return Given()


def test_ids_are_filled_in_from_the_content() -> None:
    first, second = load_rows(with_rows({"b": 1, "a": 2}, {"a": 3, "b": 1}), "train")
    assert first["id"] != second["id"]
    assert len(first["id"]) == 16
    reordered = load_rows(with_rows({"a": 2, "b": 1}), "train")[0]
    assert reordered["id"] == first["id"]
    assert load_rows(with_rows({"id": 7, "x": (1, 2)}), "train") == [{"id": "7", "x": [1, 2]}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (({"id": "a"}, {"id": "b"}, {"id": "a"}), 'rows 0 and 2 .counted from 0. of "train" have the same id "a"'),
        (({"id": 1}, {"id": "1"}), "same id"),
        (({"x": 1}, {"x": 1}), "same id"),
        (({"id": ""},), "has the id ''"),
        (({"id": True},), "has the id True"),
        (({"id": [1]},), "has the id"),
        ((["x"],), "is a list; its method `rows` must yield dicts"),
        (({"x": {1, 2}},), "cannot be written as JSON"),
        ((), 'has no "train" rows'),
    ],
)
def test_bad_rows_are_refused(given: tuple, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_rows(with_rows(*given), "train")


@pytest.mark.parametrize(
    ("scored", "message"),
    [
        ({"correct": float("nan"), "brief": 0}, "gave nan .* for 'correct'"),
        ({"correct": 1, "brief": float("inf")}, "gave inf .* for 'brief'"),
        ({"correct": 1, "brief": 10**400}, "gave inf .* for 'brief'"),
        ({"correct": 1, "brief": "1"}, "gave '1' for part 'brief'; return a number"),
        ({"correct": 1, "brief": None}, "; return a number"),
        ({"correct": 1, "brief": 1j}, "; return a number"),
        ({"correct": 1}, "returned no part 'brief'"),
        ({"correct": 1, "brief": 0, "charm": 2}, "returned the part 'charm'"),
        ({"correct": 0.5, "brief": 0}, "gave 0.5 for 'correct', the accuracy"),
        (1.0, "parts as a float"),
        (None, "parts as a NoneType"),
    ],
)
def test_bad_scores_name_task_and_row(scored: Any, message: str) -> None:
    with pytest.raises(TaskError, match=f'task "spelling", row "r7".*{message}'):
        check_parts("spelling", "r7", ("correct", "brief"), "correct", scored)


def test_booleans_count_as_0_and_1_and_reasons_travel() -> None:
    row = {"id": "0", "word": "abc"}
    right, wrong = (grade(Spelling(), row, make_plain_answer(text)) for text in ("cba", "abc"))
    assert (right.parts, right.reason) == ({"correct": 1.0, "brief": -0.5}, "")
    assert (wrong.parts, wrong.reason) == ({"correct": 0.0, "brief": -0.5}, "not its mirror image")
    assert type(right.parts["correct"]) is float


def test_self_check_counts_and_catches() -> None:
    assert run_self_check(Spelling(), 20) == SelfCheck(4, 4)

    class Wrong(Spelling):
        def gold(self, row: dict) -> str:
            return "?"

    with pytest.raises(TaskError, match="the gold answer '\\?' scores"):
        run_self_check(Wrong())

    class Gift(Spelling):
        def score(self, row: dict, answer: Any) -> Verdict:
            return Verdict({"correct": 0, "brief": 0.1})

    with pytest.raises(TaskError, match="an empty answer scores"):
        run_self_check(Gift())
    with pytest.raises(TaskError, match=r"no row of task .* was checked"):
        run_self_check(with_rows())


USER_FILE = """
from cohort.tasks.base import task
import {helper}

@task("{name}")
class Mine:
    sizes: tuple[int, ...] = (1, 2)
    def rows(self, split): yield {{"n": {helper}.N}}
    def prompt(self, row): return [{{"role": "user", "content": "?"}}]
    def score(self, row, answer): return {{"correct": len(self.sizes) == 3}}
"""


def test_a_reference_makes_the_same_task_again(tmp_path: Path) -> None:
    assert TaskRef.from_task(Arithmetic(max_terms=5)).load() == Arithmetic(max_terms=5)
    (tmp_path / "my_helper_a.py").write_text("N = 41")
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE.format(name="mine-a", helper="my_helper_a"))
    made = load_file(file).Mine(sizes=(4, 5, 6))
    ref = TaskRef.from_task(made)
    assert (ref.name, ref.settings, ref.path) == ("mine-a", {"sizes": [4, 5, 6]}, str(file))
    assert ref.load() == made
    assert load_file(file) is load_file(str(file))
    with pytest.raises(TaskError, match='no setting "size"'):
        TaskRef(name="mine-a", settings={"size": 1}, path=str(file)).load()
    with pytest.raises(TaskError, match="there is no file"):
        load_file(tmp_path / "absent.py")


def test_tasks_import_without_torch_and_quickly() -> None:
    code = "import cohort.tasks.stream, cohort.tasks.arithmetic, cohort.tasks.countdown, cohort.scoring.pool;"
    code += "import sys;"
    code += "print([m for m in ('torch', 'transformers', 'numpy', 'yaml', 'rich') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
