"""The comparison in benchmarks/neutral.py reports the smallest difference between two runs, and none for equal runs."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import neutral

MODEL = Path("checkpoints/step-000002/model/model.safetensors")


def write_run(folder: Path, **changes: float) -> Path:
    """Writes the files of a run of two steps and returns its folder. `changes` are metrics of the second step."""
    steps = [
        {"eval/accuracy": 0.5},
        {"loss": 0.1 + 0.2, "kl": math.nan, "time/step": 1.0},
        {"loss": -0.0, "kl": 1e-9, "time/step": 2.0, "rollouts/bytes": 10.0, **changes},
    ]
    folder.mkdir()
    lines = [json.dumps({"step": n, "time": 1.0, "metrics": metrics}) for n, metrics in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    for step in (1, 2):
        model = folder / "checkpoints" / f"step-{step:06d}" / "model"
        model.mkdir(parents=True)
        values = np.arange(6, dtype=np.float32).reshape(2, 3) * step
        save_file({"a": values, "b": values[0]}, model / "model.safetensors")
    (folder / "eval").mkdir()
    item = {"id": "1+1", "answers": [{"text": "2", "correct": 1.0}, {"text": "3", "correct": 0.0}]}
    (folder / "eval" / "step-000002.json").write_text(json.dumps({"accuracy": 0.5, "items": [item]}))
    return folder


def compare(tmp_path: Path, **renamed: str) -> str:
    """Returns the first difference between the runs `base` and `new`, with metrics renamed as told."""
    return neutral.compare_runs(tmp_path / "base", tmp_path / "new", renamed)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_run(tmp_path / "base")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write_run(tmp_path / "new")


def test_the_examples() -> None:
    assert doctest.testmod(neutral).attempted > 0 == doctest.testmod(neutral).failed


def test_equal_runs_are_equal(base: Path, new: Path, tmp_path: Path) -> None:
    assert compare(tmp_path) == ""


def test_times_and_sizes_of_files_may_differ(base: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "new", **{"time/step": 9.0, "time/other": 1.0, "rollouts/bytes": 11.0})
    assert compare(tmp_path) == ""


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [
        ("kl", math.nextafter(1e-9, 1), "step 2, kl: 1e-09 became 1.0000000000000003e-09"),
        ("loss", 0.0, "step 2, loss: -0.0 became 0.0"),
        ("kl", math.nan, "step 2, kl: 1e-09 became nan"),
        ("extra", 1.0, "step 2, extra: only the new tree has it (1.0)"),
    ],
)
def test_one_metric(metric: str, value: float, said: str, base: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "new", **{metric: value})
    assert compare(tmp_path) == said


def test_a_missing_metric_or_step(base: Path, new: Path, tmp_path: Path) -> None:
    text = (new / "metrics.jsonl").read_text()
    (new / "metrics.jsonl").write_text(text.replace('"kl": NaN, ', ""))
    assert compare(tmp_path) == "step 1, kl: only the base has it (nan)"
    (new / "metrics.jsonl").write_text(text.rpartition("\n")[0])
    assert compare(tmp_path) == "step 2: only the base has it"


def test_a_new_name_is_a_difference_unless_it_is_told(base: Path, new: Path, tmp_path: Path) -> None:
    text = (new / "metrics.jsonl").read_text()
    (new / "metrics.jsonl").write_text(text.replace('"kl"', '"divergence"'))
    assert compare(tmp_path) == "step 1, kl: only the base has it (nan)"
    assert compare(tmp_path, kl="divergence") == ""
    assert compare(tmp_path, loss="divergence").startswith("step 1, divergence: ")


def test_one_bit_of_the_last_checkpoint(base: Path, new: Path, tmp_path: Path) -> None:
    content = bytearray((new / MODEL).read_bytes())
    content[-1] ^= 1
    (new / MODEL).write_bytes(content)
    assert compare(tmp_path).startswith("model/model.safetensors: b: F32 [3] ")


def test_a_tensor_of_another_name_type_or_checkpoint(base: Path, new: Path, tmp_path: Path) -> None:
    tensors = load_file(new / MODEL)
    save_file({"a": tensors["a"], "c": tensors["b"]}, new / MODEL)
    assert compare(tmp_path).startswith("model/model.safetensors: b: only the base has it")
    save_file({"a": tensors["a"], "b": tensors["b"].view(np.int32)}, new / MODEL)
    assert " became I32 [3] " in compare(tmp_path)
    save_file(tensors, new / MODEL)
    (new / "checkpoints" / "step-000002").rename(new / "checkpoints" / "step-000003")
    assert compare(tmp_path) == "checkpoint: step-000002 became step-000003"


def test_an_answer(base: Path, new: Path, tmp_path: Path) -> None:
    file = new / "eval" / "step-000002.json"
    text = file.read_text()
    file.write_text(text.replace('"3"', '"4"'))
    assert "problem 0 (1+1), answer 1: ('3', 0.0) became ('4', 0.0)" in compare(tmp_path)
    file.write_text(text.replace('"accuracy": 0.5', '"accuracy": 0.6'))
    assert compare(tmp_path) == "evaluation step-000002.json, accuracy: 0.5 became 0.6"
    file.unlink()
    assert compare(tmp_path) == "evaluations of the base: ['step-000002.json'], of the new tree: []"


def test_runs_without_anything_are_not_equal(tmp_path: Path) -> None:
    """Two runs that died at once leave empty files. These prove nothing."""
    for side in ("base", "new"):
        (write_run(tmp_path / side) / "metrics.jsonl").write_text("")
    assert compare(tmp_path) == "the base has no metrics"


def test_new_names_come_from_the_tree(tmp_path: Path) -> None:
    assert neutral.read_renamed(tmp_path, "METRICS") == {}
    file = tmp_path / neutral.NAMES
    file.parent.mkdir(parents=True)
    file.write_text('METRICS = {"kl": "divergence"}\n')
    assert neutral.read_renamed(tmp_path, "METRICS") == {"kl": "divergence"}
    assert neutral.read_renamed(tmp_path, "SETTINGS") == {}
