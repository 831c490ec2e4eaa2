"""One sample while it is made: an episode of turns between the policy and an environment, as one token stream.

The token stream is never rendered again from text: it holds the tokens that the policy sampled and the environment's
tokens between them, each as they first entered it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from cohort.engines.base import Request
from cohort.tasks.environment import Past, compute_total_reward
from cohort.types import Answer, Finish, Key, Message, Outcome, Prompt, Provenance, Sample, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterTurns:
    """Settings of the policy's turns after its first."""

    max_tokens: int  # per turn
    max_total: int = 0  # of a sample, replies included; 0 = no limit
    encode_replies: Callable[[Sequence[Message]], list[int]]
    """Encodes what lies between two turns of the policy: from its end token, through the messages in the argument, to
    the beginning of the policy's next turn."""
    stop_ids: tuple[int, ...] = ()  # the tokens with which the policy may end its turn
    has_calls: bool = False  # whether the policy may call tools

    def name_failed(self, failure: str) -> str:
        """Returns why a sample failed. Where there are tools or an environment, these may have failed and not a grader.

        >>> LaterTurns(max_tokens=1, encode_replies=len, has_calls=True).name_failed("the grader raised ValueError")
        'the environment, a tool or the grader raised ValueError'
        """
        return failure.replace("the grader", "the environment, a tool or the grader", 1) if self.has_calls else failure


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSettings:
    """How the samples of a group are drawn and how their reward is computed."""

    sampling: Sampling
    group_size: int  # samples per prompt
    seed: int
    purpose: str = "train"  # or "eval": both draw different random numbers
    coefficients: Mapping[str, float]  # by reward part; a part that is not named has the coefficient 1
    later_turns: LaterTurns | None = None  # None = an episode has one turn
    context: int = 0  # completions are cut so that prompt and completion have at most so many tokens; 0 = no limit

    def make_key(self, prompt: Prompt, index: int) -> Key:
        """Returns the key that names the random numbers of one sample. `index` is the sample's place in its group."""
        return Key(
            seed=self.seed,
            purpose=self.purpose,
            task=prompt.task,
            prompt_id=prompt.id,
            visit=prompt.visit,
            sample=index,
        )

    def compute_reward(self, parts: Mapping[str, float]) -> float:
        """Returns the reward: the sum of coefficient x value over the reward parts, a dict from name to value.

        A part without a coefficient has the coefficient 1.
        """
        return compute_total_reward(parts, self.coefficients)


class AfterTurn(Enum):
    """What follows the outcome of a turn."""

    NEXT_TURN = auto()  # the policy has another turn
    CLOSE = auto()  # no token has room, and there is no reward yet: the scorer is asked to close the episode
    END = auto()  # the sample is complete


def _make_empty_sample() -> Sample:
    """Returns a sample without tokens, which an episode begins with."""
    return Sample(tokens=[], provenance=[], sampler_logprobs=[])


