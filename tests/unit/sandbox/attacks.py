"""Attacks on the sandbox: programs that print ESCAPED if they get out. Words in capitals stand for what tests plant."""

from __future__ import annotations

from dataclasses import dataclass

LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@dataclass(frozen=True)
class Attack:
    """A program, and how it fares without a sandbox."""

    name: str
    source: str
    works_outside: bool = (
        True  # whether it is shown to work without a sandbox; False = that would do harm, or needs root
    )
    needs_root: bool = False  # whether it works outside only for root


ATTACKS = [
    Attack("connect", "import socket\nsocket.create_connection(('127.0.0.1', TCP_PORT), 5)\nprint('ESCAPED')"),
    Attack(
        "datagram",
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'name?', ('127.0.0.1', UDP_PORT))\ns.settimeout(5)\n"
        "print('ESCAPED' if s.recv(100) == b'address' else '')",
    ),
    Attack("listen", "import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('ESCAPED')"),
    Attack("local-socket", "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(UNIX_PATH)\nprint('ESCAPED')"),
    Attack("read-key", "text = open(KEY_FILE).read()\nprint('ESCAPED' if 'private' in text else '')"),
    Attack("own-environment", "import os\nprint('ESCAPED' if 'planted' in str(os.environ) else '')"),
    Attack(
        "environment-of-others",
        "import glob\nfor path in glob.glob('/proc/*/environ'):\n    try:\n"
        "        if b'planted' in open(path, 'rb').read():\n            print('ESCAPED')\n"
        "    except OSError:\n        pass",
    ),
    Attack("list-processes", "import os\nif any(n.isdigit() for n in os.listdir('/proc')):\n    print('ESCAPED')"),
    Attack("read-sys", "import os\nif os.listdir('/sys'):\n    print('ESCAPED')"),
    Attack("users", "print('ESCAPED' if 'root' in open('/etc/passwd').read() else '')"),
    Attack("fork", "import os\nif os.fork() == 0:\n    os._exit(0)\nprint('ESCAPED')"),
    Attack("shell", "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'echo ESCAPED'])"),
    Attack("become-shell", "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])"),
    Attack("kill", "import os, signal\nos.kill(VICTIM, signal.SIGKILL)\nprint('ESCAPED')"),
    Attack("trace", LIBC + "if libc.ptrace(16, VICTIM, 0, 0) == 0:\n    print('ESCAPED')"),
    Attack("read-memory", LIBC + "if open('/proc/VICTIM/mem', 'rb'):\n    print('ESCAPED')"),
    Attack("write-run", "open(RUN_FOLDER + '/new', 'w').write('x')\nprint('ESCAPED')"),
    Attack("change-run", "open(RUN_FOLDER + '/metrics', 'a').write('x')\nprint('ESCAPED')"),
    Attack("delete-run", "import os\nos.remove(RUN_FOLDER + '/victim')\nprint('ESCAPED')"),
    Attack("read-package", "import os\nif os.listdir(PACKAGE):\n    print('ESCAPED')"),
    Attack(
        "fill-disk",
        "total = 0\ntry:\n    for folder in FOLDERS:\n        for n in range(8):\n"
        "            with open(f'{folder}/{n}', 'wb') as f:\n                total += f.write(bytes(4 << 20))\n"
        "except OSError:\n    pass\nprint('ESCAPED' if total > 24 << 20 else total)",
    ),
    Attack(
        "many-files",
        "n = 0\nfolder = FOLDERS[0]\ntry:\n    for n in range(4000):\n        open(f'{folder}/x{n}', 'w').close()\n"
        "except OSError:\n    pass\nprint('ESCAPED' if n > 3000 else n)",
    ),
    Attack("shared-memory", "open(SHM_FILE, 'w').write('x')\nprint('ESCAPED')"),
    Attack("memory-file", "import os\nos.memfd_create('x')\nprint('ESCAPED')"),
    Attack("system-five", LIBC + "if libc.shmget(0, 4096, 0o1600) >= 0:\n    print('ESCAPED')", works_outside=False),
    Attack(
        "inherited-file", "import os\ndata = os.pread(SECRET_FD, 100, 0)\nprint('ESCAPED' if b'secret' in data else '')"
    ),
    Attack(
        "all-files",
        "import os\nfor fd in range(3, 256):\n    try:\n        if b'secret' in os.pread(fd, 100, 0):\n"
        "            print('ESCAPED')\n    except OSError:\n        pass",
    ),
    Attack("namespaces", LIBC + "if libc.unshare(0x10000000) == 0:\n    print('ESCAPED')"),
    Attack(
        "namespaces-by-clone",
        LIBC + "import os\npid = libc.syscall(56, 0x10000011, 0, 0, 0, 0)\nif pid == 0:\n    os._exit(0)\n"
        "if pid > 0:\n    print('ESCAPED')",
        works_outside=False,
    ),
    Attack("root-user", "import os\nos.setuid(0)\nprint('ESCAPED')", needs_root=True),
    Attack("change-root", "import os\nos.chroot('/')\nprint('ESCAPED')", needs_root=True),
    Attack("high-priority", "import os\nos.nice(-5)\nprint('ESCAPED')", needs_root=True),
    Attack("higher-limits", "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))\nprint('ESCAPED')"),
    Attack("mount", LIBC + "if libc.mount(b'x', b'/tmp', b'tmpfs', 0, b'') == 0:\n    print('ESCAPED')", False),
    Attack("remount", LIBC + "if libc.mount(None, b'/', None, 32 | 4096, None) == 0:\n    print('ESCAPED')", False),
    Attack("unmount", LIBC + "if libc.umount2(b'/tmp', 2) == 0:\n    print('ESCAPED')", False),
    Attack("host-name", "import socket\nsocket.sethostname('mine')\nprint('ESCAPED')", False),
    Attack("write-root", "import os\nos.mkdir('/mine')\nprint('ESCAPED')", False),
    Attack("write-library", "import os\nopen(os.__file__, 'a')\nprint('ESCAPED')", False),
    Attack("write-program", "open('/program.py', 'a').write('#')\nprint('ESCAPED')", False),
    Attack("delete-library", "import os\nos.remove(os.__file__)\nprint('ESCAPED')", False),
    Attack("device", "import os\nos.mknod('/box/disk', 0o60600, os.makedev(8, 0))\nprint('ESCAPED')", False),
    Attack("change-device", "import os\nos.chmod('/dev/null', 0o000)\nprint('ESCAPED')", False),
    Attack("trace-init", LIBC + "if libc.ptrace(16, 1, 0, 0) == 0:\n    print('ESCAPED')", False),
    Attack(
        "handles",
        LIBC + "if libc.open_by_handle_at(-100, 0, 0) == -1 and ctypes.get_errno() != 1:\n    print('ESCAPED')",
        False,
    ),
]

