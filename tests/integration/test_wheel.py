"""The wheel: what is in it, and that it works in an environment that has nothing else, far from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a new user's shell has: nothing that leads to the checkout.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "COHORT"))}


def run(*words: object, at: Path) -> str:
    """Runs a program in a folder to its end, and returns what it printed. Fails with that if its exit code is not 0."""
    done = subprocess.run(
        [str(word) for word in words], cwd=at, env=CLEAN, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` builds from a copy of the checkout, which has leftovers and files of other kinds."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (copy / "build" / "lib" / "cohort").mkdir(parents=True)
    (copy / "build" / "lib" / "cohort" / "deleted.py").write_text("")
    (copy / "src" / "cohort" / "notes.txt").write_text("not part of the package")
    # -o: the environment of these tests is there already.
    run("make", "-o", f"{sys.prefix}/.ready", f"VENV={sys.prefix}", "wheel", at=copy)
    (built,) = (copy / "dist").iterdir()
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "src" / "cohort"
    kinds = (".py", ".json", ".jinja", ".safetensors")
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in package.rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    }
    assert {"cohort/models/tiny/model.safetensors", "cohort/recipes/tiny.py", "cohort/py.typed"} <= expected
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    described = {name.rpartition(".dist-info/")[2] for name in names if ".dist-info/" in name}
    assert described == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


@pytest.mark.slow
def test_the_quickstart_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "env", at=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, at=tmp_path)
    cohort = tmp_path / "env" / "bin" / "cohort"
    work = tmp_path / "elsewhere"
    work.mkdir()
    found = run(python, "-c", "import cohort, torch; print(cohort.__file__)", at=work)
    assert Path(found.strip()).is_relative_to(tmp_path / "env")
    assert run(cohort, "--version", at=work).startswith("cohort ")
    small = ("--batch.prompts", 4, "--batch.samples", 4, "--eval.problems", 8, "--threads", 1)
    run(cohort, "train", "quickstart", "--steps", 2, *small, at=work)
    (made,) = (work / "runs").iterdir()
    run(cohort, "resume", made, "--steps", 3, at=work)
    run(cohort, "export", made, "exported", at=work)
    assert "arithmetic" in run(cohort, "eval", "arithmetic", "--model", "exported", "--limit", 4, at=work)
    # Recipes and tasks without a package of their own are in the wheel too.
    assert "tiny_countdown" in run(cohort, "train", "--help", at=work)


@pytest.mark.slow
def test_a_torch_that_is_there_stays(wheel: Path, tmp_path: Path) -> None:
    """As in an environment with an older build for CUDA: pip would install what is missing, and not another torch."""
    run(sys.executable, "-m", "venv", tmp_path / "env", at=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    described = packages / "torch-2.11.0+cu130.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0+cu130\n")
    (described / "RECORD").write_text("")
    (described / "INSTALLER").write_text("pip\n")
    said = run(python, "-m", "pip", "install", "--dry-run", wheel, at=tmp_path)
    (would,) = [line for line in said.splitlines() if line.startswith("Would install")]
    assert " cohort-" in would and " tyro-" in would
    assert " torch-" not in would
