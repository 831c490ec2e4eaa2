"""What a run's config says of its rollouts."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.kinds import RL
from cohort.config.schema import SamplingConfig, ThinkAgain
from cohort.rollout.episode import Drawing, Further
from cohort.tasks.environment import AgainRules
from cohort.text import Tokenizer
from cohort.types import Sampling


def drawings(config: RL, sampling: Sampling, tokenizer: Tokenizer) -> tuple[Drawing, Drawing]:
    """How samples are drawn in training and in evaluation."""
    turns, further = config.turns, None
    if isinstance(turns, ThinkAgain):
        longest = turns.max_tokens or config.sampling.max_tokens
        further = Further(max_tokens=longest, follow_up=tokenizer.follow_up)
    training = Drawing(
        sampling=sampling,
        group_size=config.batch.samples,
        seed=config.seed,
        coefficients=config.reward,
        further=further,
    )
    whole = replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)
    evaluation = replace(
        training,
        sampling=whole,
        group_size=config.eval.samples,
        purpose="eval",
        further=further if config.eval.turns == "all" else None,
    )
    return training, evaluation


def again_rules(config: RL) -> AgainRules | None:
    """How graders' workers go on with an episode; None = an answer ends it."""
    t = config.turns
    if not isinstance(t, ThinkAgain):
        return None
    return AgainRules(attempts=t.attempts, below=t.below, cost=t.cost, words=t.words, coefficients=dict(config.reward))


def room_between(config: RL, tokenizer: Tokenizer) -> int:
    """The most tokens that an environment's turns take."""
    t = config.turns
    if not isinstance(t, ThinkAgain):
        return 0
    return t.attempts * max(len(tokenizer.follow_up(words)) for words in t.words)


def sampling_of(asked: SamplingConfig, tokenizer: Tokenizer) -> Sampling:
    return Sampling(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        stop_ids=tokenizer.stop_ids,
        stop_strings=asked.stop,
    )
