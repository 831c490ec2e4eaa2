"""The kinds of run: one config class per kind. That of reinforcement learning is here, the others in `imitation`.

Each adds its own settings to those of every run (`RunConfig`).
"""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from cohort.config.algos import ALGOS, GRPO, Policy
from cohort.config.engines import EngineConfig
from cohort.config.imitation import DATA, DPO, SFT
from cohort.config.preferences import PAIR_LOSSES
from cohort.config.recorded import get_recorded_name
from cohort.config.schema import (
    ENGINES,
    TURNS,
    BatchConfig,
    Conversation,
    NativeEngine,
    ReplayConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SingleTurn,
    ThinkAgain,
)
from cohort.config.scoring import ScoringConfig
from cohort.config.section import LARGEST, Effect
from cohort.errors import ConfigError, suggest_name
from cohort.registry import Registry
from cohort.tasks.base import TASKS, has_conversations
from cohort.user_code import is_foreign


@dataclass(frozen=True, kw_only=True)
class RL(RunConfig):
    """Reinforcement learning: sample completions for the prompts of a task, score them and train on the scores."""

    kind: ClassVar[str] = "rl"
    variants: ClassVar[tuple[str, ...]] = ("task", "turns", "algo", "engine")
    since_format_1: ClassVar[Mapping[str, Mapping[str, Any]]] = {"rollout": {"order": "rounds"}}

    task: Any = None
    """The task: an instance of a registered task class. Its fields are the settings of the task."""
    reward: dict[str, float] = field(default_factory=dict)
    """Coefficient of each reward part; a part that is not named has 1, a part with 0 is only recorded."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    turns: SingleTurn | ThinkAgain | Conversation = field(default_factory=SingleTurn)
    """The turns of a sample. A task with tools or an environment has conversations, also if this says `single`."""
    engine: EngineConfig = field(default_factory=NativeEngine)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    algo: Policy = field(default_factory=GRPO)
    replay: ReplayConfig = field(default_factory=ReplayConfig)

    # Clips and gates act only if the policy changes between the first and the last update on a batch.
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("algo.clip_low", "algo.clip_high", "algo.dual_clip", "algo.tau_pos", "algo.tau_neg"),
            ("learner.epochs", "learner.minibatches"),
            lambda config: config.learner.updates_per_batch > 1,
            "with one update per batch the ratio is exactly 1; raise --learner.epochs or --learner.minibatches",
        ),
        Effect(
            ("eval.turns",),
            ("turns",),
            lambda config: isinstance(config.turns, ThinkAgain),
            "every sample has only one turn; set --turns think_again",
        ),
        Effect(
            ("algo.credit.per",),
            ("turns", "task"),
            lambda config: not isinstance(config.turns, SingleTurn),
            "every sample has only one turn; set --turns think_again",
        ),
    )

    def __post_init__(self) -> None:
        if has_conversations(self.task) and isinstance(self.turns, SingleTurn):
            object.__setattr__(self, "turns", Conversation())

    @property
    def max_sampled_tokens(self) -> int:
        """The most tokens that the policy can sample for one sample, over all its turns. Prompts do not count."""
        first = self.sampling.max_tokens
        turns = self.turns
        if isinstance(turns, Conversation):
            return min(turns.max_turns * first, turns.max_total or turns.max_turns * first)
        return first + (turns.attempts * (turns.max_tokens or first) if isinstance(turns, ThinkAgain) else 0)

    def require_complete(self) -> None:
        """Raises a ConfigError if `task` is None: which `--reward` flags exist depends on the task."""
        if self.task is None:
            raise ConfigError(
                "the config has no task. Add --task NAME, or give RL(...) in the recipe a task: task=Arithmetic()."
            )

    def make_flag_records(self) -> dict[str, Any]:
        """Returns {"reward": record}, with one field per reward part, so that `--reward.PART` becomes a flag.

        The value of a field is the coefficient of its part; 1 for a part that `reward` does not name. Raises a
        ConfigError for unknown parts in `reward`, and for parts whose name cannot be a flag.
        """
        return {"reward": _make_reward_record(self.task, self.reward)}

    def replace_variant(self, name: str, value: Any) -> Self:
        """Returns a copy of the config with `value` in the field `name`, such as another algorithm.

        If `name` is "task", all reward coefficients are reset to those that the task gives its parts.
        """
        if name == "turns" and isinstance(value, SingleTurn) and has_conversations(self.task):
            raise ConfigError(
                f"the task {type(self.task).name} has tools or an environment, so that its samples have several turns: "
                "remove --turns single. --turns.max-turns 1 allows one turn."
            )
        if name != "task":
            return super().replace_variant(name, value)
        # The coefficients were for the reward parts of the former task, and conversations may have been its own.
        is_over = isinstance(self.turns, Conversation) and not has_conversations(value)
        return replace(self, task=value, reward={}, turns=SingleTurn() if is_over else self.turns)

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if settings of different sections contradict each other or a reward is not valid.

        A reward is not valid if it names unknown parts, is not finite or is 0 for all parts. `user_settings`, the full
        names of the settings that the user gave, are used for one check only: a warm-up as long as the run is an error
        only if `optim.warmup` is among them. A judge of the task whose key graders are not given is an error too.
        """
        self.algo.check_group(self.batch.samples)
        self._check_batch()
        super().check(user_settings)
        if self.replay.is_on and self.algo.is_on_policy and not self.algo.correction.is_on:
            raise ConfigError(
                f"replay.prompts is {self.replay.prompts}, so samples of older policies are trained on without a "
                "correction. Add --algo.correction.kind truncate (or mask), or set --replay.prompts 0."
            )
        self._check_kl()
        _check_coefficients(self.task, self.reward)
        self.scoring.require_keys(self.task)

    def _check_batch(self) -> None:
        """Raises a ConfigError if a batch has too few groups for its minibatches or a sample exceeds the token budget.

        Also if several turns are asked for without a chat template.
        """
        minibatches = self.learner.minibatches
        budget = self.learner.token_budget
        if minibatches > self.batch.prompts:
            raise ConfigError(
                f"learner.minibatches is {minibatches}, but a batch has only {self.batch.prompts} groups "
                "(batch.prompts) to divide. Lower --learner.minibatches or raise --batch.prompts."
            )
        # A budget of 0 is chosen automatically. A prompt has at least one token: hence <=.
        num_compared = self.algo.num_compared
        # A conversation that has no room left ends.
        if 0 < budget <= num_compared * self.max_sampled_tokens and not isinstance(self.turns, Conversation):
            completions = "a completion" if num_compared == 1 else f"{num_compared} completions that are compared"
            raise ConfigError(
                f"learner.token_budget is {budget}, too small for a prompt and {completions} of "
                f"{self.max_sampled_tokens} tokens (sampling.max_tokens, turns). Raise --learner.token-budget, or "
                "set it to 0 (automatic)."
            )
        if not isinstance(self.turns, SingleTurn) and self.template == "text":
            remedy = ", or --turns single" if isinstance(self.turns, ThinkAgain) else ""
            raise ConfigError(
                f"template is text, but --turns {get_turns_name(self.turns)} needs a chat template for what follows "
                f"the model's turns. Set --template chat{remedy}."
            )
        if isinstance(self.turns, Conversation) and self.sampling.stop:
            raise ConfigError(
                f"sampling.stop is {list(self.sampling.stop)}, which would cut the ends of calls and messages out of "
                "the conversations of this task. Remove --sampling.stop: a turn ends with the model's own end token."
            )
        if isinstance(self.turns, Conversation) and 0 < self.turns.max_total < self.sampling.max_tokens:
            raise ConfigError(
                f"turns.max_total is {self.turns.max_total}, less than one turn of sampling.max_tokens = "
                f"{self.sampling.max_tokens} tokens, so that conversations end in their first turn. Raise "
                "--turns.max-total, set it to 0 (what fits), or lower --sampling.max-tokens."
            )
        if isinstance(self.turns, ThinkAgain) and has_conversations(self.task):
            raise ConfigError(
                f"the task {type(self.task).name} has tools or an environment, which decide about further turns: "
                "--turns think_again cannot be used with it. Remove --turns."
            )
        # A class that was made of a recorded config has no methods.
        has_none = not has_conversations(self.task) and not get_recorded_name(self.task)
        if isinstance(self.turns, Conversation) and has_none:
            raise ConfigError(
                f"the task {type(self.task).name} has neither tools nor an environment, so that there is no "
                "conversation: remove --turns conversation."
            )

    def _check_kl(self) -> None:
        """Raises a ConfigError if the KL penalty would always be 0, or if its reference is refreshed despite adapters.

        Checks nothing if the penalty is off.
        """
        kl = self.algo.kl
        if not kl.is_on:
            return
        # With one update per batch, and no older samples, the policy of the update is the one that sampled.
        on_policy = self.learner.updates_per_batch == 1 and not self.replay.is_on
        if kl.refresh and self.learner.lora.is_on:
            raise ConfigError(
                f"algo.kl.refresh is {kl.refresh}, which needs a copy of the reference, but with adapters the "
                "reference is the model without them. Remove --algo.kl.refresh or set it to 0."
            )
        if kl.refresh == 1 and on_policy:
            raise ConfigError(
                "algo.kl.refresh is 1 with one update per batch, so the reference is the policy itself and the KL is "
                "0. Set --algo.kl.refresh to 2 or more, or to 0 (the reference never changes)."
            )
        if kl.to == "sampler" and on_policy:
            raise ConfigError(
                "algo.kl.to is sampler with one update per batch, so the sampler is the policy itself and the KL is 0. "
                "Set --algo.kl.to reference, or raise --learner.epochs or --learner.minibatches."
            )


