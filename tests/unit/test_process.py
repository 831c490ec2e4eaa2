"""What a process asks of its operating system, and that the user's own choice stands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cohort import process

CHURN = """
import resource, sys
from cohort import process
if sys.argv[1] == "keep":
    process.keep_memory()
import torch
torch.set_num_threads(1)
def churn(times):
    for _ in range(times):
        torch.ones(1 << 24).add_(1)  # 64 MiB, freed at once
churn(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn(8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> int:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | environment
    done = subprocess.run([sys.executable, "-c", CHURN, how], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is Linux's")
def test_freed_memory_stays_with_the_process():
    pages = 8 * (64 << 20) // os.sysconf("SC_PAGESIZE")
    assert faults("plain") > pages / 2
    assert faults("keep") < pages / 10
    assert faults("keep", MALLOC_ARENA_MAX="2") > pages / 2  # somebody has chosen already


def test_waiting_is_short_unless_the_user_chose(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    process.wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "5000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    process.wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    process.wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ
