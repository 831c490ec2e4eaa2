"""Numerics contract, line 4, slices: ranks that hold one model together give the numbers of one process.

Compared are hidden states, log-probabilities, entropies, the gradient of every parameter, its norm, and the weights and
optimizer state after a step. The models differ in what makes slices hard: a tied head, an odd vocabulary, biases, norms
of queries and keys. The losses are one over tokens and one over whole samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO, GSPO
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.engines.weights import copy_weights
from cohort.learner.attention import make_packed_attention
from cohort.learner.backend import FusedBackend
from cohort.learner.base import LiveWeights
from cohort.learner.head import token_logprobs
from cohort.learner.local import LocalLearner
from cohort.learner.optim import WholeOptimizer
from cohort.learner.tensor_backend import TensorBackend, tensor_bytes_per_microbatch
from cohort.learner.tensor_head import sliced_token_logprobs
from cohort.models.catalog import resolve_model
from cohort.models.decoder import Decoder, Norm
from cohort.models.files import load_folder
from cohort.models.tensor import TensorDecoder, full_views, shard_decoder
from cohort.types import Group
from cohort.world import Grid, ProcessGroup, World
from tests.helpers.decoders_and_groups import pack_groups, random_groups, small_decoder
from tests.helpers.made_once import make_once

# Limit of a collective call: a rank whose partners have died ends after that time.
LIMIT = timedelta(seconds=120)
TEMPERATURE = 0.7
VOCABULARY = {"embed", "head"}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},  # 61 tokens: the slices are unequal
    "untied": {"tied": False, "vocab_size": 64},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True, "tied": False, "num_kv_heads": 2, "num_heads": 4},
}
FOUR_HEADS = "four KV heads"  # a model that four ranks can hold together
MODELS[FOUR_HEADS] = {"qk_norm": True, "qkv_bias": True, "num_kv_heads": 4, "num_heads": 8}
LOSSES = {
    "tokens": GRPO(aggregate="token", entropy=0.01, kl=KLConfig(weight=0.1)),
    "whole samples": GSPO(),
}


def make_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """Returns a random decoder. Norms and biases are random too: ones and zeros would hide mistakes."""
    decoder = small_decoder(dtype, seed, 0.15, **MODELS[name])
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(decoder.named_parameters()):
        if p.ndim == 1 or p.shape[0] == 2:
            p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return decoder


def groups_of(rank: int, size: int) -> list[Group]:
    """Returns the groups of a data rank: an unequal part of the same five."""
    groups = random_groups(num_groups=5)
    return groups if size == 1 else groups[:3] if rank == 0 else groups[3:]


def make_backend(decoder: Decoder, world: World | None) -> FusedBackend:
    """Returns the backend of one process where `world` is None, else that of a rank's slice."""
    if world is None:
        return FusedBackend(decoder, WholeOptimizer(decoder, OptimConfig()), None)
    return TensorBackend(shard_decoder(decoder, world), OptimConfig())


def full_gradients(backend: FusedBackend) -> dict[str, Tensor]:
    """Returns the full gradients of all masters, by parameter."""
    masters = backend.optimizer.masters
    if isinstance(backend, TensorBackend):
        return {n: g.clone() for n, g in full_views(backend.decoder, lambda n, _: masters[n].grad)}
    return {n: m.grad.clone() for n, m in masters.items() if m.grad is not None}


def full_weights(backend: FusedBackend) -> dict[str, Tensor]:
    """Returns the full weights, by Hugging Face name."""
    return {n: w.clone() for n, w in backend.decoder.named_weights()}


def compute_gradient(backend: FusedBackend, loss: str, data: World) -> None:
    """Leaves the gradient of the groups of all data ranks in the masters of the backend."""
    config = LearnerConfig(token_budget=60)
    learner = LocalLearner(backend.decoder, config, OptimConfig(), num_updates=1, temperature=TEMPERATURE, world=data)
    learner.backend = backend
    groups = groups_of(data.rank, data.size)
    for group in groups:
        for sample in group.samples:
            sample.ref_logprobs = [-3.0 + 0.1 * i for i in range(len(sample.tokens))]
    minibatch = pack_groups(groups, 60).minibatches[0]
    assert any(span.prompt_length for m in minibatch.microbatches for span in m.layout.spans), "no prompt is shared"
    learner.forward_backward(minibatch, build_algorithm(LOSSES[loss], 16))


