"""Measures the shape of the package: imports between layers, private names used from outside, sizes of the parts.

    python scripts/architecture.py [--base COMMIT] [--markdown]

The parts and their layers are read from LAYERS in the architecture test of the measured tree. A part is a folder or
module of src/cohort, or a module inside a folder that has a layer of its own. With `--base`, every number of that
commit is printed before that of this checkout. The last column of the table is empty: it is for a sentence by hand
that says why the part grew.
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
# Where the architecture test is, in this tree and in earlier ones.
TESTS = ("tests/unit/project/test_architecture.py", "tests/unit/test_architecture.py")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function or method. `place` is file:line, and `lines` counts from `def` to the end."""

    name: str
    place: str
    lines: int


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file of the package. `name` and `imports` are dotted names without "cohort." in front."""

    name: str
    code_lines: int
    functions: list[Function]
    imports: set[str]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The sizes of one part. All are zero for a part that a tree does not have."""

    files: int = 0
    code_lines: int = 0
    functions: list[Function] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Lines of each function, shortest first."""
        return sorted(f.lines for f in self.functions)

    @property
    def median(self) -> float:
        """Median length of the functions, in lines; 0 without functions."""
        return statistics.median(self.lengths) if self.functions else 0

    @property
    def p90(self) -> int:
        """The length that 90 percent of the functions do not exceed."""
        return compute_percentile(self.lengths, 90)

    @property
    def longest(self) -> Function | None:
        """The longest function; None without functions."""
        return max(self.functions, key=lambda f: f.lines, default=None)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The measurements of one tree.

    `layers` maps each part to its layer. `private` lists, per folder, each use of a private name of another file.
    """

    modules: list[Module]
    layers: dict[str, int]
    private: dict[str, list[str]]

    @property
    def parts(self) -> dict[str, Part]:
        """The parts of the tree by name, lowest layer first. Parts without a layer come last."""
        members: dict[str, list[Module]] = {}
        for module in self.modules:
            members.setdefault(find_part(module.name, self.layers), []).append(module)
        names = sorted(members, key=lambda name: (self.layers.get(name, 99), name))
        return {name: add_up_modules(members[name]) for name in names}

    @property
    def edges(self) -> Counter[tuple[int, int]]:
        """The number of imports by (layer that imports, imported layer). Each pair of modules counts once."""
        edges: Counter[tuple[int, int]] = Counter()
        for module in self.modules:
            for name in module.imports:
                here, there = (self.layers.get(find_part(n, self.layers)) for n in (module.name, name))
                if here is not None and there is not None and here != there:
                    edges[here, there] += 1
        return edges


def find_part(module: str, layers: dict[str, int]) -> str:
    """Returns the longest part in `layers` that contains `module`; the first word of its name if there is none.

    >>> layers = {"evaluation": 5, "evaluation.standalone": 6}
    >>> [find_part(name, layers) for name in ("evaluation.standalone", "evaluation.record", "cli.main")]
    ['evaluation.standalone', 'evaluation', 'cli']
    """
    words = module.split(".")
    prefixes = [".".join(words[:n]) for n in range(len(words), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in layers), words[0])


def add_up_modules(modules: list[Module]) -> Part:
    """Returns the sizes of several modules together."""
    functions = [function for module in modules for function in module.functions]
    return Part(files=len(modules), code_lines=sum(m.code_lines for m in modules), functions=functions)


