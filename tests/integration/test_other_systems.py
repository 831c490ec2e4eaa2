"""The first steps of the quickstart where the calls are missing that only Linux has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers import without_linux
from tests.helpers.command_line import ENV, SMALL

# Runs the commands one after the other, because torch takes two seconds to import. RUN stands for the run made before.
# torch, and what it imports, would look for parts of macOS; so the system is renamed after their import.
DRIVER = """
import json, os, sys, sysconfig, urllib.request
from pathlib import Path
import torch
from cohort.scoring import process

sysconfig.get_config_vars()
sys.platform = "darwin"
make = process.make_worker_environment

def make_without(names=()):
    environment = make(names)
    return {**environment, "PYTHONPATH": sys.argv[1] + os.pathsep + environment["PYTHONPATH"]}

process.make_worker_environment = make_without
assert not hasattr(os, "sched_getaffinity")

from cohort.cli.main import main

for words in json.loads(sys.argv[2]):
    runs = [str(path.parent) for path in Path("runs").glob("*/config.yaml")]
    words = [runs[0] if word == "RUN" else word for word in words]
    print("==", *words, flush=True)
    code = main(words)
    assert code == 0, code
"""


def test_the_first_steps_need_nothing_that_only_linux_has(tmp_path: Path) -> None:
    folder = without_linux.make_folder(tmp_path)
    small = [word for word in SMALL if not word.startswith(("--steps", "--eval.every", "--save.every"))]
    commands = [
        ["train", "quickstart", *small, "--steps", "2"],
        ["resume", "RUN", "--steps", "3"],
        ["eval", "arithmetic", "--model", "tiny", "--limit", "4"],
        ["explain", "RUN"],
        ["export", "RUN", "exported"],
        ["check", "quickstart", *small],
    ]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), json.dumps(commands)],
        cwd=tmp_path,
        env={**ENV, "PYTHONPATH": os.pathsep.join([str(folder), ENV["PYTHONPATH"]])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"step +3/3 ", done.stdout)
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert "FAIL" not in done.stdout