def get_turns_name(turns: Any) -> str:
    """Returns the name that --turns has for an instance of one of its classes."""
    return next(name for name, variant in TURNS.items() if type(turns) is variant)


def list_reward_parts(task: Any) -> tuple[str, ...]:
    """Returns the names of the reward parts that a task scores, in the order in which its class lists them.

    A task without `parts` has the one part "correct".
    """
    # Of the task, not of its class: a property may compute them from the settings.
    return tuple(getattr(task, "parts", ("correct",)))


def _make_reward_record(task: Any, reward: Mapping[str, float]) -> Any:
    """Returns the coefficients as an instance of a new dataclass with one field per reward part of `task`.

    A part that `reward` does not name has the coefficient that the task gives it, which is 1 for almost all. Raises a
    ConfigError for unknown parts and for names that cannot be fields.
    """
    parts = list_reward_parts(task)
    defaults = getattr(task, "coefficients", {})
    for part in parts:
        # The names become fields of a dataclass and flags.
        if not part.isidentifier() or keyword.iskeyword(part):
            raise ConfigError(
                f'task {type(task).name} has a reward part "{part}", which is no name as in Python (letters, '
                "digits and _, "
                "no digit first, no keyword). Rename it in the task's parts and in its method score."
            )
    _check_part_names(task, reward)
    fields = [(part, float, reward.get(part, defaults.get(part, 1.0))) for part in parts]
    return dataclasses.make_dataclass("Reward", fields, frozen=True, kw_only=True)()


