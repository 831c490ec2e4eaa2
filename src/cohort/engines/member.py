"""One member of a group while it is sampled: its turns so far, and whether it gets another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cohort.engines.base import Request
from cohort.scoring.pool import ScoringPool
from cohort.tasks.draws import Draws
from cohort.tasks.stream import TaskStream
from cohort.types import Answer, Finish, Key, Message, Outcome, Prompt, Provenance, Sample, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """Another attempt after a low reward: a user's turn that asks for it, then the policy's."""

    attempts: int  # further ones at most
    below: float  # the reward at or under which there is one
    max_tokens: int  # of each
    cost: float  # what each takes from the reward
    words: tuple[str, ...]  # one of these is the user's turn
    follow: Callable[[str], list[int]]  # the tokens from the end of the policy's turn, its end token first, to its next

    @property
    def room(self) -> int:
        """The most tokens that the user's turns take."""
        return self.attempts * max(len(self.follow(words)) for words in self.words)


@dataclass(kw_only=True, slots=True)
class Tasks:
    """Where prompts come from and how samples are drawn and scored."""

    stream: TaskStream
    scorer: ScoringPool
    sampling: Sampling
    weights: Mapping[str, float]  # of the reward's parts; a part not named weighs 1
    seed: int
    purpose: str = "train"
    again: Again | None = None
    context: int = 0  # tokens a sequence may have, where completions are cut to what their prompt leaves; 0 = they fit

    def key(self, prompt: Prompt, index: int) -> Key:
        return Key(
            seed=self.seed,
            purpose=self.purpose,
            task=prompt.task,
            prompt_id=prompt.id,
            visit=prompt.visit,
            sample=index,
        )

    def reward(self, parts: Mapping[str, float]) -> float:
        return sum(self.weights.get(name, 1.0) * value for name, value in parts.items())


@dataclass(kw_only=True, slots=True)
class Member:
    """`sample` grows with every turn; its tokens are what the policy drew and what the environment put between."""

    prompt: Prompt
    index: int
    sample: Sample = field(default_factory=lambda: Sample(tokens=[], provenance=[], sampler_logprobs=[]))
    history: list[Message] = field(default_factory=list)  # the finished turns after the prompt
    num_turns: int = 0

    def request(self, id: str, tasks: Tasks) -> Request:
        """The next turn."""
        sampling = tasks.sampling
        if self.num_turns and tasks.again is not None:
            sampling = replace(sampling, max_tokens=tasks.again.max_tokens)
        if 0 < tasks.context < len(self.prompt.tokens) + sampling.max_tokens:
            sampling = replace(sampling, max_tokens=tasks.context - len(self.prompt.tokens))
        return Request(
            id=id,
            tokens=[*self.prompt.tokens, *self.sample.tokens],
            sampling=sampling,
            key=tasks.key(self.prompt, self.index),
            shared=len(self.prompt.tokens) if self.sample.tokens else -1,
            start=len(self.sample.tokens),
            messages=[*self.prompt.messages, *self.history],
        )

    def answer(self, turn: Sample) -> Answer:
        """Take a finished turn; what the grader sees of it."""
        answer = answer_of(self.prompt, turn, self.history)
        self.history.append({"role": "assistant", "content": answer.full})
        self.sample = joined(self.sample, turn) if self.num_turns else turn
        self.num_turns += 1
        return answer

    def take(self, outcome: Outcome, tasks: Tasks) -> None:
        sample = self.sample
        sample.parts, sample.reason, sample.failure = dict(outcome.parts), outcome.reason, outcome.failure
        sample.reward = None
        if not outcome.failure:
            cost = 0.0 if tasks.again is None else tasks.again.cost * (self.num_turns - 1)
            sample.reward = tasks.reward(outcome.parts) - cost

    def go_on(self, tasks: Tasks) -> bool:
        """Whether there is another turn; then the environment's words are already part of the sample.

        A turn that was cut off has not ended: there is nothing to answer to.
        """
        again, sample = tasks.again, self.sample
        if again is None or self.num_turns > again.attempts or sample.failure or sample.finish is not Finish.STOP:
            return False
        reward = tasks.reward(sample.parts)
        if reward > again.below:
            return False
        key = tasks.key(self.prompt, self.index)
        draws = Draws("again", key.seed, key.purpose, key.task, key.prompt_id, key.visit, key.sample, self.num_turns)
        words = draws.choice(again.words)
        tokens = again.follow(words)
        if sample.tokens[-1:] == tokens[:1]:  # the policy has ended its turn itself, as the template would
            tokens = tokens[1:]
        self.history.append({"role": "user", "content": words})
        said = Sample(
            tokens=tokens,
            provenance=[int(Provenance.ENVIRONMENT)] * len(tokens),
            sampler_logprobs=[0.0] * len(tokens),
            kept_mass=[1.0] * len(tokens) if sample.kept_mass else [],
            text=f"\n\n[{words}]\n\n",
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
