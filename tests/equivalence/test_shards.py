"""Numerics contract, line 4, shards: ranks that divide masters, moments or weights give the numbers of one process.

Compared are gradients, metrics, weights and stored state after three steps of `update_policy`, and a fourth step after
the state was loaded into learners with other shards and other numbers of ranks. The ranks have unequal parts of the
groups, and in the third step the first rank has all of them.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from safetensors.torch import load_file

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO, GSPO, Policy
from cohort.config.schema import LearnerConfig, LoraConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.engines.weights import copy_weights
from cohort.errors import ConfigError, TrainingStopped
from cohort.learner.local import LocalLearner
from cohort.learner.optim import WholeOptimizer
from cohort.learner.traffic import collective_bytes, weights_bytes
from cohort.loops.rl import update_policy
from cohort.models.lora import Adapters
from cohort.run import checkpoint
from cohort.run.checkpoint import Checkpoint
from cohort.serialize import dumps, loads
from cohort.types import Group
from cohort.world import ProcessGroup, World
from tests.equivalence.test_ranks import compared, share_of, step_groups
from tests.helpers.decoders_and_groups import random_groups, small_decoder
from tests.helpers.made_once import make_once

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
    recompute: bool = False
    reduce_once: bool = False  # only with shard = full
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
CASES["lora, none"] = Case(shard="none", lora=True)
CASES["activations computed twice, full"] = Case(shard="full", recompute=True)
CASES["gradients summed once, full"] = Case(shard="full", reduce_once=True)
# Not clipped: norms of slices and norms of tensors add up to sums with other roundings.
LOW = {shard: Case(shard=shard, dtype=torch.bfloat16, clip_norm=0.0) for shard in SHARDS}


def make_learner(case: Case, world: World, shard: str = "") -> LocalLearner:
    """Returns a new learner of a case, with random weights that are the same on every rank."""
    decoder = small_decoder(case.dtype, std=0.15, **case.changes)
    reference = None if case.lora else small_decoder(case.dtype, seed=1, std=0.15, **case.changes)
    learner = LocalLearner(
        decoder,
        LearnerConfig(token_budget=40, epochs=case.epochs, shard=shard or case.shard),
        OptimConfig(lr=1e-3, weight_decay=0.1, clip_norm=case.clip_norm),
        num_updates=8,
        reference=reference,
        refresh_every=case.refresh_every,
        world=world,
        adapters=Adapters(decoder, LoraConfig(rank=2), seed=3) if case.lora else None,
    )
    learner.decoder.recompute = case.recompute
    if case.reduce_once and world.size > 1:
        learner.backend.reduce_once = True
    return learner


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


def run_case(case: Case, world: World, folder: Path) -> dict[str, object]:
    """Trains three steps on this rank's groups and returns everything that is compared.

    The state is saved as a checkpoint below `folder`, and read from there.
    """
    learner = make_learner(case, world)
    algo = build_algorithm(case.algo, 16)
    gradients = watch_gradients(learner)
    addresses = [p.data_ptr() for p in learner.decoder.parameters()]
    metrics = [update_policy(learner, algo, part_of(step, world), learner.config)[1].metrics for step in range(3)]
    if case.shard != "full":
        # The engine shares this memory.
        assert [p.data_ptr() for p in learner.decoder.parameters()] == addresses
    # A model of its own, as an engine has it where the ranks divide the weights.
    sampled = small_decoder(case.dtype, seed=9, **case.changes)
    copy_weights(learner.weights(), sampled)
    state = learner.state()
    saved = Checkpoint(step=3, cursor=0, optimizer=state, numbers=state.numbers)
    if world.is_first:
        checkpoint.save(folder, saved, lambda model: model.mkdir())
    else:
        checkpoint.assist_save(saved)
    return {
        "metrics": metrics,
        "numbers": state.numbers,
        "gradients": gradients,
        "parameters": {name: tensor.clone() for name, tensor in sampled.state_dict().items()},
        "state": load_file(folder / "step-000003" / "optimizer.safetensors") if world.is_first else {},
    }


def run_fourth_step(folder: Path, case: Case, shard: str, world: World) -> dict[str, object]:
    """Loads the checkpoint that `run_case` saved into a new learner with this shard, and makes the next step.

    Returns its weights and the state before the step. Only the first rank looks into `folder`.
    """
    learner = make_learner(case, world, shard)
    source = small_decoder(case.dtype, **case.changes)
    if world.is_first:
        source.load_state_dict(torch.load(folder / "parameters.pt", weights_only=True))
    for tensor in source.state_dict().values():
        world.broadcast(tensor)
    learner.load_weights(source)
    # Only the first rank sees the files.
    state = checkpoint.load(folder / "step-000003") if world.is_first else checkpoint.Checkpoint(step=3, cursor=0)
    state.numbers = world.share(state.numbers)
    learner.load_state(state.tensors, state.numbers)
    again = {name: tensor.clone() for name, tensor in learner.state().collect().items()}
    update_policy(learner, build_algorithm(case.algo, 16), part_of(3, world), learner.config)
    return {"weights": {name: tensor.clone() for name, tensor in learner.weights()}, "state": again}


def count_bytes(case: Case, world: World) -> list[dict[str, int]]:
    """Returns the bytes that one optimizer step handed to collectives, by kind, and then one copy of the weights.

    Records that ranks exchange are left out. The first result also has the most microbatches of a rank, as "passes".
    """
    learner, seen = make_learner(case, world), []
    forward_backward, optim_step = learner.forward_backward, learner.optim_step

    def count() -> Counter[str]:
        """Returns what was counted so far."""
        return Counter({kind: n for kind, n in world.progress.bytes_by_kind.items() if kind != "exchange"})

    def watched_backward(minibatch, loss):
        seen.append(count())
        seen.append({"passes": max(world.gather(len(minibatch.microbatches)))})
        return forward_backward(minibatch, loss)

    def watched_step():
        result = optim_step()
        seen.append(count())
        return result

    learner.forward_backward, learner.optim_step = watched_backward, watched_step
    update_policy(learner, build_algorithm(case.algo, 16), part_of(0, world), learner.config)
    before, passes, after = seen
    start = count()
    copy_weights(learner.weights(), small_decoder(case.dtype, seed=9, **case.changes))
    return [dict(after - before) | passes, dict(count() - start)]


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


def run_out_of_memory(world: World) -> str:
    """Returns the message of ranks that divide the weights when memory runs out on all of them."""
    learner = make_learner(CASES["full"], world)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    learner.backend.backward = fail
    with pytest.raises(TrainingStopped) as stopped:
        learner.update(make_batch(random_groups(num_groups=7)), build_algorithm(GRPO(), 16))
    return str(stopped.value)


def try_what_is_refused(world: World) -> list[str]:
    """Returns the messages for what cannot be divided: adapters, and a feed-forward size of 41."""
    messages = []
    for case in (Case(shard="full", lora=True), Case(shard="full", changes={"ff": 41})):
        with pytest.raises(ConfigError) as refused:
            make_learner(case, world)
        messages.append(str(refused.value))
    return messages


def on_rank(rank: int, size: int, store: str, out: Path) -> None:
    """Runs all cases on one rank, in a process of its own, and writes the results into the folder `out`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
    )
    world = ProcessGroup()
    for name, case in (CASES | {f"low, {shard}": case for shard, case in LOW.items()}).items():
        found = run_case(case, world, out / name)
        torch.save(found, out / f"{name}-{rank}.pt")
        if rank == 0:
            torch.save(found["parameters"], out / name / "parameters.pt")
    # Every shard loads the state of every other.
    for shard in SHARDS:
        for other in SHARDS:
            found = run_fourth_step(out / shard, CASES[shard], other, world)
            torch.save(found, out / f"{shard} to {other}-{rank}.pt")
    counted = {shard: count_bytes(CASES[shard], world) for shard in SHARDS}
    counted |= {f"low, {shard}": count_bytes(case, world) for shard, case in LOW.items()}
    (out / f"bytes-{rank}").write_bytes(dumps(counted))
    (out / f"bad-{rank}").write_bytes(dumps({shard: run_bad_step(CASES[shard], world) for shard in SHARDS}))
    (out / f"refused-{rank}").write_bytes(dumps([*try_what_is_refused(world), run_out_of_memory(world)]))
    # Models that errors have kept hold their connections, and these abort the process if they outlive it.
    gc.collect()
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

    def make(folder: Path) -> None:
        """Runs all cases."""
        arguments = (request.param, f"{folder}/store", folder)
        torch.multiprocessing.start_processes(on_rank, arguments, nprocs=request.param, start_method="spawn")

    return Results(make_once(tmp_path_factory, f"shards_{request.param}", make), request.param)


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float, where: object) -> None:
    """Compares tensors by name: differences relative to the largest entry of each tensor."""
    assert got.keys() == expected.keys() and len(got) > 10, where
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype, (where, name)
        assert (got[name] - tensor).abs().max() <= bound * float(tensor.abs().max()), (where, name)


