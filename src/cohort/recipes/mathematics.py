"""Recipes for the task math12k: competition mathematics."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.algos import DrGRPO
from cohort.config.kinds import RL
from cohort.config.schema import BatchConfig, EvalConfig, OptimConfig, SamplingConfig, SaveConfig
from cohort.recipes.registry import recipe
from cohort.tasks.mathematics.task import Math12k


@recipe
def dr_grpo_math() -> RL:
    """MATH with Qwen2.5-Math-1.5B: 128 prompts x 8 samples, tested on MATH-500 (Dr. GRPO, arXiv:2503.20783)."""
    return RL(
        model="Qwen/Qwen2.5-Math-1.5B",
        steps=300,
        task=Math12k(style="qwen_math"),
        reward={"correct": 1.0, "format": 0.0},
        batch=BatchConfig(prompts=128, samples=8),
        sampling=SamplingConfig(max_tokens=3000),
        algo=DrGRPO(),
        optim=OptimConfig(lr=1e-6),
        eval=EvalConfig(every=50, temperature=0.0),
        save=SaveConfig(every=50),
    )


@recipe
def smollm2_math() -> RL:
    """MATH with SmolLM2-135M, small enough for a CPU: to see that every part works, not to reach a good score."""
    return replace(
        dr_grpo_math(),
        model="smollm2-135m",
        steps=20,
        task=Math12k(),
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=128),
        optim=OptimConfig(lr=3e-6, warmup=2),
        eval=EvalConfig(problems=20),
    )
