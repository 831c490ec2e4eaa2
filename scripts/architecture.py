"""Measure the shape of the package: imports between layers, private names used from outside, sizes of the parts.

    python scripts/architecture.py [--base COMMIT] [--markdown]

A part is a top-level module or package of src/cohort; its layer is read from LAYERS in
tests/unit/project/test_architecture.py. With `--base`, every number of that commit stands before this checkout's.
The last column of the table of parts is for a sentence by hand: why the part grew.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function or method: its place, as file:line, and its lines from `def` to the end."""

    name: str
    place: str
    lines: int


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file of the package. `name` and `imports` have no "cohort." in front."""

    name: str
    code_lines: int
    functions: list[Function]
    imports: set[str]

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The sizes of one part. One that a tree does not have is all zeros."""

    files: int = 0
    code_lines: int = 0
    functions: list[Function] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return sorted(f.lines for f in self.functions)

    @property
    def median(self) -> float:
        return statistics.median(self.lengths) if self.functions else 0

    @property
    def p90(self) -> int:
        return percentile(self.lengths, 90)

    @property
    def longest(self) -> Function | None:
        return max(self.functions, key=lambda f: f.lines, default=None)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All that is measured of a tree.

    `layers` maps a part to its layer. `private` names, per folder, each use of a private name of another file.
    """

    modules: list[Module]
    layers: dict[str, int]
    private: dict[str, list[str]]

    @property
    def parts(self) -> dict[str, Part]:
        names = sorted({module.part for module in self.modules}, key=lambda name: (self.layers.get(name, 99), name))
        return {name: total([m for m in self.modules if m.part == name]) for name in names}

    @property
    def edges(self) -> Counter[tuple[int, int]]:
        """How many modules of one layer are imported by modules of another: each pair of modules counts once."""
        found: Counter[tuple[int, int]] = Counter()
        for module in self.modules:
            for name in module.imports:
                here, there = (self.layers.get(part) for part in (module.part, name.partition(".")[0]))
                if here is not None and there is not None and here != there:
                    found[here, there] += 1
        return found


def total(modules: list[Module]) -> Part:
    functions = [function for module in modules for function in module.functions]
    return Part(files=len(modules), code_lines=sum(m.code_lines for m in modules), functions=functions)


def percentile(values: list[int], percent: int) -> int:
    """The smallest value that at least `percent` of the sorted values do not exceed.

    >>> percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 90), percentile([7], 90), percentile([], 90)
    (9, 7, 0)
    """
    return values[-(-len(values) * percent // 100) - 1] if values else 0


def code_lines(source: str) -> int:
    """Lines that are neither blank nor comments nor docstrings.

    >>> code_lines('def f():  # why\\n    \"\"\"What.\"\"\"\\n\\n    # more\\n    return 1\\n')
    2
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def imported(tree: ast.Module, package: Path) -> Iterator[str]:
    """The modules of the package that a file imports; `from a import b` counts as a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != package.name:
                continue
            while len(parts) > 1:
                file = package.joinpath(*parts[1:])
                if file.with_suffix(".py").exists() or (file / "__init__.py").exists():
                    yield ".".join(parts[1:])
                    break
                parts.pop()


def own_names(tree: ast.Module) -> set[str]:
    """The functions, variables and fields of a file, those of its classes included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
    return found


