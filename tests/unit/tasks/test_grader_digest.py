"""The digest of a grader covers all code that scores, and no other code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import get_task
from cohort.tasks.gsm8k import GSM8K
from cohort.tasks.ifeval import instructions
from cohort.tasks.ifeval.task import IFEval
from cohort.tasks.mathematics.task import Math500
from cohort.tasks.ref import compute_grader_digest
from cohort.user_code import load_file

FILE = """
import cohort
from helper import right


@cohort.task("helped")
class Helped:
    def rows(self, split): yield {"id": "0"}
    def prompt(self, row): return [{"role": "user", "content": "?"}]
    def score(self, row, answer): return {"correct": right(answer.text)}
"""


def record_reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Returns a set that is filled with the names of the files that are read from now on."""
    seen: set[str] = set()
    read = Path.read_bytes

    def watched(path: Path) -> bytes:
        seen.add(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", watched)
    return seen


def test_every_check_of_ifeval_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(instructions.__file__).parent
    seen = record_reads(monkeypatch)
    compute_grader_digest(IFEval())
    checks = {p.name for p in folder.glob("*.py")} - {"__init__.py"}
    assert checks - seen <= {"gold.py", "phrases.py"} and {"formats.py", "sentences.py", "task.py"} <= seen


def test_the_readers_of_numbers_and_expressions_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_reads(monkeypatch)
    compute_grader_digest(GSM8K())
    assert {"gsm8k.py", "numbers.py", "answers.py", "expression.py"} <= seen and "arithmetic.py" not in seen
    compute_grader_digest(Math500())
    assert {"task.py", "equality.py", "notation.py", "quantity.py"} <= seen


def test_it_names_the_task_and_not_its_settings() -> None:
    assert compute_grader_digest(Arithmetic()).startswith("arithmetic-")
    assert compute_grader_digest(Arithmetic()) == compute_grader_digest(Arithmetic(max_terms=5))


def test_a_users_own_module_beside_the_task_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper.py").write_text("def right(text): return float(text == 'a')\n")
    (tmp_path / "my_task.py").write_text(FILE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    load_file(tmp_path / "my_task.py")
    task = get_task("helped")()
    before = compute_grader_digest(task)
    (tmp_path / "helper.py").write_text("def right(text): return float(text == 'b')\n")
    assert compute_grader_digest(task) != before
    sys.modules.pop("helper", None)


def test_relative_imports_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task in a package: modules beside it, below it and above it score too."""
    package = tmp_path / "graders_of_mine"
    (package / "tasks" / "sub").mkdir(parents=True)
    for folder in (package, package / "tasks", package / "tasks" / "sub"):
        (folder / "__init__.py").write_text("")
    helpers = [package / name for name in ("tasks/near.py", "tasks/other.py", "tasks/sub/deep.py", "above.py")]
    for file in helpers:
        file.write_text("right = 1.0\n")
    imports = "from .near import right\nfrom . import other\nfrom ..above import right\nfrom .sub.deep import right"
    source = FILE.replace("from helper import right", imports).replace("helped", "relative")
    (package / "tasks" / "task.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        task = importlib.import_module("graders_of_mine.tasks.task").Helped()
        digests = {compute_grader_digest(task), compute_grader_digest(task)}
        for file in helpers:
            file.write_text("right = 2.0\n")
            digests.add(compute_grader_digest(task))
        assert len(digests) == 1 + len(helpers)
    finally:
        for name in [n for n in sys.modules if n.startswith("graders_of_mine")]:
            del sys.modules[name]
