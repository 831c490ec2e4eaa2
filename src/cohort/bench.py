"""Throughput of the engine, the learner and a whole step, next to what the arithmetic allows."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from cohort import limits
from cohort.algos.algorithm import build_algorithm
from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, LearnerBenchOptions
from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
from cohort.data.pack import pack
from cohort.engines.base import Request, sample
from cohort.engines.native.engine import NativeEngine
from cohort.learner.local import LocalLearner
from cohort.models.decoder import Decoder
from cohort.types import Group, Key, Prompt, Provenance, Sample, Sampling


def bench_engine(decoder: Decoder, options: EngineBenchOptions) -> BenchResult:
    shape, rate = _shape(options), limits.matmul_rate()
    engine = _engine(decoder, options, options.slots, options.weights)
    seconds = _median(lambda: _sampled(engine, decoder, shape), options.repeats)
    result = _result("engine", seconds, shape, limits.forward_flops(decoder.config, shape), rate)
    work, runs = engine.work, options.repeats + 1
    phases = {"prefill": work.prefill_seconds, "decode": work.decode_seconds, "draw": work.draw_seconds}
    result.details.update({f"{name} s": total / runs for name, total in phases.items()})
    return result


def bench_learner(decoder: Decoder, options: LearnerBenchOptions) -> BenchResult:
    shape, rate = _shape(options), limits.matmul_rate()
    learner = _learner(decoder, options.token_budget, options.prefix_sharing)
    groups = _random_groups(decoder, shape)
    seconds = _median(lambda: _trained(learner, groups, shape), options.repeats)
    return _result("learner", seconds, shape, 3 * limits.forward_flops(decoder.config, shape), rate)


def bench_step(decoder: Decoder, options: BenchOptions) -> BenchResult:
    """Sampling and training of one batch on shared weights; rewards are random, as scoring is not measured."""
    shape, rate = _shape(options), limits.matmul_rate()
    engine = _engine(decoder, options, options.prompts * options.samples, "shared")
    learner = _learner(decoder, 4096, True)
    phases: dict[str, list[float]] = {"sample s": [], "train s": []}

    def step() -> None:
        begin = time.perf_counter()
        groups = _sampled(engine, decoder, shape)
        middle = time.perf_counter()
        _trained(learner, groups, shape)
        engine.load(learner.weights(), version=1)
        phases["sample s"].append(middle - begin)
        phases["train s"].append(time.perf_counter() - middle)

    seconds = _median(step, options.repeats)
    result = _result("step", seconds, shape, 4 * limits.forward_flops(decoder.config, shape), rate)
    result.details.update({name: statistics.median(values[1:]) for name, values in phases.items()})
    return result


def _shape(o: BenchOptions) -> limits.Shape:
    return limits.Shape(
        prompts=o.prompts, samples=o.samples, prompt_tokens=o.prompt_tokens, completion_tokens=o.completion_tokens
    )


def _engine(decoder: Decoder, o: BenchOptions, slots: int, weights: Literal["shared", "fp16"]) -> NativeEngine:
    context = o.prompt_tokens + o.completion_tokens
    return NativeEngine(decoder, lambda ids: "", slots=slots, max_context=context, weights=weights)


def _learner(decoder: Decoder, token_budget: int, share: bool) -> LocalLearner:
    config = LearnerConfig(token_budget=token_budget, prefix_sharing=share)
    return LocalLearner(decoder, config, OptimConfig(lr=1e-6), num_updates=1)


def _prompts(decoder: Decoder, shape: limits.Shape) -> list[Prompt]:
    rng = random.Random(0)
    return [
        Prompt(
            task="bench",
            id=str(n),
            visit=0,
            row={},
            messages=[],
            tokens=[rng.randrange(decoder.config.vocab_size) for _ in range(shape.prompt_tokens)],
            provenance=[Provenance.PROMPT] * shape.prompt_tokens,
        )
        for n in range(shape.prompts)
    ]


def _sampled(engine: NativeEngine, decoder: Decoder, shape: limits.Shape) -> list[Group]:
    """No stop ids: every completion has the asked length."""
    prompts, sampling = _prompts(decoder, shape), Sampling(max_tokens=shape.completion_tokens)
    requests = [
        Request(
            id=f"{p.id}/{i}",
            tokens=p.tokens,
            sampling=sampling,
            key=Key(seed=0, purpose="bench", task="bench", prompt_id=p.id, visit=0, sample=i),
        )
        for p in prompts
        for i in range(shape.samples)
    ]
    done = sample(engine, requests)
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
            member.reward = float(i % 2)
    config = learner.config
    learner.update(pack(algo.advantages(groups), config.token_budget, share=config.prefix_sharing), algo)


def _median(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):  # the first warms up
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _result(what: str, seconds: float, shape: limits.Shape, flops: float, rate: float) -> BenchResult:
    return BenchResult(
        what=what,
        seconds=seconds,
        tokens_per_second=shape.num_completion / seconds,
        fraction=flops / rate / seconds,
        limit=f"{rate / 1e9:.0f} GFLOP/s, the rate of a large matrix product here on {torch.get_num_threads()} threads",
        details={"limit s": flops / rate},
    )
