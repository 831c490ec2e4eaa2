"""Numerics contract, line 4, shards: ranks that divide masters, moments or weights give the numbers of one process.

Compared are gradients, metrics, weights and stored state after three steps of `update_policy`, and a fourth step after
the state was loaded into learners with other shards and other numbers of ranks. The ranks have unequal parts of the
groups, and in the third step the first rank has all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO, GSPO, Policy
from cohort.config.schema import LearnerConfig, LoraConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.engines.weights import copy_weights
from cohort.learner.local import LocalLearner
from cohort.learner.traffic import collective_bytes
from cohort.loops.rl import update_policy
from cohort.models.lora import Adapters
from cohort.serialize import dumps, loads
from cohort.types import Group
from cohort.world import ProcessGroup, World
from tests.equivalence.test_ranks import compared, share_of, step_groups
from tests.helpers.decoders_and_groups import small_decoder

# Limit of a collective call: a rank whose partners have died ends after that time.
LIMIT = timedelta(seconds=120)
SHARDS = ("none", "optimizer", "full")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    shard: str
    dtype: torch.dtype = torch.float64
    algo: Policy = field(default_factory=lambda: GRPO(kl=KLConfig(weight=0.1)))
    epochs: int = 1
    clip_norm: float = 0.05  # below the norms of the gradients, so that clipping has an effect
    lora: bool = False
    refresh_every: int = 0
    changes: dict[str, object] = field(default_factory=dict)  # of the model


CASES = {shard: Case(shard=shard) for shard in SHARDS}
CASES |= {
    f"whole samples, {shard}": Case(shard=shard, algo=GSPO(clip_low=0.2, clip_high=0.2), epochs=2)
    for shard in SHARDS[1:]
}
CASES |= {
    f"own head, biases and a moving reference, {shard}": Case(
        shard=shard, clip_norm=0.0, refresh_every=2, changes={"tied": False, "qkv_bias": True, "qk_norm": True}
    )
    for shard in SHARDS[1:]
}
CASES["lora"] = Case(shard="optimizer", lora=True)
# Not clipped: norms of slices and norms of tensors add up to sums with other roundings.
LOW = {shard: Case(shard=shard, dtype=torch.bfloat16, clip_norm=0.0) for shard in ("none", "optimizer")}


def make_learner(case: Case, world: World, shard: str = "") -> LocalLearner:
    """Returns a new learner of a case, with random weights that are the same on every rank."""
    decoder = small_decoder(case.dtype, std=0.15, **case.changes)
    reference = None if case.lora else small_decoder(case.dtype, seed=1, std=0.15, **case.changes)
    return LocalLearner(
        decoder,
        LearnerConfig(token_budget=40, epochs=case.epochs, shard=shard or case.shard),
        OptimConfig(lr=1e-3, weight_decay=0.1, clip_norm=case.clip_norm),
        num_updates=8,
        reference=reference,
        refresh_every=case.refresh_every,
        world=world,
        adapters=Adapters(decoder, LoraConfig(rank=2), seed=3) if case.lora else None,
    )


def part_of(step: int, world: World) -> list[Group]:
    """Returns this rank's groups of a step."""
    groups = step_groups(step)
    if step != 2:
        return share_of(groups, world.rank, world.size)
    return groups if world.rank == 0 else []


def watch_gradients(learner: LocalLearner) -> list[dict[str, torch.Tensor]]:
    """Returns a list to which every `forward_backward` adds the gradient, summed over ranks."""
    whole, found = learner.forward_backward, []

    def watched(minibatch, loss):
        result = whole(minibatch, loss)
        found.append(learner.optimizer.full_grads())
        return result

    learner.forward_backward = watched
    return found


def copy_weights_of(learner: LocalLearner) -> dict[str, torch.Tensor]:
    """Returns copies of the current weights by Hugging Face name. Every rank must call it."""
    return {name: tensor.detach().clone() for name, tensor in learner.weights()}


def copy_state_of(learner: LocalLearner) -> dict[str, torch.Tensor]:
    """Returns copies of the stored tensors by name, on the first rank. Every rank must call it."""
    return {name: tensor.clone() for name, tensor in learner.state().collect().items()}


def run_case(case: Case, world: World) -> dict[str, object]:
    """Trains three steps on this rank's groups and returns everything that is compared."""
    learner = make_learner(case, world)
    algo = build_algorithm(case.algo, 16)
    gradients = watch_gradients(learner)
    addresses = [p.data_ptr() for p in learner.decoder.parameters()]
    metrics = [update_policy(learner, algo, part_of(step, world), learner.config)[1].metrics for step in range(3)]
    if case.shard != "full":
        # Whoever samples shares this memory.
        assert [p.data_ptr() for p in learner.decoder.parameters()] == addresses
    return {
        "metrics": metrics,
        "numbers": learner.state().numbers,
        "gradients": gradients,
        "weights": copy_weights_of(learner),
        "state": copy_state_of(learner),
    }


