"""Measurement of the throughput of the engine, the learner and a whole step, compared with what the hardware allows."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, LearnerBenchOptions
from cohort.config.schema import GRPO, LearnerConfig, NativeEngine, OptimConfig
from cohort.data.pack import make_batch
from cohort.engines.base import Engine, Request, sample
from cohort.engines.factory import EngineModel, make_engine
from cohort.errors import ConfigError
from cohort.learner.local import LocalLearner
from cohort.learner.plan import MemoryDemand, MemoryPlan, plan_memory
from cohort.models import limits
from cohort.models.auto import AnyDecoder
from cohort.models.decoder import Decoder
from cohort.models.device import available_bytes
from cohort.types import Group, Key, Prompt, Provenance, Sample, Sampling


@dataclass(frozen=True, kw_only=True)
class HardwareLimit:
    """The shortest time that the hardware allows for a piece of work."""

    seconds: float
    description: str  # the measured rates that the time is computed from
    details: dict[str, float] = field(default_factory=dict)  # the times of its phases, by label


def bench_engine(decoder: Decoder, options: EngineBenchOptions) -> BenchResult:
    """Measures how fast the native engine (Cohort's own sampler) samples batches of prompts of random tokens.

    Returns the median seconds of `options.repeats` batches after one that is not counted, completion tokens per second,
    and the fraction of the hardware limit that was reached. Details include the mean seconds per batch of prefill,
    decode and draw, and the seconds of the engine's start. Raises ConfigError if `options.copies` is not "shared" and
    the model is on a GPU.
    """
    if decoder.embed.is_cuda and options.copies != "shared":
        raise ConfigError(
            f"--copies {options.copies} works on CPUs only, and the model is on a GPU: add --device cpu, or remove "
            "--copies."
        )
    shape = _make_shape(options)
    # Before the engine is made, because measuring the rates takes memory that is not the engine's.
    limit = _compute_engine_limit(decoder, shape)
    batches = [_make_requests(_make_prompts(decoder, shape, seed), shape) for seed in range(options.repeats + 1)]
    context = options.prompt_tokens + options.completion_tokens
    slots = options.slots or (options.prompts * options.samples if decoder.embed.is_cuda else 64)
    _reset_peak_memory(decoder)
    begin = time.perf_counter()
    engine = make_engine(
        NativeEngine(slots=slots, weights=options.copies), EngineModel(decoder=decoder, context=context)
    )
    # One token of one request: after it, everything that is prepared on first use is ready.
    first = batches[0][0]
    sample(engine, [replace(first, sampling=replace(first.sampling, max_tokens=1))])
    start_up = time.perf_counter() - begin
    # The first batch warms up and is not counted.
    sample(engine, batches[0])
    before = replace(engine.work)
    seconds = statistics.median(_measure_seconds(partial(sample, engine, batch)) for batch in batches[1:])
    result = _make_result("engine", seconds, shape, limit, decoder)
    for phase in ("prefill", "decode", "draw"):
        spent = getattr(engine.work, f"{phase}_seconds") - getattr(before, f"{phase}_seconds")
        result.details[f"{phase} s"] = spent / options.repeats
    result.details["start-up s"] = start_up
    return result


def bench_learner(decoder: Decoder, options: LearnerBenchOptions) -> BenchResult:
    """Measures an update (forward pass, backward pass, optimizer step) on a batch of random tokens.

    Returns the median seconds of `options.repeats` updates after one that is not counted, completion tokens per second,
    and the fraction of the hardware limit that was reached. The updates change the weights of `decoder`. Raises
    ConfigError if the memory of the GPU is too small.
    """
    shape = _make_shape(options)
    # A backward pass takes twice the arithmetic of a forward pass.
    limit = _compute_arithmetic_limit(decoder, 3 * limits.count_forward_flops(decoder.config, shape))
    plan = _plan_memory(decoder, shape, options.token_budget, kv=False)
    learner = _make_learner(decoder, options.token_budget, options.prefix_sharing, plan)
    groups = _make_random_groups(decoder, shape)
    _reset_peak_memory(decoder)
    seconds = _measure_median(lambda: _train_on(learner, groups, shape), options.repeats)
    return _make_result("learner", seconds, shape, limit, decoder, learner, plan)


def bench_step(decoder: Decoder, options: BenchOptions) -> BenchResult:
    """Measures whole steps: sampling a batch, an update on it, and loading the new weights into the engine.

    Nothing is scored: rewards alternate between 0 and 1. Returns the median seconds of `options.repeats` steps after
    one that is not counted. The details include the median seconds of sampling and of the rest (update and loading).
    The updates change the weights of `decoder`. Raises ConfigError if the memory of the GPU is too small.
    """
    shape = _make_shape(options)
    limit = _compute_step_limit(decoder, shape)
    context = options.prompt_tokens + options.completion_tokens
    plan = _plan_memory(decoder, shape, 0, kv=True)
    learner = _make_learner(decoder, 0, True, plan)
    subject = EngineModel(decoder=decoder, context=context, reserve=0 if plan is None else plan.update)
    engine = make_engine(NativeEngine(slots=options.prompts * options.samples), subject)
    _reset_peak_memory(decoder)
    phases: dict[str, list[float]] = {"sample s": [], "train s": []}

    def step() -> None:
        """Samples a batch, trains on it and loads the new weights; records the time of both phases."""
        begin = time.perf_counter()
        groups = _sample_groups(engine, decoder, shape)
        middle = time.perf_counter()
        _train_on(learner, groups, shape)
        # A step of a run ends with the new weights in the engine, so this is measured too.
        engine.load(learner.weights(), version=1)
        _synchronize(decoder)
        phases["sample s"].append(middle - begin)
        phases["train s"].append(time.perf_counter() - middle)

    seconds = _measure_median(step, options.repeats)
    result = _make_result("step", seconds, shape, limit, decoder, learner, plan)
    # The first value of each phase is that of the warm-up.
    result.details.update({name: statistics.median(values[1:]) for name, values in phases.items()})
    return result


def _make_shape(options: BenchOptions) -> limits.BatchShape:
    """Returns the sizes of the batch to measure: prompts, samples per prompt, and lengths in tokens.

    With `lengths` "lognormal", which only the engine benchmark has, each completion gets its own length.
    """
    has_own_lengths = isinstance(options, EngineBenchOptions) and options.lengths == "lognormal"
    return limits.BatchShape(
        prompts=options.prompts,
        samples=options.samples,
        prompt_tokens=options.prompt_tokens,
        completion_tokens=options.completion_tokens,
        lengths=limits.draw_lognormal_lengths(options.prompts * options.samples, options.completion_tokens)
        if has_own_lengths
        else (),
    )


def _compute_engine_limit(decoder: Decoder, shape: limits.BatchShape) -> HardwareLimit:
    """Returns the shortest time in which this machine could sample the batch, from rates that are measured here.

    On a CPU the arithmetic alone limits it. On a GPU memory traffic does too, and the details have the limits of
    prefill and decode, and the limit if samples of a group did not share their prompt.
    """
    config = decoder.config
    weight = decoder.embed
    if weight.device.type != "cuda":
        return _compute_arithmetic_limit(decoder, limits.count_forward_flops(config, shape))
    rates = limits.measure_gpu_rates(weight.dtype)
    least = limits.estimate_sampling_seconds(config, shape, rates, weight.itemsize)
    alone = limits.estimate_sampling_seconds(config, shape.without_sharing(), rates, weight.itemsize)
    return HardwareLimit(
        seconds=least.total,
        description=f"{rates.bytes / 1e9:.0f} GB/s copied and {rates.flops / 1e12:.0f} TFLOP/s multiplied, "
        f"measured here on {torch.cuda.get_device_name()}",
        details={
            "limit prefill s": least.prefill,
            "limit decode s": least.decode,
            "limit unshared s": alone.total,
        },
    )


def _compute_step_limit(decoder: Decoder, shape: limits.BatchShape) -> HardwareLimit:
    """Returns the shortest time in which this machine could sample the batch and then train on it.

    It is the sum of the limits of both; on a GPU the details have the two.
    """
    if not decoder.embed.is_cuda:
        return _compute_arithmetic_limit(decoder, 4 * limits.count_forward_flops(decoder.config, shape))
    sampling = _compute_engine_limit(decoder, shape)
    training = _compute_arithmetic_limit(decoder, 3 * limits.count_forward_flops(decoder.config, shape))
    parts = {"limit sample s": sampling.seconds, "limit train s": training.seconds}
    return HardwareLimit(seconds=sampling.seconds + training.seconds, description=sampling.description, details=parts)


def _compute_arithmetic_limit(decoder: Decoder, flops: float) -> HardwareLimit:
    """Returns the time of `flops` floating-point operations at the rate of a large matrix product, measured here."""
    if decoder.embed.is_cuda:
        rate = limits.measure_gpu_rates(decoder.embed.dtype).flops
        words = f"{rate / 1e12:.0f} TFLOP/s, the rate of a large matrix product here on {torch.cuda.get_device_name()}"
        return HardwareLimit(seconds=flops / rate, description=words)
    rate = limits.measure_matmul_rate(dtype=decoder.embed.dtype)
    threads = torch.get_num_threads()
    words = f"{rate / 1e9:.0f} GFLOP/s, the rate of a large matrix product here on {threads} threads"
    return HardwareLimit(seconds=flops / rate, description=words)


def _make_learner(decoder: Decoder, token_budget: int, share: bool, plan: MemoryPlan | None) -> LocalLearner:
    """Returns a learner that trains all weights of `decoder` itself, not of a copy.

    `token_budget` is the most tokens per microbatch (0 = 4096). A memory `plan`, which only GPUs have, replaces it and
    decides whether activations are recomputed. With `share` the prompt of a group is computed once per group.
    """
    config = LearnerConfig(token_budget=token_budget or 4096, prefix_sharing=share)
    learner = LocalLearner(decoder, config, OptimConfig(lr=1e-6), num_updates=1)
    learner.apply_plan(plan)
    return learner


def _plan_memory(decoder: Decoder, shape: limits.BatchShape, token_budget: int, kv: bool) -> MemoryPlan | None:
    """Returns how training on the batch divides the memory of the GPU; None on a CPU.

    `token_budget` is the most tokens per microbatch; 0 = as many as fit. With `kv` the plan includes the KV memory of
    an engine that samples the batch. Raises ConfigError if not even the smallest microbatch fits.
    """
    if not decoder.embed.is_cuda:
        return None
    tokens = shape.prompts * shape.prompt_tokens + shape.num_completion_tokens
    demand = MemoryDemand(
        model=decoder.config,
        bytes_per_number=decoder.embed.itemsize,
        longest=shape.prompt_tokens + shape.completion_tokens,
        batch_tokens=tokens,
        kv_tokens=tokens if kv else 0,
    )
    return plan_memory(demand, available_bytes(decoder.embed.device), token_budget)


def _reset_peak_memory(decoder: Decoder) -> None:
    """Frees cached GPU memory and makes the recorded peak count from now on. Does nothing on a CPU."""
    if decoder.embed.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _synchronize(decoder: AnyDecoder) -> None:
    """Waits until the GPU has done all work that was started, so that times are complete. Does nothing on a CPU."""
    if decoder.embed.is_cuda:
        torch.cuda.synchronize()


def _make_prompts(decoder: Decoder, shape: limits.BatchShape, seed: int = 0) -> list[Prompt]:
    """Returns the prompts of the batch, made of random tokens. Equal seeds give equal prompts."""
    rng = random.Random(seed)
    return [
        Prompt(
            task="bench",
            id=str(n),
            visit=seed,
            row={},
            messages=[],
            tokens=[rng.randrange(decoder.config.vocab_size) for _ in range(shape.prompt_tokens)],
            provenance=[Provenance.PROMPT] * shape.prompt_tokens,
        )
        for n in range(shape.prompts)
    ]


def _make_requests(prompts: Sequence[Prompt], shape: limits.BatchShape) -> list[Request]:
    """Returns one sampling request per completion of the batch, all samples of a prompt after each other.

    None has stop ids, so every completion gets exactly the length that `shape` gives it.
    """
    lengths = iter(shape.completion_lengths)
    return [
        Request(
            id=f"{p.id}/{i}",
            tokens=p.tokens,
            sampling=Sampling(max_tokens=next(lengths)),
            key=Key(seed=0, purpose="bench", task="bench", prompt_id=p.id, visit=p.visit, sample=i),
        )
        for p in prompts
        for i in range(shape.samples)
    ]


def _sample_groups(engine: Engine, decoder: Decoder, shape: limits.BatchShape) -> list[Group]:
    """Samples the batch with the engine and returns its groups, one per prompt, without rewards.

    The prompts are of random tokens and the same in every call.
    """
    prompts = _make_prompts(decoder, shape)
    done = sample(engine, _make_requests(prompts, shape))
    return [Group(prompt=p, samples=[done[f"{p.id}/{i}"] for i in range(shape.samples)]) for p in prompts]


def _make_random_groups(decoder: Decoder, shape: limits.BatchShape) -> list[Group]:
    """Returns the groups of the batch with random tokens as completions, without sampling and without rewards.

    Every completion has `shape.completion_tokens` tokens, and all log-probabilities are 0. All calls give equal groups.
    """
    rng = random.Random(1)

    def make_sample() -> Sample:
        tokens = [rng.randrange(decoder.config.vocab_size) for _ in range(shape.completion_tokens)]
        marks = [int(Provenance.SAMPLED)] * len(tokens)
        return Sample(tokens=tokens, provenance=marks, sampler_logprobs=[0.0] * len(tokens))

    return [
        Group(prompt=p, samples=[make_sample() for _ in range(shape.samples)]) for p in _make_prompts(decoder, shape)
    ]


def _train_on(learner: LocalLearner, groups: list[Group], shape: limits.BatchShape) -> None:
    """Does one update on the groups, with rewards that alternate between 0 and 1, and waits until it is done.

    Changes the weights of the learner and, in place, the groups: their rewards, advantages, masks and fates are set,
    and old log-probabilities are removed. `shape` gives the algorithm (GRPO) the longest completion.
    """
    algo = build_algorithm(GRPO(), shape.completion_tokens)
    for group in groups:
        for i, member in enumerate(group.samples):
            member.reward = float(i % 2)
            # The same groups are trained on several times; each time they must look as if they had just been sampled.
            member.old_logprobs = None
    learner.update(make_batch(algo.advantages(groups)), algo)
    _synchronize(learner.decoder)


def _measure_median(run: Callable[[], object], repeats: int) -> float:
    """Calls `run` once without counting, then `repeats` times. Returns the median seconds of those calls."""
    run()
    return statistics.median(_measure_seconds(run) for _ in range(repeats))


def _measure_seconds(run: Callable[[], object]) -> float:
    """Calls `run` once and returns how many seconds that took."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _make_result(
    what: str,
    seconds: float,
    shape: limits.BatchShape,
    limit: HardwareLimit,
    decoder: Decoder,
    learner: LocalLearner | None = None,
    plan: MemoryPlan | None = None,
) -> BenchResult:
    """Returns a BenchResult: seconds, completion tokens per second, and the fraction of the hardware limit reached.

    `what` is the name of the benchmark. The details are the limit in seconds, the details of the limit and, where
    given, the learner's tokens per microbatch and the planned memory; on a GPU also the peak of memory since it was
    last reset.
    """
    details = {"limit s": limit.seconds, **limit.details}
    if learner is not None:
        details["tokens per microbatch"] = learner.token_budget
    if plan is not None:
        details["planned GPU memory GiB"] = plan.peak / 2**30
    if decoder.embed.is_cuda:
        details["peak GPU memory GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return BenchResult(
        what=what,
        seconds=seconds,
        tokens_per_second=shape.num_completion_tokens / seconds,
        fraction=limit.seconds / seconds,
        limit=limit.description,
        setting=f"{decoder.embed.device.type}, {str(decoder.embed.dtype).removeprefix('torch.')}",
        details=details,
    )
