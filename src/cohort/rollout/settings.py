"""Translates the config of a run into the settings of its rollouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cohort.config.kinds import RL
from cohort.config.schema import Conversation, SamplingConfig, ThinkAgain
from cohort.rollout.episode import EpisodeSettings, LaterTurns
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.environment import AgainRules
from cohort.text import Tokenizer
from cohort.tools.formats import choose_format
from cohort.types import Sampling

REPLY_TOKENS = 256  # of the messages between two turns of a conversation, for plans of memory


def make_episode_settings(
    config: RL, sampling: Sampling, tokenizer: Tokenizer, context: int
) -> tuple[EpisodeSettings, EpisodeSettings]:
    """Returns two settings of episodes: those for training and those for evaluation.

    `sampling` has the sampling options of training, `context` is the most tokens of a prompt with its sample; 0 = no
    limit. Evaluation samples at `eval.temperature` without top-p, top-k and min-p, draws `eval.samples` per problem,
    and has second attempts only if `eval.turns` is "all".
    """
    turns = config.turns
    later_turns = None
    if isinstance(turns, ThinkAgain):
        # 0 means the same limit as in the first turn.
        longest = turns.max_tokens or config.sampling.max_tokens
        later_turns = LaterTurns(
            max_tokens=longest, encode_replies=tokenizer.encode_replies, stop_ids=tokenizer.stop_ids
        )
    elif isinstance(turns, Conversation):
        later_turns = make_conversation_turns(turns, sampling, tokenizer)
    training = EpisodeSettings(
        sampling=sampling,
        group_size=config.batch.samples,
        seed=config.seed,
        coefficients=config.reward,
        later_turns=later_turns,
        context=context,
    )
    # Evaluations draw from the whole policy, also where training truncates it.
    whole_policy = replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)
    evaluation = replace(
        training,
        sampling=whole_policy,
        group_size=config.eval.samples,
        purpose="eval",
        later_turns=later_turns if config.eval.turns == "all" or isinstance(turns, Conversation) else None,
    )
    return training, evaluation


def make_conversation_turns(turns: Conversation, sampling: Sampling, tokenizer: Tokenizer) -> LaterTurns:
    """Returns the settings of the turns after the first in conversations with tools or an environment."""
    return LaterTurns(
        max_tokens=sampling.max_tokens,
        max_total=turns.max_total,
        encode_replies=partial(tokenizer.encode_replies, with_tools=True),
        stop_ids=tokenizer.stop_ids,
        has_calls=True,
    )


def describe_conversation(rules: ConversationRules, max_total: int) -> str:
    """Returns the limits and the format of conversations as evaluations record them: what decides a result."""
    limits = f"{rules.max_turns} turns, {rules.max_calls} calls of {rules.seconds:g} s, {rules.characters} characters"
    return f"{limits}, {max_total or 'all'} tokens, {rules.format}"


def make_conversation_rules(turns: Conversation, tokenizer: Tokenizer) -> ConversationRules:
    """Returns the rules by which scoring workers run tools and environments."""
    format = turns.format
    if format == "auto":
        format = choose_format(tokenizer.get_template_source(with_tools=True))
    return ConversationRules(
        max_turns=turns.max_turns,
        max_calls=turns.max_calls,
        format=format,
        seconds=turns.seconds,
        characters=turns.max_characters,
    )


def make_again_rules(config: RL) -> AgainRules | None:
    """Returns the rules by which a scoring worker asks the policy for another attempt at a problem.

    None = the first answer ends an episode.
    """
    t = config.turns
    if not isinstance(t, ThinkAgain):
        return None
    return AgainRules(attempts=t.attempts, below=t.below, cost=t.cost, words=t.words, coefficients=dict(config.reward))


def max_environment_tokens(config: RL, tokenizer: Tokenizer) -> int:
    """Returns how many tokens the environment may add to one sample, over all turns; 0 = one turn.

    For conversations it is a guess, because results of tools may have any length: one that has no room left ends.
    """
    t = config.turns
    if isinstance(t, Conversation):
        return max(0, t.max_total - config.max_sampled_tokens) if t.max_total else t.max_turns * REPLY_TOKENS
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
