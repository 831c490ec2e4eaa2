"""Throughput of the engine, the learner and a whole step, next to what the hardware allows."""

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
from cohort.engines.factory import Subject, make_engine
from cohort.errors import ConfigError
from cohort.learner.local import LocalLearner
from cohort.learner.plan import Load, Plan, plan_memory
from cohort.models import limits
from cohort.models.auto import AnyDecoder
from cohort.models.decoder import Decoder
from cohort.models.device import available_bytes
from cohort.types import Group, Key, Prompt, Provenance, Sample, Sampling


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The least seconds, what they rest on, and how they divide."""

    seconds: float
    words: str
    details: dict[str, float] = field(default_factory=dict)


def bench_engine(decoder: Decoder, options: EngineBenchOptions) -> BenchResult:
    if decoder.embed.is_cuda and options.copies != "shared":
        raise ConfigError(f"--copies {options.copies} is for CPUs, and there is a GPU here: add --device cpu.")
    shape = _shape(options)
    # before the engine is made: what the measurement of the rates needs is not the engine's memory
    limit = _engine_limit(decoder, shape)
    batches = [_requests(_prompts(decoder, shape, seed), shape) for seed in range(options.repeats + 1)]
    context = options.prompt_tokens + options.completion_tokens
    slots = options.slots or (options.prompts * options.samples if decoder.embed.is_cuda else 64)
    _forget_peak(decoder)
    begin = time.perf_counter()
    engine = make_engine(NativeEngine(slots=slots, weights=options.copies), Subject(decoder=decoder, context=context))
    first = batches[0][0]
    sample(engine, [replace(first, sampling=replace(first.sampling, max_tokens=1))])
    start_up = time.perf_counter() - begin
    sample(engine, batches[0])  # warms up
    before = replace(engine.work)
    seconds = statistics.median(_seconds(partial(sample, engine, batch)) for batch in batches[1:])
    result = _result("engine", seconds, shape, limit, decoder)
    for phase in ("prefill", "decode", "draw"):
        spent = getattr(engine.work, f"{phase}_seconds") - getattr(before, f"{phase}_seconds")
        result.details[f"{phase} s"] = spent / options.repeats
    result.details["start-up s"] = start_up
    return result


def bench_learner(decoder: Decoder, options: LearnerBenchOptions) -> BenchResult:
    shape = _shape(options)
    limit = _arithmetic_limit(decoder, 3 * limits.forward_flops(decoder.config, shape))
    plan = _plan(decoder, shape, options.token_budget, kv=False)
    learner = _learner(decoder, options.token_budget, options.prefix_sharing, plan)
    groups = _random_groups(decoder, shape)
    _forget_peak(decoder)
    seconds = _median(lambda: _trained(learner, groups, shape), options.repeats)
    return _result("learner", seconds, shape, limit, decoder, learner, plan)


def bench_step(decoder: Decoder, options: BenchOptions) -> BenchResult:
    """Sampling and training of one batch on shared weights; rewards are random, as scoring is not measured."""
    shape = _shape(options)
    limit = _step_limit(decoder, shape)
    context = options.prompt_tokens + options.completion_tokens
    plan = _plan(decoder, shape, 0, kv=True)
    learner = _learner(decoder, 0, True, plan)
    subject = Subject(decoder=decoder, context=context, reserve=0 if plan is None else plan.update)
    engine = make_engine(NativeEngine(slots=options.prompts * options.samples), subject)
    _forget_peak(decoder)
    phases: dict[str, list[float]] = {"sample s": [], "train s": []}

    def step() -> None:
        begin = time.perf_counter()
        groups = _sampled(engine, decoder, shape)
        middle = time.perf_counter()
        _trained(learner, groups, shape)
        engine.load(learner.weights(), version=1)
        _wait(decoder)
        phases["sample s"].append(middle - begin)
        phases["train s"].append(time.perf_counter() - middle)

    seconds = _median(step, options.repeats)
    result = _result("step", seconds, shape, limit, decoder, learner, plan)
    result.details.update({name: statistics.median(values[1:]) for name, values in phases.items()})
    return result


def _shape(o: BenchOptions) -> limits.Shape:
    own = isinstance(o, EngineBenchOptions) and o.lengths == "lognormal"
    return limits.Shape(
        prompts=o.prompts,
        samples=o.samples,
        prompt_tokens=o.prompt_tokens,
        completion_tokens=o.completion_tokens,
        lengths=limits.lognormal_lengths(o.prompts * o.samples, o.completion_tokens) if own else (),
    )


def _engine_limit(decoder: Decoder, shape: limits.Shape) -> Limit:
    config, weight = decoder.config, decoder.embed
    if weight.device.type != "cuda":
        return _arithmetic_limit(decoder, limits.forward_flops(config, shape))
    rates = limits.gpu_rates(weight.dtype)
    least = limits.least_seconds(config, shape, rates, weight.itemsize)
    alone = limits.least_seconds(config, shape.unshared(), rates, weight.itemsize)
    return Limit(
        seconds=least.total,
        words=f"{rates.bytes / 1e9:.0f} GB/s copied and {rates.flops / 1e12:.0f} TFLOP/s multiplied, "
        f"measured here on {torch.cuda.get_device_name()}",
        details={
            "limit prefill s": least.prefill,
            "limit decode s": least.decode,
            "limit unshared s": alone.total,
        },
    )


def _step_limit(decoder: Decoder, shape: limits.Shape) -> Limit:
    """Sampling and training, one after the other."""
    if not decoder.embed.is_cuda:
        return _arithmetic_limit(decoder, 4 * limits.forward_flops(decoder.config, shape))
    sampling = _engine_limit(decoder, shape)
    training = _arithmetic_limit(decoder, 3 * limits.forward_flops(decoder.config, shape))
    parts = {"limit sample s": sampling.seconds, "limit train s": training.seconds}
    return Limit(seconds=sampling.seconds + training.seconds, words=sampling.words, details=parts)


def _arithmetic_limit(decoder: Decoder, flops: float) -> Limit:
    if decoder.embed.is_cuda:
        rate = limits.gpu_rates(decoder.embed.dtype).flops
        words = f"{rate / 1e12:.0f} TFLOP/s, the rate of a large matrix product here on {torch.cuda.get_device_name()}"
        return Limit(seconds=flops / rate, words=words)
    rate = limits.matmul_rate(dtype=decoder.embed.dtype)
    return Limit(
        seconds=flops / rate,
        words=f"{rate / 1e9:.0f} GFLOP/s, the rate of a large matrix product here on {torch.get_num_threads()} threads",
    )


def _learner(decoder: Decoder, token_budget: int, share: bool, plan: Plan | None) -> LocalLearner:
    config = LearnerConfig(token_budget=token_budget or 4096, prefix_sharing=share)
    learner = LocalLearner(decoder, config, OptimConfig(lr=1e-6), num_updates=1)
    learner.follow(plan)
    return learner


def _plan(decoder: Decoder, shape: limits.Shape, token_budget: int, kv: bool) -> Plan | None:
    if not decoder.embed.is_cuda:
        return None
    tokens = shape.prompts * shape.prompt_tokens + shape.num_completion
    load = Load(
        model=decoder.config,
        width=decoder.embed.itemsize,
        longest=shape.prompt_tokens + shape.completion_tokens,
        batch_tokens=tokens,
        kv_tokens=tokens if kv else 0,
    )
    return plan_memory(load, available_bytes(decoder.embed.device), token_budget)


def _forget_peak(decoder: Decoder) -> None:
    if decoder.embed.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _wait(decoder: AnyDecoder) -> None:
    if decoder.embed.is_cuda:
        torch.cuda.synchronize()


def _prompts(decoder: Decoder, shape: limits.Shape, seed: int = 0) -> list[Prompt]:
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


def _requests(prompts: Sequence[Prompt], shape: limits.Shape) -> list[Request]:
    """No stop ids: every completion has the asked length."""
    lengths = iter(shape.completions)
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


def _sampled(engine: Engine, decoder: Decoder, shape: limits.Shape) -> list[Group]:
    prompts = _prompts(decoder, shape)
    done = sample(engine, _requests(prompts, shape))
    return [Group(prompt=p, samples=[done[f"{p.id}/{i}"] for i in range(shape.samples)]) for p in prompts]


def _random_groups(decoder: Decoder, shape: limits.Shape) -> list[Group]:
    rng = random.Random(1)

    def one() -> Sample:
        tokens = [rng.randrange(decoder.config.vocab_size) for _ in range(shape.completion_tokens)]
        marks = [int(Provenance.SAMPLED)] * len(tokens)
        return Sample(tokens=tokens, provenance=marks, sampler_logprobs=[0.0] * len(tokens))

    return [Group(prompt=p, samples=[one() for _ in range(shape.samples)]) for p in _prompts(decoder, shape)]


def _trained(learner: LocalLearner, groups: list[Group], shape: limits.Shape) -> None:
    algo = build_algorithm(GRPO(), shape.completion_tokens)
    for group in groups:
        for i, member in enumerate(group.samples):
            member.reward, member.old_logprobs = float(i % 2), None  # as if they had just been drawn
    learner.update(make_batch(algo.advantages(groups)), algo)
    _wait(learner.decoder)


def _median(run: Callable[[], object], repeats: int) -> float:
    run()  # warms up
    return statistics.median(_seconds(run) for _ in range(repeats))


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _result(
    what: str,
    seconds: float,
    shape: limits.Shape,
    limit: Limit,
    decoder: Decoder,
    learner: LocalLearner | None = None,
    plan: Plan | None = None,
) -> BenchResult:
    details = {"limit s": limit.seconds, **limit.details}
    if learner is not None:
        details["tokens a microbatch"] = learner.token_budget
    if plan is not None:
        details["planned GPU memory GiB"] = plan.peak / 2**30
    if decoder.embed.is_cuda:
        details["peak GPU memory GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return BenchResult(
        what=what,
        seconds=seconds,
        tokens_per_second=shape.num_completion / seconds,
        fraction=limit.seconds / seconds,
        limit=limit.words,
        setting=f"{decoder.embed.device.type}, {str(decoder.embed.dtype).removeprefix('torch.')}",
        details=details,
    )