def foreign_modules(tree: ast.Module, package: str) -> set[str]:
    """The names under which a file knows modules of others: their private names are not ours to judge."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            found |= {name for name in names if name != package}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in (package, "tests"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def private_uses(tree: ast.Module, place: str, package: str = "cohort") -> Iterator[str]:
    """Private names of other files: imported, or read from an object by a file that has no such name itself."""
    own, foreign = own_names(tree), foreign_modules(tree, package)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{place}:{node.lineno} imports {node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            whole = ast.unparse(node)
            if whole.partition(".")[0] not in foreign:
                yield f"{place}:{node.lineno} uses {whole}"


def measure_module(path: Path, package: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    place = path.relative_to(package).as_posix()
    parts = list(path.relative_to(package).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    functions = [
        Function(name=node.name, place=f"{place}:{node.lineno}", lines=(node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Module(
        name=".".join(parts),
        code_lines=code_lines(source),
        functions=functions,
        imports=set(imported(tree, package)),
    )


def read_layers(root: Path) -> dict[str, int]:
    """The layer of each part, from the architecture test of a tree."""
    text = (root / "tests" / "unit" / "test_architecture.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            table: dict[int, tuple[str, ...]] = ast.literal_eval(node.value)
            return {part: layer for layer, parts in table.items() for part in parts}
    raise SystemExit(f"{root}: the architecture test has no LAYERS")


def measure(root: Path) -> Shape:
    """The shape of the tree at `root`."""
    package = root / "src" / "cohort"
    modules = [measure_module(path, package) for path in sorted(package.rglob("*.py"))]
    private: dict[str, list[str]] = {}
    for folder in FOLDERS:
        private[folder] = []
        for path in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            private[folder] += private_uses(tree, path.relative_to(root).as_posix(), package.name)
    return Shape(modules=modules, layers=read_layers(root), private=private)


# ---- printing --------------------------------------------------------------------------------------------------


def change(before: float | None, after: float) -> str:
    """A number, after the number of the base where there is one.

    >>> change(None, 5), change(5, 5), change(4, 5.5)
    ('5', '5', '4 -> 5.5')
    """
    return f"{after:g}" if before is None or before == after else f"{before:g} -> {after:g}"


def table(rows: list[list[str]], markdown: bool) -> str:
    """Rows under each other; the first is the head."""
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def part_row(name: str, layer: str, part: Part, base: Part | None) -> list[str]:
    longest = part.longest
    return [
        name,
        layer,
        change(base and base.files, part.files),
        change(base and base.code_lines, part.code_lines),
        change(base and len(base.functions), len(part.functions)),
        change(base and base.median, part.median),
        change(base and base.p90, part.p90),
        f"{longest.lines} ({longest.name}, {longest.place})" if longest else "",
        "",
    ]


def part_rows(shape: Shape, base: Shape | None) -> list[list[str]]:
    """A row per part, those that only the base has included, and one for the whole package."""
    rows = [["part", "layer", "files", "code lines", "functions", "median", "p90", "longest function", "why it grew"]]
    old = base.parts if base else {}
    for name, part in {**shape.parts, **{name: Part() for name in old if name not in shape.parts}}.items():
        layer = shape.layers.get(name, (base or shape).layers.get(name, "?"))
        rows.append(part_row(name, str(layer), part, old.get(name, Part()) if base else None))
    return [*rows, part_row("all", "", total(shape.modules), total(base.modules) if base else None)]


def edge_rows(shape: Shape, base: Shape | None) -> list[list[str]]:
    """How many imports go from each layer to each other."""
    layers = sorted({layer for s in (shape, base) if s for pair in s.edges for layer in pair})
    rows = [["from \\ to", *map(str, layers)]]
    for here in layers:
        numbers = [change(base and base.edges[here, there], shape.edges[here, there]) for there in layers]
        rows.append([str(here), *("" if number == "0" else number for number in numbers)])
    return rows


def private_list(shape: Shape, base: Shape | None) -> str:
    """How many private names each folder uses of another file, and where; with a base, only the new ones."""
    lines = []
    for folder, uses in shape.private.items():
        old = base.private[folder] if base else []
        lines.append(f"{folder}: {change(len(old) if base else None, len(uses))}")
        known = {use.partition(" ")[2] for use in old}  # without the line, which moves
        lines += [f"- {use}" for use in uses if use.partition(" ")[2] not in known]
    return "\n".join(lines)


def report(shape: Shape, base: Shape | None, markdown: bool) -> str:
    return "\n\n".join(
        [
            table(part_rows(shape, base), markdown),
            "Imports from layer to layer (pairs of modules):",
            table(edge_rows(shape, base), markdown),
            "Private names used from another file" + (", and which are new:" if base else ":"),
            private_list(shape, base),
        ]
    )


def unpack(commit: str, folder: Path) -> Path:
    """The files of a commit, in `folder`."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="COMMIT", help="also measure this commit and show what changed")
    parser.add_argument("--markdown", action="store_true", help="tables for a document")
    a = parser.parse_args()
    base = None
    if a.base:
        with tempfile.TemporaryDirectory() as folder:
            base = measure(unpack(a.base, Path(folder)))
    print(report(measure(ROOT), base, a.markdown))


if __name__ == "__main__":
    main()
