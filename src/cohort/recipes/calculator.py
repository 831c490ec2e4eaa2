"""Recipes for sums with a calculator as a tool: that of the project re-grpo, and two for models that need no hub."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO, DrGRPO
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    Conversation,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    NativeEngine,
    OptimConfig,
    SamplingConfig,
    SaveConfig,
)
from cohort.recipes.registry import recipe
from cohort.tasks.calculator import Calculator

_CORRECT_ALONE = {"correct": 1.0, "format": 0.0, "called": 0.0, "ran": 0.0, "steps": 0.0}


@recipe
def calculator() -> RL:
    """A calculator as a tool, with Qwen2.5-3B-Instruct: QLoRA, two turns, 4 prompts x 4 samples (re-grpo)."""
    return RL(
        model="Qwen/Qwen2.5-3B-Instruct",
        # 1,024 prompts, 4 per step.
        steps=256,
        task=Calculator(
            max_terms=6,
            max_digits=6,
            parentheses=True,
            negatives=True,
            spaces=True,
            keep=(10, 10**8),
            instructions=True,
            reward="seed",
        ),
        reward=_CORRECT_ALONE | {"correct": 0.0, "steps": 1.0},
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=128, temperature=0.7),
        turns=Conversation(max_turns=2),
        algo=GRPO(kl=KLConfig(weight=0.01)),
        optim=OptimConfig(lr=5e-6),
        learner=LearnerConfig(lora=LoraConfig(rank=16, alpha=32.0, base="nf4")),
        eval=EvalConfig(every=64, problems=500),
    )


@recipe
def coder_calculator() -> RL:
    """A calculator as a tool, with Qwen2.5-Coder-1.5B-Instruct: all weights are trained, 64 prompts x 8 samples."""
    base = calculator()
    return replace(
        base,
        model="qwen2.5-coder-1.5b",
        steps=80,
        task=replace(base.task, min_terms=3, max_digits=4, reward="plain"),
        reward=_CORRECT_ALONE,
        batch=BatchConfig(prompts=64, samples=8),
        sampling=SamplingConfig(max_tokens=256),
        # The model writes calls of its template's format into code blocks, where they are not looked for.
        turns=Conversation(max_turns=4, format="tags"),
        engine=NativeEngine(slots=512),
        algo=DrGRPO(dead="drop"),
        optim=OptimConfig(lr=3e-6, warmup=4, beta2=0.99),
        learner=LearnerConfig(),
        eval=EvalConfig(problems=256),
        # One checkpoint takes 25 GB.
        save=SaveConfig(every=80, keep_last=1, keep_best=False, rollouts=10),
    )


@recipe
def tiny_calculator() -> RL:
    """A calculator as a tool, with the bundled model: sums of more terms and digits than it was taught."""
    return RL(
        model="tiny",
        steps=120,
        task=Calculator(max_terms=4),
        reward=_CORRECT_ALONE,
        batch=BatchConfig(prompts=32, samples=8),
        sampling=SamplingConfig(max_tokens=48),
        turns=Conversation(max_turns=3),
        optim=OptimConfig(lr=3e-4, warmup=3),
        learner=LearnerConfig(token_budget=8192),
        eval=EvalConfig(problems=500),
        save=SaveConfig(every=20),
    )
