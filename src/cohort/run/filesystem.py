"""Finds out whether a path is on a network file system, where SQLite needs other settings."""

from __future__ import annotations

import os
from pathlib import Path

# Types of file systems, as the kernel names them, that other machines may use at the same time.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "pvfs2"),
    *("ocfs2", "gfs2", "ncpfs", "coda", "vboxsf", "prl_fs", "virtiofs", "davfs"),
}


def is_on_network(path: Path) -> bool:
    """Returns whether `path` is on a network file system. Most FUSE file systems count as one.

    Outside Linux the answer is always False.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return False
    kind = find_mount_type(os.path.realpath(path), mounts)
    return kind in _NETWORK or kind.startswith("fuse.")


def find_mount_type(path: str, mountinfo: str) -> str:
    """Returns the type of the file system that holds `path`, as the kernel names it; "" if none is found.

    `path` is absolute and without symbolic links. `mountinfo` is the content of /proc/self/mountinfo, the kernel's list
    of mounted file systems.

    >>> find_mount_type("/data/runs/a", "1 0 8:1 / / rw - ext4 /dev/sda rw\\n2 1 0:9 / /data rw - nfs4 host:/ rw")
    'nfs4'
    """
    best = ""
    kind = ""
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        # The fifth field is the mount point. The kernel writes a space in it as \040.
        point = fields.split(" ")[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The longest mount point wins, and of equal ones the later, which hides the earlier.
        if inside and len(point) >= len(best):
            best, kind = point, tail.split(" ")[0]
    return kind
