"""Which kind of file system a path is on."""

from __future__ import annotations

import os
from pathlib import Path

_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "pvfs2"),
    *("ocfs2", "gfs2", "ncpfs", "coda", "vboxsf", "prl_fs", "virtiofs", "davfs"),
}


def is_network(path: Path) -> bool:
    """Whether other machines may use the same files, as far as the kernel tells (Linux; elsewhere: no)."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return False
    kind = mount_type(os.path.realpath(path), mounts)
    return kind in _NETWORK or kind.startswith("fuse.")


def mount_type(path: str, mountinfo: str) -> str:
    """The type of the file system that holds `path`, from the kernel's list of mounts.

    >>> mount_type("/data/runs/a", "1 0 8:1 / / rw - ext4 /dev/sda rw\\n2 1 0:9 / /data rw - nfs4 host:/ rw")
    'nfs4'
    """
    best, kind = "", ""
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides an earlier one.
        if inside and len(point) >= len(best):
            best, kind = point, tail.split(" ")[0]
    return kind
