"""The counts of scripts/architecture.py, on a package that is small enough to count by hand."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from scripts import architecture

FILES = {
    "tests/unit/project/test_architecture.py": 'LAYERS = {0: ("types",), 1: ("tasks",), 2: ("cli",)}\n',
    "src/cohort/types.py": (
        '"""What\nall use."""\n\nSIZE = 3  # a comment\n\n\ndef _half():\n    """Of it."""\n    return SIZE / 2\n'
    ),
    "src/cohort/tasks/__init__.py": "",
    "src/cohort/tasks/sums.py": (
        "import os\n\nfrom cohort import types\nfrom cohort.types import SIZE, _half\n\n\n"
        "class Sums:\n    def __init__(self):\n        self._total = SIZE\n\n    def join(self, other):\n"
        "        os._exit(0)\n        return self._total + other._total + types._half()\n"
    ),
    "src/cohort/cli/main.py": (
        "import cohort.types\nfrom cohort.tasks import sums\nfrom cohort.tasks.sums import Sums\n\n\n"
        "def main():\n    return sums, Sums()._total, cohort.types.SIZE\n"
    ),
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def shape(tmp_path: Path) -> architecture.Shape:
    return architecture.measure_tree(write(tmp_path / "tree", FILES))


def test_the_examples() -> None:
    assert doctest.testmod(architecture).attempted > 0 == doctest.testmod(architecture).failed


def test_sizes_of_the_parts(shape: architecture.Shape) -> None:
    parts = shape.parts
    assert list(parts) == ["types", "tasks", "cli"]  # by layer
    assert [part.files for part in parts.values()] == [1, 2, 1]
    assert [part.code_lines for part in parts.values()] == [3, 9, 5]
    tasks = parts["tasks"]
    assert (tasks.lengths, tasks.median, tasks.p90) == ([2, 3], 2.5, 3)
    assert tasks.longest == architecture.Function(name="join", place="tasks/sums.py:11", lines=3)


def test_imports_between_layers_count_once_per_pair_of_modules(shape: architecture.Shape) -> None:
    assert shape.edges == {(1, 0): 1, (2, 0): 1, (2, 1): 1}


def test_private_names_of_other_files(shape: architecture.Shape) -> None:
    """Not those of the file itself, and not those of the standard library."""
    assert sorted(shape.private["src"]) == [
        "src/cohort/cli/main.py:7 uses Sums()._total",
        "src/cohort/tasks/sums.py:13 uses types._half",
        "src/cohort/tasks/sums.py:4 imports cohort.types._half",
    ]


def test_before_and_after(shape: architecture.Shape, tmp_path: Path) -> None:
    changed = {**FILES, "src/cohort/types.py": "SIZE = 3\nONE = 1\n", "src/cohort/cli/main.py": ""}
    changed["src/cohort/cli/more.py"] = "import cohort.types\n\n\ndef run():\n    return cohort.types._SIZES\n"
    report = architecture.make_report(architecture.measure_tree(write(tmp_path / "new", changed)), shape, markdown=True)
    lines = report.splitlines()
    assert "| types | 0 | 1 | 3 -> 2 | 1 -> 0 | 3 -> 0 | 3 -> 0 |  |  |" in lines
    assert "| cli | 2 | 1 -> 2 | 5 -> 3 | 1 | 2 | 2 | 2 (run, cli/more.py:4) |  |" in lines
    assert "| 2 | 1 | 1 -> 0 |  |" in lines  # from the command line to the layers below
    assert lines[lines.index("src: 3") + 1] == "- src/cohort/cli/more.py:5 uses cohort.types._SIZES"


def test_a_part_that_is_gone_or_new(shape: architecture.Shape, tmp_path: Path) -> None:
    files = {name: text for name, text in FILES.items() if "/cli/" not in name}
    smaller = architecture.measure_tree(write(tmp_path / "new", files))
    assert architecture.make_part_rows(smaller, shape)[-2][:5] == ["cli", "2", "1 -> 0", "5 -> 0", "1 -> 0"]
    assert architecture.make_part_rows(shape, smaller)[-2][:5] == ["cli", "2", "0 -> 1", "0 -> 5", "0 -> 1"]


def test_a_module_in_a_folder_can_have_a_layer_of_its_own(tmp_path: Path) -> None:
    layers = 'LAYERS = {0: ("types",), 1: ("tasks",), 2: ("cli", "tasks.sums")}\n'
    shape = architecture.measure_tree(
        write(tmp_path / "tree", {**FILES, "tests/unit/project/test_architecture.py": layers})
    )
    assert list(shape.parts) == ["types", "tasks", "cli", "tasks.sums"]
    assert shape.edges == {(2, 0): 2}


def test_the_architecture_test_may_be_at_its_old_place(shape: architecture.Shape, tmp_path: Path) -> None:
    files = {name.replace("/project/", "/"): text for name, text in FILES.items()}
    assert architecture.measure_tree(write(tmp_path / "old", files)) == shape


def test_the_layers_of_this_tree_are_found() -> None:
    layers = architecture.read_layers(architecture.ROOT)
    package = architecture.ROOT / "src" / "cohort"
    main = architecture.measure_module(package / "cli" / "main.py", package)
    assert {architecture.find_part(name, layers) for name in (main.name, *main.imports)} <= layers.keys()
    assert layers["types"] == 0 < layers["cli"]
