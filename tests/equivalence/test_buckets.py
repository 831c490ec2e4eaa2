"""Numerics contract, line 4: sums of gradients that begin during the backward give the numbers of sums after it.

Ranks have unequal parts of the groups, and in the third step the first rank has all of them. Compared are gradients and
weights, the order of the sums on all ranks, and what happens where a rank's memory runs out after sums have begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from cohort.algos.algorithm import build_algorithm
from cohort.config.algos import GRPO, GSPO, Policy
from cohort.config.schema import LearnerConfig, LoraConfig, OptimConfig
from cohort.data.pack import make_batch, pack
from cohort.errors import RankError
from cohort.learner import buckets
from cohort.learner.local import LocalLearner
from cohort.learner.minibatch import sum_counts
from cohort.loops.rl import update_policy
from cohort.models.auto import AnyDecoder
from cohort.models.lora import Adapters
from cohort.world import ProcessGroup, World
from tests.equivalence.test_ranks import share_of, step_groups
from tests.helpers.decoders_and_groups import random_groups, small_decoder
from tests.helpers.foreign_models import load_foreign, write_foreign_folder
from tests.helpers.made_once import make_once

# Limit of a collective call: a rank whose partners have died ends after that time.
LIMIT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    dtype: torch.dtype = torch.float64
    algo: Policy = field(default_factory=GRPO)
    lora: bool = False
    recompute: bool = False
    minibatches: int = 1
    foreign: str = ""  # family of a model that transformers runs
    changes: dict[str, object] = field(default_factory=dict)  # of the model


CASES = {
    "float64": Case(),
    "own head and biases": Case(changes={"tied": False, "qkv_bias": True, "qk_norm": True}),
    "whole samples, minibatches": Case(algo=GSPO(clip_low=0.2, clip_high=0.2), minibatches=2),
    "activations computed twice": Case(recompute=True),
    "bf16": Case(dtype=torch.bfloat16),
    "bf16, own head": Case(dtype=torch.bfloat16, changes={"tied": False}),
    "lora": Case(lora=True),
    "gpt2": Case(foreign="gpt2"),
    "own head of transformers": Case(foreign="gpt_neox", dtype=torch.float32),
}
# Cases in which a backward completes gradients before its end. Those of adapters are too small to travel early.
OVERLAPPING = [name for name in CASES if name != "lora"]


class WatchedWorld(ProcessGroup):
    """Ranks that note the sizes of the sums they begin, and which of them they begin during a backward."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.sizes: list[int] = []
        self.num_early = 0
        self.is_backward = False

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        self.sizes.append(x.numel())
        self.num_early += self.is_backward
        return super().begin_sum(x)


def make_learner(case: Case, folder: Path, world: World, overlaps: bool) -> LocalLearner:
    """Returns a new learner of a case, with random weights that are the same on every rank."""
    decoder: AnyDecoder
    if case.foreign:
        decoder = load_foreign(folder / case.foreign, case.dtype)
    else:
        decoder = small_decoder(case.dtype, std=0.15, **case.changes)
    learner = LocalLearner(
        decoder,
        LearnerConfig(token_budget=40, minibatches=case.minibatches, shard="none"),
        OptimConfig(lr=1e-3, weight_decay=0.1, clip_norm=0.05),
        num_updates=8,
        world=world,
        adapters=Adapters(decoder, LoraConfig(rank=2), seed=3) if case.lora else None,
    )
    learner.decoder.recompute = case.recompute
    learner.optimizer.overlaps = overlaps
    if isinstance(world, WatchedWorld):
        backward = learner.backend.backward

        def watched(*args: object) -> None:
            world.is_backward = True
            try:
                backward(*args)
            finally:
                world.is_backward = False

        learner.backend.backward = watched
    return learner


def part_of(step: int, world: World) -> list:
    """Returns this rank's groups of a step."""
    groups = step_groups(step)
    for n, group in enumerate(groups):
        group.order = n
    if step != 2:
        return share_of(groups, world.rank, world.size)
    return groups if world.rank == 0 else []


def run_case(case: Case, folder: Path, world: WatchedWorld, overlaps: bool) -> dict[str, object]:
    """Trains three steps on this rank's groups, and returns everything that is compared."""
    learner = make_learner(case, folder, world, overlaps)
    algo, gradients, early = build_algorithm(case.algo, 16), [], []
    whole = learner.forward_backward
    world.sizes.clear()

    def watched(minibatch, loss):
        world.num_early = 0
        result = whole(minibatch, loss)
        gradients.append(learner.optimizer.full_grads())
        early.append((len(minibatch.microbatches), world.num_early))
        return result

    learner.forward_backward = watched
    before = world.progress.bytes_by_kind["sum"]
    for step in range(3):
        update_policy(learner, algo, part_of(step, world), learner.config)
    return {
        "gradients": gradients,
        "weights": {name: p.detach().clone() for name, p in learner.weights()},
        "early": early,
        "sizes": list(world.sizes),
        "bytes": world.progress.bytes_by_kind["sum"] - before,
        "left": len(learner.optimizer._hooks),
    }


