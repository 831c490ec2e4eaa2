"""The kinds of run: each is a config with its own settings besides those that every run has."""

from __future__ import annotations

import dataclasses
import keyword
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from cohort.config.algos import ALGOS, GRPO, Policy
from cohort.config.engines import EngineConfig
from cohort.config.schema import (
    ENGINES,
    TURNS,
    BatchConfig,
    NativeEngine,
    ReplayConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SingleTurn,
    ThinkAgain,
)
from cohort.config.section import AtLeast1, Effect, Section
from cohort.errors import ConfigError, nearest
from cohort.tasks.traces.styles import Mix


@dataclass(frozen=True, kw_only=True)
class RL(RunConfig):
    """Reinforcement learning: sample answers to the prompts of a task, score them, train on what they were worth."""

    kind: ClassVar[str] = "rl"
    variants: ClassVar[tuple[str, ...]] = ("task", "turns", "algo", "engine")
    since_format_1: ClassVar[Mapping[str, Mapping[str, Any]]] = {"rollout": {"order": "rounds"}}

    task: Any = None
    """The task, an instance of a registered task class; its fields are the difficulty knobs."""
    reward: dict[str, float] = field(default_factory=dict)
    """Weights of the reward's parts; a part not named weighs 1, 0 = only logged."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    turns: SingleTurn | ThinkAgain = field(default_factory=SingleTurn)
    engine: EngineConfig = field(default_factory=NativeEngine)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: Policy = field(default_factory=GRPO)
    replay: ReplayConfig = field(default_factory=ReplayConfig)

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("algo.clip_low", "algo.clip_high", "algo.dual_clip", "algo.tau_pos", "algo.tau_neg"),
            ("learner.epochs", "learner.minibatches"),
            lambda config: config.learner.updates > 1,
            "with one update per batch the ratio is exactly 1; raise --learner.epochs or --learner.minibatches",
        ),
        Effect(
            ("eval.turns",),
            ("turns",),
            lambda config: isinstance(config.turns, ThinkAgain),
            "there is one turn only; set --turns think_again",
        ),
    )

    @property
    def max_sampled(self) -> int:
        """The most tokens the policy draws for one sample, in all its turns."""
        first, turns = self.sampling.max_tokens, self.turns
        return first + (turns.attempts * (turns.max_tokens or first) if isinstance(turns, ThinkAgain) else 0)

    def require_complete(self) -> None:
        if self.task is None:
            raise ConfigError("the config has no task; give it one, for example task=Arithmetic().")

    def records(self) -> dict[str, Any]:
        return {"reward": _weights(self.task, self.reward)}

    def with_variant(self, name: str, value: Any) -> Self:
        changed = super().with_variant(name, value)
        return replace(changed, reward={}) if name == "task" else changed  # the weights were for the other task's parts

    def check(self, given: Collection[str]) -> None:
        self.algo.check_group(self.batch.samples)
        self._check_batch()
        super().check(given)
        if self.replay.on and not self.algo.correction.on:
            raise ConfigError(
                "replay.prompts uses samples of older policies as if the current one had drawn them; "
                "add --algo.correction.kind truncate (or mask)."
            )
        self._check_kl()
        _check_reward(self.task, self.reward)

    def _check_batch(self) -> None:
        minibatches, budget = self.learner.minibatches, self.learner.token_budget
        if minibatches > self.batch.prompts:
            raise ConfigError(
                f"learner.minibatches is {minibatches}, but a batch has only {self.batch.prompts} groups "
                "(batch.prompts) to divide; lower --learner.minibatches."
            )
        if 0 < budget <= self.max_sampled:
            raise ConfigError(
                f"learner.token_budget is {budget}, too small for a prompt and a completion of "
                f"{self.max_sampled} tokens (sampling.max_tokens, turns); raise --learner.token-budget."
            )
        if isinstance(self.turns, ThinkAgain) and self.template == "text":
            raise ConfigError("--turns think_again needs a chat template for its turns; use --template chat.")

    def _check_kl(self) -> None:
        kl = self.algo.kl
        if not kl.on:
            return
        once = self.learner.updates == 1 and not self.replay.on
        if kl.refresh and self.learner.lora.on:
            raise ConfigError("algo.kl.refresh needs a reference of its own; adapters have none: drop one of the two.")
        if kl.refresh == 1 and once:
            raise ConfigError("algo.kl.refresh = 1 with one update a batch: the reference is the policy; raise it.")
        if kl.to == "sampler" and once:
            raise ConfigError(
                "algo.kl.to = sampler with one update a batch: the sampler is the policy; use --algo.kl.to reference, "
                "or raise --learner.epochs or --learner.minibatches."
            )


@dataclass(frozen=True, kw_only=True)
class Traces(Mix):
    """Synthetic conversations about sums, Countdown and a calculator: what the bundled model was taught on."""

    rows: AtLeast1 = 2000
    """Distinct sums of three terms, and as many others in proportion."""


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig(Section):
    """What one step trains on. Micro-batching is automatic."""

    examples: AtLeast1 = 32
    """Examples per step."""


_NOT_EVALUATED = "an sft run is not evaluated; measure its model with cohort eval"


@dataclass(frozen=True, kw_only=True)
class SFT(RunConfig):
    """Supervised fine-tuning: imitate the assistant's words in given conversations."""

    kind: ClassVar[str] = "sft"
    variants: ClassVar[tuple[str, ...]] = ("data",)
    unused: ClassVar[tuple[str, ...]] = ("eval",)

    data: Traces = field(default_factory=Traces)
    batch: ExamplesConfig = field(default_factory=ExamplesConfig)

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("eval.every", "eval.problems", "eval.samples", "eval.temperature", "eval.turns", "save.keep_best"),
            (),
            lambda config: False,
            _NOT_EVALUATED,
        ),
        Effect(("save.rollouts",), (), lambda config: False, "an sft run samples nothing"),
        Effect(("learner.prefix_sharing",), (), lambda config: False, "an example has one answer"),
    )

    def check(self, given: Collection[str]) -> None:
        super().check(given)
        if self.template != "chat":
            raise ConfigError("the examples are conversations, which need a chat template; use --template chat.")
        if self.learner.minibatches > self.batch.examples:
            raise ConfigError(
                f"learner.minibatches is {self.learner.minibatches}, but a step has only {self.batch.examples} "
                "examples (batch.examples) to divide; lower --learner.minibatches."
            )