@dataclass(kw_only=True, slots=True)
class Episode:
    """One sample under way. `sample` grows with every turn of the policy and every reply of the environment."""

    prompt: Prompt
    index: int  # of the sample in its group
    settings: EpisodeSettings
    sample: Sample = field(default_factory=_make_empty_sample)
    history: list[Message] = field(default_factory=list)  # the finished turns after the prompt
    answers: list[Answer] = field(default_factory=list)  # one per turn of the policy
    earned: list[float] = field(default_factory=list)  # rewards of the turns alone, one per turn
    calls: list[Counter[str]] = field(default_factory=list)  # calls of tools by outcome, one per turn

    @property
    def num_allowed(self) -> int:
        """The most tokens that prompt and sample may have together; 0 = no limit."""
        later_turns = self.settings.later_turns
        total = 0 if later_turns is None else later_turns.max_total
        limits = [self.settings.context, total and len(self.prompt.tokens) + total]
        return min((limit for limit in limits if limit), default=0)

    def make_request(self, id: str) -> Request:
        """Returns the request to the engine for the policy's next turn. `id` becomes the id of the request.

        Its tokens are the prompt and everything after it so far. Its `max_tokens` is the limit of this turn (first or
        later), lowered to what `num_allowed` leaves.
        """
        sampling = self.settings.sampling
        later_turns = self.settings.later_turns
        if self.answers and later_turns is not None:
            sampling = replace(sampling, max_tokens=later_turns.max_tokens)
        tokens = [*self.prompt.tokens, *self.sample.tokens]
        if 0 < self.num_allowed < len(tokens) + sampling.max_tokens:
            sampling = replace(sampling, max_tokens=self.num_allowed - len(tokens))
        return Request(
            id=id,
            tokens=tokens,
            sampling=sampling,
            key=self.settings.make_key(self.prompt, self.index),
            # In the first turn all tokens are the prompt's, which the whole group shares.
            shared=len(self.prompt.tokens) if self.sample.tokens else -1,
            # Random numbers are keyed by position in the sample, so a later turn continues their sequence.
            start=len(self.sample.tokens),
            messages=join_messages(self.prompt.messages, self.history),
            # Only the new tokens of the next turn are then computed. All turns of an episode have the same id.
            keep=later_turns is not None,
            continues=id if self.answers else "",
        )

    def make_past(self) -> Past | None:
        """Returns the episode's key and the answers before the newest one; None if episodes have only one turn.

        A scoring worker that does not know the episode replays it from these answers.
        """
        if self.settings.later_turns is None:
            return None
        return Past(key=self.settings.make_key(self.prompt, self.index), answers=tuple(self.answers[:-1]))

    def add_turn(self, turn: Sample) -> Answer:
        """Adds a finished turn of the policy to `sample`, `history` and `answers`.

        Returns the turn as the answer that the grader sees. The first turn becomes `sample` itself; later ones are
        appended to a new sample, with the finish reason of the newest turn.
        """
        answer = make_answer(self.prompt, turn, self.history)
        self.history.append({"role": "assistant", "content": answer.full})
        self.sample = join_turns(self.sample, turn) if self.answers else turn
        self.answers.append(answer)
        return answer

    def settle(self, outcome: Outcome) -> AfterTurn:
        """Takes over the outcome of the newest turn, and the environment's replies. Returns what comes next."""
        self.add_outcome(outcome)
        if not outcome.failure and self.add_replies(outcome.replies):
            return AfterTurn.NEXT_TURN
        return AfterTurn.CLOSE if outcome.replies and not outcome.parts else AfterTurn.END

    def add_outcome(self, outcome: Outcome) -> None:
        """Stores a grader's outcome of the newest turn in the sample: reward, reward parts, reason and failure.

        It replaces the outcome of the turn before. The reward is that of the parts less `outcome.cost`, and what the
        turns have earned; None after a failure. A limit that ended the conversation becomes the finish reason. If the
        outcome has a `stand_in`, that replaces the newest answer in `answers`.
        """
        # The answer was too much work for the grader. A worker that plays the episode again gets this one in its place.
        if outcome.stand_in is not None:
            self.answers[-1] = outcome.stand_in
        sample, later_turns = self.sample, self.settings.later_turns
        sample.parts = dict(outcome.parts)
        sample.reason = outcome.reason
        sample.failure = outcome.failure if later_turns is None else later_turns.name_failed(outcome.failure)
        self.earned += [0.0] * (len(self.answers) - len(self.earned))
        self.earned[-1] += outcome.earned
        self.calls += [Counter() for _ in range(len(self.answers) - len(self.calls))]
        self.calls[-1].update(outcome.calls)
        if outcome.crashed and later_turns is not None and later_turns.has_calls:
            self.calls[-1]["crash"] += 1
        sample.calls = self.count_calls()
        if len(self.answers) > 1:
            sample.messages = list(self.history)
            sample.turn_calls = [dict(calls) for calls in self.calls]
        if outcome.ending:
            sample.finish = Finish(outcome.ending)
        # A failure is not a reward of 0: it says nothing about the answer.
        if outcome.failure:
            sample.reward = None
            return
        last = self.settings.compute_reward(outcome.parts) - outcome.cost
        sample.reward = last + math.fsum(self.earned)
        if any(self.earned):
            sample.turn_rewards = [*self.earned[:-1], self.earned[-1] + last]

    def count_calls(self) -> dict[str, int]:
        """Returns the calls of tools in all turns so far, by outcome."""
        total: Counter[str] = Counter()
        for calls in self.calls:
            total.update(calls)
        return dict(total)

    def add_replies(self, replies: Sequence[Message]) -> bool:
        """Appends the environment's replies to `sample` and `history`. Returns whether the policy has another turn.

        It has none, and nothing is appended, if there are no replies, episodes have one turn, or no token has room
        after the replies (`num_allowed`). Otherwise `sample` becomes a new sample whose outcome is empty until the next
        `add_outcome`. An end token that the policy sampled is not repeated.
        """
        later_turns = self.settings.later_turns
        sample = self.sample
        if not replies or later_turns is None:
            return False
        tokens = later_turns.encode_replies(replies)
        # The policy may have sampled its end token, or another stop token, where the template puts one as well.
        if sample.tokens[-1:] == tokens[:1] or (sample.tokens and sample.tokens[-1] in later_turns.stop_ids):
            tokens = tokens[1:]
        if 0 < self.num_allowed <= len(self.prompt.tokens) + len(sample.tokens) + len(tokens):
            return False
        self.history += replies
        reply_tokens = Sample(
            tokens=tokens,
            provenance=[int(Provenance.ENVIRONMENT)] * len(tokens),
            sampler_logprobs=[0.0] * len(tokens),
            # Only truncated sampling records this field; its length must stay that of the tokens.
            kept_mass=[1.0] * len(tokens) if sample.kept_mass else [],
            text="".join(f"\n\n[{reply['content']}]\n\n" for reply in replies),
        )
        self.sample = join_turns(sample, reply_tokens)
        return True