def compute_case(name: str, loss: str, tensor: World | None, data: World) -> dict[str, Any]:
    """Returns all compared numbers of one case, of one process (`tensor` is None) or of a rank."""
    decoder, reference = make_model(name), make_model(name, seed=1)
    backend = make_backend(decoder, tensor)
    micro = pack_groups(random_groups(), 200).minibatches[0].microbatches[0]
    attend = make_packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
    seen: dict[str, Any] = {}
    with torch.no_grad():
        hidden = backend.decoder(micro.tokens, micro.positions, attend)[micro.source]
        head = backend.decoder.head_weight
        if tensor is None:
            seen["logprobs"], seen["entropy"] = token_logprobs(hidden, head, micro.targets, TEMPERATURE)
        else:
            span = backend.decoder.vocabulary
            found = sliced_token_logprobs(hidden, head, micro.targets, span, TEMPERATURE)
            seen["logprobs"], seen["entropy"] = found
            reference = shard_decoder(reference, tensor).requires_grad_(False)
        seen["hidden"] = hidden
        seen["policy"] = backend.logprobs(micro, TEMPERATURE)
        with backend.as_reference(reference):
            seen["reference"] = backend.logprobs(micro, TEMPERATURE)
    compute_gradient(backend, loss, data)
    seen["gradients"] = full_gradients(backend)
    seen["own"] = {n: m.grad.clone() for n, m in backend.optimizer.masters.items()}
    seen["norm"] = torch.tensor(backend.optimizer.grad_norm())
    backend.step(1e-3, 0.5)
    seen["stepped"] = full_weights(backend)
    seen["state"] = {key: entry.read().clone() for key, entry in backend.state().items()}
    return seen


def check_weights_on_rank(name: str, world: World) -> None:
    """Checks that slices joined are the whole model, in the same order, also after a copy into an engine's decoder."""
    decoder = make_model(name)
    before = {n: p.clone() for n, p in decoder.named_parameters()}
    sharded = shard_decoder(decoder, world)
    before_bytes = world.progress.bytes_by_kind["join"]
    joined, whole = list(sharded.named_weights()), list(decoder.named_weights())
    # Every slice is sent once, at the length of the longest one.
    sent = {
        n: p.nbytes * sharded.vocabulary.largest // len(p) for n, p in sharded.named_parameters() if n in VOCABULARY
    }
    sent |= {n: p.nbytes for n, p in sharded.named_parameters() if n not in sharded.replicated | VOCABULARY}
    assert world.progress.bytes_by_kind["join"] - before_bytes == sum(sent.values())
    assert [n for n, _ in joined] == [n for n, _ in whole]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(joined, whole, strict=True))
    for n, full in full_views(sharded):
        assert torch.equal(full, before[n]) and full.is_contiguous()
    # The slices have storage of their own: the whole model does not follow them.
    for p in sharded.parameters():
        p.data.zero_()
    assert all(torch.equal(p, before[n]) for n, p in decoder.named_parameters())
    engine, sharded = make_model(name, seed=5), shard_decoder(decoder, world)

    before_bytes = world.progress.bytes_by_kind["join"]
    copy_weights(LiveWeights(sharded), engine)
    # Every slice has travelled once.
    assert world.progress.bytes_by_kind["join"] - before_bytes == sum(sent.values())
    assert all(torch.equal(p, before[n]) for n, p in engine.named_parameters())


def check_state_on_rank(name: str, world: World) -> None:
    """Checks that the optimizer's state survives the way through full tensors, bit by bit, and is used afterwards."""
    backends = [make_backend(make_model(name), world) for _ in range(2)]
    first, second = backends
    compute_gradient(first, "tokens", World())
    first.step(1e-3, 1.0)
    full = {key: entry.read().clone() for key, entry in first.state().items()}
    assert {key.partition("/")[0] for key in full} == {"exp_avg", "exp_avg_sq"}
    assert all(full[f"exp_avg/{n}"].shape == p.shape for n, p in make_model(name).named_parameters())
    second.load_state(full, num_steps=1)
    second.decoder.load_state_dict(first.decoder.state_dict())
    for key, entry in second.state().items():
        assert torch.equal(entry.read(), full[key]) and full[key].any(), key
    for backend in backends:
        compute_gradient(backend, "tokens", World())
        backend.step(1e-3, 1.0)
    weights = [dict(b.decoder.named_parameters()) for b in backends]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


