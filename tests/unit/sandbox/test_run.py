"""Running of programs: inputs, results, limits, modes, and what is said where there is no sandbox."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cohort
from cohort.errors import SandboxError
from cohort.sandbox import (
    ProgramLimits,
    call_functions,
    exchange,
    find_missing,
    forbid,
    run,
    run_program,
    set_mode,
)
from cohort.sandbox.driver import MAX_ITEMS, decode_value, encode_value
from cohort.sandbox.filter import build_filter
from cohort.sandbox.records import MAX_SOURCE
from cohort.sandbox.root import plan_root

SOURCE = str(Path(cohort.__file__).parents[1])
QUICK = ProgramLimits(cpu_seconds=1, wall_seconds=3)


@pytest.fixture(autouse=True)
def usual_state() -> Iterator[None]:
    """Sets mode and ban back after a test."""
    yield
    set_mode("auto")
    forbid("")


def call(function: str, *arguments: Any) -> dict[str, Any]:
    return {"function": function, "arguments": [encode_value(a) for a in arguments], "keywords": {}}


def run_in_child(script: str, command: tuple[str, ...] = (sys.executable,), **options: Any) -> str:
    """Returns what a script prints in a process of its own."""
    done = subprocess.run(
        [*command, "-c", script],
        env={"PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_this_machine_has_a_sandbox() -> None:
    """Without it, the tests of this folder prove nothing."""
    assert find_missing() is None


def test_input_and_output() -> None:
    done = run_program("import sys\nprint(sys.stdin.read().upper())\nprint('e', file=sys.stderr)", "héllo\n")
    assert (done.outcome, done.stdout, done.stderr, done.exit_code) == ("finished", "HÉLLO\n\n", "e\n", 0)
    assert 0 < done.cpu_seconds < done.seconds + 1


def test_a_large_input_is_read_or_left(tmp_path: Path) -> None:
    text = "x" * 3_000_000
    assert run_program("import sys\nprint(len(sys.stdin.read()))", text).stdout == "3000000\n"
    assert run_program("print('done')", text).stdout == "done\n"
    assert run_program("import os\nos.close(0)\nprint('done')", text).stdout == "done\n"


@pytest.mark.parametrize(
    ("source", "code"), [("import sys\nsys.exit(3)", 3), ("import os\nos._exit(9)", 9), ("1/0", 1)]
)
def test_exit_codes(source: str, code: int) -> None:
    done = run_program(source)
    assert (done.outcome, done.exit_code) == ("raised", code)


def test_a_program_has_the_standard_library_and_nothing_else() -> None:
    source = (
        "import asyncio, collections, datetime, decimal, hashlib, itertools, json, math, random, re, sqlite3\n"
        "import threading\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "try:\n    import pytest\nexcept ImportError:\n    print('no packages')\n"
        "try:\n    import cohort\nexcept ImportError:\n    print('no cohort')"
    )
    done = run_program(source)
    assert done.stdout == "thread\nno packages\nno cohort\n", done


def test_packages_in_the_folder_of_the_interpreter_are_hidden() -> None:
    plan = plan_root([])
    packages = [path for path in plan.hidden if path.endswith("site-packages")]
    base = os.path.realpath(sys.base_prefix)
    assert [path for path in packages if path.startswith(base)], "the interpreter has such a folder"
    listed = run_program(f"import os\nprint([os.listdir(path) for path in {packages!r}])").stdout
    assert listed == f"{[[] for _ in packages]}\n"


def test_hidden_folders_inside_the_library_are_empty() -> None:
    folder = os.path.dirname(json.__file__)
    assert os.path.realpath(folder) in plan_root([folder]).hidden


def test_the_same_program_gives_the_same_output() -> None:
    source = "print({'a', 'b', 'c', 'd', 'e'}, hash('x'))"
    assert len({run_program(source).stdout for _ in range(3)}) == 1


def test_calls_and_their_results() -> None:
    source = (
        "import math\ndef add(a, b=1):\n    print('noise')\n    return a + b\ndef fail():\n    raise ValueError('no')\n"
    )
    calls = [call("add", 1, 2), call("add", [1], [2]), call("fail"), call("missing"), call("math.sqrt", 4.0)]
    done = call_functions(source, [*calls, {"function": "add", "arguments": [1], "keywords": {"b": 5}}])
    assert [r.get("value", r.get("error")) for r in done.results] == [
        3,
        [1, 2],
        "ValueError: no",
        "AttributeError: module 'program' has no attribute 'missing'",
        {"float": "2.0"},
        6,
    ]


def test_a_program_that_ends_early_has_the_results_before() -> None:
    source = "import os\ndef f(n):\n    if n == 2:\n        os._exit(0)\n    return n"
    done = call_functions(source, [call("f", n) for n in range(4)])
    assert done.results == [{"value": 0}, {"value": 1}, None, None] and done.outcome == "finished"
    assert call_functions("1/0", [call("f", 1)]).results == [None]
    assert call_functions("import sys\nsys.exit(0)", [call("f", 1)]).results == [None]


def test_results_that_the_program_makes_up_do_not_count() -> None:
    """It does not know the word that stands before a result when it is loaded."""
    source = 'import os\nos.write(3, b\'loaded\\n0 {"value": 5}\\n 0 {"value": 5}\\nx 0 {"value": 5}\\n\')\n'
    done = call_functions(source + "def f():\n    return 7", [call("f")])
    assert done.results in ([{"value": 7}], [None])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**30),
        1.5,
        float("inf"),
        2j,
        "a\ud800é",
        b"\x00\xff",
        [],
        [1, [2]],
        (1,),
        {1, 2},
        {"a": (1, {2: 3})},
    ],
)
def test_values_survive_the_way(value: Any) -> None:
    there = json.loads(json.dumps(encode_value(value)))
    assert decode_value(there) == value and type(decode_value(there)) is type(value)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"a": 1},
        {"tuple": 1},
        {"tuple": [], "set": []},
        {"set": [[]]},
        {"dict": [1]},
        {"dict": [[1, 2, 3]]},
        {"float": "x"},
        {"float": []},
        {"bytes": 5},
        {"complex": ["1"]},
        1.5,
        [0] * (MAX_ITEMS + 1),
        [[0] * 200] * 51,
    ],
)
def test_damaged_values_are_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        decode_value(data)


def test_objects_that_are_no_plain_values() -> None:
    source = (
        "from collections import Counter\nclass Any:\n    def __eq__(self, other): return True\n"
        "def f(n): return [Any(), Counter('aa'), iter([]), f, 10 ** 5000][n]"
    )
    results = call_functions(source, [call("f", n) for n in range(5)]).results
    assert results[1] == {"value": {"dict": [["a", 2]]}}
    assert all("error" in results[n] for n in (0, 2, 3))
    # Too many digits for a decimal number.
    assert decode_value(results[4]["value"]) == 10**5000


def test_a_source_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="more than"):
        run_program("#" * (MAX_SOURCE + 1))
    assert run_program("#" * (MAX_SOURCE - 10)).outcome == "finished"


def test_forbidden_in_this_process() -> None:
    forbid("it holds keys")
    with pytest.raises(SandboxError, match="it holds keys"):
        run_program("print(1)")
    with pytest.raises(SandboxError, match="it holds keys"):
        call_functions("", [])


def test_without_a_sandbox_there_are_limits(tmp_path: Path) -> None:
    """With the mode "none" a program can read what we can. Limits, and an empty environment, are still there."""
    (tmp_path / "note").write_text("mine")
    set_mode("none")
    done = run_program(f"import os\nprint(open({str(tmp_path / 'note')!r}).read(), sorted(os.environ), os.listdir())")
    assert done.stdout.startswith("mine ['HOME', 'LC_CTYPE', 'PYTHONHASHSEED'] ")
    assert run_program("while True: pass", "", QUICK).outcome == "time"
    assert run_program("x = 'x' * (1 << 40)").outcome == "memory"
    assert run_program("import time\ntime.sleep(100)", "", QUICK).outcome == "time"
    assert run_program("while True: print('x' * 10000)").outcome == "output"
    assert call_functions("def f(): return 1", [call("f")]).results == [{"value": 1}]
    folder = run_program("import os\nprint(os.getcwd())").stdout.strip()
    assert folder and not os.path.exists(folder)


def test_without_a_sandbox_nothing_is_left_either() -> None:
    set_mode("none")
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 100)\n"
        "        time.sleep(600)\n    os._exit(0)\nos.wait()\nprint(os.getpid())"
    )
    done = run_program(source)
    assert done.outcome == "finished", done
    found = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert not [line for line in found.splitlines() if "cohort-program-" in line]


def test_an_unknown_mode() -> None:
    with pytest.raises(SandboxError, match="use auto or none"):
        set_mode("some")  # type: ignore[arg-type]


def test_where_namespaces_are_not_allowed() -> None:
    """As in a container whose filter refuses new namespaces: one line says so, and nothing runs unprotected."""
    printed = run_in_child(
        "import os\nfrom cohort.sandbox import *\nfrom cohort.sandbox.filter import build_filter\n"
        "from cohort.sandbox.kernel_calls import *\nforbid_new_privileges()\n"
        "install_filter(build_filter(os.uname().machine, True))\nprint(find_missing())\n"
        "try:\n    run_program('print(5)')\nexcept Exception as e:\n    print(type(e).__name__, e)\n"
        "set_mode('none')\nprint(run_program('print(5)').stdout)"
    )
    first, second, third = printed.split("\n", 2)
    assert "this machine does not allow it" in first and "Operation not permitted" in first
    assert second.startswith("SandboxError") and "--scoring.sandbox none" in second
    assert third == "5\n\n"


@pytest.mark.parametrize("limited", [False, True])
def test_inside_a_user_namespace(limited: bool) -> None:
    """As in a container without root, whose only user is its own; and where no more namespaces are allowed there."""
    printed = run_in_child(
        "import os\nfrom cohort.sandbox import *\nfrom cohort.sandbox.kernel_calls import *\n"
        "uid, gid = os.getuid(), os.getgid()\nleave_namespaces(NEW_USER)\n"
        "open('/proc/self/setgroups', 'w').write('deny')\n"
        "open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')\nopen('/proc/self/gid_map', 'w').write(f'0 {gid} 1')\n"
        f"if {limited}: open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "print(find_missing())\nprint(find_missing() or run_program('import os; print(os.getuid())').stdout)"
    )
    if limited:
        assert "user.max_user_namespaces" in printed
    else:
        assert printed.split() == ["None", "65534"]


def test_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        sysname = "Darwin"

    monkeypatch.setattr(os, "uname", Other)
    assert run._look_for_missing() == "programs can be isolated on Linux only"


def test_an_ordinary_user_needs_no_rights() -> None:
    """As root, with an interpreter that others may read; the other tests show it if they do not run as root."""
    command: tuple[str, ...] = (sys.executable,)
    options: dict[str, Any] = {}
    if os.geteuid() == 0:
        readable = shutil.which("python3", path="/usr/bin:/usr/local/bin")
        if readable is None or not os.path.realpath(readable).startswith("/usr"):
            pytest.skip("no interpreter that another user could start")
        command, options = (readable,), {"user": 12345, "group": 12345, "extra_groups": []}
    printed = run_in_child(
        "import os\nfrom cohort.sandbox import *\nprint(os.getuid() != 0, find_missing())\n"
        "print(run_program('import os; print(os.getuid(), os.listdir(\"/box\"))').stdout)",
        command,
        **options,
    )
    assert printed.startswith("True None\n65534 []")


def test_several_threads_and_forks_of_a_caller() -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda n=n: results.append(run_program(f"print({n})").stdout)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"{n}\n" for n in range(6)]
    printed = run_in_child(
        "import os\nfrom cohort.sandbox import *\nrun_program('')\npid = os.fork()\n"
        "print(run_program('print(1)').stdout, flush=True)\nif pid: os.waitpid(pid, 0)\nelse: os._exit(0)"
    )
    assert printed.split() == ["1", "1"]


def test_no_file_descriptor_is_left_open() -> None:
    run_program("")
    before = os.listdir("/proc/self/fd")
    for source in ("", "1/0", "while True: print('x' * 10000)"):
        run_program(source, "input", QUICK)
        call_functions(source, [call("f")], QUICK)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_filter_is_known_for_two_machines() -> None:
    assert build_filter("riscv64", False) is None
    for machine in ("x86_64", "aarch64"):
        code = build_filter(machine, False)
        assert code is not None and len(code) % 8 == 0 and len(code) // 8 < 4096
        assert len(code) > len(build_filter(machine, True) or b"")


def test_the_start_of_the_sandbox_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is not too slow because the machine is. A sandbox that never starts is no verdict either."""
    run_program("")
    assert run._state.spawner is not None
    spawner = run._state.spawner.process
    spawner.send_signal(signal.SIGSTOP)
    timer = threading.Timer(1.0, spawner.send_signal, (signal.SIGCONT,))
    timer.start()
    done = run_program("print(1)", "", ProgramLimits(wall_seconds=0.9))
    assert done.outcome == "finished" and done.seconds > 0.9
    timer.join()
    monkeypatch.setattr(exchange, "STOP_SECONDS", 0.5)
    spawner.send_signal(signal.SIGSTOP)
    with pytest.raises(SandboxError, match="longer than"):
        run_program("print(1)")
    assert spawner.poll() is not None
