"""Finds out whether a path is on a network file system, where SQLite needs other settings."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

# Types of file systems, as the kernel names them, that other machines may use at the same time.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "pvfs2"),
    *("ocfs2", "gfs2", "ncpfs", "coda", "vboxsf", "prl_fs", "virtiofs", "davfs"),
    *("afpfs", "webdav", "macfuse", "osxfuse", "fusefs"),  # of macOS
}
_MOUNT_SECONDS = 10.0  # after which the program `mount` counts as failed: a lost server may hold it up


def is_on_network(path: Path) -> bool:
    """Returns whether `path` is on a network file system. Most FUSE file systems count as one.

    False if the system does not tell.
    """
    try:
        mounts = read_mountinfo(Path("/proc/self/mountinfo").read_text())
    except OSError:
        mounts = read_mount_output(_run_mount())
    kind = find_mount_type(os.path.realpath(path), mounts)
    return kind in _NETWORK or kind.startswith("fuse.")


def find_mount_type(path: str, mounts: list[tuple[str, str]]) -> str:
    """Returns the type of the file system that holds `path`, as the kernel names it; "" if none is found.

    `path` is absolute and without symbolic links. `mounts` are pairs of mount point and type, later ones above earlier.

    >>> find_mount_type("/data/runs/a", [("/", "ext4"), ("/data", "nfs4")])
    'nfs4'
    """
    best = ""
    kind = ""
    for point, type_there in mounts:
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The longest mount point wins, and of equal ones the later, which hides the earlier.
        if inside and len(point) >= len(best):
            best, kind = point, type_there
    return kind


def read_mountinfo(text: str) -> list[tuple[str, str]]:
    """Returns mount point and type of each file system in Linux's /proc/self/mountinfo.

    >>> read_mountinfo("1 0 8:1 / / rw - ext4 /dev/sda rw\\n2 1 0:9 / /my\\\\040data rw - nfs4 host:/ rw")
    [('/', 'ext4'), ('/my data', 'nfs4')]
    """
    lines = [line.partition(" - ") for line in text.splitlines()]
    # The fifth field is the mount point. The kernel writes a space in it as \040.
    return [(head.split(" ")[4].replace("\\040", " "), tail.split(" ")[0]) for head, _, tail in lines]


def read_mount_output(text: str) -> list[tuple[str, str]]:
    """Returns mount point and type of each file system that the program `mount` of macOS lists.

    >>> read_mount_output("/dev/disk3s1 on / (apfs, local)\\n//me@host/data on /Volumes/my data (smbfs, nodev)")
    [('/', 'apfs'), ('/Volumes/my data', 'smbfs')]
    """
    return re.findall(r"^.+? on (/.*) \((\w+)[^()]*\)$", text, flags=re.MULTILINE)


def _run_mount() -> str:
    """Returns what the program `mount` prints: the mounted file systems; "" if there is no such program or it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["mount"], capture_output=True, text=True, timeout=_MOUNT_SECONDS, check=False)
        return done.stdout
    return ""
