"""Whole runs on several ranks that stay together: `python -m tests.helpers.rank_runs FOLDER DEVICE CASE ...` as a rank.

Processes take seconds to start and to import torch, so all cases of a test share them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cohort.config.load import load_config
from cohort.errors import CohortError
from cohort.jobs.build import build_job
from cohort.jobs.inputs import settle_inputs
from cohort.jobs.start import resume_run, start_run
from cohort.ranks.agree import agree_on_errors
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.ranks.launch import launch_ranks
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts, make_rollout_path
from cohort.types import Group
from cohort.world import ONE_PROCESS, World

# Clock times, and sizes of packs and files, which may differ.
NOT_COMPARED = ("time/", "pack/", "rollouts/")


def do_case(folder: Path, case: str, world: World) -> None:
    """Does one case, which is JSON: {"name": of the run, "recipe": ..., "flags": [...]} or {"name": ..., "resume": n}.

    `resume` is the new number of steps, and `flags` then are settings that change. A CohortError is written to a file.
    """
    spec = json.loads(case)
    try:
        if "resume" in spec:
            changes = spec.get("flags", [])
            resume_run(folder / spec["name"], build_job, spec["resume"], "plain", (), world, changes)
        else:
            config = agree_on_errors(world, lambda: settle_inputs(load_config(spec["recipe"], spec["flags"])))
            start_run(config, build_job, folder, "plain", (), spec["name"], world)
    except CohortError as error:
        (folder / f"{spec['name']}-{world.rank}.error").write_text(str(error))


def run_together(
    folder: Path, cases: list[dict[str, Any]], num_ranks: int, device: str = "cpu", module: str = __name__
) -> None:
    """Does cases on `num_ranks` ranks, one after another in the same processes. One rank is this process.

    `device` is where the ranks train ("cpu" or "cuda"), `module` the program of a rank.
    """
    words = _make_words(folder, device, cases)
    if num_ranks == 1:
        for word in words[2:]:
            do_case(folder, word, ONE_PROCESS)
    else:
        assert launch_ranks(words, num_ranks, program=("-m", module)) == 0
    _require_success(folder)


def run_under_torchrun(folder: Path, cases: list[dict[str, Any]], num_ranks: int, device: str) -> None:
    """Does cases on ranks that torchrun starts, also if it is one."""
    words = _make_words(folder, device, cases)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run([*launcher, "-m", __name__, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    _require_success(folder)


def _make_words(folder: Path, device: str, cases: list[dict[str, Any]]) -> list[str]:
    """Returns the words after the program of a rank. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return [str(folder), device, *(json.dumps(case) for case in cases)]


def _require_success(folder: Path) -> None:
    """Fails if a rank has refused a case."""
    refused = {path.name: path.read_text() for path in folder.glob("*.error")}
    assert not refused, refused


def compare_runs(found: Path, expected: Path, step: int, bound: float = 1e-9) -> None:
    """Compares metrics, samples token by token, weights and optimizer state of two runs after a step."""
    metrics, wanted = read_metrics(found), read_metrics(expected)
    assert metrics.keys() == wanted.keys()
    for key, value in wanted.items():
        # Before the first update policy and reference are the same, and rounding decides which reward is higher.
        if key not in ((1, "reward/accuracy"), (1, "implicit/accuracy")):
            assert metrics[key] == pytest.approx(value, rel=bound, abs=bound), key
    for ours, theirs in zip(read_groups(found), read_groups(expected), strict=True):
        assert [g.prompt for g in ours] == [g.prompt for g in theirs]
        assert [[s.tokens for s in g.samples] for g in ours] == [[s.tokens for s in g.samples] for g in theirs]
        assert [[s.reward for s in g.samples] for g in ours] == [[s.reward for s in g.samples] for g in theirs]
        assert [g.excluded for g in ours] == [g.excluded for g in theirs]
        for g, h in zip(ours, theirs, strict=True):
            for s, t in zip(g.samples, h.samples, strict=True):
                assert s.advantage == pytest.approx(t.advantage, rel=bound, abs=bound)
                assert (s.old_logprobs or []) == pytest.approx(t.old_logprobs or [], abs=bound)
    tensors, others = read_tensors(found, step), read_tensors(expected, step)
    assert tensors.keys() == others.keys()
    for name, tensor in others.items():
        assert tensors[name].shape == tensor.shape and tensors[name].dtype == tensor.dtype
        assert float((tensors[name] - tensor).abs().max()) <= bound * max(1.0, float(tensor.abs().max())), name


def read_metrics(run: Path) -> dict[tuple[int, str], float]:
    """Returns the metrics of a run that must not depend on the number of ranks, by step and name."""
    with Reader(run / "run.db") as reader:
        found = {(m.step, m.name): m.value for m in reader.read_metrics()}
    return {key: value for key, value in found.items() if not key[1].startswith(NOT_COMPARED)}


def read_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Returns weights and optimizer state of a checkpoint by name."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    return load_file(folder / "model" / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def read_groups(run: Path) -> list[list[Group]]:
    """Returns the groups of every step of a run, as its rollout files have them."""
    return [load_rollouts(make_rollout_path(run / "rollouts", n), "") for n in list_rollout_steps(run / "rollouts")]


def main() -> None:
    """Does the cases of the command line as one of several ranks."""
    torch.set_num_threads(1)
    folder, device, *cases = sys.argv[1:]
    world = join_ranks(device)
    # By which library the ranks exchange tensors.
    (Path(folder) / f"backend-{world.rank}").write_text(torch.distributed.get_backend())
    for case in cases:
        do_case(Path(folder), case, world)
    leave_ranks()


if __name__ == "__main__":
    main()
