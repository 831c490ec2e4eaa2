"""Numerics contract, line 4, ranks: two gloo processes with half the groups each give the gradient of one with all."""

from __future__ import annotations

import torch
import torch.distributed
import torch.multiprocessing

from cohort.algos.algorithm import build_algorithm
from cohort.config.algos import GRPO, GSPO, CorrectionConfig
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.learner.local import LocalLearner
from cohort.models.catalog import resolve
from cohort.models.files import load_folder
from cohort.world import ProcessGroup, World
from tests.support import packed, random_groups, small_decoder

CASES = {
    "token": GRPO(aggregate="token"),
    "sequence": GRPO(),
    "constant": GRPO(aggregate="constant"),
    "prompt": GRPO(aggregate="prompt"),
    "whole samples": GSPO(correction=CorrectionConfig(kind="truncate", level="geometric")),
}


def gradient(groups, world, case, decoder=None):
    decoder = decoder or small_decoder(torch.float64)
    learner = LocalLearner(decoder, LearnerConfig(token_budget=40), OptimConfig(), num_updates=1, world=world)
    algo = build_algorithm(CASES[case], 16)
    learner.forward_backward(packed(groups, 40).minibatches[0], algo)
    return {n: m.grad for n, m in learner.optimizer.masters.items()}


def tiny():
    """The bundled model in fp32."""
    return load_folder(resolve("tiny"), torch.float32).decoder


def on_rank(rank, store, out):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    groups = random_groups(num_groups=5)
    mine = groups[:4] if rank == 0 else groups[4:]  # unequal shares on purpose
    for case in CASES:
        torch.save(gradient(mine, ProcessGroup(), case), f"{out}/{case}-{rank}.pt")
    torch.save(gradient(mine, ProcessGroup(), "token", tiny()), f"{out}/tiny-{rank}.pt")
    empty = gradient([], ProcessGroup(), "token") if rank else gradient(groups, ProcessGroup(), "token")
    torch.save(empty, f"{out}/empty-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_4_4_two_ranks_give_the_gradient_of_one(tmp_path):
    torch.multiprocessing.start_processes(on_rank, (f"{tmp_path}/store", tmp_path), nprocs=2, start_method="spawn")
    groups = random_groups(num_groups=5)
    for name in (*CASES, "empty", "tiny"):
        expected = gradient(groups, World(), name if name in CASES else "token", tiny() if name == "tiny" else None)
        tolerance = 1e-5 if name == "tiny" else 1e-10
        for rank in (0, 1):
            got = torch.load(f"{tmp_path}/{name}-{rank}.pt", weights_only=True)
            for n, g in expected.items():
                assert (got[n] - g).abs().max() <= tolerance * float(g.abs().max()), (name, rank, n)
