"""Recipes that learn from given answers: SFT and DPO, on rows of your own, of tasks and of public data sets."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.imitation import (
    DPO,
    SFT,
    AnswerSampling,
    Conversations,
    ExamplesConfig,
    PairRows,
    PairsConfig,
    TaskAnswers,
)
from cohort.config.preferences import Sigmoid
from cohort.config.schema import EvalConfig, LearnerConfig, LoraConfig, OptimConfig, SaveConfig
from cohort.recipes.registry import recipe
from cohort.tasks.countdown import Countdown
from cohort.tasks.gsm8k import GSM8K

ULTRAFEEDBACK = "HuggingFaceH4/ultrafeedback_binarized"


@recipe
def sft() -> SFT:
    """Supervised fine-tuning on conversations of your own: --model M --data.path rows.jsonl."""
    return SFT(
        model="smollm2-135m",
        data=Conversations(),
        batch=ExamplesConfig(examples=32),
        passes=1.0,
        optim=OptimConfig(lr=2e-5, warmup=5, schedule="cosine", lr_floor=0.1),
        save=SaveConfig(every=100, rollouts=10),
    )


@recipe
def gsm8k_sft() -> SFT:
    """GSM8K with Qwen2.5-0.5B-Instruct: imitates the worked answers of the data set, in two passes (miniseq)."""
    return SFT(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        task=GSM8K(style="hashes"),
        data=TaskAnswers(max_tokens=2048),
        batch=ExamplesConfig(examples=64),
        passes=2.0,
        optim=OptimConfig(lr=1e-5, warmup=5, schedule="cosine", lr_floor=0.1, clip_norm=3.0),
        sampling=AnswerSampling(max_tokens=512),
        eval=EvalConfig(every=50, temperature=0.0),
        save=SaveConfig(every=50, rollouts=10),
    )


@recipe
def smollm2_gsm8k_sft() -> SFT:
    """GSM8K with SmolLM2-135M, small enough for a CPU: to see that every part works, not to reach a good score."""
    return replace(
        gsm8k_sft(),
        model="smollm2-135m",
        steps=20,
        passes=0.0,
        batch=ExamplesConfig(examples=8),
        optim=OptimConfig(lr=1e-4, warmup=2, clip_norm=3.0),
        sampling=AnswerSampling(max_tokens=128),
        eval=EvalConfig(problems=20, temperature=0.0),
        save=SaveConfig(every=20, rollouts=10),
    )


@recipe
def countdown_sft() -> SFT:
    """Countdown with SmolLM2-135M, or another model: imitates solutions of generated problems, in two passes."""
    return SFT(
        model="smollm2-135m",
        task=Countdown(instructions=True),
        data=TaskAnswers(),
        batch=ExamplesConfig(examples=64),
        passes=2.0,
        optim=OptimConfig(lr=3e-4, warmup=10, schedule="cosine", lr_floor=0.1),
        learner=LearnerConfig(token_budget=8192),
        sampling=AnswerSampling(max_tokens=128),
        eval=EvalConfig(every=100, problems=500),
        save=SaveConfig(every=100, rollouts=10),
    )


@recipe
def dpo() -> DPO:
    """Preference optimisation on pairs of answers of your own: --model M --data.path pairs.jsonl."""
    return DPO(
        model="smollm2-135m",
        data=PairRows(),
        batch=PairsConfig(pairs=32),
        passes=1.0,
        optim=OptimConfig(lr=5e-6, warmup=5, schedule="cosine", lr_floor=0.1),
        save=SaveConfig(every=100, rollouts=10),
    )


@recipe
def ultrafeedback_dpo() -> DPO:
    """UltraFeedback with Qwen2.5-7B-Instruct: beta 0.1, imitation 0.1, 2049 tokens, adapters of rank 64 (miniseq)."""
    return DPO(
        model="Qwen/Qwen2.5-7B-Instruct",
        data=PairRows(
            path=ULTRAFEEDBACK,
            train_split="train_prefs",
            test_split="test_prefs",
            max_tokens=2049,
            too_long="skip",
            empty="skip",
            equal="skip",
        ),
        batch=PairsConfig(pairs=32),
        loss=Sigmoid(beta=0.1, nll=0.1),
        passes=1.0,
        optim=OptimConfig(lr=1e-5, warmup=5, schedule="cosine"),
        learner=LearnerConfig(lora=LoraConfig(rank=64, alpha=128.0, targets=("q_proj", "v_proj", "o_proj"))),
        eval=EvalConfig(every=200, problems=500),
        save=SaveConfig(every=200, rollouts=10),
    )


@recipe
def smollm2_dpo() -> DPO:
    """UltraFeedback with SmolLM2-135M, small enough for a CPU: to see that every part works, on short pairs."""
    data = PairRows(
        path=ULTRAFEEDBACK,
        train_split="train_prefs",
        test_split="test_prefs",
        max_tokens=512,
        too_long="skip",
        empty="skip",
        equal="skip",
    )
    return replace(
        ultrafeedback_dpo(),
        model="smollm2-135m",
        steps=20,
        passes=0.0,
        data=data,
        batch=PairsConfig(pairs=4),
        optim=OptimConfig(lr=5e-6, warmup=2),
        learner=LearnerConfig(),
        eval=EvalConfig(problems=20),
        save=SaveConfig(every=20, rollouts=10),
    )
