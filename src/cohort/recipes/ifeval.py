"""Recipes for the task ifeval: following instructions that a program can check."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.algos import GRPO
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
    SamplingConfig,
    SaveConfig,
)
from cohort.recipes.registry import recipe
from cohort.tasks.ifeval.task import IFEval

# Coefficients of the reward's parts.
COEFFICIENTS = {
    "prompt_strict": 0.4,
    "instruction_strict": 0.3,
    "prompt_loose": 0.2,
    "instruction_loose": 0.1,
    "format": 0.1,
    "thinks": 0.05,
    "effort": 2.0,
}


@recipe
def ifeval() -> RL:
    """Instructions with Qwen2.5-7B: adapters, 16 prompts x 16 samples, generated prompts (TorchRL)."""
    return RL(
        model="Qwen/Qwen2.5-7B",
        steps=390,
        task=IFEval(answer="tags"),
        reward=COEFFICIENTS,
        batch=BatchConfig(prompts=16, samples=16),
        sampling=SamplingConfig(max_tokens=2048),
        algo=GRPO(aggregate="token", entropy=1e-4),
        optim=OptimConfig(lr=1e-5, eps=1e-5, clip_norm=10.0),
        learner=LearnerConfig(lora=LoraConfig(rank=8, alpha=16.0)),
        eval=EvalConfig(every=100),
        save=SaveConfig(every=100),
    )


@recipe
def smollm2_ifeval() -> RL:
    """Instructions with SmolLM2-135M, small enough for a CPU: to see that all parts work, not to reach a good score."""
    return replace(
        ifeval(),
        model="smollm2-135m",
        steps=20,
        task=IFEval(),
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=128),
        optim=OptimConfig(lr=3e-6, warmup=2),
        learner=LearnerConfig(),
        eval=EvalConfig(problems=20),
    )