def count_bytes(name: str, per_token: bool, recompute: bool, world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of one microbatch by kind of collective: (counted, by the formula)."""
    backend = make_backend(make_model(name), world)
    backend.decoder.recompute = recompute
    micro = pack_groups(random_groups(), 200).minibatches[0].microbatches[0]
    before = Counter(world.progress.bytes_by_kind)
    backend.backward(micro, TEMPERATURE, lambda rows, logprobs, entropy: (logprobs, entropy), per_token)
    counted = Counter(world.progress.bytes_by_kind)
    counted.subtract(before)
    expected = tensor_bytes_per_microbatch(
        backend.decoder.config,
        len(micro.tokens),
        len(micro.targets),
        world.size,
        dtype=torch.float64,
        per_token=per_token,
        recompute=recompute,
    )
    return {kind: n for kind, n in counted.items() if n}, expected


def break_norms(decoder: TensorDecoder) -> None:
    """Replaces the norms of queries and keys by ones whose gradient is that of the rank's own heads alone."""
    for layer in decoder.layers:
        for side in ("q_norm", "k_norm"):
            norm = getattr(layer, side)
            plain = Norm(len(norm.weight), norm.eps)
            plain.weight = norm.weight
            setattr(layer, side, plain)


def bf16_gradients(world: World | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Returns the full gradients of a model with bf16 weights that computes in `dtype`."""
    backend = make_backend(make_model("qk_norm", torch.bfloat16).to(dtype), world)
    compute_gradient(backend, "tokens", World())
    return full_gradients(backend)


def tiny_logprobs(world: World | None) -> Tensor:
    """Returns log-probabilities of the bundled model."""
    backend = make_backend(load_folder(resolve_model("tiny"), torch.float64).decoder, world)
    with torch.no_grad():
        return backend.logprobs(pack_groups(random_groups(), 200).minibatches[0].microbatches[0], 1.0)


def on_rank(rank: int, size: int, store: str, out: Any) -> None:
    """Runs all cases on one rank, in a process of its own, and writes the results into the folder `out`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
    )
    world = ProcessGroup()
    grid: Grid = world.split(2)
    shrink_chunks()
    seen: dict[str, Any] = {
        f"{name}/{loss}": compute_case(name, loss, grid.tensor, grid.data) for name in MODELS for loss in LOSSES
    }
    if size == 2:
        for name in MODELS:
            check_weights_on_rank(name, grid.tensor)
            check_state_on_rank(name, grid.tensor)
        options = [
            (name, per_token, again) for name in MODELS for per_token in (True, False) for again in (True, False)
        ]
        torch.save([count_bytes(*option, grid.tensor) for option in options], f"{out}/bytes-{rank}.pt")
        broken = make_backend(make_model("qk_norm"), grid.tensor)
        break_norms(broken.decoder)
        compute_gradient(broken, "tokens", grid.data)
        torch.save({n: m.grad for n, m in broken.optimizer.masters.items()}, f"{out}/broken-{rank}.pt")
        torch.save(bf16_gradients(grid.tensor), f"{out}/bf16-{rank}.pt")
        torch.save(tiny_logprobs(grid.tensor), f"{out}/tiny-{rank}.pt")
    else:
        row = world.split(4)
        in_four = {f"{FOUR_HEADS}/{loss}": compute_case(FOUR_HEADS, loss, row.tensor, row.data) for loss in LOSSES}
        torch.save(in_four, f"{out}/four-{rank}.pt")
    torch.save(seen, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def shrink_chunks() -> None:
    """Makes the head run in many chunks of rows."""
    import cohort.learner.head

    cohort.learner.head.CHUNK_LOGITS = 61 * 5


def run_ranks(folder: Any, size: int) -> None:
    """Starts all ranks and waits for them."""
    arguments = (size, f"{folder}/store", folder)
    torch.multiprocessing.start_processes(on_rank, arguments, nprocs=size, start_method="spawn")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder with the results of two ranks that hold each model together."""
    return make_once(tmp_path_factory, "tensor", lambda folder: run_ranks(folder, 2))


def load_results(folder: Any, name: str) -> Any:
    """Returns what a rank wrote."""
    return torch.load(f"{folder}/{name}.pt", weights_only=True)


def assert_close(got: Tensor, expected: Tensor, bound: float, what: Any) -> None:
    """Checks that the largest difference is at most `bound` times the largest entry."""
    assert got.shape == expected.shape, what
    assert (got - expected).abs().max() <= bound * max(float(expected.abs().max()), 1e-3), what


def check_cases(results: list[Any], names: Iterable[str], tensor: int = 2) -> None:
    """Compares all numbers of these models on all ranks, of which `tensor` hold a model, with those of one process."""
    for name in names:
        for loss in LOSSES:
            expected = compute_case(name, loss, None, World())
            for rank, result in enumerate(results):
                got, what = result[f"{name}/{loss}"], (name, loss, rank)
                for part in ("hidden", "logprobs", "entropy", "policy", "reference", "norm"):
                    assert_close(got[part], expected[part], 1e-10, (*what, part))
                assert got["gradients"].keys() == expected["gradients"].keys()
                for n, g in expected["gradients"].items():
                    assert g.any(), (*what, n)
                    assert_close(got["gradients"][n], g, 1e-10, (*what, n))
                for n, w in expected["stepped"].items():
                    # Adam divides by roots of tiny squares and so magnifies rounding.
                    assert_close(got["stepped"][n], w, 1e-7, (*what, n))
                assert got["state"].keys() == expected["state"].keys()
                for n, moment in got["state"].items():
                    assert_close(moment, expected["state"][n], 1e-9, (*what, n))


def test_4_5_two_ranks_with_slices_equal_one_process(two_ranks):
    check_cases([load_results(two_ranks, str(rank)) for rank in range(2)], MODELS)


@pytest.mark.slow
def test_4_5_four_ranks_in_a_grid_or_a_row_equal_one_process(tmp_path):
    run_ranks(tmp_path, 4)
    check_cases([load_results(tmp_path, str(rank)) for rank in range(4)], MODELS)
    check_cases([load_results(tmp_path, f"four-{rank}") for rank in range(4)], [FOUR_HEADS], tensor=4)


def find_unequal(results: list[dict[str, Tensor]]) -> set[str]:
    """Returns the parameters whose own gradients are not the same bits on both ranks."""
    return {n for n, g in results[0].items() if g.shape != results[1][n].shape or not torch.equal(g, results[1][n])}


def test_gradients_of_common_parameters_are_the_same_bits_on_all_ranks(two_ranks):
    for name in MODELS:
        common = {n for n in make_model(name).state_dict() if n.endswith(("norm.weight", "out_bias", "down_bias"))}
        for loss in LOSSES:
            own = [load_results(two_ranks, str(rank))[f"{name}/{loss}"]["own"] for rank in range(2)]
            assert common and find_unequal(own) == own[0].keys() - common, (name, loss)


def test_a_norm_that_sees_only_its_own_heads_would_be_found(two_ranks):
    """Shows that the comparison above can fail: without the sum over ranks these gradients differ."""
    unequal = find_unequal([load_results(two_ranks, f"broken-{rank}") for rank in range(2)])
    assert {n for n in unequal if "norm" in n} == {f"layers.{i}.{s}_norm.weight" for i in range(2) for s in "qk"}


def test_the_bytes_of_collectives_follow_a_formula(two_ranks):
    for rank in range(2):
        for counted, expected in load_results(two_ranks, f"bytes-{rank}"):
            assert counted == expected and expected["sum"] and expected["join"]


def test_bf16_slices_have_fp32_gradients_as_exact_as_those_of_one_process(two_ranks):
    exact, alone = bf16_gradients(None, torch.float64), bf16_gradients(None)
    for rank in range(2):
        got = load_results(two_ranks, f"bf16-{rank}")
        assert got.keys() == exact.keys() and {g.dtype for g in got.values()} == {torch.float32}
        errors, errors_alone = (
            {n: float((x[n] - g).norm() / g.norm()) for n, g in exact.items()} for x in (got, alone)
        )
        assert max(errors.values()) <= 1.5 * max(errors_alone.values()) < 0.1


def test_the_bundled_model_in_slices(two_ranks):
    expected = tiny_logprobs(None)
    for rank in range(2):
        assert (load_results(two_ranks, f"tiny-{rank}") - expected).abs().max() <= 1e-10