# What a program may do to itself: how it ends.
ENDINGS = {
    "huge-output": ("while True:\n    print('x' * 10000)", "output"),
    "huge-errors": ("import sys\nwhile True:\n    sys.stderr.write('x' * 10000)", "output"),
    "huge-results": ("import os\nwhile True:\n    os.write(3, b'x' * 10000)", "output"),
    "huge-memory": ("x = []\nwhile True:\n    x.append(bytearray(1 << 20))", "memory"),
    "one-huge-object": ("x = 'x' * (1 << 40)", "memory"),
    "sleep": ("import time\ntime.sleep(1000)", "time"),
    "wait-for-input": ("import signal\nsignal.pause()", "time"),
    "busy": ("while True:\n    pass", "time"),
    "busy-in-c": ("sum(range(10 ** 12))", "time"),
    "ignores-the-limit": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
        "time",
    ),
    "blocks-all-signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True:\n    pass",
        "time",
    ),
    "busy-threads": (
        "import threading\nfor _ in range(4):\n    threading.Thread(target=lambda: sum(range(10 ** 12))).start()",
        "time",
    ),
    "threads-without-end": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(1000,)).start()",
        "time",  # the first ones are waited for
    ),
    "recursion": ("def f():\n    return f()\nf()", "raised"),
    "deep-recursion": ("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x):\n    return [f(x)]\nf(0)", None),
    "deep-source": ("x = " + "(" * 5000 + ")" * 5000, "raised"),
    "crash": ("import ctypes\nctypes.string_at(0)", "killed"),
    "abort": ("import os\nos.abort()", "killed"),
    "kills-itself": ("import os\nos.kill(os.getpid(), 9)", "killed"),
    "kills-its-parent": ("import os\nos.kill(os.getppid(), 9)\nprint('ESCAPED' * (os.getppid() != 1))", "finished"),
    "kills-its-group": ("import os\nos.killpg(0, 9)", "killed"),
    "kills-everything": ("import os\nos.kill(-1, 9)", None),
    "stops-its-parent": ("import os\nos.kill(1, 19)", "finished"),
    "interrupts-its-parent": ("import os\nos.kill(1, 2)\nos.kill(1, 15)", "finished"),
    "closes-everything": ("import os\nos.closerange(0, 1000)\nwhile True:\n    pass", "time"),
    "exit-handler": ("import atexit, time\natexit.register(time.sleep, 1000)", "time"),
    "refuses-to-end": (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        "time",
    ),
    "null-byte": ("print(1)\x00", "raised"),
    "half-character": ("print('\ud800')", "raised"),
    "other-letters": ("\uff50\uff52\uff49\uff4e\uff54(1)", "finished"),  # Python reads these as print(1)
    "other-direction": ("x = 1 # \u202e\u2066\nprint(x)", "finished"),
    "not-text": ("print(b'\\xff')\nimport os\nos.write(1, b'\\xff\\xfe\\x00')", "finished"),
    "other-encoding": ("# coding: utf-7\nprint(1)", "finished"),
    "empty": ("", "finished"),
}
