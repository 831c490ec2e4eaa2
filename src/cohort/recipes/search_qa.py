"""Recipes for questions with a search as a tool: that of the project re-grpo, and a small one."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    Conversation,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
    SamplingConfig,
)
from cohort.recipes.registry import recipe
from cohort.tasks.search.rewards import COEFFICIENTS
from cohort.tasks.search.task import SearchQA

# Three passages of 1,500 characters with their titles.
_RESULT = 5_000


@recipe
def search_qa() -> RL:
    """SQuAD with a search, with Qwen2.5-3B-Instruct: QLoRA, two turns, 4 prompts x 4 samples (re-grpo)."""
    return RL(
        model="Qwen/Qwen2.5-3B-Instruct",
        # 1,024 prompts, 4 per step.
        steps=256,
        task=SearchQA(context="tool", reward="seed"),
        reward=dict(COEFFICIENTS["seed"]),
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=128, temperature=0.7),
        turns=Conversation(max_turns=2, max_characters=_RESULT),
        algo=GRPO(kl=KLConfig(weight=0.01)),
        optim=OptimConfig(lr=5e-6, clip_norm=0.2),
        learner=LearnerConfig(lora=LoraConfig(rank=16, alpha=32.0, base="nf4")),
        eval=EvalConfig(every=64, problems=200),
    )


@recipe
def smollm2_search_qa() -> RL:
    """The questions that come with Cohort, with SmolLM2-135M: a right answer is paid; to see that every part works."""
    return replace(
        search_qa(),
        model="smollm2-135m",
        steps=20,
        task=SearchQA(corpus="small", context="tool", max_chars=400),
        reward=dict(COEFFICIENTS["correct"]),
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=64),
        turns=Conversation(max_turns=3, max_characters=1_500),
        optim=OptimConfig(lr=3e-6, warmup=2),
        learner=LearnerConfig(),
        algo=GRPO(),
        eval=EvalConfig(problems=20),
    )
