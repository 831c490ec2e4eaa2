"""Ranks on one GPU do what one process does: a single rank over nccl, and two that share the GPU over gloo.

nccl refuses two ranks on one GPU, so `join_ranks` takes gloo for them, and tensors go through host memory. Runs in
float64 show that results are equal, without the kernels. Runs in bf16 show that the kernels work on divided models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import only_gpu

pytest.importorskip("tyro")

# isort: split

from tests.helpers.rank_runs import compare_runs, read_groups, read_metrics, run_together, run_under_torchrun

pytestmark = only_gpu

# Sums in another order, of which a GPU has no fixed one, and what Adam makes of them.
BOUND = 1e-8
SMALL = [
    *("--device=cuda", "--steps=2", "--batch.prompts=4", "--batch.samples=4", "--sampling.max-tokens=16"),
    *("--eval.problems=6", "--task.train-size=24", "--task.test-size=12", "--threads=1"),
]
DIVISIONS = {
    "none": "--learner.shard=none",
    "optimizer": "--learner.shard=optimizer",
    "full": "--learner.shard=full",
    "tensor": "--learner.tensor=2",
}


def make_case(name: str, dtype: str, *flags: str) -> dict[str, Any]:
    """Returns a small quickstart on the GPU as a case of `run_together`."""
    return {"name": name, "recipe": "quickstart", "flags": [*SMALL, f"--learner.dtype={dtype}", *flags]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of runs in one process."""
    folder = tmp_path_factory.mktemp("alone")
    run_together(folder, [make_case("exact", "float64"), make_case("bf16", "bfloat16")], 1, "cuda")
    yield folder


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of runs on two ranks that share the GPU, by the way in which the model is divided."""
    folder = tmp_path_factory.mktemp("sharing")
    cases = [make_case(name, "float64", flag) for name, flag in DIVISIONS.items()]
    cases += [make_case(f"{name} bf16", "bfloat16", flag) for name, flag in DIVISIONS.items()]
    run_together(folder, cases, 2, "cuda")
    yield folder


def test_one_rank_over_nccl_is_one_process(alone: Path, tmp_path: Path) -> None:
    run_under_torchrun(tmp_path, [make_case("exact", "float64"), make_case("bf16", "bfloat16")], 1, "cuda")
    assert (tmp_path / "backend-0").read_text() == "nccl"
    compare_runs(tmp_path / "exact", alone / "exact", 2, BOUND)
    compare_roughly(tmp_path / "bf16", alone / "bf16")


def test_ranks_that_share_a_gpu_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_together(tmp_path, [], 2, "cuda")
    assert capfd.readouterr().err.count("ranks share a GPU: for trying out, not for speed (2 ranks, GPUs: 1)") == 1
    assert [(tmp_path / f"backend-{rank}").read_text() for rank in range(2)] == ["gloo", "gloo"]


@pytest.mark.parametrize("name", DIVISIONS)
def test_two_ranks_on_one_gpu_are_one_process(alone: Path, sharing: Path, name: str) -> None:
    compare_runs(sharing / name, alone / "exact", 2, BOUND)


@pytest.mark.parametrize("name", DIVISIONS)
def test_two_ranks_on_one_gpu_in_bf16(alone: Path, sharing: Path, name: str) -> None:
    compare_roughly(sharing / f"{name} bf16", alone / "bf16")


def compare_roughly(found: Path, expected: Path) -> None:
    """Compares the first steps of two runs in bf16. Rounding decides near ties, and a few samples go other ways."""
    ours, theirs = read_groups(found), read_groups(expected)
    assert [g.prompt for g in ours[0]] == [g.prompt for g in theirs[0]]
    pairs = [(s, t) for g, h in zip(ours[0], theirs[0], strict=True) for s, t in zip(g.samples, h.samples, strict=True)]
    assert sum(s.tokens == t.tokens for s, t in pairs) >= 0.75 * len(pairs)
    metrics, wanted = read_metrics(found), read_metrics(expected)
    for step in (1, 2):
        assert metrics[step, "updates/done"] == wanted[step, "updates/done"]
        assert metrics[step, "sampler_gap/mean"] < 0.05
    assert metrics[1, "grad_norm"] == pytest.approx(wanted[1, "grad_norm"], rel=0.5)
