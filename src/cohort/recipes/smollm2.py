"""Recipes for SmolLM2-135M-Instruct: `cohort pull smollm2-135m` fetches it."""

from __future__ import annotations

from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    OptimConfig,
    SamplingConfig,
)
from cohort.recipes.registry import recipe
from cohort.tasks.arithmetic import Arithmetic


@recipe
def smollm2_arithmetic() -> RL:
    """Arithmetic with SmolLM2-135M: a real instruct model, minutes per step on two CPU cores."""
    return RL(
        model="smollm2-135m",
        steps=100,
        task=Arithmetic(instructions=True),
        reward={"correct": 1.0, "format": 0.1},
        batch=BatchConfig(prompts=16, samples=8),
        sampling=SamplingConfig(max_tokens=96),
        optim=OptimConfig(lr=3e-6, warmup=5),
        learner=LearnerConfig(token_budget=4096),
        eval=EvalConfig(every=25, problems=100),
    )
