"""Recipes that learn from answers of your own: supervised fine-tuning and preference optimisation, with any model."""

from __future__ import annotations

from cohort.config.imitation import DPO, SFT, Conversations, ExamplesConfig, PairRows, PairsConfig
from cohort.config.schema import OptimConfig, SaveConfig
from cohort.recipes.registry import recipe


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
