"""Translates the config of a run into the settings of its rollouts."""

from __future__ import annotations

from dataclasses import replace

from cohort.config.kinds import RL
from cohort.config.schema import SamplingConfig, ThinkAgain
from cohort.rollout.episode import EpisodeSettings, LaterTurns
from cohort.tasks.environment import AgainRules
from cohort.text import Tokenizer
from cohort.types import Sampling


def make_episode_settings(
    config: RL, sampling: Sampling, tokenizer: Tokenizer
) -> tuple[EpisodeSettings, EpisodeSettings]:
    """Returns two settings of episodes: those for training and those for evaluation.

    `sampling` has the sampling options of training. Evaluation samples at `eval.temperature` without top-p, top-k and
    min-p, draws `eval.samples` per problem, and has later turns only if `eval.turns` is "all".
    """
    turns = config.turns
    later_turns = None
    if isinstance(turns, ThinkAgain):
        # 0 means the same limit as in the first turn.
        longest = turns.max_tokens or config.sampling.max_tokens
        later_turns = LaterTurns(max_tokens=longest, follow_up=tokenizer.encode_follow_up)
    training = EpisodeSettings(
        sampling=sampling,
        group_size=config.batch.samples,
        seed=config.seed,
        coefficients=config.reward,
        later_turns=later_turns,
    )
    # Evaluations draw from the whole policy, also where training truncates it.
    whole_policy = replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)
    evaluation = replace(
        training,
        sampling=whole_policy,
        group_size=config.eval.samples,
        purpose="eval",
        later_turns=later_turns if config.eval.turns == "all" else None,
    )
    return training, evaluation


def make_again_rules(config: RL) -> AgainRules | None:
    """Returns the rules by which a scoring worker asks the policy for another attempt at a problem.

    None = the first answer ends an episode.
    """
    t = config.turns
    if not isinstance(t, ThinkAgain):
        return None
    return AgainRules(attempts=t.attempts, below=t.below, cost=t.cost, words=t.words, coefficients=dict(config.reward))


def max_environment_tokens(config: RL, tokenizer: Tokenizer) -> int:
    """Returns an upper bound of the tokens that the environment adds to one sample, over all turns; 0 = one turn."""
    t = config.turns
    if not isinstance(t, ThinkAgain):
        return 0
    return t.attempts * max(len(tokenizer.encode_follow_up(words)) for words in t.words)


def make_sampling(config: SamplingConfig, tokenizer: Tokenizer) -> Sampling:
    """Returns the sampling options of a config, with the stop tokens of the model's tokenizer."""
    return Sampling(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_ids=tokenizer.stop_ids,
        stop_strings=config.stop,
    )
