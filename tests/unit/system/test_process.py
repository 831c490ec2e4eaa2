"""Settings of a process: freed memory and spinning threads. A choice of the user is kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cohort.system import process

# Three children of one process, because torch takes two seconds to import. Each prints its number of page faults.
CHURN = """
import os, resource, sys
import torch
from cohort.system import process
torch.set_num_threads(1)

def churn(times):
    for _ in range(times):
        torch.ones(1 << 24).add_(1)  # 64 MiB, freed at once

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for keep, environment in ((False, {}), (True, {}), (True, {"MALLOC_ARENA_MAX": "2"})):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        continue
    os.environ.update(environment)
    if keep:
        process.keep_freed_memory()
    churn(8)
    before = faults()
    churn(8)
    print(faults() - before, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is Linux's")
def test_freed_memory_stays_with_the_process():
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", CHURN], env=env, capture_output=True, text=True, check=True)
    plain, kept, chosen = map(int, done.stdout.split())
    pages = 8 * (64 << 20) // os.sysconf("SC_PAGESIZE")
    assert plain > pages / 2
    # One of the eight may still be returned to the system, depending on what else is on the heap.
    assert kept < pages / 4
    assert chosen > pages / 2  # the user has set a MALLOC_ variable


@pytest.mark.parametrize(("variable", "value"), [("GOMP_SPINCOUNT", "5000"), ("KMP_BLOCKTIME", "1")])
def test_threads_spin_briefly_unless_the_user_chose(monkeypatch, variable, value):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv(variable, raising=False)
    process.shorten_thread_spinning()
    assert os.environ[variable] == value
    monkeypatch.setenv(variable, "7")
    process.shorten_thread_spinning()
    assert os.environ[variable] == "7"
    monkeypatch.delenv(variable)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    process.shorten_thread_spinning()
    assert variable not in os.environ


# Modules that Windows lacks; a command must not import one before it is refused.
WITHOUT_UNIX = """
import sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
sys.platform = "win32"
"""


@pytest.mark.parametrize(
    "program",
    [
        "import sys; from cohort.cli.main import main; sys.exit(main(['train', 'quickstart']))",
        "import cohort\ntry: cohort.train('quickstart')\nexcept Exception as e: sys.exit(f'cohort: {e}')",
    ],
)
def test_windows_is_told_to_use_wsl_in_one_line(program):
    done = subprocess.run([sys.executable, "-c", WITHOUT_UNIX + program], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr == (
        "cohort: Cohort runs on Linux and macOS. On Windows use WSL: run `wsl --install` once, then install and start "
        "Cohort in its Linux shell.\n"
    )


# Prints the GOMP_SPINCOUNT that torch finds, and whether a run makes idle threads. Training itself is replaced.
ORDER = """
import os, sys
{first}
import cohort
import torch
from cohort.jobs import build
from cohort.models import spinning
build.start_run = lambda config, *args: build.configure_torch(config.threads, torch.device("cpu"))
cohort.train("quickstart", {{"threads": {threads}}})
print(os.environ.get("GOMP_SPINCOUNT"), spinning._held is not None, torch.get_num_threads())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp is Linux's")
@pytest.mark.parametrize(
    ("first", "threads", "printed"),
    [("", 2, "5000 False 2"), ("import torch", 2, "None True 2"), ("import torch", 1, "None False 1")],
)
def test_training_from_python_waits_briefly_whether_torch_is_imported_before_or_after(first, threads, printed):
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    program = ORDER.format(first=first, threads=threads)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == printed
