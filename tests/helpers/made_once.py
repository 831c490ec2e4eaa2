"""Folders that take long to make and that many tests read: made once per test session.

A fixture of a module is made again in each process of the session that runs a test of this module. These folders are
made by the first process that needs them, and the others wait.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # which a benchmark that uses this does without


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder `name`, which `make` fills if nobody has. Tests only read it, and work on copies."""
    base = factory.getbasetemp()
    # All processes of a session have the folder above.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made_once"
    shared.mkdir(exist_ok=True)
    folder, done = shared / name, shared / f"{name}.done"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            # What another process left when it failed.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