def reward_parts(task: Any) -> tuple[str, ...]:
    """The parts a task scores, in its own order."""
    return tuple(getattr(type(task), "parts", ("correct",)))


def _weights(task: Any, reward: Mapping[str, float]) -> Any:
    """The reward's weights as a record with one field per part."""
    parts = reward_parts(task)
    for part in parts:
        if not part.isidentifier() or keyword.iskeyword(part):
            raise ConfigError(f'task {type(task).name}: reward part "{part}" must be a plain word.')
    _check_parts(task, reward)
    fields = [(part, float, reward.get(part, 1.0)) for part in parts]
    return dataclasses.make_dataclass("Reward", fields, frozen=True, kw_only=True)()


def _check_parts(task: Any, reward: Mapping[str, float]) -> None:
    parts = reward_parts(task)
    for part in reward:
        if part not in parts:
            raise ConfigError(f'unknown reward part "{part}" of task {type(task).name}.{nearest(part, parts)}')


def _check_reward(task: Any, reward: Mapping[str, float]) -> None:
    _check_parts(task, reward)
    for part, weight in reward.items():
        if not math.isfinite(weight):
            raise ConfigError(f"reward.{part} is {weight}; it must be a finite number.")
    if all(reward.get(part, 1.0) == 0 for part in reward_parts(task)):
        raise ConfigError("every part of the reward weighs 0: there is nothing to learn; raise one of --reward.*.")


DATA: dict[str, type] = {"traces": Traces}
KINDS: dict[str, type[RunConfig]] = {"rl": RL, "sft": SFT}
VARIANTS: dict[str, dict[str, type]] = {"turns": TURNS, "algo": ALGOS, "engine": ENGINES, "data": DATA}
"""What is chosen by name, besides the task: of each only the chosen one's settings exist."""


def require_rl(config: RunConfig, what: str) -> RL:
    """`config`, if it is of reinforcement learning; otherwise `what` is refused."""
    if not isinstance(config, RL):
        raise ConfigError(f"{what} is for runs of reinforcement learning; this one is of the kind {config.kind}.")
    return config
