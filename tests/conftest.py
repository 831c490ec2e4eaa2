"""Settings of Hypothesis, and fixtures for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Hypothesis tries the same examples in every run. There is no deadline, because a busy machine must not fail a test.
settings.register_profile("cohort", deadline=None, derandomize=True)
settings.load_profile("cohort")

# A shell without job control starts programs in the background with some signals ignored, nohup ignores another, and
# processes pass that on.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

SOURCE = Path(__file__).resolve().parents[1] / "src"
Done = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sets torch back to one thread after a test, if OMP_NUM_THREADS is 1.

    A training run inside the test process changes torch's number of threads. With two test processes at two threads
    each, later tests would be very slow.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)


@pytest.fixture
def run_cohort(tmp_path: Path) -> Callable[..., Done]:
    """Returns a function that runs `cohort ARGS` in its own process and an empty folder: `run_cohort("train", ...)`."""

    def run(*args: str, timeout: float = 300) -> Done:
        command = [sys.executable, "-m", "cohort", *args]
        # The command uses this checkout, even if another one is installed.
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
