"""The records that travel between tasks, engines, algorithms and the learner. Standard library only.

Ragged data stays in plain lists here: a record must be serialisable and must not pin a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from cohort.fates import Fate

Message = dict[str, Any]
"""A chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str, ...}."""

Row = dict[str, Any]
"""One item of a task's data. JSON-serialisable; `id` is filled in by the task stream when missing."""


class Provenance(IntEnum):
    """Where a token came from, recorded when it comes to exist and never derived afterwards."""

    PROMPT = 0
    SAMPLED = 1  # drawn by the policy: the only tokens an RL loss may touch
    ENVIRONMENT = 2  # tool results and other turns
    FORCED = 3  # an assistant prefix the policy had to continue
    TARGET = 4  # given to be imitated or compared: the only tokens SFT and DPO may touch


class Finish(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Names one stream of random numbers; with a token position it names one uniform number."""

    seed: int
    purpose: str  # "train" or "eval"
    task: str
    prompt_id: str
    visit: int  # how often this prompt was drawn before
    sample: int  # index in the group


class SampleId(NamedTuple):
    """Names a sample wherever it goes. Unique in a batch."""

    task: str
    prompt: str
    visit: int
    sample: int  # place in its group


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to draw tokens, and when to stop."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
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


@dataclass(kw_only=True, slots=True)
class Sample:
    """What one member of a group said, with everything the learner and the reader need to know of it.

    `tokens` starts after the prompt and includes the sampled end-of-sequence token and, in conversations,
    the environment's tokens. All per-token lists have its length.
    """

    tokens: list[int]
    provenance: list[int]
    sampler_logprobs: list[float]  # at the sampling temperature, before truncation; 0.0 where not sampled
    kept_mass: list[float] = field(default_factory=list)  # empty unless top-p/top-k/min-p was used
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first token, policy version) spans
    finish: Finish = Finish.STOP
    text: str = ""  # the completion alone: special tokens removed, stop string trimmed
    # filled by scoring
    parts: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    reason: str = ""  # the grader's reason, if it gave one
    failure: str = ""  # infrastructure failure: the sample leaves its group, it is not a zero
    # filled by the learner and the algorithm
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    advantage: float = 0.0
    token_advantages: list[float] | None = None  # per token, where they differ; None = `advantage` for every token
    masked: Fate = Fate.TRAINED  # why this sample is out of the loss

    @property
    def num_sampled(self) -> int:
        return self.provenance.count(Provenance.SAMPLED)

    @property
    def num_turns(self) -> int:
        """How often the policy spoke: runs of tokens it drew."""
        drawn = [p == Provenance.SAMPLED for p in self.provenance]
        return sum(here and not before for before, here in zip([False, *drawn], drawn, strict=False))


@dataclass(kw_only=True, slots=True)
class Group:
    """A prompt and its samples: the unit of baselines, of prefix sharing and of ranks."""

    prompt: Prompt
    samples: list[Sample]
    excluded: Fate = Fate.TRAINED  # why the whole group is out of the update
    reused: int = 0  # steps since it was sampled, where it is used again; 0 = sampled in this step

    def ids(self) -> list[SampleId]:
        """The ids of its samples, in their order."""
        p = self.prompt
        return [SampleId(p.task, p.id, p.visit, index) for index in range(len(self.samples))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a grader sees of a sample."""

    text: str  # the completion alone
    full: str  # with the forced assistant prefix in front
    finish: str
    num_tokens: int
    conversation: list[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A grader's result: a verdict (`parts`, perhaps with a reason) or a failure, never both.

    An environment that goes on says its `replies`; `cost` is what it takes from the reward. `stand_in` is what was
    scored instead of an answer that was too much work, where the episode may go on from it.
    """

    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    failure: str = ""
    replies: list[Message] = field(default_factory=list)
    cost: float = 0.0
    stand_in: Answer | None = None
