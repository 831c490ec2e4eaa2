"""Hostile programs: random combinations of attacks, scored as answers of the task code by scoring workers.

python benchmarks/hostile_programs.py --count 1000 --seed 0 --workers 4

Each program ignores signals, starts threads or patches Python, then tries some attacks, and then ends in some way: it
loops, sleeps, floods its output or memory, exits early, or makes up results. The script exits with 1 if any of them is
scored as right, is not scored at all, takes longer than its limits, reaches what was planted for it, or leaves a
process or file behind. It prints how they ended, and what an empty program costs.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cohort.sandbox import find_missing, run_program
from cohort.scoring.pool import ScoringPool
from cohort.system.kernel import list_children
from cohort.tasks.base import make_plain_answer
from cohort.tasks.code.rows import make_row
from cohort.tasks.code.task import WALL_PER_CPU_SECOND, Code

SECONDS = 0.4  # per program; CPU time is rounded up to a second
GRACE_SECONDS = 5.0  # beyond the limits, on a busy machine
PRELUDES = [
    "",
    "import signal\nfor n in {1, 2, 3, 13, 14, 15, 17, 24, 27}: signal.signal(n, signal.SIG_IGN)",
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "import sys; sys.setrecursionlimit(10 ** 8); sys.set_int_max_str_digits(0)",
    "import threading\nfor _ in range(8): threading.Thread(target=lambda: sum(range(10 ** 11)), daemon=True).start()",
    "import builtins; builtins.abs = builtins.len = lambda *_: 0",
    "import atexit, os; atexit.register(os._exit, 0)",
    "import sys; sys.settrace(lambda *_: None); sys.excepthook = lambda *_: None",
    "import os; os.closerange(0, 64)",
    "import gc; gc.disable(); junk = [o for o in gc.get_objects()]",
]
# FOLDER, PORT and VICTIM stand for what is planted.
ATTACKS = [
    "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "open(FOLDER + '/escaped', 'w').write('x')",
    "import shutil; shutil.rmtree(FOLDER)",
    "import os; [os.remove(FOLDER + '/' + n) for n in os.listdir(FOLDER)]",
    "import os; os.kill(VICTIM, 9)",
    "import os; os.kill(os.getppid(), 9)",
    "import os; os.kill(1, 9); os.kill(1, 2); os.kill(1, 19)",
    "import os; [os.kill(n, 9) for n in range(2, 400) if n != os.getpid()]",
    "import os\nfor _ in range(1000): os.fork()",
    "import subprocess; subprocess.Popen(['/bin/sh', '-c', 'sleep 1000 &'])",
    "import os; os.fork() or os.setsid() or os.fork() or os.execv('/bin/sleep', ['sleep', '1000'])",
    "import multiprocessing; multiprocessing.Process(target=print).start()",
    "import ctypes; ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None)",
    "import ctypes; ctypes.CDLL(None).unshare(0x10000000)",
    "import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)",
    "import ctypes; ctypes.string_at(0)",
    "import ctypes; [ctypes.CDLL(None).syscall(n, -1, -1, -1, -1, -1, -1) for n in range(440, 470)]",
    "import os; os.chroot('/box'); os.setuid(0)",
    "import os; os.symlink('/', '/box/root'); os.listdir('/box/root/proc')",
    "import os\nfor n in range(10 ** 6): os.mkdir(f'/box/{n}')",
    "for n in range(100): open(f'/tmp/{n}', 'wb').write(bytes(1 << 22))",
    "files = []\nwhile True: files.append(open('/dev/null'))",
    "import os\nfor fd in range(3, 100): os.write(fd, b'0 {\"value\": true}\\n')",
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "import os; os.nice(-20)",
    "import sys; sys.modules['__main__'].do_call = lambda *_: {'value': True}",
    "import os\nfor folder, _, names in os.walk('/'):\n    if 'problems.json' in names: raise SystemExit(folder)",
    "print(open('/proc/self/environ').read())",
    "import mmap; m = mmap.mmap(-1, 1 << 27); m.write(bytes(1 << 27))",
    "x = 9 ** 9 ** 6",
    "compile('(' * 10 ** 5, 'x', 'exec')",
    "def g(): return g()\ng()",
]
ENDINGS = [
    ("busy", "while True: pass"),
    ("sleep", "import time; time.sleep(1000)"),
    ("flood", "while True: print('x' * 4096)"),
    ("flood-results", "import os\nwhile True: os.write(3, b'x' * 4096)"),
    ("memory", "x = []\nwhile True: x.append('x' * 10 ** 6)"),
    *[("exit", "import sys; sys.exit(0)"), ("exit", "import os; os._exit(0)"), ("abort", "import os; os.abort()")] * 3,
    *[("none", "def f(n): return None"), ("false", "def f(n): return 0"), ("true", "def f(n): return True")] * 3,
    ("equal", "class A:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\ndef f(n): return A()"),
    ("equal", "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\ndef f(n): return A()"),
    ("long", "def f(n): return 'x' * 10 ** 7"),
    ("deep", "def f(n):\n    x = []\n    for _ in range(5000): x = [x]\n    return x"),
    ("keys", "def f(n): return {i * (2 ** 61 - 1): i for i in range(9000)}"),
    ("text", "\x00\u202e\ud800 def f(n): return 1"),
]
# A rule that no program can guess, tested in all forms.
VALUES = {n: n * n + 7919 for n in (0, 3, 11)}
TESTS: list[list[Any]] = [
    [{"function": "f", "arguments": [n], "expected": value} for n, value in VALUES.items()],
    [f"assert f({n}) == {value}" for n, value in VALUES.items()],
    [{"input": f"{n}\n", "output": f"{value}\n"} for n, value in VALUES.items()],
]


@dataclass
class Report:
    """What became of the programs, and what is wrong."""

    faults: list[str] = field(default_factory=list)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0


def make_program(draws: random.Random, planted: dict[str, str]) -> str:
    """Returns a program: a prelude, up to three attacks, each with its errors caught or not, and an ending."""
    parts = [draws.choice(PRELUDES)]
    for attack in draws.sample(ATTACKS, draws.randint(1, 3)):
        lines = "\n".join(f"    {line}" for line in attack.splitlines())
        parts.append(f"try:\n{lines}\nexcept BaseException: pass" if draws.random() < 0.9 else attack)
    parts.append(draws.choice(ENDINGS)[1])
    source = "\n".join(parts)
    for word, value in planted.items():
        source = source.replace(word, value)
    return source


def list_below(pid: int) -> set[int]:
    """Returns all processes below one."""
    found: set[int] = set()
    rest = [pid]
    while rest:
        children = set(list_children(rest.pop())) - found
        found |= children
        rest += children
    return found


def try_programs(count: int, seed: int, workers: int) -> Report:
    """Scores `count` hostile programs, and returns what happened."""
    report = Report()
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    (folder / "note").write_text("planted")
    files_before = {name for name in os.listdir("/tmp") if name.startswith("cohort-program-")}
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100000)"])
    below = list_below(os.getpid())
    planted = {"FOLDER": repr(str(folder)), "PORT": str(server.getsockname()[1]), "VICTIM": str(victim.pid)}
    draws = random.Random(seed)
    sources = [make_program(draws, planted) for _ in range(count)]
    rows = [
        {
            "id": str(n),
            **make_row({"prompt": "p", "tests": TESTS[n % len(TESTS)], "solution": "def f(n): ..."}, "refuse"),
        }
        for n in range(count)
    ]
    task = Code(seconds=SECONDS)
    # The longest that an answer may take by the clock.
    most = WALL_PER_CPU_SECOND * SECONDS * len(VALUES) + GRACE_SECONDS
    began = time.monotonic()
    try:
        with ScoringPool(task, workers) as pool:
            for start in range(0, count, 4 * workers):
                batch = range(start, min(count, start + 4 * workers))
                now = time.monotonic()
                answers = [make_plain_answer(f"```python\n{sources[n]}\n```") for n in batch]
                outcomes = pool.score(zip([rows[n] for n in batch], answers, strict=True))
                for n, outcome in zip(batch, outcomes, strict=True):
                    report.reasons[shorten_reason(outcome.reason)] += 1
                    if outcome.failure:
                        report.faults.append(f"program {n} was not scored: {outcome.failure[:200]}")
                    elif outcome.parts["correct"] or outcome.parts["passed"]:
                        report.faults.append(f"program {n} passed tests: {outcome.parts}")
                if time.monotonic() - now > most * 4 + GRACE_SECONDS:
                    report.faults.append(f"programs {batch} took {time.monotonic() - now:.1f} s")
        report.seconds = time.monotonic() - began
        report.faults += look_around(folder, server, victim, below, files_before)
    finally:
        victim.kill()
        victim.wait()
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
    return report


def shorten_reason(reason: str) -> str:
    """Returns the kind of a reason, without the number of the test and what it is about."""
    text = reason.partition(": ")[2] or reason
    return text.partition(":")[0][:60] if not text.startswith("assert") else "wrong result"


def look_around(
    folder: Path,
    server: socket.socket,
    victim: subprocess.Popen[bytes],
    below: set[int],
    files_before: set[str],
    seconds: float = 10.0,
) -> list[str]:
    """Returns what the programs changed outside their sandboxes. Processes that are ending have some seconds for it."""
    faults = []
    if [(p.name, p.read_text()) for p in folder.iterdir()] != [("note", "planted")]:
        faults.append(f"the planted folder has changed: {sorted(os.listdir(folder))}")
    if victim.poll() is not None:
        faults.append("the planted process was ended")
    try:
        server.accept()
        faults.append("the planted server was reached")
    except BlockingIOError:
        pass
    deadline = time.monotonic() + seconds
    while (left := list_below(os.getpid()) - below) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        faults.append(f"processes are left: {sorted(left)}")
    new = {name for name in os.listdir("/tmp") if name.startswith("cohort-program-")} - files_before
    return faults + ([f"files are left: {sorted(new)}"] if new else [])


def measure_cost(count: int = 100) -> dict[str, float]:
    """Returns median and largest milliseconds of a program that prints one line, run one after another."""
    run_program("")
    times = []
    for _ in range(count):
        began = time.perf_counter()
        assert run_program("print(1)").stdout == "1\n"
        times.append(1000 * (time.perf_counter() - began))
    return {"median": round(statistics.median(times), 1), "largest": round(max(times), 1)}


def main() -> None:
    """Runs the programs and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="programs (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the combinations (0)")
    parser.add_argument("--workers", type=int, default=4, help="scoring workers (4)")
    arguments = parser.parse_args()
    if missing := find_missing():
        sys.exit(f"there is no sandbox here: {missing}")
    cost = measure_cost()
    report = try_programs(arguments.count, arguments.seed, arguments.workers)
    found = {
        "programs": arguments.count,
        "seconds": round(report.seconds, 1),
        "faults": report.faults,
        "reasons": dict(report.reasons.most_common()),
        "milliseconds_per_small_program": cost,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
    }
    print(json.dumps(found, indent=1))
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
