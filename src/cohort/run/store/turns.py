"""The turns of a sample, as run.db and readers of rollouts show them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from cohort.types import Finish, Provenance, Sample

MAX_CHARACTERS = 2000  # of a turn and of the reply to it; the rollout file has all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTurn:
    """One turn of the policy, and the environment's reply to it."""

    num_tokens: int  # that the policy drew
    num_reply_tokens: int
    finish: Finish  # of the last turn that of the sample; earlier turns ended with a stop token
    calls: dict[str, int] | None  # of tools, by outcome; None = not recorded per turn
    reward: float | None  # of this turn alone; None = the sample has one reward for all turns
    text: str  # at most MAX_CHARACTERS characters, as `reply`
    reply: str  # contents of the messages before the next turn, with a blank line between; "" after the last turn


def list_turns(sample: Sample) -> list[SampleTurn]:
    """Returns the turns of a sample that has several; [] for a sample of one turn."""
    texts, replies = _split_messages(sample)
    if len(texts) < 2:
        return []
    lengths = [(drawn, len(list(run))) for drawn, run in groupby(p == Provenance.SAMPLED for p in sample.provenance)]
    padding = [0] * len(texts)
    drawn = [num for is_drawn, num in lengths if is_drawn] + padding
    added = [num for is_drawn, num in lengths if not is_drawn] + padding
    # Rollouts of earlier versions have no calls per turn, and most samples no rewards per turn.
    calls = [*sample.turn_calls, *[None] * len(texts)]
    rewards = [*sample.turn_rewards, *[None] * len(texts)]
    last = len(texts) - 1
    return [
        SampleTurn(
            num_tokens=drawn[number],
            num_reply_tokens=added[number],
            finish=sample.finish if number == last else Finish.STOP,
            calls=calls[number],
            reward=rewards[number],
            text=texts[number][:MAX_CHARACTERS],
            reply=replies[number][:MAX_CHARACTERS],
        )
        for number in range(len(texts))
    ]


def _split_messages(sample: Sample) -> tuple[list[str], list[str]]:
    """Returns the texts of the policy's turns, and for each the reply to it."""
    texts: list[str] = []
    replies: list[list[str]] = []
    for message in sample.messages:
        content = str(message.get("content") or "")
        if message.get("role") == "assistant":
            texts.append(content)
            replies.append([])
        elif replies:
            replies[-1].append(content)
    return texts, ["\n\n".join(reply) for reply in replies]