@pytest.mark.parametrize("name", CASES)
def test_4_4_shards_equal_one_process(results, tmp_path, name):
    expected = run_case(CASES[name], World(), tmp_path)
    for rank, found in enumerate(results.of(name)):
        for mine, alone in zip(found["metrics"], expected["metrics"], strict=True):
            assert compared(mine) == pytest.approx(compared(alone), abs=1e-9, rel=1e-9), rank
        assert found["numbers"] == expected["numbers"] and found["numbers"]["optimizer_steps"] > 2
        assert len(found["gradients"]) == len(expected["gradients"])
        for step, (mine, alone) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
            # Later steps follow updates by Adam, which divides by roots of tiny squares and so magnifies rounding.
            assert_close(mine, alone, 1e-10 if step == 0 else 1e-7, (rank, step))
        assert_close(found["parameters"], expected["parameters"], 1e-9, rank)
        if rank == 0:
            assert_close(found["state"], expected["state"], 1e-7, rank)
    assert any("reference/" in name for name in expected["state"]) == bool(CASES[name].refresh_every)


def test_all_ranks_have_the_same_weights(results):
    for name in CASES:
        first, *others = results.of(name)
        for other in others:
            assert all(torch.equal(tensor, other["parameters"][n]) for n, tensor in first["parameters"].items()), name