def join_messages(prompt: Sequence[Message], later: Sequence[Message]) -> list[Message]:
    """Returns the messages of a prompt and those after it.

    A last message of the assistant in the prompt is begun there and repeated in full by the first one after it.
    """
    is_begun = bool(prompt and later) and prompt[-1]["role"] == "assistant"
    return [*(prompt[:-1] if is_begun else prompt), *later]


def make_answer(prompt: Prompt, turn: Sample, history: Sequence[Message] = ()) -> Answer:
    """Returns a turn of the policy as the answer that the grader sees.

    `history` has the messages between the prompt and this turn; it is empty in the first turn. Only then does
    `Answer.full` begin with the text that the policy was made to continue (`prompt.forced_text`).
    """
    full = turn.text if history else prompt.forced_text + turn.text
    # A prompt with forced text ends with a message of the assistant, which the answer repeats in full.
    before = prompt.messages[:-1] if prompt.forced_text else prompt.messages
    return Answer(
        text=turn.text,
        full=full,
        finish=str(turn.finish),
        num_tokens=len(turn.tokens),
        tokens=turn.tokens,
        conversation=[*before, *history, {"role": "assistant", "content": full}],
    )


def join_turns(sample: Sample, more: Sample) -> Sample:
    """Returns a new sample: the tokens of `sample`, then those of `more`.

    Joined are tokens, provenance, sampler log-probabilities, kept mass, versions and text. All other fields, such as
    reward, finish reason and the learner's log-probabilities, are those of `more`.
    """
    num = len(sample.tokens)
    return replace(
        more,
        tokens=sample.tokens + more.tokens,
        provenance=sample.provenance + more.provenance,
        sampler_logprobs=sample.sampler_logprobs + more.sampler_logprobs,
        kept_mass=sample.kept_mass + more.kept_mass,
        versions=sample.versions + [(num + first, version) for first, version in more.versions],
        text=sample.text + more.text,
    )
