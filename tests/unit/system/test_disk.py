"""Durable writes: files are replaced whole, and what is not a regular file is written through."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cohort.errors import RunError
from cohort.system import disk
from cohort.system.disk import is_standard_output, open_replacement, write_atomically


def read_in_background(path: Path) -> Callable[[], bytes]:
    """Starts to read a pipe, and returns a function that waits for its end and returns what was read."""
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    thread.start()

    def wait() -> bytes:
        thread.join(timeout=20)
        return found[0]

    return wait


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    write_atomically(path, "nëw")
    assert path.read_bytes() == "nëw".encode() and list(tmp_path.iterdir()) == [path]


def test_an_error_in_the_block_keeps_the_old_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(ValueError, match="the rows ended"), open_replacement(path) as file:
        file.write(b"half")
        raise ValueError("the rows ended")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "target.txt"
    target.write_text("old")
    (tmp_path / "link").symlink_to("elsewhere/target.txt")
    write_atomically(tmp_path / "link", "new")
    (tmp_path / "dangling").symlink_to("elsewhere/made.txt")
    write_atomically(tmp_path / "dangling", "made")
    assert (tmp_path / "link").is_symlink() and target.read_text() == "new"
    assert (tmp_path / "dangling").is_symlink() and (tmp_path / "elsewhere" / "made.txt").read_text() == "made"


@pytest.mark.parametrize("through_link", [False, True])
def test_a_pipe_is_written_through_and_stays(tmp_path, through_link):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = tmp_path / "link" if through_link else pipe
    if through_link:
        path.symlink_to(pipe)
    wait = read_in_background(pipe)
    write_atomically(path, "rows")
    assert wait() == b"rows" and stat.S_ISFIFO(pipe.stat().st_mode)
    assert path.is_symlink() == through_link


def test_a_full_device_is_told_in_plain_words_and_stays(tmp_path):
    path = Path("/dev/full")
    if os.geteuid() == 0:
        # Only root may replace a node, so only root needs one of its own.
        path = tmp_path / "full"
        os.mknod(path, stat.S_IFCHR | 0o666, os.stat("/dev/full").st_rdev)
    with pytest.raises(RunError, match=r"cannot write .*full: the disk is full or your quota is used up\. Free"):
        write_atomically(path, "rows")
    assert stat.S_ISCHR(path.stat().st_mode)
    assert [p for p in tmp_path.iterdir() if p != path] == []


def test_a_disk_that_fills_up_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fill(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "fsync", fill)
    with pytest.raises(RunError, match="the disk is full"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_standard_output_is_written_to_and_not_replaced(tmp_path, capfd):
    path = tmp_path / "stdout"
    path.symlink_to("/dev/fd/1")
    print("before")
    write_atomically(path, "rows\n")
    print("after")
    assert path.is_symlink() and is_standard_output(path) and not is_standard_output(tmp_path)
    assert capfd.readouterr().out == "before\nrows\nafter\n"
