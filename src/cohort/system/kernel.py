"""What not every operating system has: each function here says what it does where the call is missing.

Linux has all of it. macOS has no processor affinity, no prctl, no /proc, and does not enforce a limit of the address
space. The rest of the package asks here and needs to know nothing of this.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Numbers of options, from Linux's prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PS_SECONDS = 10.0  # after which the program `ps` counts as failed
# A line of /proc/locks about an exclusive flock that is held: process, device in hexadecimal digits, inode.
_HELD_FLOCK = re.compile(r"^\d+: FLOCK +\w+ +WRITE +(-?\d+) +([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)


def count_cores() -> int:
    """Returns the number of processor cores that this process may use, at least 1.

    Where the system does not tell, it is the number of cores of the machine.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_memory_size() -> int | None:
    """Returns the size of the machine's main memory in bytes; None if the system does not tell."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return size if size > 0 else None


def find_free_memory() -> int | None:
    """Returns the bytes of main memory that new tensors can take without swapping; None if the system does not tell.

    A limit on the memory of this process and its siblings counts too, such as that of a container. Without /proc it is
    the size of the machine's memory.
    """
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    except OSError:
        return find_memory_size()
    available = [int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:"]
    free = available[0] if available else find_memory_size()
    limited = _find_free_in_group(Path("/sys/fs/cgroup"))
    return min((n for n in (free, limited) if n is not None), default=None)


def _find_free_in_group(group: Path) -> int | None:
    """Returns the bytes that a control group of Linux, version 2, leaves to its processes; None if it has no limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Pages of files are given up when memory is needed.
        return max(0, limit - used + int(counts.get("file", 0)))
    # There is no such group, or its limit is the word "max".
    except (OSError, ValueError):
        return None


def find_shared_memory(num_bytes: int) -> Path | None:
    """Returns the folder whose files are in main memory, if it has room for so many bytes; None if not."""
    folder = Path("/dev/shm")
    try:
        free = os.statvfs(folder)
    except OSError:
        return None
    has_room = free.f_bavail * free.f_frsize >= num_bytes
    return folder if has_room and os.access(folder, os.W_OK) else None


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies for any reason.

    `parent` is the parent's process id: if that process is dead already, this one ends at once, with code 0. The end of
    the parent's thread that started this process counts too. Where the kernel cannot kill it, a parent that dies later
    has no effect.
    """
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above; then no signal will come.
    if os.getppid() != parent:
        os._exit(0)


def adopt_orphans() -> bool:
    """Makes this process the parent of every descendant whose own parent dies. Returns whether the kernel can do it.

    Such a process would otherwise become a child of the system's first process, and its origin would be lost.
    """
    return _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _call_prctl(option: int, value: int) -> bool:
    """Calls Linux's prctl. Returns False if there is no such call, or if the kernel refuses."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return False
    return bool(prctl(option, value, 0, 0, 0) == 0)


def list_children(pid: int) -> list[int]:
    """Returns the process ids of the children of a process, zombies included; [] if the process is gone.

    Without /proc the program `ps` is asked. [] also if that fails.
    """
    try:
        lists = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in os.listdir(f"/proc/{pid}/task")]
        return [int(child) for text in lists for child in text.split()]
    except OSError:
        # There is no /proc, the kernel is built without these lists, or a thread has just ended.
        lines = [line.split(None, 2) for line in _run_ps("-A", "-o", "pid=,ppid=,comm=").splitlines()]
        # `ps` lists itself too, as a child of this process that has ended since.
        return [int(child) for child, parent, name in lines if parent == str(pid) and Path(name).name != "ps"]


def measure_memory(pid: int) -> int:
    """Returns the resident memory of a process in bytes; 0 if it is gone or the system does not tell.

    Without /proc the program `ps` is asked.
    """
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()
    except OSError:
        kilobytes = _run_ps("-o", "rss=", "-p", str(pid)).strip()
        return int(kilobytes) << 10 if kilobytes.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class FileLock:
    """An exclusive lock that a process holds on a file by `flock`."""

    pid: int
    device: int  # of the file, as in its `os.stat`; some file systems have another number there
    inode: int


def list_file_locks() -> list[FileLock] | None:
    """Returns the exclusive locks that processes of this machine hold; None if the system does not tell.

    Nothing is locked or opened to find out. Locks of processes that this one cannot see, as those of another container,
    are not among them.
    """
    try:
        text = Path("/proc/locks").read_text()
    except OSError:
        return None
    return [
        FileLock(int(pid), os.makedev(int(major, 16), int(minor, 16)), int(inode))
        for pid, major, minor, inode in _HELD_FLOCK.findall(text)
    ]


def is_process_alive(pid: int) -> bool:
    """Returns whether there is a process of this number, of any user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _run_ps(*arguments: str) -> str:
    """Returns what the program `ps` prints for the arguments; "" if there is no such program or it fails."""
    # Imported here, because a scoring worker on Linux never needs it and must start quickly.
    import subprocess

    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["ps", *arguments], capture_output=True, text=True, timeout=_PS_SECONDS, check=False)
        return done.stdout
    return ""


def measure_peak_memory() -> int:
    """Returns the largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, others kilobytes.
    return peak if sys.platform == "darwin" else peak << 10


def limit_memory(more: int) -> bool:
    """Limits this process to the address space that it uses now plus `more` bytes.

    Returns False, and limits nothing, where the kernel does not enforce such a limit or does not tell how much is used.
    """
    # macOS has the name, but enforces nothing.
    if not hasattr(resource, "RLIMIT_AS") or sys.platform == "darwin":
        return False
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
        set_soft_limit(resource.RLIMIT_AS, int(pages) * resource.getpagesize() + more)
    except (OSError, ValueError):
        return False
    return True


def set_soft_limit(which: int, value: int) -> None:
    """Sets the soft limit `which` (resource.RLIMIT_*) to `value`, or to the hard limit if that is lower.

    The hard limit stays as it was.
    """
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
