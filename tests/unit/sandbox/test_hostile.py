"""Random combinations of attacks: all are wrong answers, within their limits, and nothing is left of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hostile_programs import list_below, look_around, try_programs


@pytest.mark.parametrize(("count", "seed"), [(40, 1), pytest.param(1000, 0, marks=pytest.mark.slow)])
def test_hostile_programs(count: int, seed: int) -> None:
    report = try_programs(count, seed, workers=3)
    assert not report.faults, "\n".join(report.faults)
    assert sum(report.reasons.values()) == count and len(report.reasons) > 5, report.reasons


def test_the_faults_would_be_seen(tmp_path: Path) -> None:
    """Everything that a program must not do, done by the test itself."""
    (tmp_path / "note").write_text("changed")
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    victim = subprocess.Popen([sys.executable, "-S", "-c", ""])
    victim.wait()
    below = list_below(os.getpid())
    with socket.create_connection(server.getsockname()), server, subprocess.Popen(["sleep", "600"]) as left:
        found = look_around(tmp_path, server, victim, below, set(), seconds=0.2)
        left.kill()
    assert [fault.split(":")[0] for fault in found[:4]] == [
        "the planted folder has changed",
        "the planted process was ended",
        "the planted server was reached",
        "processes are left",
    ]
