"""Recipes for programs that are run against tests."""

from __future__ import annotations

from cohort.config.kinds import RL
from cohort.config.schema import BatchConfig, EvalConfig, LearnerConfig, OptimConfig, SamplingConfig
from cohort.recipes.registry import recipe
from cohort.tasks.code.task import Code


@recipe
def smollm2_code() -> RL:
    """Small programs in Python with SmolLM2-135M, run in a sandbox: the problems that come with Cohort."""
    return RL(
        model="smollm2-135m",
        steps=60,
        task=Code(),
        # Only a program that passes all tests is paid.
        reward={"correct": 1.0, "passed": 0.0},
        batch=BatchConfig(prompts=8, samples=8),
        sampling=SamplingConfig(max_tokens=160),
        optim=OptimConfig(lr=3e-6, warmup=5),
        learner=LearnerConfig(token_budget=4096),
        eval=EvalConfig(every=20),
    )
