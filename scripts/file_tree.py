"""Write docs/files.md: every file of the package with the first sentence of its docstring.

python scripts/file_tree.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cohort"
PAGE = ROOT / "docs" / "files.md"
# From the bottom layer to the top, as in docs/design.md.
ORDER = [
    *("types", "fates", "errors", "system"),
    *("config", "text", "tasks", "scoring", "recipes"),
    *("serialize", "world", "algos", "data", "models", "engines", "learner"),
    *("rollout", "loops", "run", "evaluation", "logs"),
    *("jobs", "inspect", "cli"),
]
HEAD = """# The files of the package

`scripts/file_tree.py` writes this page from the modules' docstrings. The order is that of the layers, lowest first
([design.md](design.md)). Paths are below `src/cohort/`; `tests/unit/` has the same folders.
"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def section(part: str) -> list[str]:
    """Return the lines of one folder or of one module at the root."""
    module = PACKAGE / f"{part}.py"
    if module.exists():
        return [f"- `{part}.py`: {first_sentence(module)}"]
    folder = PACKAGE / part
    files = sorted(p for p in folder.rglob("*.py") if p.name != "__init__.py")
    about = first_sentence(folder / "__init__.py")
    lines = ["", f"## `{part}/`", "", *([f"{about}.", ""] if about else [])]
    return lines + [f"- `{p.relative_to(PACKAGE).as_posix()}`: {first_sentence(p)}" for p in files]


def page() -> str:
    """Return the whole page as Markdown."""
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    parts -= {"__init__", "__main__"}
    assert parts == set(ORDER), f"ORDER and the package differ by {sorted(parts ^ set(ORDER))}"
    modules = [part for part in ORDER if (PACKAGE / f"{part}.py").exists()]
    folders = [part for part in ORDER if part not in modules]
    lines = ["## At the root", "", *(line for part in modules for line in section(part))]
    lines += [line for part in folders for line in section(part)]
    return HEAD + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
