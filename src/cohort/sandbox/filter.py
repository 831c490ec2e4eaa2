"""The filter of system calls (seccomp): which calls the kernel refuses to a program, as a program of the kernel's own.

The namespaces already make these calls harmless. The filter keeps most of the kernel's rarely used code, where its
errors are, out of reach. It also stops programs that start processes.
"""

from __future__ import annotations

import struct

# Numbers of system calls on x86-64 and on arm64; None = there is no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Networks. A pair of sockets is allowed: asyncio needs one.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Parts of the kernel that a test problem has no use for.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_FORKS: tuple[tuple[int, ...], tuple[int, ...]] = ((57, 58), ())  # fork and vfork
_CLONE = (56, 220)
_CLONE3 = 435  # its flags are in memory, where the filter cannot look
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables above, AUDIT_ARCH
_X32 = 0x40000000  # bit of the numbers of another set of calls on x86-64
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020000
_EPERM, _ENOSYS = 1, 38
# Instructions and results, from the kernel's bpf_common.h and seccomp.h.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, of little-endian machines


def build_filter(machine: str, may_fork: bool) -> bytes | None:
    """Returns the filter for a machine (as in `os.uname`) as an array of struct sock_filter; None if it is not known.

    Refused calls fail with EPERM. `may_fork` allows new processes; threads are always allowed.
    """
    if machine not in _MACHINES:
        return None
    column, arch = _MACHINES[machine]
    numbers = [pair[column] for pair in _DENIED.values()]
    denied = [n for n in numbers if n is not None] + ([] if may_fork else list(_FORKS[column]))
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if column == 0:
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in denied:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # The C library then uses clone.
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    code += [(_EQUAL, 1, 0, _CLONE[column]), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    code += [(_ANY_BIT, 0, 1, _CLONE_NAMESPACES), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    if not may_fork:
        code += [(_ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
