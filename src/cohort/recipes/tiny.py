"""Recipes for the bundled `tiny` model: they take minutes on the processor of a laptop."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.algos import GRPO, OnlineDPO
from cohort.config.imitation import DPO, SFT, AnswerSampling, ExamplesConfig, PairsConfig, SumPairs, TaskAnswers, Traces
from cohort.config.kinds import RL
from cohort.config.schema import (
    BatchConfig,
    DrGRPO,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
    SamplingConfig,
    SaveConfig,
    ThinkAgain,
)
from cohort.recipes.registry import recipe
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.countdown import Countdown
from cohort.tasks.mix import Mix
from cohort.tasks.reasoning_gym.task import make_task


@recipe
def quickstart() -> RL:
    """Arithmetic with the bundled model: reward rises within two minutes on two CPU cores."""
    return RL(
        model="tiny",
        steps=30,
        task=Arithmetic(),
        reward={"correct": 1.0, "format": 0.0},
        batch=BatchConfig(prompts=32, samples=8),
        sampling=SamplingConfig(max_tokens=64),
        optim=OptimConfig(lr=3e-4, warmup=3),
        learner=LearnerConfig(token_budget=8192),
        eval=EvalConfig(problems=500),
        save=SaveConfig(every=20),
    )


@recipe
def tiny_dr_grpo() -> RL:
    """The quickstart with Dr. GRPO: advantages without division by the deviation, a constant length divisor."""
    return replace(quickstart(), algo=DrGRPO())


@recipe
def tiny_lora() -> RL:
    """The quickstart with adapters of rank 8 on every matrix instead of all weights, and a higher learning rate."""
    learner = LearnerConfig(token_budget=8192, lora=LoraConfig(rank=8, alpha=16.0))
    return replace(quickstart(), learner=learner, optim=OptimConfig(lr=2e-3, warmup=3))


@recipe
def tiny_countdown() -> RL:
    """Countdown with the bundled model: reach a target from three or four numbers, in 150 steps."""
    return replace(quickstart(), steps=150, task=Countdown(), sampling=SamplingConfig(max_tokens=192))


@recipe
def tiny_countdown_minibatches() -> RL:
    """The recipe tiny_countdown with four optimizer steps per step and an entropy bonus, in 50 steps."""
    learner = LearnerConfig(token_budget=8192, minibatches=4)
    return replace(tiny_countdown(), steps=50, algo=GRPO(entropy=0.001), learner=learner)


@recipe
def tiny_again() -> RL:
    """The recipe tiny_lora with a second attempt after a wrong answer: its score counts."""
    return replace(tiny_lora(), turns=ThinkAgain(), algo=GRPO(aggregate="token", entropy=1e-4))


@recipe
def tiny_mix() -> RL:
    """Sums and Countdown with three numbers in one run, with the bundled model: two of three prompts are Countdown."""
    return replace(
        quickstart(),
        steps=40,
        task=Mix(tasks=("arithmetic", 'countdown{"max_numbers": 3}'), shares=(1.0, 2.0)),
        sampling=SamplingConfig(max_tokens=96),
    )


@recipe
def tiny_reasoning_gym() -> RL:
    """Sums of the package reasoning-gym with the bundled model; needs pip install 'cohort[reasoning-gym]'."""
    # The bundled model was taught sums without parentheses, of at most three terms and two digits, and no instructions.
    task = make_task(
        dataset="basic_arithmetic",
        max_terms=3,
        max_digits=2,
        operators=("+", "-"),
        allow_parentheses=False,
        instructions="none",
        train_size=4_000,
        test_size=500,
    )
    return replace(quickstart(), steps=60, task=task, reward={})


@recipe
def tiny_sft() -> SFT:
    """Supervised fine-tuning of the bundled model: imitate answers that work step by step."""
    return SFT(
        model="tiny",
        steps=40,
        data=Traces(think=0.85, broken=0.0, right=1.0),
        batch=ExamplesConfig(examples=64),
        optim=OptimConfig(lr=3e-4, warmup=4, schedule="cosine", lr_floor=0.1),
        learner=LearnerConfig(token_budget=8192),
        save=SaveConfig(every=20, rollouts=10),
    )


@recipe
def tiny_countdown_sft() -> SFT:
    """Supervised fine-tuning of the bundled model on solutions of Countdown with three numbers: about a minute."""
    return SFT(
        model="tiny",
        steps=80,
        task=Countdown(max_numbers=3),
        data=TaskAnswers(),
        batch=ExamplesConfig(examples=64),
        optim=OptimConfig(lr=3e-4, warmup=4, schedule="cosine", lr_floor=0.1),
        learner=LearnerConfig(token_budget=8192),
        sampling=AnswerSampling(max_tokens=96),
        eval=EvalConfig(every=40, problems=500),
        save=SaveConfig(every=40, rollouts=10),
    )


@recipe
def tiny_dpo() -> DPO:
    """Preference optimisation of the bundled model: right answers are better than wrong ones."""
    return DPO(
        model="tiny",
        steps=60,
        data=SumPairs(),
        batch=PairsConfig(pairs=32),
        optim=OptimConfig(lr=1e-4, warmup=4, schedule="cosine", lr_floor=0.1),
        learner=LearnerConfig(token_budget=8192),
        save=SaveConfig(every=20, rollouts=10),
    )


@recipe
def tiny_online_dpo() -> RL:
    """The quickstart with DPO on pairs from the reward: the best and the worst sample of each group."""
    return replace(quickstart(), steps=20, algo=OnlineDPO())