def run_fourth_step(found: dict[str, object], case: Case, shard: str, world: World) -> dict[str, object]:
    """Loads the results of three steps into a new learner with this shard, and makes the next step.

    Returns its weights and the state before the step. Only the first rank has the tensors of the state.
    """
    learner = make_learner(case, world, shard)
    source = small_decoder(case.dtype, **case.changes)
    # By the names of parameters: the first process stored the weights of the decoder that samples.
    source.load_state_dict(found["parameters"])
    learner.load_weights(source)
    learner.load_state(found["state"] if world.is_first else {}, found["numbers"])
    again = copy_state_of(learner)
    update_policy(learner, build_algorithm(case.algo, 16), part_of(3, world), learner.config)
    return {"weights": copy_weights_of(learner), "state": again}


def count_bytes(case: Case, world: World) -> dict[str, int]:
    """Returns the bytes that one optimizer step handed to collectives, by kind, without those of metrics."""
    learner = make_learner(case, world)
    algo = build_algorithm(case.algo, 16)
    before: Counter[str] = Counter(world.progress.bytes_by_kind)
    whole, seen = learner.optim_step, []

    def watched():
        result = whole()
        seen.append(Counter(world.progress.bytes_by_kind) - before)
        return result

    learner.optim_step = watched
    whole_backward = learner.forward_backward

    def watched_backward(minibatch, loss):
        before.clear()
        before.update(world.progress.bytes_by_kind)
        return whole_backward(minibatch, loss)

    learner.forward_backward = watched_backward
    update_policy(learner, algo, part_of(0, world), learner.config)
    return {kind: count for kind, count in seen[0].items() if kind != "exchange"}


