"""Write the file tree in README.md from the modules' docstrings: python scripts/file_tree.py"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "cohort"
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: begin -->", "<!-- tree: end -->"
# from the bottom layer to the top, as in docs/design.md
ORDER = [
    *("types", "errors", "clock", "disk"),
    *("config", "text", "tasks", "scoring", "recipes"),
    *("algos", "data", "models"),
    *("limits", "engines", "learner", "checkpoint"),
    *("evaluate", "logs", "store", "loops"),
    *("build", "jobs", "bench", "cli"),
]


def about(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


def tree() -> str:
    """One line a file."""
    tops = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    unordered = sorted(tops - set(ORDER) - {"__init__", "__main__"})
    lines = []
    for top in [*ORDER, *unordered]:
        file, folder = PACKAGE / f"{top}.py", PACKAGE / top
        if file.exists():
            lines.append(f"{file.name:<23} {about(file)}")
        if folder.is_dir():
            lines.append(f"{top}/")
            names = sorted(p for p in folder.rglob("*.py") if p.name != "__init__.py")
            lines += [f"  {p.relative_to(folder).as_posix():<21} {about(p)}" for p in names]
    return "\n".join(lines)


def with_tree(text: str) -> str:
    """README's text with the tree brought up to date."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```\n{tree()}\n```\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_tree(README.read_text(encoding="utf-8")), encoding="utf-8")
