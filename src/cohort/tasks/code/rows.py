"""Rows of the task code: prompts with tests, from rows in Cohort's own form or in that of MBPP or HumanEval.

A test of a made row is a dict of one of four forms:

    {"input": text, "output": text}                              the program is run with an input
    {"function": name, "arguments": [...], "expected": value}    a function is called; the values are those of JSON
    {"assert": text}                                             an assertion that is judged outside the sandbox
    {"statement": text}                                          a statement that is run in the sandbox: a weaker test
"""

from __future__ import annotations

import ast
from typing import Any, Literal

from cohort.tasks.code.assertions import parse_assertion
from cohort.tasks.source import UnusableRow
from cohort.types import Row

Asserts = Literal["refuse", "skip", "trusted"]
COLUMNS = (
    *("id", "task_id", "prompt", "text", "tests", "test_list", "test", "entry_point", "split"),
    *("solution", "code", "canonical_solution", "test_imports", "test_setup_code"),
)
_CANDIDATE = "candidate"  # HumanEval's name for the function in its tests


def make_row(raw: dict[str, Any], asserts: Asserts) -> Row:
    """Returns a row with prompt, tests, solution, functions, head and skipped (why the row is to be left out, or "").

    `functions` are the names that the program defines as far as they are known. `head` is code that stands before the
    program: the beginning of a function that the prompt of HumanEval has. Raises ValueError for columns that do not
    fit, and for tests that cannot be judged outside the sandbox, unless `asserts` allows them.
    """
    name = "prompt" if raw.get("prompt") is not None else "text"
    prompt = raw.get(name)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'column "prompt" has {prompt!r:.60}, not a text')
    entry = _read_text(raw, "entry_point")
    is_humaneval = "canonical_solution" in raw or ("test" in raw and "tests" not in raw and "test_list" not in raw)
    head = prompt.rstrip() + "\n" if is_humaneval and f"def {entry}" in prompt else ""
    solution = _read_text(raw, "solution") or _read_text(raw, "code") or head + _read_text(raw, "canonical_solution")
    functions = sorted({*_list_definitions(solution), *([entry] if entry else [])})
    tests, problem = _make_tests(raw, entry, frozenset(functions))
    if problem and asserts == "refuse":
        raise UnusableRow(
            f"a test cannot be judged outside the sandbox ({problem}); leave such rows out with --task.asserts skip, "
            "or run such tests in the program's own process, which a program can cheat, with --task.asserts trusted"
        )
    setup = "\n".join([*_read_list(raw, "test_imports"), _read_text(raw, "test_setup_code")]).strip()
    row: Row = {
        "prompt": prompt.strip() if not head else prompt,
        "tests": tests,
        "solution": solution if solution.strip() else "",
        "functions": functions,
        "head": head,
        "setup": setup,
        "skipped": problem if problem and asserts == "skip" else "",
    }
    identity = raw.get("id") if raw.get("id") is not None else raw.get("task_id")
    return row if identity is None else row | {"id": identity}


def _read_text(raw: dict[str, Any], column: str) -> str:
    """Returns a column that may be missing; "" then. Raises ValueError if it has something other than a text."""
    value = raw.get(column)
    if value is not None and not isinstance(value, str):
        raise ValueError(f'column "{column}" has {value!r:.60}, not a text')
    return value or ""


def _read_list(raw: dict[str, Any], column: str) -> list[str]:
    """Returns a column of texts that may be missing; [] then. Raises ValueError if it is anything else."""
    value = raw.get(column) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'column "{column}" has {value!r:.60}, not a list of texts')
    return value


def _list_definitions(source: str) -> list[str]:
    """Returns the names of the functions and classes that a program defines; [] if it is no Python."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]


def _make_tests(raw: dict[str, Any], entry: str, functions: frozenset[str]) -> tuple[list[dict[str, Any]], str]:
    """Returns the tests of a row, and why one of them cannot be judged outside the sandbox; "" if all can."""
    column = next((name for name in ("tests", "test_list", "test") if raw.get(name) is not None), "tests")
    given = raw.get(column)
    if isinstance(given, str | dict):
        given = [given]
    if not isinstance(given, list) or not given:
        # Without any such column, another one may hold the tests.
        kind = ValueError if given is None else UnusableRow
        raise kind(
            f'column "{column}" has {given!r:.60}, not a list of tests' + ("" if given is None else "; correct it")
        )
    tests: list[dict[str, Any]] = []
    problems: list[str] = []
    for test in given:
        if isinstance(test, dict):
            tests.append(_check_test(test))
        elif isinstance(test, str):
            made, problem = _split_statements(test, entry, functions)
            tests += made
            problems += [problem] if problem else []
        else:
            raise UnusableRow(f'column "{column}" has the test {test!r:.60}, neither a text nor an object; correct it')
    if not tests:
        raise UnusableRow(f'column "{column}" has no tests; add some')
    return tests, problems[0] if problems else ""


_SHAPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "input": {"input": str, "output": str},
    "function": {"function": str, "arguments": list},
}


def _check_test(test: dict[str, Any]) -> dict[str, Any]:
    """Returns a test that is an object. Raises ValueError if it has neither of the two forms."""
    for kind, shape in _SHAPES.items():
        if kind in test:
            names = {*shape} if kind == "input" else {*shape, "expected"}
            if {*test} != names or not all(isinstance(test[name], form) for name, form in shape.items()):
                break
            return dict(test)
    raise UnusableRow(
        f'the test {test!r:.80} is neither {{"input": text, "output": text}} nor '
        '{"function": name, "arguments": [...], "expected": value}; correct it'
    )


def _split_statements(text: str, entry: str, functions: frozenset[str]) -> tuple[list[dict[str, Any]], str]:
    """Returns the tests in a piece of Python, and why they cannot be judged outside the sandbox; "" if they can.

    It is a series of assert statements, or HumanEval's function `check(candidate)` with a series of them.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnusableRow(f"the test {text!r:.60} is no Python; correct it") from None
    check = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is not None and not entry:
        raise UnusableRow(
            'the test is a function "check", but there is no column "entry_point" with the name of what it checks; add '
            "it, or set --task.columns entry_point=COLUMN"
        )
    tests = []
    try:
        for statement in body if check is None else check.body:
            if _does_nothing(statement):
                continue
            if check is not None:
                _rename_candidate(statement, entry)
            asserted = ast.unparse(statement)
            parse_assertion(asserted, functions)
            tests.append({"assert": asserted})
        if not tests:
            raise ValueError("it has no assertion")
    except ValueError as error:
        whole = text if check is None else f"{text}\ncheck({entry})"
        return [{"statement": whole}], f"{text.strip()[:60]!r}: {error}"
    return tests, ""


def _does_nothing(statement: ast.stmt) -> bool:
    """Returns whether a statement of a test is a docstring, `pass`, or an assertion of a constant that holds."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and bool(statement.test.value)
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _rename_candidate(statement: ast.stmt, entry: str) -> None:
    """Replaces HumanEval's `candidate` by the name of the function, in the statement itself."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == _CANDIDATE:
            node.id = entry