def test_a_bf16_model_gets_the_same_bits_with_and_without_shards(results):
    found = {shard: results.of(f"low, {shard}") for shard in SHARDS}
    start = small_decoder(torch.bfloat16, std=0.15).state_dict()
    none = found["none"][0]
    assert any(not torch.equal(t, start[n]) for n, t in none["parameters"].items())
    # Sums of two numbers have no order. With more ranks the order of gloo's sums decides about the last bit.
    if results.size == 2:
        for one, other in zip(found["none"], found["optimizer"], strict=True):
            assert all(torch.equal(t, other["parameters"][n]) for n, t in one["parameters"].items())
    for shard in SHARDS:
        state = found[shard][0]["state"]
        assert state.keys() == none["state"].keys() and {t.dtype for t in state.values()} == {torch.float32}
        for name, t in none["state"].items():
            if name.startswith("master/"):
                # Three steps of 1e-3. Where the weights are divided, gradients of matrices are rounded to bf16.
                assert (state[name] - t).abs().mean() <= 3e-4, (shard, name)
                rounded = found[shard][0]["parameters"][name.removeprefix("master/")]
                assert torch.equal(rounded, state[name].to(torch.bfloat16)), (shard, name)


def test_the_state_of_any_shards_continues_in_any_others(results):
    """Bit for bit the same state, and the weights after the next step that one process has."""
    for shard in SHARDS:
        found = results.of(shard)[0]
        # One process reads the state of several ranks.
        expected = run_fourth_step(results.folder / shard, CASES[shard], "none", World())
        assert all(torch.equal(t, found["state"][n]) for n, t in expected["state"].items())
        for other in SHARDS:
            moved = results.of(f"{shard} to {other}")
            assert moved[0]["state"].keys() == found["state"].keys()
            assert all(torch.equal(t, found["state"][n]) for n, t in moved[0]["state"].items()), (shard, other)
            for rank in range(results.size):
                assert_close(moved[rank]["weights"], expected["weights"], 1e-9, (shard, other, rank))


def test_what_cannot_be_divided_is_refused_by_name(results):
    for adapters, uneven, memory in results.records("refused"):
        assert "learner.shard = full" in adapters and "--learner.shard optimizer" in adapters
        assert "feed-forward size 41" in uneven and f"{results.size} ranks" in uneven
        assert memory.startswith("out of memory with ") and "--learner.token_budget" in memory


def test_one_rank_has_nothing_to_divide():
    for shard in ("auto", "none", "optimizer", "full"):
        learner = make_learner(Case(shard="none"), World(), shard)
        assert isinstance(learner.optimizer, WholeOptimizer)


def test_a_rank_with_a_bad_gradient_stops_the_step_on_all(results):
    for shard in SHARDS:
        for found in (record[shard] for record in results.records("bad")):
            assert found[0]["updates/bad"] == 1.0 and "grad_norm" not in found[0], shard
            assert found[1]["updates/no_signal"] == 1.0 and found[1]["grad_norm"] == 0.0, shard


def test_bytes_of_collectives_follow_the_formula(results):
    cases = {shard: CASES[shard] for shard in SHARDS} | {f"low, {shard}": case for shard, case in LOW.items()}
    for name, case in cases.items():
        shapes = {n: tuple(p.shape) for n, p in small_decoder(case.dtype, **case.changes).named_parameters()}
        sizes = {"bytes_per_number": case.dtype.itemsize, "bytes_per_master": max(4, case.dtype.itemsize)}
        for step, sync in (record[name] for record in results.records("bytes")):
            passes = step.pop("passes")
            assert passes > 1
            assert step == collective_bytes(shapes, ranks=results.size, shard=case.shard, passes=passes, **sizes), name
            gathered = weights_bytes(shapes, ranks=results.size, bytes_per_number=case.dtype.itemsize)
            assert sync == (gathered if case.shard == "full" else {}), name
