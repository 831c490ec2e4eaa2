"""What every test may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, and no deadline: a busy machine must not fail a test.
settings.register_profile("cohort", deadline=None, derandomize=True)
settings.load_profile("cohort")

SOURCE = Path(__file__).resolve().parents[1] / "src"
Done = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A run in this process sets torch's threads. Left at two, with two test processes, they make later tests crawl."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)


@pytest.fixture
def run_cohort(tmp_path: Path) -> Callable[..., Done]:
    """The command line in a process of its own, in an empty folder: `run_cohort("train", "quickstart")`."""

    def run(*args: str, timeout: float = 300) -> Done:
        command = [sys.executable, "-m", "cohort", *args]
        env = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
        }  # wherever the package is installed, this checkout runs
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
