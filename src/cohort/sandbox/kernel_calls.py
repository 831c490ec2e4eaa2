"""The calls of Linux that Python does not have: namespaces, mounts, capabilities and the filter of system calls.

Every function raises OSError if the kernel refuses. Only the spawner's children use them.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

# Kinds of namespaces, from the kernel's sched.h.
NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
# Flags of mounts, from mount.h.
READ_ONLY, NO_SETUID, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2
_HERE = -100  # AT_FDCWD
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442  # the same on all machines
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
_SET_PARENT_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _DROP_BOUND, _NO_NEW_PRIVILEGES, _AMBIENT = 1, 4, 22, 24, 38, 47
_CLEAR_ALL = 4
_FILTER_MODE = 2
_CAPABILITIES_VERSION = 0x20080522
_NUM_CAPABILITIES = 64


class _AttributeBlock(ctypes.Structure):
    """The argument of mount_setattr."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("added", "removed", "propagation", "user_namespace"))


class _FilterHeader(ctypes.Structure):
    """The argument of prctl that has a filter: struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


@cache
def _library() -> ctypes.CDLL:
    """Returns the C library."""
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    """Raises OSError with the last error of the C library if a call returned below 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _set_process_option(option: int, first: int, second: int = 0) -> None:
    """Calls prctl."""
    arguments = map(ctypes.c_ulong, (first, second, 0, 0))
    _check(_library().prctl(option, *arguments), f"prctl {option}")


def leave_namespaces(kinds: int) -> None:
    """Moves this process into new namespaces of the kinds given. A new one of processes is for its children."""
    try:
        _check(_library().unshare(kinds), "new namespaces")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # The kernel's own text is about the space on a device.
        text = "new namespaces: a limit is reached, such as that of sysctl user.max_user_namespaces"
        raise OSError(errno.ENOSPC, text) from None


def mount_tmpfs(target: str, options: str, flags: int = NO_SETUID | NO_DEVICES) -> None:
    """Mounts a new file system in memory at `target`."""
    _check(_library().mount(b"tmpfs", target.encode(), b"tmpfs", flags, options.encode()), f"tmpfs at {target}")


def make_mounts_private() -> None:
    """Keeps later mounts of this namespace from those that it was copied from."""
    _check(_library().mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "private mounts")


def mount_again(source: str, target: str, flags: int) -> None:
    """Mounts a file or folder, with all mounts below it, at a second place, with the flags added to it."""
    _check(_library().mount(source.encode(), target.encode(), None, _BIND | _RECURSIVE, None), f"mount of {source}")
    change = _AttributeBlock(added=flags)
    arguments = (_HERE, target.encode(), _AT_RECURSIVE, ctypes.byref(change), ctypes.sizeof(change))
    if _library().syscall(_SYS_MOUNT_SETATTR, *arguments) == 0:
        return
    # Kernels before 5.12 change one mount at a time. Flags that it has must be kept.
    kept = os.statvfs(target).f_flag & (READ_ONLY | NO_SETUID | NO_DEVICES | NO_PROGRAMS | 0x400 | 0x800)
    remount_flags = _REMOUNT | _BIND | kept | flags
    _check(_library().mount(None, target.encode(), None, remount_flags, None), f"flags of {source}")


def make_read_only(target: str) -> None:
    """Makes a mount of this namespace read-only."""
    flags = _REMOUNT | _BIND | READ_ONLY | NO_SETUID | NO_DEVICES
    _check(_library().mount(None, target.encode(), None, flags, None), f"read-only {target}")


def enter_root(folder: str) -> None:
    """Makes a mount the root of all processes of this namespace, and removes the former root from it."""
    os.chdir(folder)
    machine = os.uname().machine
    if machine not in _SYS_PIVOT_ROOT:
        raise OSError(38, f"no sandbox for machines of the kind {machine}")
    _check(_library().syscall(_SYS_PIVOT_ROOT[machine], b".", b"."), "pivot_root")
    _check(_library().umount2(b".", _DETACH), "removal of the former root")
    os.chdir("/")


def drop_capability_bounds() -> None:
    """Makes sure that no program that this process starts gets a capability. Needs capabilities itself."""
    for number in range(_NUM_CAPABILITIES):
        try:
            _set_process_option(_DROP_BOUND, number)
        except OSError:
            # The kernel knows no more of them. The first is known to all.
            if number == 0:
                raise
            break


def drop_capabilities() -> None:
    """Takes all capabilities from this process for good."""
    _set_process_option(_AMBIENT, _CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    _check(_library().capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def forbid_new_privileges() -> None:
    """Makes the kernel ignore set-uid bits and file capabilities of all programs that this process starts."""
    _set_process_option(_NO_NEW_PRIVILEGES, 1)


def die_with_parent_signal(signal: int) -> None:
    """Asks for a signal when the parent ends. Credentials must be final: a change of them undoes it."""
    _set_process_option(_SET_PARENT_SIGNAL, signal)


def hide_from_debuggers() -> None:
    """Keeps processes of the same user from tracing this one and from reading its memory."""
    _set_process_option(_SET_DUMPABLE, 0)


def install_filter(code: bytes) -> None:
    """Installs a filter of system calls for this process and all programs that it starts, for good."""
    buffer = ctypes.create_string_buffer(code, len(code))
    header = _FilterHeader(len(code) // 8, ctypes.cast(buffer, ctypes.c_char_p))
    _check(
        _library().prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), ctypes.byref(header), 0, 0),
        "filter of system calls",
    )