def _check_part_names(task: Any, reward: Mapping[str, float]) -> None:
    """Raises a ConfigError if `reward`, coefficients by part, names a part that the task does not score."""
    parts = list_reward_parts(task)
    cls = type(task)
    for part in reward:
        if part not in parts:
            # A class of the user may have forgotten to list the part. One of Cohort lists all that it returns.
            all_parts = ", ".join(f'"{name}"' for name in (*parts, part))
            own = (
                f" If its method score returns this part, write parts = ({all_parts}) in the class {cls.__name__}."
                if is_foreign(cls)
                else ""
            )
            raise ConfigError(
                f'unknown reward part "{part}" of task {getattr(cls, "name", cls.__name__)}.'
                f"{suggest_name(part, parts)}{own} If it is the part of another recipe's task, as in "
                "replace(quickstart(), task=...), write reward={} beside task=. Otherwise correct the name in reward, "
                "in the recipe or config.yaml."
            )


def _check_coefficients(task: Any, reward: Mapping[str, float]) -> None:
    """Raises a ConfigError if `reward`, coefficients by part, names unknown parts, is too large or is all 0.

    A part of the task that `reward` does not name has the coefficient 1.
    """
    _check_part_names(task, reward)
    for part, coefficient in reward.items():
        if not abs(coefficient) <= LARGEST:
            raise ConfigError(
                f"reward.{part} is {coefficient}; it must be a finite number from {-LARGEST:,} to {LARGEST:,}. Set "
                f"--reward.{part} to one, for example 1."
            )
    if all(reward.get(part, 1.0) == 0 for part in list_reward_parts(task)):
        flags = ", ".join(f"--reward.{part}" for part in list_reward_parts(task))
        raise ConfigError(
            f"all reward parts have the coefficient 0, so there is nothing to learn. Set one of these above 0: {flags}."
        )


KINDS: dict[str, type[RunConfig]] = {"rl": RL, "sft": SFT, "dpo": DPO}
VARIANTS: dict[str, Registry[Any]] = {
    "task": TASKS,
    "turns": Registry("turns", TURNS, is_open=False),
    "algo": ALGOS,
    "engine": Registry("engine", ENGINES, is_open=False),
    "data": DATA,
    "loss": PAIR_LOSSES,
}
"""The classes that can be chosen by name for each field. Only the chosen class's settings exist."""


def require_rl(config: RunConfig, what: str) -> RL:
    """Returns `config` unchanged if it is of the kind rl, and raises a ConfigError otherwise.

    `what` is what needs such a run, as the subject of the message, such as "cohort replay".
    """
    if not isinstance(config, RL):
        raise ConfigError(
            f"the command {what} is for runs of reinforcement learning (kind rl), but this run is of the kind "
            f"{config.kind}. Give the command an rl run or recipe."
        )
    return config
