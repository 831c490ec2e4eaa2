"""Draw functions, error messages or metrics for a reading test: can a stranger understand them without the source?

    python scripts/reading_test.py functions           60 functions: name, signature and docstring, nothing else
    python scripts/reading_test.py errors              30 messages that users can cause
    python scripts/reading_test.py metrics             10 metrics: name and what the documents say
    python scripts/reading_test.py functions --source  the same draw with the source, for the person who compares

The draw is seeded by the hash of HEAD, so that nobody can choose it. One reader says what each function does and
returns (what happened and what to do, for an error; what it measures and what a high value means, for a metric). A
second one compares with the source. At least 56 of 60 functions should be right.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cohort"
METRICS = ROOT / "docs" / "algorithms.md"
NUM_DRAWN = {"functions": 60, "errors": 30, "metrics": 10}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to read: `shown` is all that the reader sees, `source` is for the person who compares."""

    name: str
    shown: str
    source: str


def main() -> None:
    """Prints the draw for the kind given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(NUM_DRAWN))
    parser.add_argument("--source", action="store_true", help="print the source below each item")
    parser.add_argument("--commit", default="HEAD", help="the commit whose hash seeds the draw")
    options = parser.parse_args()
    items = sorted(list_items(options.kind), key=lambda item: item.name)
    seed = subprocess.check_output(["git", "rev-parse", options.commit], cwd=ROOT, text=True).strip()
    drawn = random.Random(f"{seed} {options.kind}").sample(items, NUM_DRAWN[options.kind])
    print(f"{len(drawn)} of {len(items)} {options.kind}, drawn by {seed}\n")
    for number, item in enumerate(drawn, 1):
        print(f"--- {number}. {item.shown}\n" + (f"\n{item.source}\n" if options.source else ""))


def list_items(kind: str) -> list[Item]:
    """Returns everything that can be drawn for `kind`."""
    if kind == "metrics":
        return list(read_metrics())
    modules = sorted(PACKAGE.rglob("*.py"))
    read = read_functions if kind == "functions" else read_errors
    return [item for path in modules for item in read(path)]


def read_functions(path: Path) -> Iterator[Item]:
    """Yields the functions and methods of a module, except special methods (`__init__` and the like)."""
    text = path.read_text(encoding="utf-8")
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for name, node in walk_functions(ast.parse(text), ""):
        if not node.name.startswith("__"):
            signature = f"def {module}.{name}({ast.unparse(node.args)})"
            signature += f" -> {ast.unparse(node.returns)}" if node.returns else ""
            docstring = ast.get_docstring(node) or "(no docstring)"
            source = ast.get_source_segment(text, node) or ""
            yield Item(name=f"{module}.{name}", shown=f"{signature}\n{docstring}", source=source)


def walk_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    """Yields (qualified name, node) for the functions of a module and of its classes, not for those in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from walk_functions(child, f"{prefix}{child.name}.")


def read_errors(path: Path) -> Iterator[Item]:
    """Yields the messages of the errors that a module raises for users: subclasses of CohortError."""
    text = path.read_text(encoding="utf-8")
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    tree = ast.parse(text)
    constants = read_text_constants(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = ast.unparse(node.exc.func)
            message = literal_text(node.exc.args[0], constants)
            if name in ("ConfigError", "ModelError", "TaskError", "RunError", "EngineError") and message:
                lines = text.splitlines()[max(0, node.lineno - 12) : node.end_lineno]
                yield Item(name=f"{module}:{node.lineno}", shown=f"cohort: {message}", source="\n".join(lines))


def read_text_constants(tree: ast.Module) -> dict[str, str]:
    """Returns the text constants of a module by name: a user sees their text, not their name."""
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = literal_text(node.value, constants)
    return constants


def literal_text(node: ast.expr, constants: dict[str, str]) -> str:
    """Returns the text of a string or f-string with `{expression}` in place of values; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal_text(part, constants) or "{" + ast.unparse(node) + "}" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        source = ast.unparse(node.value)
        return constants.get(source) or "{" + source + "}"
    return ""


def read_metrics() -> Iterator[Item]:
    """Yields the rows of the table of metrics in docs/algorithms.md."""
    section = METRICS.read_text(encoding="utf-8").partition("## Metrics")[2]
    for line in section.splitlines():
        if re.match(r"\| `", line):
            name, _, meaning = (cell.strip() for cell in line.strip("|").partition("|"))
            yield Item(name=name, shown=f"{name}: {meaning}", source="")


if __name__ == "__main__":
    main()
