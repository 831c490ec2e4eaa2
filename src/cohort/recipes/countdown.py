"""Recipes for Countdown: those of the projects TinyZero, miniseq and RL-GRPO, and one for a smaller model."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.algos import GRPO, DrGRPO
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    NativeEngine,
    OptimConfig,
    SamplingConfig,
    SaveConfig,
)
from cohort.recipes.registry import recipe
from cohort.tasks.countdown import Countdown


@recipe
def countdown() -> RL:
    """Countdown with Qwen2.5-3B: 64 prompts x 8 samples, 1024 tokens, an open think tag (TinyZero, miniseq)."""
    return RL(
        model="Qwen/Qwen2.5-3B",
        steps=125,
        task=Countdown(instructions=True, think=True),
        # A right answer in tags earns 1 in all, a wrong answer in tags 0.1.
        reward={"correct": 0.9, "format": 0.1},
        batch=BatchConfig(prompts=64, samples=8),
        sampling=SamplingConfig(max_tokens=1024),
        algo=GRPO(scale="none", aggregate="token"),
        optim=OptimConfig(lr=1e-6, schedule="cosine", warmup=6, weight_decay=0.01),
        eval=EvalConfig(every=25, problems=500),
        save=SaveConfig(every=25),
    )


@recipe
def countdown_minibatches() -> RL:
    """Countdown with Qwen2.5-3B-Instruct: 8 prompts x 8 samples in four minibatches, an entropy bonus (RL-GRPO)."""
    return replace(
        # The project makes one pass over its data; the number of steps is that of the recipe countdown.
        countdown(),
        model="Qwen/Qwen2.5-3B-Instruct",
        # A right answer earns 1.01, a wrong one in tags 0.01.
        reward={"correct": 1.0, "format": 0.01},
        batch=BatchConfig(prompts=8, samples=8),
        sampling=SamplingConfig(max_tokens=896),
        algo=GRPO(entropy=0.001),
        optim=OptimConfig(lr=1e-6),
        learner=LearnerConfig(minibatches=4),
    )


@recipe
def coder_countdown() -> RL:
    """Countdown with Qwen2.5-Coder-1.5B-Instruct: all weights are trained, in seven minutes on one H200."""
    return replace(
        countdown(),
        model="qwen2.5-coder-1.5b",
        steps=72,
        task=Countdown(instructions=True, think=True, data="$COHORT_DATA/countdown_{split}.jsonl"),
        # With a reward for the format, this model learns to guess at once: its shortest answers are the best formed.
        reward={"correct": 1.0, "format": 0.0},
        # At first one answer in a hundred is right, so that groups need many samples.
        batch=BatchConfig(prompts=64, samples=16),
        sampling=SamplingConfig(max_tokens=512),
        engine=NativeEngine(slots=1024),
        learner=LearnerConfig(minibatches=2),
        algo=DrGRPO(dead="drop", clip_high=0.28),
        optim=OptimConfig(lr=2e-6, warmup=10, beta2=0.99),
        eval=EvalConfig(every=25, problems=256),
        # One checkpoint takes 25 GB.
        save=SaveConfig(every=72, keep_last=1, keep_best=False, rollouts=10),
    )
