"""Runs on several ranks: what they train on, compute, record and save is what one process does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cohort.config.algos import ALGOS
from cohort.run.store.reader import Reader
from tests.helpers.command_line import cohort
from tests.helpers.made_once import make_once
from tests.helpers.rank_runs import compare_runs, read_groups, run_together, run_under_torchrun

FEW = [
    *("--steps=2", "--batch.samples=4", "--sampling.max-tokens=16", "--eval.problems=6"),
    *("--task.train-size=24", "--task.test-size=12", "--learner.dtype=float64", "--threads=1"),
]
SMALL = [*FEW, "--batch.prompts=4"]
SHARDS = ("none", "optimizer", "full")
# Refills, several optimizer steps per batch, and groups of earlier steps: what is decided over all ranks.
DECIDED = ["--algo=dapo", "--learner.minibatches=2", "--learner.epochs=2", "--replay.prompts=2"]
GIVEN = ["--steps=2", "--learner.dtype=float64", "--threads=1", "--learner.minibatches=2"]
CASES: list[dict[str, Any]] = [
    {"name": "plain", "recipe": "quickstart", "flags": SMALL},
    {"name": "decided", "recipe": "quickstart", "flags": [*SMALL, *DECIDED, "--algo.correction.kind=truncate"]},
    {"name": "continuous", "recipe": "quickstart", "flags": [*SMALL, "--algo=dapo", "--rollout.order=continuous"]},
    # Fewer prompts than ranks: one has nothing to sample, and nothing to train on.
    {"name": "one", "recipe": "quickstart", "flags": [*FEW, "--batch.prompts=1", "--algo.kl.weight=0.1"]},
    {"name": "sft", "recipe": "tiny_sft", "flags": [*GIVEN, "--batch.examples=5"]},
    {"name": "dpo", "recipe": "tiny_dpo", "flags": [*GIVEN, "--batch.pairs=5", "--eval.problems=9"]},
]
SHARDED: list[dict[str, Any]] = [
    *({"name": s, "recipe": "quickstart", "flags": [*SMALL, f"--learner.shard={s}"]} for s in SHARDS[1:]),
    {"name": "tensor", "recipe": "quickstart", "flags": [*SMALL, "--learner.tensor=2"]},
]
# A run goes on with another number of ranks and other shards; here from two ranks, below from one.
LATER: list[dict[str, Any]] = [
    {"name": "tensor", "resume": 3, "flags": ["--learner.tensor=1", "--learner.shard=optimizer"]},
    {"name": "optimizer", "resume": 3, "flags": ["--learner.shard=full"]},
    {"name": "full", "resume": 3, "flags": ["--learner.shard=none", "--learner.tensor=2"]},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All cases on one rank and on two, started once."""

    def make(folder: Path) -> None:
        """Makes the runs."""
        run_together(folder / "alone", CASES, 1)
        run_together(folder / "together", [*CASES, *SHARDED, *LATER], 2)

    folder = make_once(tmp_path_factory, "rank_runs", make)
    return folder / "alone", folder / "together"


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_two_ranks_do_what_one_process_does(folders: tuple[Path, Path], name: str) -> None:
    alone, together = folders
    compare_runs(together / name, alone / name, 2)
    steps = read_groups(alone / name)
    assert len(steps) == 2 and all(steps)


def test_tensors_that_a_connection_cannot_read_go_through_host_memory(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Ranks that share a GPU speak over gloo. Here all memory counts as a GPU's, except copies made for gloo."""
    plain = {"name": "none", "recipe": "quickstart", "flags": SMALL}
    run_together(tmp_path, [plain, *SHARDED], 2, module="tests.helpers.unreadable_memory")
    for name in ("none", *(case["name"] for case in SHARDED)):
        compare_runs(tmp_path / name, folders[0] / "plain", 2)
    assert set((tmp_path / "copied-0").read_text().split()) == {"all_reduce", "_JOIN", "_SUM_SCATTERED"}


def test_one_rank_under_torchrun_is_one_process(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run_under_torchrun(tmp_path, [CASES[0]], 1, "cpu")
    compare_runs(tmp_path / "plain", folders[0] / "plain", 2)


def test_ranks_tell_how_even_their_work_is(folders: tuple[Path, Path]) -> None:
    with Reader(folders[1] / "plain" / "run.db") as reader:
        values = reader.read_series("pack/evenness").values()
    assert len(values) == 2 and all(0.5 < value <= 1.0 for value in values)


def test_shards_and_numbers_of_ranks_change_no_result(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Two steps with one division of the model, a third with another, or on one rank."""
    for folder in folders:
        shutil.copytree(folder / "plain", tmp_path / folder.name / "plain")
        run_together(tmp_path / folder.name, [{"name": "plain", "resume": 3}], 1)
    expected = tmp_path / "alone" / "plain"
    compare_runs(tmp_path / "together" / "plain", expected, 3)
    for name in ("optimizer", "full", "tensor"):
        compare_runs(folders[1] / name, expected, 3)


@pytest.mark.slow
def test_an_evaluation_on_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    """The second time it is read and not made again."""
    flags = ["eval", "arithmetic", "--limit", "11", "--samples", "2", "--max-tokens", "16", "--threads", "1"]
    found = []
    for folder, more in (("one", []), ("two", ["--ranks", "2"]), ("two", ["--ranks", "2"])):
        done = cohort(*flags, "--out", folder, *more, at=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr
        [file] = (tmp_path / folder).iterdir()
        found.append((done.stdout.replace(folder, ""), file.name, file.read_text()))
    assert found[0] == found[1]
    assert found[2][1:] == found[1][1:] and "this evaluation existed already" in found[2][0]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_algorithm_on_every_shard(num_ranks: int, tmp_path: Path) -> None:
    flags = [*FEW[1:], "--steps=5", "--batch.prompts=4"]
    alone: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    for algo in ALGOS:
        case = {"name": algo, "recipe": "quickstart", "flags": [*flags, f"--algo={algo}"]}
        alone.append(case)
        for shard in SHARDS:
            together.append({**case, "name": f"{algo}-{shard}", "flags": [*case["flags"], f"--learner.shard={shard}"]})
        together.append({**case, "name": f"{algo}-tensor", "flags": [*case["flags"], "--learner.tensor=2"]})
    run_together(tmp_path / "alone", alone, 1)
    run_together(tmp_path / "together", together, num_ranks)
    for case in together:
        compare_runs(tmp_path / "together" / case["name"], tmp_path / "alone" / case["name"].rpartition("-")[0], 5)
