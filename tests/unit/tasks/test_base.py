"""The definition of tasks: registration, rows, scores, self-checks and references."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cohort.config.kinds import list_reward_parts
from cohort.errors import ConfigError, TaskError, UserCodeError
from cohort.tasks import base
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import Verdict, get_task, list_task_names, load_rows, make_plain_answer, make_with_defaults, task
from cohort.tasks.calls import compute_summary, get_gold, make_messages
from cohort.tasks.grading import grade
from cohort.tasks.parts import check_parts
from cohort.tasks.ref import TaskRef
from cohort.tasks.self_check import SelfCheck, run_self_check
from cohort.user_code import load_file


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
        task("mute")(type("Mute", (), {**body, "parts": ("style",), "accuracy": "correct"}))
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
        ((), 'has no rows for the split "train"'),
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
    with pytest.raises(ConfigError, match="there is no file"):
        load_file(tmp_path / "absent.py")


def test_tasks_import_without_torch_and_quickly() -> None:
    code = "import cohort.tasks.stream, cohort.tasks.arithmetic, cohort.tasks.countdown, cohort.scoring.pool;"
    code += "import sys;"
    code += "print([m for m in ('torch', 'transformers', 'numpy', 'yaml', 'rich') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# -- tasks of users --------------------------------------------------------------------------------------------------


def make_own(**methods: Any) -> Any:
    """Returns a task like `Spelling` with other methods or attributes."""
    return type("Own", (Spelling,), methods)()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "`rows` returned None (is `return` missing? "),
        (None, '.py, line 231) for "train"; it must yield dicts, or return a list of them'),
        ("text", "`rows` returned a str"),
        ({"id": 1}, "`rows` returned a dict"),
        (5, "`rows` returned a int"),
        ([{"id": "a\ud800", "x": 1}], 'row 0 (counted from 0, id "a\\ud800") contains half a character'),
        ([{"id": "a", "x": ["\udc80"]}], 'row 0 (counted from 0, id "a") contains half a character'),
    ],
)
def test_rows_that_are_none_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_rows(make_own(rows=lambda self, split: returned), "train")
    assert message in str(caught.value)
    str(caught.value).encode()  # it can be printed


def test_rows_without_end_are_read_up_to_a_limit_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = make_own(rows=lambda self, split: ({"id": n} for n in count()))
    assert [row["id"] for row in load_rows(endless, "train", limit=3)] == ["0", "1", "2"]
    monkeypatch.setattr(base, "MAX_ROWS", 100)
    with pytest.raises(TaskError, match=r'`rows` gives more than 100 rows for "train"; let it end'):
        load_rows(endless, "train")


def test_an_exception_in_rows_is_the_users() -> None:
    def rows(self: Any, split: str) -> Iterator[Any]:
        yield {"id": "a"}
        yield {"id": [][1]}

    with pytest.raises(UserCodeError, match=r'the method rows of the task "spelling" raised IndexError') as caught:
        load_rows(make_own(rows=rows), "train")
    assert caught.value.place[1].strip() == 'yield {"id": [][1]}'


@pytest.mark.parametrize(
    ("method", "function", "words"),
    [
        ("rows", lambda self: [], "def rows(self, split)"),
        ("prompt", lambda self: [], "def prompt(self, row)"),
        ("score", lambda self, row: {}, "def score(self, row, answer)"),
        ("gold", lambda: "", "def gold(self, row)"),
        ("summary", lambda self, rows: {}, "def summary(self, rows, parts)"),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_when_it_is_defined(method: str, function: Any, words: str) -> None:
    sound = {name: getattr(Spelling, name) for name in ("rows", "prompt", "score")}
    with pytest.raises(TaskError) as caught:
        task("miscalled")(type("Miscalled", (), {**sound, method: function}))
    assert f"write {words}" in str(caught.value)
    flexible = {**sound, method: lambda *args, **more: None}
    task(f"flexible-{method}")(type("Flexible", (), {**flexible, "__qualname__": f"Flexible{method}"}))


def test_a_setting_without_a_default_is_named() -> None:
    sound = {name: getattr(Spelling, name) for name in ("rows", "prompt", "score")}
    cls = task("needy")(type("Needy", (), {**sound, "__annotations__": {"size": int}}))
    assert cls(size=3).size == 3  # a recipe can give it
    with pytest.raises(TaskError, match=r"its setting size has no default.* as in size: int = 1"):
        make_with_defaults(cls)


def test_a_gold_answer_and_a_summary_are_checked() -> None:
    row = {"id": "r"}
    assert get_gold(make_own(gold=None), row) is None
    with pytest.raises(TaskError, match='row "r": its method `gold` returned a int; return a right answer as text'):
        get_gold(make_own(gold=lambda self, row: 5), row)
    with pytest.raises(
        UserCodeError, match=r'the method gold of the task "spelling", for row "r" \(columns: id\), raised KeyError'
    ):
        get_gold(make_own(gold=lambda self, row: row["none"]), row)
    assert compute_summary(Spelling(), [row], [{"correct": 1.0}]) == {}
    assert compute_summary(make_own(summary=lambda self, rows, parts: {"a": True}), [row], [{}]) == {"a": 1.0}
    for wrong in ("good", None, {"a": "b"}, {"a": float("nan")}, {1: 1.0}, [1.0]):
        with pytest.raises(TaskError, match=r"`summary` returned .*; return a dict of finite numbers by name"):
            compute_summary(make_own(summary=lambda self, rows, parts, w=wrong: w), [row], [{}])


def test_a_prompt_is_checked_where_it_comes_in() -> None:
    row = {"id": "a\ud800"}
    for wrong in (None, 7, [], [{"content": "x"}], [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(
            TaskError, match=r'row "a\\ud800": .* the method `prompt`|row "a\\ud800": the method'
        ) as caught:
            make_messages(make_own(prompt=lambda self, row, w=wrong: w), row)
        str(caught.value).encode()


def test_a_forgotten_return_is_named_with_its_place() -> None:
    def score(self: Any, row: Any, answer: Any) -> None:
        _ = {"correct": 1.0, "brief": 1.0}

    place = f"is `return` missing\\? {__file__}, line {score.__code__.co_firstlineno}"
    for wrong in (score, lambda self, row, answer: None, lambda self, row, answer: Verdict(None)):  # type: ignore[arg-type]
        with pytest.raises(
            TaskError, match=r'row "r": the method `score` returned None \(is `return` missing\?'
        ) as caught:
            grade(make_own(score=wrong), {"id": "r"}, make_plain_answer("x"))
        assert wrong is not score or re.search(place, str(caught.value))
    with pytest.raises(TaskError, match=r"the method `prompt` must return .*not None \(is `return` missing\?"):
        make_messages(make_own(prompt=lambda self, row: None), {"id": "r"})


def test_partial_credit_in_the_accuracy_is_told_what_to_do() -> None:
    with pytest.raises(TaskError, match=r"return 0 or 1 for it, or set accuracy = None in the class for a continuous"):
        check_parts("t", "r", ("correct",), "correct", {"correct": 0.7})


def test_attributes_of_a_task_may_be_properties_that_its_settings_decide() -> None:
    def count(self: Any) -> tuple[str, ...]:
        return tuple(f"part{index}" for index in range(self.num))

    body: dict[str, Any] = {"__annotations__": {"num": int}, "num": 2, "rows": lambda self, split: []}
    body |= {"prompt": lambda self, row: "?", "score": lambda self, row, answer: {}}
    body |= {"parts": property(count), "accuracy": property(lambda self: self.parts[0])}
    body |= {"optional_parts": property(lambda self: self.num > 2), "packages": property(lambda self: {"a": "a"})}
    body |= {"max_tokens": property(lambda self: self.num * 8), "work_seconds": property(lambda self: 1.5)}
    body |= {"service": property(lambda self: True), "needs_sandbox": property(lambda self: True)}
    cls = task("counted")(type("Counted", (), body))
    made = [cls(num=num) for num in (1, 3)]
    assert [(m.parts, m.accuracy, m.optional_parts, m.max_tokens) for m in made] == [
        (("part0",), "part0", False, 8),
        (("part0", "part1", "part2"), "part0", True, 24),
    ]
    assert (made[0].packages, made[0].work_seconds, made[0].service, made[0].needs_sandbox) == (
        {"a": "a"},
        1.5,
        True,
        True,
    )
    assert list_reward_parts(made[1]) == ("part0", "part1", "part2")


def test_the_page_of_tasks_lists_what_a_grader_sees_and_its_example_works() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    section = page.split("### What a grader sees of an answer")[1].split("### ")[0]
    listed = re.findall(r"^\| `answer\.(\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(field.name for field in fields(make_plain_answer("")))
    [example] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    for calls, correct in ((["error", "ok"], 1.0), (["error"], 0.0), ([], 0.0)):
        answer = replace(make_plain_answer("7"), calls=calls)
        assert names["score"](None, {"price": 7}, answer) == {"correct": correct}
