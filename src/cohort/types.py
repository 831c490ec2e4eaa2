"""Records that are passed between tasks, engines, algorithms and the learner. Standard library only.

Data of varying length stays in plain lists. A record must be serialisable and must not hold memory of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from cohort.fates import Fate

Message = dict[str, Any]
"""A chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}."""

Row = dict[str, Any]
"""One item of a task's data. JSON-serialisable. A row without `id` gets one from the prompt stream of the task."""


class Provenance(IntEnum):
    """Where a token came from. It is recorded when the token is made and never worked out afterwards."""

    PROMPT = 0
    # Drawn by the policy: the only tokens that an RL loss may touch.
    SAMPLED = 1
    # Tool results and other turns that the policy did not write.
    ENVIRONMENT = 2
    # An assistant prefix that the policy had to continue.
    FORCED = 3
    # Given to be imitated or compared: the only tokens that SFT and DPO may touch.
    TARGET = 4


class Finish(StrEnum):
    """Why a sample ended: a stop token or stop string, the limit of tokens of a turn, an abort, or a limit of the
    conversation (its number of turns, its number of calls of tools, or its tokens in total)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TURNS = "turns"
    CALLS = "calls"
    TOTAL = "total"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Name of one sequence of random numbers. Key and token position together name one uniform number."""

    seed: int
    purpose: str  # "train" or "eval"
    task: str
    prompt_id: str
    visit: int  # how often this prompt was drawn before
    sample: int  # index in the group


class SampleId(NamedTuple):
    """Name of a sample in every part of the program. It occurs once in a batch."""

    task: str
    prompt: str
    visit: int
    sample: int  # index in its group


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn, and when sampling stops."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p is on, so that some tokens can never be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(kw_only=True, slots=True)
class Prompt:
    """A row rendered to tokens. `tokens` may end with a forced assistant prefix: see `provenance`."""

    task: str
    id: str
    visit: int
    row: Row
    messages: list[Message]
    tokens: list[int]
    provenance: list[int]  # PROMPT or FORCED, one per token
    forced_text: str = ""  # the assistant prefix as text; Answer.full starts with it
    tools: list[Any] = field(default_factory=list)  # descriptions of the tools that the model may call


@dataclass(kw_only=True, slots=True)
class Sample:
    """One completion, with everything that the learner and a reader of the run need to know about it.

    `tokens` starts after the prompt. It includes the sampled end-of-sequence token and, in conversations, the
    environment's tokens. All per-token lists have its length.
    """

    tokens: list[int]
    provenance: list[int]
    sampler_logprobs: list[float]  # at the sampling temperature, before truncation; 0.0 where not sampled
    kept_mass: list[float] = field(default_factory=list)  # empty unless top-p/top-k/min-p was used
    versions: list[tuple[int, int]] = field(default_factory=list)  # spans: (index of first token, policy version)
    finish: Finish = Finish.STOP
    text: str = ""  # the completion alone: special tokens removed, stop string trimmed
    # Filled by scoring.
    parts: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    reason: str = ""  # the grader's reason; "" = it gave none
    failure: str = ""  # infrastructure failure: the sample leaves its group, it does not get reward 0
    turn_rewards: list[float] = field(default_factory=list)  # per turn of the policy; [] = one reward for all of them
    calls: dict[str, int] = field(default_factory=dict)  # calls of tools by their outcome: "ok", "error", ...
    turn_calls: list[dict[str, int]] = field(default_factory=list)  # `calls` per turn, in samples of several turns
    messages: list[Message] = field(default_factory=list)  # those after the prompt, in samples of several turns
    # Filled by the learner and the algorithm.
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    advantage: float = 0.0  # where it differs between tokens, the one of the largest size: 0 = no token has one
    token_advantages: list[float] | None = None  # per token, where they differ; None = `advantage` for every token
    masked: Fate = Fate.TRAINED  # why this sample is out of the loss; TRAINED = it is in the loss

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy drew."""
        return self.provenance.count(Provenance.SAMPLED)

    @property
    def is_truncated(self) -> bool:
        """Whether the limit of tokens, of a turn or in total, ended the sample."""
        return self.finish in (Finish.LENGTH, Finish.TOTAL)

    @property
    def num_turns(self) -> int:
        """The number of turns that the policy wrote: runs of neighbouring tokens that it drew; 0 if it drew none."""
        drawn = [p == Provenance.SAMPLED for p in self.provenance]
        # A turn begins at every drawn token whose predecessor was not drawn.
        return sum(here and not before for before, here in zip([False, *drawn], drawn, strict=False))


@dataclass(kw_only=True, slots=True)
class Group:
    """A prompt and its samples. Baselines, prefix sharing and the division among ranks work on whole groups."""

    prompt: Prompt
    samples: list[Sample]
    excluded: Fate = Fate.TRAINED  # why the whole group is out of the update; TRAINED = it is in the update
    reused: int = 0  # steps since the group was sampled, where replay uses it again; 0 = sampled in this step
    # Place among the groups of the step on all ranks. It is not stored: files have groups in this order.
    order: int = field(default=0, compare=False, metadata={"stored": False})

    @property
    def is_given(self) -> bool:
        """Whether its answers are given examples, to be imitated or compared, which no policy drew in the run."""
        return any(Provenance.TARGET in sample.provenance for sample in self.samples)

    def ids(self) -> list[SampleId]:
        """Returns the ids of the samples, in the order of `samples`."""
        p = self.prompt
        return [SampleId(p.task, p.id, p.visit, index) for index in range(len(self.samples))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A completion as text, with what else a grader may see of the sample."""

    text: str  # the completion alone
    full: str  # with the forced assistant prefix in front
    finish: str
    num_tokens: int
    conversation: list[Message]
    calls: list[str] = field(default_factory=list)  # outcomes of the calls of tools so far, such as "ok", in order
    tokens: list[int] = field(default_factory=list)  # the ids of the completion's tokens; [] = not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A grader's result: either reward parts (perhaps with a reason) or a failure, never both.

    An environment whose episode continues gives the messages of its next turn in `replies`. `cost` is subtracted from
    the reward. `earned` is a reward of this turn alone, which is added. `calls` are the calls of tools in this turn, by
    outcome. `ending` is the limit that ended the conversation, as a Finish; "" = none did. `stand_in` is the answer
    that was scored in place of one whose scoring would have been too much work; it is set where the episode may
    continue from that answer.
    """

    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    failure: str = ""
    replies: list[Message] = field(default_factory=list)
    cost: float = 0.0
    earned: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    ending: str = ""
    crashed: bool = False  # whether the failure is that the process died or was killed
    stand_in: Answer | None = None