def compute_percentile(values: list[int], percent: int) -> int:
    """Returns the smallest of the sorted `values` that at least `percent` percent of them do not exceed; 0 for none.

    >>> compute_percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 90), compute_percentile([7], 90)
    (9, 7)
    """
    return values[-(-len(values) * percent // 100) - 1] if values else 0


def count_code_lines(source: str) -> int:
    """Returns the number of lines that are neither blank nor comments nor docstrings.

    >>> count_code_lines('def f():  # why\\n    \"\"\"What.\"\"\"\\n\\n    # more\\n    return 1\\n')
    2
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    # Strings that are statements are docstrings.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def is_private(name: str) -> bool:
    """Returns whether a name begins with one underscore, other than `_` itself."""
    return name.startswith("_") and not name.endswith("__") and name != "_"


def find_imports(tree: ast.Module, package: Path) -> Iterator[str]:
    """Yields the modules of `package` that a file imports. `from a import b` counts as a.b if that is a module."""
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
            # The longest beginning of the name that is a module: the end can be a class or function.
            while len(parts) > 1:
                file = package.joinpath(*parts[1:])
                if file.with_suffix(".py").exists() or (file / "__init__.py").exists():
                    yield ".".join(parts[1:])
                    break
                parts.pop()


def find_own_names(tree: ast.Module) -> set[str]:
    """Returns the names of functions, variables and fields that a file defines, also inside its classes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            names.add(node.attr)
    return names


def find_foreign_names(tree: ast.Module, package: str) -> set[str]:
    """Returns the names that a file imports from other packages. Their private names do not count."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            found |= {name for name in names if name != package}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in (package, "tests"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def find_private_uses(tree: ast.Module, place: str, package: str = "cohort") -> Iterator[str]:
    """Yields a line for each use of a private name of another file. `place` is the path of the file that uses it.

    A use is an import, or an attribute of an object if the file itself defines no such name.
    """
    own = find_own_names(tree)
    foreign = find_foreign_names(tree, package)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for alias in node.names:
                if is_private(alias.name):
                    yield f"{place}:{node.lineno} imports {node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            # The first word of the expression tells whether it belongs to another package.
            whole = ast.unparse(node)
            if whole.partition(".")[0] not in foreign:
                yield f"{place}:{node.lineno} uses {whole}"


def measure_module(path: Path, package: Path) -> Module:
    """Returns the measurements of one file of the folder `package`."""
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
        code_lines=count_code_lines(source),
        functions=functions,
        imports=set(find_imports(tree, package)),
    )


def read_layers(root: Path) -> dict[str, int]:
    """Returns the layer of each part, from the architecture test of the tree at `root`."""
    for file in (root / name for name in TESTS):
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
                table: dict[int, tuple[str, ...]] = ast.literal_eval(node.value)
                return {part: layer for layer, parts in table.items() for part in parts}
    raise SystemExit(f"{root}: no table LAYERS in {' or '.join(TESTS)}; choose a commit that has one.")


def measure_tree(root: Path) -> Shape:
    """Returns the measurements of the tree at `root`."""
    package = root / "src" / "cohort"
    modules = [measure_module(path, package) for path in sorted(package.rglob("*.py"))]
    private: dict[str, list[str]] = {}
    for folder in FOLDERS:
        private[folder] = []
        for path in sorted((root / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            private[folder] += find_private_uses(tree, path.relative_to(root).as_posix(), package.name)
    return Shape(modules=modules, layers=read_layers(root), private=private)


# ---- printing --------------------------------------------------------------------------------------------------


def format_change(before: float | None, after: float) -> str:
    """Returns the number `after` as text; with another number `before` (None = no base) both with an arrow.

    >>> format_change(None, 5), format_change(5, 5), format_change(4, 5.5)
    ('5', '5', '4 -> 5.5')
    """
    return f"{after:g}" if before is None or before == after else f"{before:g} -> {after:g}"


def format_table(rows: list[list[str]], markdown: bool) -> str:
    """Returns rows as a table, in Markdown or in columns. The first row is the head."""
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def make_part_row(name: str, layer: str, part: Part, base: Part | None) -> list[str]:
    """Returns the cells of one part, with the change since `base` if there is one."""
    longest = part.longest
    return [
        name,
        layer,
        format_change(base and base.files, part.files),
        format_change(base and base.code_lines, part.code_lines),
        format_change(base and len(base.functions), len(part.functions)),
        format_change(base and base.median, part.median),
        format_change(base and base.p90, part.p90),
        f"{longest.lines} ({longest.name}, {longest.place})" if longest else "",
        "",
    ]


def make_part_rows(shape: Shape, base: Shape | None) -> list[list[str]]:
    """Returns the head, one row per part (also for parts that only the base has) and one for the whole package."""
    rows = [["part", "layer", "files", "code lines", "functions", "median", "p90", "longest function", "why it grew"]]
    old = base.parts if base else {}
    for name, part in {**shape.parts, **{name: Part() for name in old if name not in shape.parts}}.items():
        layer = shape.layers.get(name, (base or shape).layers.get(name, "?"))
        rows.append(make_part_row(name, str(layer), part, old.get(name, Part()) if base else None))
    return [
        *rows,
        make_part_row("all", "", add_up_modules(shape.modules), add_up_modules(base.modules) if base else None),
    ]


def make_edge_rows(shape: Shape, base: Shape | None) -> list[list[str]]:
    """Returns the head and one row per layer with its number of imports from each other layer."""
    layers = sorted({layer for s in (shape, base) if s for pair in s.edges for layer in pair})
    rows = [["from \\ to", *map(str, layers)]]
    for here in layers:
        numbers = [format_change(base and base.edges[here, there], shape.edges[here, there]) for there in layers]
        rows.append([str(here), *("" if number == "0" else number for number in numbers)])
    return rows


def format_private_uses(shape: Shape, base: Shape | None) -> str:
    """Returns one line per folder with its number of private names used from other files, and a line for each use.

    With a base, only the uses that the base does not have are listed.
    """
    lines = []
    for folder, uses in shape.private.items():
        old = base.private[folder] if base else []
        lines.append(f"{folder}: {format_change(len(old) if base else None, len(uses))}")
        # Without file and line number, which change when code moves.
        known = {use.partition(" ")[2] for use in old}
        lines += [f"- {use}" for use in uses if use.partition(" ")[2] not in known]
    return "\n".join(lines)


def make_report(shape: Shape, base: Shape | None, markdown: bool) -> str:
    """Returns the whole output: the tables of parts and imports, and the private names."""
    return "\n\n".join(
        [
            format_table(make_part_rows(shape, base), markdown),
            "Imports from layer to layer (pairs of modules):",
            format_table(make_edge_rows(shape, base), markdown),
            "Private names used from another file" + (", and which are new:" if base else ":"),
            format_private_uses(shape, base),
        ]
    )


def unpack_commit(commit: str, folder: Path) -> Path:
    """Writes the files of a commit into `folder` and returns `folder`."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main() -> None:
    """Measures this checkout, and the base if one is named, and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="COMMIT", help="also measure this commit and show what changed")
    parser.add_argument("--markdown", action="store_true", help="tables for a document")
    a = parser.parse_args()
    base = None
    if a.base:
        with tempfile.TemporaryDirectory() as folder:
            base = measure_tree(unpack_commit(a.base, Path(folder)))
    print(make_report(measure_tree(ROOT), base, a.markdown))


if __name__ == "__main__":
    main()