def run_short_of_memory(case: Case, folder: Path, world: WatchedWorld, is_short: bool) -> dict[str, object]:
    """Computes a gradient of which some sums have begun when memory runs out on the second rank, if it `is_short`."""
    learner = make_learner(case, folder, world, True)
    groups, algo = random_groups(num_groups=7, seed=4), build_algorithm(case.algo, 16)
    batch = make_batch(share_of(groups, world.rank, world.size))
    learner.expect_samples(1)
    if is_short and world.rank == 1:
        # The first layer's norm gets its gradient when those of the other layers have been handed over.
        norm = learner.decoder.layers[0].attn_norm.weight

        def fail(grad: Tensor) -> None:
            if learner.optimizer._buckets is not None and learner.optimizer._buckets.is_open:
                handle.remove()
                raise torch.OutOfMemoryError("no memory left")

        handle = norm.register_hook(fail)
    world.sizes.clear()
    gradients = []
    whole = learner.forward_backward

    def watched(minibatch, loss):
        result = whole(minibatch, loss)
        gradients.append(learner.optimizer.full_grads())
        return result

    learner.forward_backward = watched
    notices = learner.update(batch, algo).notices
    return {"gradients": gradients, "sizes": list(world.sizes), "notices": notices}


def find_error(case: Case, folder: Path) -> str:
    """Returns what the first rank says if the others take part in no sum within a time limit."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=2))
    waiting = WatchedWorld(group)
    waiting.progress.step = 7
    learner = make_learner(case, folder, waiting, True)
    message = ""
    if waiting.rank == 0:
        minibatch = pack(make_batch(random_groups(num_groups=7)), 40, True)[0]
        with waiting.phase("an update"), pytest.raises(RankError) as lost:
            learner._run_microbatches(minibatch, sum_counts(minibatch, World()), build_algorithm(case.algo, 16))
            assert waiting.num_early > 3
            learner.optimizer.reduce(waiting)
        message = str(lost.value)
    return message


def on_rank(rank: int, size: int, store: str, out: Path) -> None:
    """Runs all cases on one rank, in a process of its own, and writes the results into the folder `out`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
    )
    # So that the matrices of a small model travel one by one, and its vectors together.
    buckets.BUCKET_NUMBERS = 600
    world = WatchedWorld()
    for name, case in CASES.items():
        found = [run_case(case, out, world, overlaps) for overlaps in (False, True)]
        torch.save(found, out / f"{name}-{rank}.pt")
    for name in ("float64", "bf16", "own head and biases"):
        found = [run_short_of_memory(CASES[name], out, world, is_short) for is_short in (False, True)]
        torch.save(found, out / f"short, {name}-{rank}.pt")
    (out / f"error-{rank}").write_text(find_error(CASES["float64"], out))
    world.gather(0)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["two ranks", "four ranks"])
def results(request, tmp_path_factory) -> Callable[[str], list]:
    """Starts the ranks once for all tests of this file. Returns a function that reads what all ranks found."""

    def make(folder: Path) -> None:
        """Runs all cases."""
        for family in ("gpt2", "gpt_neox"):
            write_foreign_folder(folder / family, family)
        arguments = (request.param, f"{folder}/store", folder)
        torch.multiprocessing.start_processes(on_rank, arguments, nprocs=request.param, start_method="spawn")

    folder = make_once(tmp_path_factory, f"buckets_{request.param}", make)
    read = lambda name: [torch.load(folder / f"{name}-{n}.pt", weights_only=False) for n in range(request.param)]  # noqa: E731
    read.folder = folder
    return read


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float, where: object) -> None:
    """Compares tensors by name: differences relative to the largest entry of each tensor."""
    assert got.keys() == expected.keys() and len(got) > 5, where
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= bound * float(tensor.abs().max()), (where, name)


@pytest.mark.parametrize("name", CASES)
def test_4_4_sums_during_the_backward_are_those_after_it(results, name):
    for rank, (after, during) in enumerate(results(name)):
        assert len(during["gradients"]) == 3 * CASES[name].minibatches
        for mine, expected in zip(during["gradients"], after["gradients"], strict=True):
            assert_close(mine, expected, 1e-12, rank)
        assert_close(during["weights"], after["weights"], 1e-12, rank)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_make_the_same_sums_in_the_same_order(results, name):
    found = results(name)
    for after, during in found:
        assert during["sizes"] == found[0][0]["sizes"] and during["sizes"] == after["sizes"]
        # No byte more or less travels.
        assert during["bytes"] == after["bytes"] == found[0][0]["bytes"]
        assert during["left"] == 0, "a hook was left on a parameter"


@pytest.mark.parametrize("name", OVERLAPPING)
def test_sums_begin_before_the_backward_ends(results, name):
    for after, during in results(name):
        assert all(num == 0 for _, num in after["early"])
        # Without microbatches, nothing is complete before the end.
        assert all((num > 3) == (passes > 0) for passes, num in during["early"]), during["early"]
    assert any(passes == 0 for _, during in results(name) for passes, _ in during["early"])
    assert any(passes > 1 for _, during in results(name) for passes, _ in during["early"])


@pytest.mark.parametrize("name", ["float64", "bf16", "own head and biases"])
def test_a_rank_whose_memory_runs_out_does_not_begin_a_sum_twice(results, name):
    # In bf16 the products of smaller microbatches are rounded elsewhere.
    bound = 3e-2 if name == "bf16" else 1e-12
    for rank, (enough, short) in enumerate(results(f"short, {name}")):
        assert any("out of memory" in text for _, text in short["notices"]) == (rank == 1)
        assert short["sizes"] == enough["sizes"]
        for mine, expected in zip(short["gradients"], enough["gradients"], strict=True):
            assert_close(mine, expected, bound, rank)


def test_a_sum_that_the_others_do_not_take_part_in_ends_with_their_place(results):
    message = (results.folder / "error-0").read_text()
    assert "rank 0 lost the other ranks during an update in step 7" in message
