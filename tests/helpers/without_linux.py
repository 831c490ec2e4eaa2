"""A Python without the calls that only Linux has: as on a Mac, as far as that can be pretended."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from cohort.scoring import process

# Python runs a module of this name at its start. In a process that has no torch to import, the platform is renamed too.
SITECUSTOMIZE = '''
import ctypes, os, resource, sys

for name in ("sched_getaffinity", "waitid", "P_PID", "WNOWAIT", "pidfd_open", "memfd_create", "posix_fadvise",
             "preadv", "pwritev", "O_TMPFILE", "posix_fallocate", "copy_file_range", "eventfd", "splice"):
    if hasattr(os, name):
        delattr(os, name)
del resource.RLIMIT_AS

def refuse_proc(event, arguments):
    """Makes every open and every listing of a path in /proc fail as if there were none."""
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

sys.addaudithook(refuse_proc)

class Library(ctypes.CDLL):
    """A C library without the functions of Linux and of its C library."""

    def __getattr__(self, name):
        if name in ("prctl", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
if "cohort.scoring.worker" in sys.orig_argv:
    # Python looks for a file of its own that is named after the platform; so it is read before.
    import sysconfig
    sysconfig.get_config_vars()
    sys.platform = "darwin"
'''


def make_folder(parent: Path) -> Path:
    """Makes the folder that has to be in PYTHONPATH, and returns it."""
    folder = parent / "without_linux"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return folder


def use_in_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes scoring workers that are started from now on lack the calls."""
    make = process.make_worker_environment

    def make_without(names: Iterable[str] = ()) -> dict[str, str]:
        environment = make(names)
        return {**environment, "PYTHONPATH": os.pathsep.join([str(folder), environment["PYTHONPATH"]])}

    monkeypatch.setattr(process, "make_worker_environment", make_without)
