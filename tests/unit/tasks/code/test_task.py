"""The task code: its rows in all forms, the problems that come with it, verdicts, and scoring in workers."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import SandboxError, TaskError
from cohort.sandbox import forbid, run
from cohort.scoring.pool import ScoringPool
from cohort.system.kernel import is_process_alive, list_children
from cohort.tasks.base import get_task, load_rows, make_plain_answer
from cohort.tasks.code.judging import is_same_output, is_same_value
from cohort.tasks.code.rows import make_row
from cohort.tasks.code.task import Code
from cohort.tasks.grading import grade
from cohort.tasks.self_check import run_self_check

MBPP = {
    "task_id": 7,
    "text": "Write a function to add.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'import math\n\n\ndef half(n: int) -> float:\n    """The half.\n    >>> half(3)\n    1.5\n    """\n',
    "canonical_solution": "    return n / 2\n",
    "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate(3) == 1.5, 'first'\n"
    "    assert abs(candidate(1) - 0.5) < 1e-6\n    assert True, 'always'\n",
    "entry_point": "half",
}


def make_task(folder: Path, *rows: dict[str, Any], **settings: Any) -> Code:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Code(data=str(folder / "rows.jsonl"), **settings)


def score(task: Code, row: dict[str, Any], text: str) -> tuple[float, float, str]:
    outcome = grade(task, row, make_plain_answer(text))
    return outcome.parts["correct"], outcome.parts["passed"], outcome.reason


def test_every_problem_that_comes_with_cohort() -> None:
    """Its solution passes, and an empty answer does not."""
    task = Code()
    assert len(load_rows(task, "train")) >= 60 and len(load_rows(task, "test")) >= 20
    found = run_self_check(task, 1000)
    assert found.num_gold == found.num_rows == len(load_rows(task, "train")) + len(load_rows(task, "test"))


def test_no_solution_passes_the_tests_of_another_problem() -> None:
    """So the tests tell problems apart. The names of the functions would tell it too, so these are made the same."""
    rows = [row for row in load_rows(Code(), "test") if len(row["functions"]) == 1 and "assert" in row["tests"][0]]
    sources = {row["id"]: row["solution"].replace(f"{row['functions'][0]}(", "same(") for row in rows}
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        tests = [{"assert": test["assert"].replace(f"{row['functions'][0]}(", "same(")} for test in row["tests"]]
        changed = {**row, "tests": tests, "functions": ["same"]}
        assert score(Code(), changed, sources[row["id"]])[0] == 1
        assert score(Code(), changed, sources[other["id"]])[0] == 0


def test_rows_of_mbpp(tmp_path: Path) -> None:
    task = make_task(tmp_path, MBPP)
    [row] = load_rows(task, "test")
    assert row["id"] == "7" and [t["assert"] for t in row["tests"]] == MBPP["test_list"]
    assert score(task, row, task.gold(row))[:2] == (1, 1)
    assert "assert add(1, 2) == 3" in task.prompt(row)[0]["content"]
    assert "assert add(-1, 1)" not in task.prompt(row)[0]["content"]


def test_rows_of_humaneval(tmp_path: Path) -> None:
    task = make_task(tmp_path, HUMANEVAL, shown=0)
    [row] = load_rows(task, "test")
    assert [t["assert"] for t in row["tests"]] == [
        "assert half(3) == 1.5, 'first'",
        "assert abs(half(1) - 0.5) < 1e-06",
    ]
    assert score(task, row, task.gold(row))[:2] == (1, 1)
    assert task.prompt(row)[0]["content"].startswith("Complete this function:\n\n```python\nimport math")
    # A whole function, or only what follows the prompt.
    assert score(task, row, "```python\ndef half(n):\n    return n / 2\n```")[0] == 1
    assert score(task, row, "```python\n    return n / 2\n```")[0] == 1
    assert score(task, row, "```python\n    return n\n```")[:2] == (0, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": 5}, 'column "prompt" has 5'),
        ({"test_list": []}, 'column "test_list" has [], not a list of tests'),
        ({"test_list": [5]}, "neither a text nor an object"),
        ({"test_list": ["assert ("]}, "is no Python"),
        ({"test_list": [{"input": "a"}]}, "is neither"),
        ({"test_list": [{"input": 1, "output": "a"}]}, "is neither"),
        ({"test_list": [{"function": "f", "arguments": 1, "expected": 2}]}, "is neither"),
        ({"test_list": ["x = 1\nassert add(x, 1) == 2"]}, "--task.asserts skip"),
        ({"test_list": ["def check(candidate):\n    assert candidate(1)"]}, 'no column "entry_point"'),
        ({"code": 5}, 'column "code" has 5'),
        ({"test_imports": "import math"}, "not a list of texts"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as raised:
        load_rows(make_task(tmp_path, {**MBPP, **changes}), "test")
    assert said in str(raised.value) and "line 1" in str(raised.value)
    # The row has its columns: what is wrong is in one of them.
    assert 'has no column "test' not in str(raised.value)


def test_rows_that_cannot_be_judged_outside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = {**MBPP, "task_id": 8, "text": "Other", "test_list": ["for n in range(3):\n    assert add(n, n) == 2 * n"]}
    task = make_task(tmp_path, MBPP, loop, asserts="skip")
    assert [row["id"] for row in load_rows(task, "test")] == ["7"]
    assert "cannot be judged outside the sandbox: 1" in caplog.text
    task = make_task(tmp_path, MBPP, loop, asserts="trusted")
    rows = load_rows(task, "test")
    assert [row["id"] for row in rows] == ["7", "8"]
    assert [score(task, row, task.gold(row))[0] for row in rows] == [1, 1]


@pytest.mark.parametrize(
    "settings", [{"asserts": "x"}, {"shown": -1}, {"seconds": 0}, {"seconds": 11}, {"memory": 1}, {"memory": 10**6}]
)
def test_settings_that_are_not_allowed(settings: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="it needs"):
        Code(**settings)


def test_imports_and_setup_stand_before_the_program(tmp_path: Path) -> None:
    task = make_task(tmp_path, {**MBPP, "test_imports": ["import math"], "test_setup_code": "one = 1"})
    [row] = load_rows(task, "test")
    assert score(task, row, "def add(a, b):\n    return math.floor(a + b) * one")[0] == 1


IO_ROW = {"id": 1, "prompt": "Double.", "tests": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(4)]}


@pytest.mark.parametrize(
    ("source", "passed", "said"),
    [
        ("print(2 * int(input()))", 1.0, ""),
        ("n = int(input())\nprint(2 * n if n < 3 else 0)", 0.75, "test 4 of 4: wrong output"),
        ("print(1 / int(input()))", 0.0, "test 1 of 4: ZeroDivisionError: division by zero"),
        ("print(0)", 0.25, "test 2 of 4: wrong output"),
        ("import os\nos.fork()\nprint(2 * int(input()))", 0.0, "PermissionError: [Errno 1] Operation not permitted"),
        ("x = [0] * 10 ** 10", 0.0, "more memory than it may"),
        ("while True: pass", 0.0, "test 1 of 4: the program ran longer than it may"),
        ("while True: print(1)", 0.0, "wrote more than it may"),
        ("print(2 * int(input())", 0.0, "SyntaxError"),
    ],
)
def test_verdicts_on_inputs(tmp_path: Path, source: str, passed: float, said: str) -> None:
    task = make_task(tmp_path, IO_ROW, seconds=1.0)
    [row] = load_rows(task, "test")
    began = time.monotonic()
    correct, share, reason = score(task, row, f"```python\n{source}\n```")
    assert (correct, share) == (float(passed == 1), passed) and said in reason and bool(said) == bool(reason)
    # A program that takes too long is not run again for the other inputs.
    assert time.monotonic() - began < 10


def test_values() -> None:
    assert is_same_value({"a": [1, None, "x"]}, {"a": (1, None, "x")})
    assert not is_same_value([1], [1, 2]) and not is_same_value({"1": 1}, {1: 1}) and not is_same_value("1", 1)
    assert not is_same_value(0, False) and not is_same_value(None, 0) and not is_same_value(1.0, 10**400)
    assert is_same_value(2, 2.0) and not is_same_value(10**20, 10**20 + 1)
    # Of a whole number no share may be missing, and above 2^53 nothing.
    assert is_same_value(3, 3 + 5e-10) and not is_same_value(3, 3 + 5e-9) and not is_same_value(10**12, 1e12 + 0.5)
    assert is_same_value(10**17, 1e17) and not is_same_value(10**17 + 1, 1e17) and not is_same_value(0, math.inf)
    assert not is_same_value(0, math.nan) and is_same_value(1e12, 1e12 + 0.5) and is_same_value(2.0, 2)


def test_numbers_with_thousands_of_digits_are_compared(tmp_path: Path) -> None:
    tests = ["assert f(10**5000) == -(10**5000)", "assert f(1) == -1"]
    task = make_task(tmp_path, {"prompt": "Negate.", "tests": tests})
    [row] = load_rows(task, "test")
    assert score(task, row, "```python\ndef f(n): return -n\n```")[0] == 1.0
    assert score(task, row, "```python\ndef f(n): return n + 1\n```")[2] == (
        "test 1 of 2: assert f(10 ** 5000) == -10 ** 5000 fails"
    )


def test_outputs() -> None:
    assert is_same_output("a\nb\n", "a  \r\nb") and not is_same_output("a\nb", "a b")
    assert not is_same_output(" a", "a") and is_same_output("", "\n\n")


def test_a_sandbox_that_does_not_start_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    [row, *_] = load_rows(Code(), "train")
    answer = make_plain_answer(Code().gold(row))
    forbid("it holds keys")
    try:
        with pytest.raises(SandboxError, match="it holds keys"):
            grade(Code(), row, answer)
    finally:
        forbid("")
    monkeypatch.setattr(run._state, "missing", "no namespaces")
    with pytest.raises(TaskError, match=r"no namespaces.*--scoring.sandbox none"):
        grade(Code(), row, answer)


def test_rows_without_a_solution(tmp_path: Path) -> None:
    task = make_task(tmp_path, IO_ROW)
    [row] = load_rows(task, "test")
    with pytest.raises(TaskError, match='add a column "solution"'):
        task.gold(row)


def test_workers_score_programs_and_leave_nothing(tmp_path: Path) -> None:
    """Right, wrong and endless answers, in worker processes with their own limits. All processes end with the pool."""
    task = get_task("code")(seconds=1.0)
    rows = load_rows(task, "train")[:6]
    answers = [task.gold(row) for row in rows] + [
        "while True: pass",
        "import os\nos.kill(-1, 9)",
        "```python\n1/0\n```",
    ]
    with ScoringPool(task, 1) as pool:
        pairs = zip(rows + rows[:3], answers, strict=True)
        found = pool.score([(row, make_plain_answer(text)) for row, text in pairs])
        below = list_all_below(os.getpid())
    assert [o.parts["correct"] for o in found] == [1.0] * 6 + [0.0] * 3 and not any(o.failure for o in found)
    deadline = time.monotonic() + 10
    while any(map(is_process_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) >= 3 and not any(map(is_process_alive, below)), "guard, worker and spawner are gone"


def list_all_below(pid: int) -> list[int]:
    """Returns all processes below one, but for the spawner of this process."""
    own = run._state.spawner.process.pid if run._state.spawner else -1
    found: list[int] = []
    rest = [pid]
    while rest:
        children = [child for child in list_children(rest.pop()) if child != own]
        found += children
        rest += children
    return found


def test_a_killed_pool_leaves_no_program(tmp_path: Path) -> None:
    """The worker is in the middle of a program when it is killed."""
    task = get_task("code")(seconds=10.0)
    [row, *_] = load_rows(task, "train")
    pool = ScoringPool(task, 1)
    pool.submit("a", row, make_plain_answer("import time\ntime.sleep(1000)"))
    deadline = time.monotonic() + 30
    # Guard, worker, spawner, supervisor, init and program.
    while len(below := list_all_below(os.getpid())) < 6 and time.monotonic() < deadline:
        pool.poll(0.05)
    assert len(below) >= 6
    for pid in list_children(os.getpid()):
        if pid in below:
            os.kill(list_children(pid)[0], signal.SIGKILL)
    pool.close()
    while any(map(is_process_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_process_alive, below))


def test_made_rows_are_plain() -> None:
    row = make_row(MBPP, "refuse")
    assert json.loads(json.dumps(row)) == row


def test_the_place_of_a_solution(tmp_path: Path) -> None:
    rows = [{**MBPP, "task_id": n, "question": f"Add, number {n}.", "program": MBPP["code"]} for n in range(3)]
    renamed = [{name: value for name, value in row.items() if name not in ("text", "code")} for row in rows]
    task = make_task(tmp_path, *renamed, columns=("text=question", "code=program"))
    assert [task.locate_gold(row) for row in load_rows(task, "test")] == [
        f'column "program" of {tmp_path / "rows.jsonl"}, line {n}' for n in (1, 2, 3)
    ]
