"""Count how the package reads, before and after: comments, docstrings, parallel assignments, long document lines.

    python scripts/prose.py --base COMMIT

Prints a Markdown table with the numbers of COMMIT and of this checkout.
"""

from __future__ import annotations

import argparse
import ast
import io
import tempfile
import tokenize
from pathlib import Path

from architecture import ROOT, count_code_lines, unpack_commit

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the commit to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = measure(unpack_commit(options.base, Path(folder)))
    after = measure(ROOT)
    print(f"| | {options.base} | now |\n|---|---:|---:|")
    for name, value in after.items():
        print(f"| {name} | {before[name]} | {value} |")


def measure(tree: Path) -> dict[str, str]:
    """Returns what was counted in a tree, by the name of the row."""
    files = sorted((tree / "src" / "cohort").rglob("*.py"))
    pages = [*sorted((tree / "docs").glob("*.md")), tree / "README.md"]
    num_comments = num_code_lines = 0
    functions: list[FunctionNode] = []
    num_parallel = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        num_comments += count_full_line_comments(text)
        num_code_lines += count_code_lines(text)
        functions += [node for node in nodes if isinstance(node, FunctionNode) and not node.name.startswith("__")]
        num_parallel += sum(is_long_parallel_assignment(node) for node in nodes)
    undocumented = [node for node in functions if not ast.get_docstring(node)]
    long_lines = sum(len(line) > 120 for page in pages for line in page.read_text(encoding="utf-8").splitlines())
    return {
        "modules at the root of the package": str(len(list((tree / "src" / "cohort").glob("[!_]*.py")))),
        "full-line comments per 100 lines of code": f"{100 * num_comments / num_code_lines:.1f}",
        "functions": str(len(functions)),
        "functions without a docstring": str(len(undocumented)),
        "parallel assignments of three and more values": str(num_parallel),
        "lines of documents over 120 columns": str(long_lines),
    }


def count_full_line_comments(source: str) -> int:
    """Returns the number of lines that are only a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT and token.line.strip().startswith("#") for token in tokens)


def is_long_parallel_assignment(node: ast.AST) -> bool:
    """Returns whether a node is `a, b, c = x, y, z`: three and more values assigned one by one in a single line."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    return isinstance(target, ast.Tuple) and len(target.elts) >= 3


if __name__ == "__main__":
    main()
