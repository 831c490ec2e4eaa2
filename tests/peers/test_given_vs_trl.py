"""benchmarks/given_vs_trl.py on a CPU: it runs both sides, and sees where they do not train on the same tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "given_vs_trl.py"
SIZES = ["--pairs=4", "--prompt-tokens=32", "--answer-tokens=8", "--rows=4", "--row-tokens=128"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module. It imports others of its folder."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("given_vs_trl", SCRIPT)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Its dataclasses look for it there.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_both_sides_train_on_the_same(script, tmp_path, kind):
    out = tmp_path / "given.json"
    # Two rows per microbatch, so that the denominators of TRL's gradient accumulation count.
    settings = ["--trl", "varlen:2:keep:fp32", "sdpa:1:checkpointing:fp32", "nothing:1:keep:fp32"]
    command = [sys.executable, str(SCRIPT), "--device=cpu", "--shape=small", f"--kinds={kind}", "--steps=1", *SIZES]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--budgets", "256", f"--out={out}", *settings], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = [script.Result(**r) for r in json.loads(out.read_text())["kinds"][kind]["results"]]
    ours, *theirs = [r for r in results if not r.stored]
    assert ours.side == "Cohort" and [r.setting for r in theirs] == settings[1:]
    *worked, failed = theirs
    # A setting that fails is a line of the table, and not the end.
    assert failed.failure and not failed.seconds and failed.failure in done.stdout
    for other in worked:
        assert script.find_differences(ours, other) == []
        # The second step has the weights of the first one's update.
        assert other.losses == pytest.approx(ours.losses, abs=2e-4)
    assert ours.losses[1] != pytest.approx(ours.losses[0], abs=1e-5)
    if kind == "dpo":
        assert [r.side for r in results if r.stored] == ["Cohort", "TRL"]


def test_other_work_is_seen(script):
    first = {"targets": 100, "total": 12345, "loss": 2.0, "grad_norm": 1.0, "chosen": -50.0, "rejected": -60.0}
    ours = script.Result(kind="dpo", side="Cohort", setting="", numbers="fp32", first=first)
    theirs = replace(ours, side="TRL")
    assert script.find_differences(ours, theirs) == []
    for name, value in {"targets": 99, "total": 12346, "loss": 2.01, "grad_norm": 1.1, "chosen": -51.0}.items():
        [difference] = script.find_differences(ours, replace(theirs, first={**first, name: value}))
        assert difference.startswith(name)


def test_rows_are_full_and_settings_have_names(script):
    job = script.Job(kind="sft", model="", vocab=50, size=20, steps=1, row=4096)
    rows = script.draw_rows(job, 0)
    assert rows != script.draw_rows(job, 1) and rows == script.draw_rows(job, 0)
    assert {sum(map(len, row)) for row in rows} == {4096} and len({len(row) for row in rows}) > 1
    ids = {token for row in rows for document in row for token in document}
    assert min(ids) >= 3 and max(ids) < 50
    for text in ("varlen:16:keep:bf16:liger", "sdpa:4:checkpointing:fp32", "varlen:2:keep:bf16:liger:compile"):
        assert str(script.Setting.parse(text)) == text
