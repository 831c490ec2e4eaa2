"""What not every operating system has, and what takes its place there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cohort.system import disk, kernel


@pytest.fixture
def no_proc(monkeypatch):
    """Makes reading and listing in /proc fail, as on a system without it."""

    def refuse(*_args, **_options):
        raise FileNotFoundError

    monkeypatch.setattr(kernel.Path, "read_text", refuse)
    monkeypatch.setattr(os, "listdir", refuse)


def test_cores_are_those_of_the_process_or_else_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert kernel.count_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert kernel.count_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert kernel.count_cores() == 1


def test_the_size_of_memory_may_be_unknown(monkeypatch):
    size = kernel.find_memory_size()
    assert size is not None and size > 1 << 28
    for answer in (ValueError("unrecognized configuration name"), OSError(), -1):

        def tell(name, answer=answer):
            if isinstance(answer, Exception):
                raise answer
            return 4096 if name == "SC_PAGE_SIZE" else answer

        monkeypatch.setattr(os, "sysconf", tell)
        assert kernel.find_memory_size() is None


class NoLibrary:
    """Stands for ctypes.CDLL where the C library lacks every function."""

    def __init__(self, name):
        pass


def test_without_prctl_nothing_is_promised(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", NoLibrary)
    assert not kernel.adopt_orphans()
    kernel.die_with_parent(os.getppid())


def test_a_process_whose_parent_is_gone_ends(monkeypatch):
    program = "import os\nfrom cohort.system.kernel import die_with_parent\ndie_with_parent(1 << 30)\nprint('on')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("proc", [True, False])
def test_children_are_found_with_and_without_proc(request, proc):
    program = "import subprocess, sys; subprocess.Popen(['cat']); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    if not proc:
        request.getfixturevalue("no_proc")
    (grandchild,) = kernel.list_children(child.pid)
    assert child.pid in kernel.list_children(os.getpid())
    assert kernel.list_children(grandchild) == []
    child.stdin.close()
    child.wait()
    child.stdout.close()
    assert kernel.list_children(child.pid) == []


def test_memory_of_a_process_is_the_same_with_and_without_proc(request):
    before = kernel.measure_memory(os.getpid())
    assert before > 1 << 23
    assert kernel.measure_peak_memory() >= before * 0.9
    request.getfixturevalue("no_proc")
    assert 0.5 < kernel.measure_memory(os.getpid()) / before < 2
    assert kernel.measure_memory(1 << 30) == 0


def test_without_ps_and_proc_nothing_is_found(no_proc, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel.list_children(os.getpid()) == []
    assert kernel.measure_memory(os.getpid()) == 0


def test_memory_is_not_limited_where_the_kernel_does_not_enforce_it(request, monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_AS)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not kernel.limit_memory(1 << 30)
    with monkeypatch.context() as patch:
        patch.delattr(resource, "RLIMIT_AS")
        assert not kernel.limit_memory(1 << 30)
    request.getfixturevalue("no_proc")
    assert not kernel.limit_memory(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def test_peak_memory_is_in_bytes_on_every_system(monkeypatch):
    usage = resource.getrusage(resource.RUSAGE_SELF)
    assert kernel.measure_peak_memory() >= usage.ru_maxrss << 10
    monkeypatch.setattr(sys, "platform", "darwin")
    assert kernel.measure_peak_memory() < usage.ru_maxrss << 9


def test_files_are_written_through_the_memory_of_the_drive_where_that_takes_another_call(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, call: calls.append(call))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    disk.write_atomically(tmp_path / "a", "text")
    assert calls == [51, 51]  # the file and its folder
    calls.clear()

    def refuse(fd, call):
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    disk.sync_directory(tmp_path)
    assert calls == ["fsync"]


def test_a_file_system_that_cannot_sync_directories_is_no_error(monkeypatch, tmp_path):
    def refuse(number):
        def fsync(fd):
            raise OSError(number, "refused")

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    disk.sync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="refused"):
        disk.sync_directory(tmp_path)


def test_free_memory_is_what_the_machine_and_its_group_leave(monkeypatch, tmp_path):
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n",
        "/sys/fs/cgroup/memory.max": "4000000\n",
        "/sys/fs/cgroup/memory.current": "3000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 1\nfile 500000\n",
    }

    def read(path, *_args, **_options):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(kernel.Path, "read_text", read)
    # Pages of files can be given up.
    assert kernel.find_free_memory() == 1_500_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert kernel.find_free_memory() == 5000 << 10
    files.clear()
    assert kernel.find_free_memory() == kernel.find_memory_size()


def test_exclusive_locks_are_listed_and_shared_ones_are_not(tmp_path: Path) -> None:
    files = [tmp_path / "exclusive", tmp_path / "shared", tmp_path / "free"]
    opened = [open(file, "w") for file in files]  # noqa: SIM115
    fcntl.flock(opened[0], fcntl.LOCK_EX)
    fcntl.flock(opened[1], fcntl.LOCK_SH)
    locks = kernel.list_file_locks()
    assert locks is not None
    inodes = [lock.inode for lock in locks if lock.pid == os.getpid()]
    assert [file.stat().st_ino in inodes for file in files] == [True, False, False]
    for file in opened:
        file.close()
    assert files[0].stat().st_ino not in [lock.inode for lock in kernel.list_file_locks() or ()]


def test_where_locks_are_not_listed_none_is_said(no_proc: None) -> None:
    assert kernel.list_file_locks() is None


def test_a_process_is_alive_until_it_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert kernel.is_process_alive(child.pid) and kernel.is_process_alive(1)
    child.communicate(b"\n")
    assert not kernel.is_process_alive(child.pid)
