"""Whole runs on several ranks that stay together: `python -m tests.helpers.rank_runs FOLDER CASE ...` as a rank.

Processes take seconds to start and to import torch, so all cases of a test share them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def run_together(folder: Path, cases: list[dict[str, Any]], num_ranks: int) -> None:
    """Does cases on `num_ranks` ranks, one after another in the same processes. One rank is this process."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(folder), *(json.dumps(case) for case in cases)]
    if num_ranks == 1:
        for word in words[1:]:
            do_case(folder, word, ONE_PROCESS)
    else:
        assert launch_ranks(words, num_ranks, program=("-m", "tests.helpers.rank_runs")) == 0
    refused = {path.name: path.read_text() for path in folder.glob("*.error")}
    assert not refused, refused


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
    folder, *cases = sys.argv[1:]
    world = join_ranks("cpu")
    for case in cases:
        do_case(Path(folder), case, world)
    leave_ranks()


if __name__ == "__main__":
    main()
