"""The root folder of a program: an empty file system in memory, with what Python needs and nothing else.

It has the system's libraries, the interpreter and its standard library, all read-only, four devices, and two folders
that can be written, both in memory: the home /box and /tmp. There are no homes, no installed packages, no /proc, no
/sys and no /etc but the list of libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob

from cohort.sandbox.kernel_calls import (
    NO_DEVICES,
    NO_PROGRAMS,
    NO_SETUID,
    READ_ONLY,
    enter_root,
    make_mounts_private,
    make_read_only,
    mount_again,
    mount_tmpfs,
)

HOME = "/box"
PROGRAM = "/program.py"
DRIVER = "/driver.py"
_BUILT_AT = "/proc"  # any folder that every system has: the new root covers it
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_OTHER = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_STORES = ("/nix/store", "/gnu/store")  # where some systems keep all programs and libraries


@dataclass(frozen=True, kw_only=True, slots=True)
class RootPlan:
    """What of this machine a program sees."""

    executable: str
    shown: tuple[str, ...]  # files and folders, read-only; none is inside another
    links: tuple[tuple[str, str], ...]  # symbolic links and where they lead
    hidden: tuple[str, ...]  # folders inside those that are shown: empty for the program


def plan_root(hidden: Sequence[str]) -> RootPlan:
    """Returns what programs see, for this interpreter and machine. `hidden` are folders that they must not see."""
    executable = os.path.realpath(sys.executable)
    base = os.path.realpath(sys.base_prefix)
    wanted = [path for path in _LIBRARIES if os.path.isdir(path) and not os.path.islink(path)]
    wanted += [store for store in _STORES if executable.startswith(store + "/")]
    wanted += [path for name in ("lib", "lib64") if os.path.isdir(path := os.path.realpath(os.path.join(base, name)))]
    wanted += [path for path in _OTHER if os.path.exists(path)]
    shown: list[str] = []
    for path in (*wanted, executable):
        if not any(_is_inside(path, other) for other in shown):
            shown = [other for other in shown if not _is_inside(other, path)] + [path]
    packages = [
        found
        for path in shown
        for pattern in ("python3*/site-packages", "python3*/dist-packages")
        for found in glob(f"{path}/{pattern}")
    ]
    covered = [path for path in map(os.path.realpath, (*packages, *hidden)) if os.path.isdir(path)]
    return RootPlan(
        executable=executable,
        shown=tuple(shown),
        links=tuple((path, os.readlink(path)) for path in _LIBRARIES if os.path.islink(path)),
        hidden=tuple(path for path in dict.fromkeys(covered) if any(_is_inside(path, other) for other in shown)),
    )


def _is_inside(path: str, folder: str) -> bool:
    """Returns whether a path is a folder or inside it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def build_root(plan: RootPlan, files: dict[str, bytes], disk_mb: int) -> None:
    """Builds the root of a program in this process's own namespace of mounts, and enters it.

    `files` are written into it, by path. The two folders that can be written have `disk_mb` MiB each.
    """
    make_mounts_private()
    mount_tmpfs(_BUILT_AT, "size=8m,nr_inodes=4k,mode=755")
    for path in plan.shown:
        _show(path, NO_DEVICES)
    for path, target in plan.links:
        os.makedirs(_BUILT_AT + os.path.dirname(path), exist_ok=True)
        os.symlink(target, _BUILT_AT + path)
    for path in plan.hidden:
        mount_tmpfs(_BUILT_AT + path, "size=4k,nr_inodes=1,mode=755", NO_SETUID | NO_DEVICES | READ_ONLY)
    for path in _DEVICES:
        # A program hardly needs these, and not every machine has or lends them.
        with suppress(OSError):
            _show(path, 0)
    for path in (HOME, "/tmp"):
        os.makedirs(_BUILT_AT + path, exist_ok=True)
        options = f"size={disk_mb}m,nr_inodes=1k,mode=777"
        mount_tmpfs(_BUILT_AT + path, options, NO_SETUID | NO_DEVICES | NO_PROGRAMS)
    for path, content in files.items():
        with open(_BUILT_AT + path, "wb") as file:
            file.write(content)
    enter_root(_BUILT_AT)
    make_read_only("/")


def _show(path: str, flags: int) -> None:
    """Shows a file or folder of this machine, read-only, at the same place of the root that is built."""
    target = _BUILT_AT + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "xb"):
            pass
    mount_again(path, target, READ_ONLY | NO_SETUID | flags)