def parameters_from(weights: dict[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    """Returns weights with Hugging Face names as the state dict of a decoder."""
    decoder = small_decoder(case.dtype, **case.changes)
    copy_weights(list(weights.items()), decoder)
    return dict(decoder.state_dict())


def run_bad_step(case: Case, world: World) -> list[dict[str, float]]:
    """Returns the metrics of two steps: one where only the second rank's gradient is not finite, and a dead one.

    In the dead one all advantages are 0.
    """
    learner = make_learner(case, world)
    algo, found = build_algorithm(GRPO(), 16), []
    for value in (float("nan"), 0.0):
        groups = part_of(0, world)
        for sample in (s for g in groups for s in g.samples):
            sample.advantage = value if world.rank == min(1, world.size - 1) else 0.0
        found.append(learner.update(make_batch(groups), algo).metrics)
    return found


def on_rank(rank: int, size: int, store: str, out: Path) -> None:
    """Runs all cases on one rank, in a process of its own, and writes the results into the folder `out`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
    )
    world = ProcessGroup()
    for name, case in (CASES | {f"low, {shard}": case for shard, case in LOW.items()}).items():
        torch.save(run_case(case, world), out / f"{name}-{rank}.pt")
    # Every shard loads the state of every other.
    for shard in SHARDS:
        found = torch.load(out / f"{shard}-0.pt", weights_only=False) if rank == 0 else {}
        found |= {"parameters": parameters_from(found["weights"], CASES[shard])} if rank == 0 else {}
        # Only the first rank sees the files.
        found["numbers"] = world.share(found.get("numbers"))
        if rank:
            found["parameters"] = small_decoder(torch.float64).state_dict()
        for tensor in found["parameters"].values():
            world.broadcast(tensor)
        for other in SHARDS:
            torch.save(run_fourth_step(found, CASES[shard], other, world), out / f"{shard} to {other}-{rank}.pt")
    counted = {shard: count_bytes(CASES[shard], world) for shard in SHARDS}
    counted |= {f"low, {shard}": count_bytes(case, world) for shard, case in LOW.items()}
    bad = {shard: run_bad_step(CASES[shard], world) for shard in SHARDS}
    (out / f"bytes-{rank}").write_bytes(dumps(counted))
    (out / f"bad-{rank}").write_bytes(dumps(bad))
    torch.distributed.destroy_process_group()


class Results:
    """What the ranks wrote."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size

    def of(self, name: str) -> list[dict]:
        """Returns the results of all ranks for a case."""
        return [torch.load(self.folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(self.size)]

    def records(self, name: str) -> list[dict]:
        """Returns the records of all ranks."""
        return [loads((self.folder / f"{name}-{rank}").read_bytes()) for rank in range(self.size)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["two ranks", "four ranks"])
def results(request, tmp_path_factory) -> Results:
    """Starts the ranks once for all tests of this file."""
    folder = tmp_path_factory.mktemp("shards")
    arguments = (request.param, f"{folder}/store", folder)
    torch.multiprocessing.start_processes(on_rank, arguments, nprocs=request.param, start_method="spawn")
    return Results(folder, request.param)


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float, where: object) -> None:
    """Compares tensors by name: differences relative to the largest entry of each tensor."""
    assert got.keys() == expected.keys() and len(got) > 10, where
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype, (where, name)
        assert (got[name] - tensor).abs().max() <= bound * float(tensor.abs().max()), (where, name)


@pytest.mark.parametrize("name", CASES)
def test_4_4_shards_equal_one_process(results, name):
    expected = run_case(CASES[name], World())
    for rank, found in enumerate(results.of(name)):
        for mine, alone in zip(found["metrics"], expected["metrics"], strict=True):
            assert compared(mine) == pytest.approx(compared(alone), abs=1e-9, rel=1e-9), rank
        assert found["numbers"] == expected["numbers"] and found["numbers"]["optimizer_steps"] > 2
        assert len(found["gradients"]) == len(expected["gradients"])
        for step, (mine, alone) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
            # Later steps follow updates by Adam, which divides by roots of tiny squares and so magnifies rounding.
            assert_close(mine, alone, 1e-10 if step == 0 else 1e-7, (rank, step))
        assert_close(found["weights"], expected["weights"], 1e-9, rank)
        if rank == 0:
            assert_close(found["state"], expected["state"], 1e-7, rank)
        else:
            assert found["state"] == {}


def test_all_ranks_have_the_same_weights(results):
    for name in CASES:
        first, *others = results.of(name)
        for other in others:
            assert all(torch.equal(tensor, other["weights"][n]) for n, tensor in first["weights"].items()), name


def test_a_bf16_model_gets_the_same_bits_with_and_without_shards(results):
    none, optimizer = results.of("low, none"), results.of("low, optimizer")
    start = dict(small_decoder(torch.bfloat16, std=0.15).named_weights())
    for one, other in zip(none, optimizer, strict=True):
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(t, other["weights"][n]) for n, t in one["weights"].items())
    assert any(not torch.equal(t, start[n]) for n, t in none[0]["weights"].items())
    assert none[0]["state"].keys() == optimizer[0]["state"].keys()
    assert {t.dtype for t in optimizer[0]["state"].values()} == {torch.float32}
    assert any(name.startswith("master/") for name in optimizer[0]["state"])


def test_the_state_of_any_shards_continues_in_any_others(results):
    """Bit for bit the same state, and the weights after the next step that one process has."""
    alone, expected = World(), {}
    for shard in SHARDS:
        found = results.of(shard)[0]
        found["parameters"] = parameters_from(found["weights"], CASES[shard])
        expected[shard] = run_fourth_step(found, CASES[shard], "none", alone)
        # One process reads the state of several ranks.
        assert all(torch.equal(t, found["state"][n]) for n, t in expected[shard]["state"].items())
        for other in SHARDS:
            moved = results.of(f"{shard} to {other}")
            assert moved[0]["state"].keys() == found["state"].keys()
            assert all(torch.equal(t, found["state"][n]) for n, t in moved[0]["state"].items()), (shard, other)
            for rank in range(results.size):
                assert_close(moved[rank]["weights"], expected[shard]["weights"], 1e-9, (shard, other, rank))
    start = results.of("none")[0]["weights"]
    assert any(not torch.equal(t, start[n]) for n, t in expected["none"]["weights"].items())


def test_a_rank_with_a_bad_gradient_stops_the_step_on_all(results):
    for shard in SHARDS:
        for found in (record[shard] for record in results.records("bad")):
            assert found[0]["updates/bad"] == 1.0 and "grad_norm" not in found[0], shard
            assert found[1]["updates/no_signal"] == 1.0 and found[1]["grad_norm"] == 0.0, shard


def test_bytes_of_collectives_follow_the_formula(results):
    cases = {shard: CASES[shard] for shard in SHARDS} | {f"low, {shard}": case for shard, case in LOW.items()}
    for name, case in cases.items():
        decoder = small_decoder(case.dtype, **case.changes)
        exact = 8 if case.dtype == torch.float64 else 4
        expected = collective_bytes(
            [tuple(p.shape) for p in decoder.parameters()],
            ranks=results.size,
            shard=case.shard,
            bytes_per_number=case.dtype.itemsize,
            bytes_per_master=exact,
        )
        for record in results.records("bytes"):
            assert record[name] == expected, name
