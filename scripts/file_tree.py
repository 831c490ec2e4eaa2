"""Writes docs/files.md: the layers of the package, and every file with the first sentence of its docstring.

python scripts/file_tree.py
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cohort"
PAGE = ROOT / "docs" / "files.md"
ARCHITECTURE = ROOT / "tests" / "unit" / "project" / "test_architecture.py"
HEAD = """# The files of the package

`scripts/file_tree.py` writes this page. It reads the layers from `tests/unit/project/test_architecture.py` and the
sentences from the modules' docstrings. Paths are below `src/cohort/`; `tests/unit/` has the same folders.

## Layers

A module may import modules of its own layer and of the layers below. The architecture test checks it.
"""
# The note of each layer in the table, besides the rule above.
RULES = {
    0: "the standard library alone",
    1: "no torch and no numpy: commands start at once",
    2: "torch; never tasks, scoring or recipes",
    3: "the decoder and its files",
    4: "engines and learner never import each other",
    5: "engines and learner only through `base.py` and `engines/sync.py`",
    6: "builds concrete engines and learners",
    7: "commands, and the public names of the package",
}


def read_layers() -> dict[int, list[str]]:
    """Returns LAYERS of the architecture test: the parts of each layer, lowest layer first."""
    for node in ast.parse(ARCHITECTURE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            layers = ast.literal_eval(node.value)
            return {number: [part for part in parts if not part.startswith("__")] for number, parts in layers.items()}
    raise SystemExit(f"{ARCHITECTURE} has no LAYERS.")


def read_first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def format_file(path: Path) -> list[str]:
    """Returns the list item of one file, wrapped to at most 118 columns."""
    item = f"- `{path.relative_to(PACKAGE).as_posix()}`: {read_first_sentence(path)}"
    return textwrap.wrap(item, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def format_folder(folder: Path) -> list[str]:
    """Returns the section of one folder: its heading, its purpose, and one list item per file."""
    files = sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")
    about = read_first_sentence(folder / "__init__.py")
    lines = ["", f"## `{folder.name}/`", "", *([f"{about}.", ""] if about else [])]
    return lines + [line for path in files for line in format_file(path)]


def make_page() -> str:
    """Returns the whole page as Markdown."""
    layers = read_layers()
    lines = [HEAD, "| layer | parts | note |", "|---:|---|---|"]
    lines += [f"| {number} | {', '.join(parts)} | {RULES[number]} |" for number, parts in layers.items()]
    # A dotted part is one module of a folder; the folder's section lists it.
    parts = [part for group in layers.values() for part in group if "." not in part]
    modules = [part for part in parts if (PACKAGE / f"{part}.py").exists()]
    lines += ["", "## At the root", ""]
    lines += [line for part in modules for line in format_file(PACKAGE / f"{part}.py")]
    for part in parts:
        if part not in modules:
            lines += format_folder(PACKAGE / part)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
