"""The recipe arithmetic of the tiny-grpo family of projects. `quickstart` is its variant for the bundled model."""

from __future__ import annotations

from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
    SamplingConfig,
)
from cohort.recipes.registry import recipe
from cohort.tasks.arithmetic import Arithmetic


@recipe
def arithmetic() -> RL:
    """Arithmetic with Llama-3.2-1B-Instruct: 32 prompts x 12 samples, QLoRA rank 16, KL 0.01 (tiny-grpo, re-grpo)."""
    return RL(
        model="unsloth/Llama-3.2-1B-Instruct",
        steps=300,
        task=Arithmetic(
            max_digits=3,
            parentheses=True,
            negatives=True,
            spaces=True,
            keep=(10, 10**8),
            instructions=True,
        ),
        reward={"correct": 1.0, "format": 0.1},
        batch=BatchConfig(prompts=32, samples=12),
        sampling=SamplingConfig(max_tokens=1024),
        algo=GRPO(kl=KLConfig(weight=0.01)),
        optim=OptimConfig(lr=5e-6),
        learner=LearnerConfig(lora=LoraConfig(rank=16, alpha=32.0, base="nf4")),
        eval=EvalConfig(every=50, problems=500),
    )
