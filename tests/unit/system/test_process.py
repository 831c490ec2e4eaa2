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
    assert kept < pages / 10
    assert chosen > pages / 2  # the user has set a MALLOC_ variable


def test_threads_spin_briefly_unless_the_user_chose(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    process.shorten_thread_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "5000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    process.shorten_thread_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    process.shorten_thread_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
