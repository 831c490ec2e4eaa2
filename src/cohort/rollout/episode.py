"""One sample while it is made: the stream of its tokens, turn by turn.

The policy's tokens stay as they were drawn and the environment's as they were put between: nothing is rendered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cohort.engines.base import Request
from cohort.errors import TaskError
from cohort.tasks.environment import Past, total_reward
from cohort.types import Answer, Key, Message, Outcome, Prompt, Provenance, Sample, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Further:
    """Turns after the first."""

    max_tokens: int  # of each
    follow_up: Callable[[str], list[int]]
    """The tokens from the end of the policy's turn, its end token first, through a user's turn to the policy's next."""

    def tokens(self, replies: Sequence[Message]) -> list[int]:
        """What is put between two turns of the policy."""
        if len(replies) != 1 or replies[0]["role"] != "user":
            raise TaskError(f"an environment can reply with one user's message only, not {str(list(replies))[:80]}")
        return self.follow_up(replies[0]["content"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """How samples are drawn and what they are paid."""

    sampling: Sampling
    group_size: int
    seed: int
    purpose: str = "train"
    coefficients: Mapping[str, float]  # of the reward's parts; a part that is not named counts once
    further: Further | None = None  # None = the first turn is the last
    context: int = 0  # tokens a sequence may have, where completions are cut to what is left; 0 = they fit

    def key(self, prompt: Prompt, index: int) -> Key:
        """Names the random numbers of a sample."""
        return Key(
            seed=self.seed,
            purpose=self.purpose,
            task=prompt.task,
            prompt_id=prompt.id,
            visit=prompt.visit,
            sample=index,
        )

    def reward(self, parts: Mapping[str, float]) -> float:
        return total_reward(parts, self.coefficients)


def _nothing() -> Sample:
    return Sample(tokens=[], provenance=[], sampler_logprobs=[])


@dataclass(kw_only=True, slots=True)
class Episode:
    """`sample` grows with every turn of the policy and of the environment."""

    prompt: Prompt
    index: int  # in its group
    drawing: Drawing
    sample: Sample = field(default_factory=_nothing)
    history: list[Message] = field(default_factory=list)  # the finished turns after the prompt
    answers: list[Answer] = field(default_factory=list)  # one per turn of the policy

    def request(self, id: str) -> Request:
        """The policy's next turn."""
        sampling, further = self.drawing.sampling, self.drawing.further
        if self.answers and further is not None:
            sampling = replace(sampling, max_tokens=further.max_tokens)
        tokens = [*self.prompt.tokens, *self.sample.tokens]
        if 0 < self.drawing.context < len(tokens) + sampling.max_tokens:
            sampling = replace(sampling, max_tokens=self.drawing.context - len(tokens))
        return Request(
            id=id,
            tokens=tokens,
            sampling=sampling,
            key=self.drawing.key(self.prompt, self.index),
            shared=len(self.prompt.tokens) if self.sample.tokens else -1,
            start=len(self.sample.tokens),
            messages=[*self.prompt.messages, *self.history],
        )

    def past(self) -> Past | None:
        """What the environment has seen before the newest turn; None where there is one turn only."""
        if self.drawing.further is None:
            return None
        return Past(key=self.drawing.key(self.prompt, self.index), answers=tuple(self.answers[:-1]))

    def add_turn(self, turn: Sample) -> Answer:
        """Append a finished turn of the policy; returns what the grader sees of it."""
        answer = answer_of(self.prompt, turn, self.history)
        self.history.append({"role": "assistant", "content": answer.full})
        self.sample = joined(self.sample, turn) if self.answers else turn
        self.answers.append(answer)
        return answer

    def add_outcome(self, outcome: Outcome) -> None:
        """Note what the newest turn is worth: the last outcome counts."""
        if outcome.stand_in is not None:  # whoever plays the episode again must not be given too much work again
            self.answers[-1] = outcome.stand_in
        sample = self.sample
        sample.parts, sample.reason, sample.failure = dict(outcome.parts), outcome.reason, outcome.failure
        sample.reward = None if outcome.failure else self.drawing.reward(outcome.parts) - outcome.cost

    def go_on(self, replies: Sequence[Message]) -> bool:
        """Append what the environment said; False where nothing was said or no token is left for an answer."""
        further, sample = self.drawing.further, self.sample
        if not replies or further is None:
            return False
        tokens = further.tokens(replies)
        if sample.tokens[-1:] == tokens[:1]:  # the policy has ended its turn itself, as the template would
            tokens = tokens[1:]
        if 0 < self.drawing.context <= len(self.prompt.tokens) + len(sample.tokens) + len(tokens):
            return False
        self.history += replies
        said = Sample(
            tokens=tokens,
            provenance=[int(Provenance.ENVIRONMENT)] * len(tokens),
            sampler_logprobs=[0.0] * len(tokens),
            kept_mass=[1.0] * len(tokens) if sample.kept_mass else [],
            text="".join(f"\n\n[{reply['content']}]\n\n" for reply in replies),
        )
        self.sample = joined(sample, said)
        return True


def answer_of(prompt: Prompt, turn: Sample, history: Sequence[Message] = ()) -> Answer:
    """What the grader sees: the completion alone, and with the prefix the policy was made to continue."""
    full = turn.text if history else prompt.forced_text + turn.text
    before = prompt.messages[:-1] if prompt.forced_text else prompt.messages
    return Answer(
        text=turn.text,
        full=full,
        finish=str(turn.finish),
        num_tokens=len(turn.tokens),
        conversation=[*before, *history, {"role": "assistant", "content": full}],
    )


def joined(sample: Sample, more: Sample) -> Sample:
    """A sample and what came after it."""
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
