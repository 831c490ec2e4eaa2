"""Numerics contract, line 4, ranks: several processes with a part of the groups each give the numbers of one process.

Compared are the gradient, the metrics and the coefficients that are adjusted by them, for every algorithm, also those
with baselines over the batch and those with targets. The parts are unequal on purpose, and one rank may have no group.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import CorrectionConfig, CreditConfig, KLConfig
from cohort.config.algos import ALGOS, DAPO, GRPO, GSPO, OnlineDPO, Policy, ReinforcePP
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.learner.local import LocalLearner
from cohort.loops.rl import update_policy
from cohort.models.catalog import resolve_model
from cohort.models.files import load_folder
from cohort.serialize import dumps, loads
from cohort.types import Finish, Group, Provenance
from cohort.world import ProcessGroup, World
from tests.helpers.decoders_and_groups import pack_groups, random_groups, small_decoder

# Limit of a collective call: a rank whose partners have died ends after that time.
LIMIT = timedelta(seconds=120)
CASES: dict[str, Policy] = {name: config() for name, config in ALGOS.items()}
CASES |= {
    "token": GRPO(aggregate="token"),
    "prompt": GRPO(aggregate="prompt"),
    "constant": GRPO(aggregate="constant"),
    "batch scale": GRPO(scale="batch"),
    "dropped": GRPO(dead="drop", truncated="mask"),
    "penalised": DAPO(dead="keep", truncated="penalize"),
    "whole samples": GSPO(correction=CorrectionConfig(kind="truncate", level="geometric")),
    "steered": GRPO(kl=KLConfig(weight=0.1, target=0.01), entropy=0.01, entropy_target=0.5),
    "pairs": OnlineDPO(pairs="random", truncated="mask", nll=0.2),
    "turns": GRPO(dead="drop", credit=CreditConfig(per="turn", discount=0.9)),
    "turns of the batch": ReinforcePP(
        kl=KLConfig(weight=0.1, estimator="k1", place="reward"), credit=CreditConfig(per="turn")
    ),
    "KL in the reward": GRPO(kl=KLConfig(weight=0.1, place="reward", target=0.05)),
}
NOT_COMPARED = ("time/", "pack/", "rollouts/")


@dataclass
class StepResults:
    """What a rank, or the one process, computed in three steps. In the last step the first rank has all groups."""

    metrics: list[dict[str, float]]
    # State of the algorithm after the steps.
    state: dict[str, float]
    gradients: dict[str, torch.Tensor]  # by step and parameter


def step_groups(step: int) -> list[Group]:
    """Returns the groups of a step: different rewards, a dead group, a failure, truncated samples, a reused group.

    Some samples are conversations of two turns with a reward each.
    """
    rng = random.Random(step)
    groups = random_groups(num_groups=7, seed=step)
    for n, group in enumerate(groups):
        group.prompt = replace(group.prompt, visit=step)
        group.reused = 1 if n == 5 else 0
        for sample in group.samples:
            sample.advantage = 0.0
            sample.reward = 0.5 if n == 2 else float(rng.randrange(3))
            sample.parts = {"correct": sample.reward}
            sample.sampler_logprobs = [rng.uniform(-4, -1) for _ in sample.tokens]
            sample.finish = rng.choice((Finish.STOP, Finish.STOP, Finish.LENGTH))
            if len(sample.tokens) > 2 and n != 2:
                sample.provenance[1] = Provenance.ENVIRONMENT
                sample.turn_rewards = [early := rng.choice((0.0, 0.25, 1.0)), sample.reward - early]
    groups[4].samples[1].failure, groups[4].samples[1].reward = "the worker died", None
    return groups


def share_of(groups: list[Group], rank: int, size: int) -> list[Group]:
    """Returns the groups of a rank: neighbouring ones, most for the first rank, none for the last of four."""
    cuts = {1: [0, 7], 2: [0, 5, 7], 4: [0, 4, 6, 7, 7]}[size]
    return groups[cuts[rank] : cuts[rank + 1]]


def three_steps(name: str, world: World) -> StepResults:
    """Trains three steps with this rank's groups and returns what it computed."""
    config = LearnerConfig(token_budget=40)
    decoder, reference = small_decoder(torch.float64, std=0.15), small_decoder(torch.float64, seed=1, std=0.15)
    learner = LocalLearner(decoder, config, OptimConfig(lr=1e-3), num_updates=4, reference=reference, world=world)
    algo, metrics = build_algorithm(CASES[name], 16), []
    gradients: dict[str, torch.Tensor] = {}
    whole = learner.forward_backward

    def watched(minibatch, loss):
        result = whole(minibatch, loss)
        step = len(gradients) // len(learner.optimizer.masters)
        masters = learner.optimizer.masters.items()
        found = {f"{step}/{n}": torch.zeros_like(m) if m.grad is None else m.grad.clone() for n, m in masters}
        gradients.update({n: g.detach() for n, g in found.items()})
        return result

    learner.forward_backward = watched
    for step in range(3):
        groups = step_groups(step)
        mine = share_of(groups, world.rank, world.size) if step < 2 else groups if not world.rank else []
        metrics.append(update_policy(learner, algo, mine, config)[1].metrics)
    return StepResults(metrics=metrics, state=algo.state(), gradients=gradients)


