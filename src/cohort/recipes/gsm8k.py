"""Recipes for GSM8K: those of the projects miniseq, gsm8k-grpo and TorchRL, and small ones of Cohort's own."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.algo_sections import KLConfig
from cohort.config.algos import GRPO, DrGRPO
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    NativeEngine,
    OptimConfig,
    SamplingConfig,
    SaveConfig,
    ThinkAgain,
)
from cohort.recipes.registry import recipe
from cohort.tasks.gsm8k import GSM8K


@recipe
def gsm8k() -> RL:
    """GSM8K with Qwen2.5-0.5B-Instruct: 128 prompts x 8 samples, KL 0.001 (miniseq, but with the chat template)."""
    return RL(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        steps=300,
        task=GSM8K(style="hashes", reward="verl"),
        batch=BatchConfig(prompts=128, samples=8),
        sampling=SamplingConfig(max_tokens=3000),
        algo=GRPO(scale="none", aggregate="token", kl=KLConfig(weight=0.001)),
        optim=OptimConfig(lr=1e-6, schedule="cosine", warmup=6, weight_decay=0.01),
        eval=EvalConfig(every=25),
        save=SaveConfig(every=50),
    )


@recipe
def gsm8k_1_5b() -> RL:
    """The recipe gsm8k with Qwen2.5-1.5B-Instruct."""
    return replace(gsm8k(), model="Qwen/Qwen2.5-1.5B-Instruct")


@recipe
def gsm8k_3b() -> RL:
    """The recipe gsm8k with Qwen2.5-3B-Instruct."""
    return replace(gsm8k(), model="Qwen/Qwen2.5-3B-Instruct")


@recipe
def gsm8k_7b_lora() -> RL:
    """The recipe gsm8k with Qwen2.5-7B-Instruct: adapters of rank 64 on q, v and o, 64 prompts x 8 samples."""
    lora = LoraConfig(rank=64, alpha=128.0, targets=("q_proj", "v_proj", "o_proj"))
    batch = BatchConfig(prompts=64, samples=8)
    return replace(gsm8k(), model="Qwen/Qwen2.5-7B-Instruct", batch=batch, learner=LearnerConfig(lora=lora))


@recipe
def gsm8k_14b_lora() -> RL:
    """The recipe gsm8k_7b_lora with Qwen2.5-14B-Instruct."""
    return replace(gsm8k_7b_lora(), model="Qwen/Qwen2.5-14B-Instruct")


@recipe
def gsm8k_tutor() -> RL:
    """GSM8K with Qwen2.5-3B-Instruct as a concise tutor: Dr. GRPO, 8 prompts x 4 samples, one epoch (gsm8k-grpo)."""
    return RL(
        model="Qwen/Qwen2.5-3B-Instruct",
        # One epoch: 7,473 rows, 8 per step.
        steps=934,
        task=GSM8K(style="tutor", reward="tutor", test_size=500),
        batch=BatchConfig(prompts=8, samples=4),
        sampling=SamplingConfig(max_tokens=512, temperature=0.7),
        algo=DrGRPO(),
        optim=OptimConfig(lr=5e-6, warmup=10),
        eval=EvalConfig(every=200, temperature=0.0),
        save=SaveConfig(every=200),
    )


@recipe
def gsm8k_tutor_llama2() -> RL:
    """The recipe gsm8k_tutor with Llama-2-7b-chat."""
    return replace(gsm8k_tutor(), model="meta-llama/Llama-2-7b-chat-hf")


@recipe
def gsm8k_again() -> RL:
    """GSM8K with Qwen2.5-3B and a second attempt after a low reward: adapters, 32 prompts x 16 samples (TorchRL)."""
    return RL(
        model="Qwen/Qwen2.5-3B",
        steps=195,
        task=GSM8K(style="tags", reward="verl"),
        batch=BatchConfig(prompts=32, samples=16),
        sampling=SamplingConfig(max_tokens=1024),
        turns=ThinkAgain(),
        algo=GRPO(aggregate="token", entropy=1e-4),
        optim=OptimConfig(lr=1e-5, eps=1e-5),
        learner=LearnerConfig(lora=LoraConfig(rank=8, alpha=16.0)),
        eval=EvalConfig(every=50),
        save=SaveConfig(every=50),
    )


@recipe
def smollm2_gsm8k() -> RL:
    """GSM8K with SmolLM2-135M, small enough for a CPU: to see that every part works, not to reach a good score."""
    return RL(
        model="smollm2-135m",
        steps=20,
        task=GSM8K(style="hashes", reward="verl"),
        batch=BatchConfig(prompts=4, samples=4),
        sampling=SamplingConfig(max_tokens=128),
        optim=OptimConfig(lr=3e-6, warmup=2),
        eval=EvalConfig(problems=20),
    )


@recipe
def smollm2_gsm8k_tutor() -> RL:
    """The recipe smollm2_gsm8k with the prompt, the reward and the algorithm (Dr. GRPO) of gsm8k_tutor."""
    return replace(smollm2_gsm8k(), task=GSM8K(style="tutor", reward="tutor"), algo=DrGRPO())


@recipe
def smollm2_gsm8k_again() -> RL:
    """The recipe smollm2_gsm8k with a second attempt after a low reward."""
    return replace(smollm2_gsm8k(), turns=ThinkAgain())


@recipe
def coder_gsm8k() -> RL:
    """GSM8K with Qwen2.5-Coder-1.5B-Instruct: all weights are trained, in twelve minutes on one H200."""
    return RL(
        model="qwen2.5-coder-1.5b",
        steps=126,
        task=GSM8K(),
        batch=BatchConfig(prompts=128, samples=8),
        sampling=SamplingConfig(max_tokens=512),
        engine=NativeEngine(slots=1024),
        algo=DrGRPO(dead="drop"),
        optim=OptimConfig(lr=4e-6, schedule="linear", lr_floor=0.05, warmup=10, beta2=0.99),
        eval=EvalConfig(every=25, problems=256, temperature=0.0),
        # One checkpoint takes 25 GB.
        save=SaveConfig(every=126, keep_last=1, keep_best=False, rollouts=10),
    )