def gradient(groups, world, decoder):
    """Returns the gradient of one minibatch, by parameter."""
    learner = LocalLearner(decoder, LearnerConfig(token_budget=40), OptimConfig(), num_updates=1, world=world)
    learner.forward_backward(pack_groups(groups, 40).minibatches[0], build_algorithm(GRPO(aggregate="token"), 16))
    return {n: m.grad for n, m in learner.optimizer.masters.items()}


def tiny():
    """The bundled model in fp32."""
    return load_folder(resolve_model("tiny"), torch.float32).decoder


def on_rank(rank, size, store, out):
    """Runs all cases on one rank, in a process of its own, and writes the results into the folder `out`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
    )
    world = ProcessGroup()
    assert world.gather({"rank": rank, "own": [0.5] * rank}) == [{"rank": n, "own": [0.5] * n} for n in range(size)]
    for name in CASES:
        seen = three_steps(name, world)
        torch.save(seen.gradients, f"{out}/{name}-{rank}.pt")
        (out / f"{name}-{rank}").write_bytes(dumps({"metrics": seen.metrics, "state": seen.state}))
    torch.save(gradient(share_of(random_groups(num_groups=7), rank, size), world, tiny()), f"{out}/fp32-{rank}.pt")
    torch.distributed.destroy_process_group()


def compared(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics that must be equal: clock times and sizes of packs may differ."""
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}


def check(tmp_path, size: int) -> None:
    """Compares `size` ranks with one process, in all cases."""
    arguments = (size, f"{tmp_path}/store", tmp_path)
    torch.multiprocessing.start_processes(on_rank, arguments, nprocs=size, start_method="spawn")
    for name in CASES:
        expected = three_steps(name, World())
        for rank in range(size):
            results = loads((tmp_path / f"{name}-{rank}").read_bytes())
            for mine, alone in zip(results["metrics"], expected.metrics, strict=True):
                assert compared(mine) == pytest.approx(compared(alone), abs=1e-10, rel=1e-10), (name, rank)
            assert results["state"] == pytest.approx(expected.state, rel=1e-12), (name, rank)
            got = torch.load(f"{tmp_path}/{name}-{rank}.pt", weights_only=True)
            assert got.keys() == expected.gradients.keys() and len(got) == 3 * len(small_decoder().state_dict())
            for n, g in expected.gradients.items():
                # Later steps follow updates by Adam, which divides by roots of tiny squares and so magnifies rounding.
                bound = 1e-10 if n.startswith("0/") else 1e-7
                assert (got[n] - g).abs().max() <= bound * max(float(g.abs().max()), 1e-3), (name, rank, n)
    expected = gradient(random_groups(num_groups=7), World(), tiny())
    for rank in range(size):
        got = torch.load(f"{tmp_path}/fp32-{rank}.pt", weights_only=True)
        for n, g in expected.items():
            assert (got[n] - g).abs().max() <= 1e-5 * float(g.abs().max()), (rank, n)


def test_4_4_two_ranks_equal_one_process(tmp_path):
    check(tmp_path, 2)


@pytest.mark.slow
def test_4_4_four_ranks_equal_one_process(tmp_path):
    check(tmp_path, 4)


def test_a_rank_without_the_others_would_compute_other_numbers():
    """Shows that the comparison can fail: a rank's own groups give other baselines than the batch."""
    for name in ("reinforce_pp", "batch scale", "turns of the batch"):
        algo, groups = build_algorithm(replace(CASES[name], kl=KLConfig()), 16), step_groups(0)
        whole = [s.advantage for g in algo.advantages(groups)[:5] for s in g.samples]
        alone = [s.advantage for g in algo.advantages(share_of(groups, 0, 2)) for s in g.samples]
        assert alone != pytest.approx(whole, rel=1e-6), name
