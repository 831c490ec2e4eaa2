"""The kinds of run that learn from given answers: supervised fine-tuning (SFT) and preference optimisation (DPO).

`DATA` maps the names of `--data` to the classes that say where the examples come from.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from cohort.config.preferences import PairLoss, Sigmoid
from cohort.config.schema import RunConfig, SaveConfig
from cohort.config.scoring import ScoringConfig
from cohort.config.section import AtLeast0, AtLeast1, BelowOne, Bound, Effect, FiniteAtLeast0, Section, Text
from cohort.errors import ConfigError
from cohort.registry import Registry
from cohort.tasks.traces.styles import Mix
from cohort.user_code import make_function_spec

SplitName = Annotated[Text, Bound("the name of a split", lambda text: "/" not in text and "{" not in text)]


@dataclass(frozen=True, kw_only=True)
class Traces(Mix):
    """Synthetic conversations about sums, Countdown and a calculator, on which the bundled model was trained."""

    rows: AtLeast1 = 2000
    """Number of distinct sums of three terms; the numbers of all other problems are in proportion to it."""


@dataclass(frozen=True, kw_only=True)
class ExampleRows(Section):
    """Rows of a file, or of a data set of the Hugging Face hub."""

    path: Text = ""
    """The file (.jsonl, .json, .csv, .parquet), or owner/name on the hub. With {split} in it, the rows of train are
    trained on and those of test are held out."""
    map: Text = ""
    """A function of yours, as file.py:function, that makes an example of a raw row, or None to leave the row out."""
    columns: tuple[str, ...] = ()
    """Columns that have another name in the file, as ours=theirs."""
    train_split: SplitName = "train"
    """Name of the split that is trained on, on the hub or in place of {split}, such as train_prefs."""
    test_split: SplitName = ""
    """Name of the split that is held out, such as test_prefs; empty = test, if the path has {split}."""
    max_tokens: AtLeast0 = 0
    """Limit of tokens, prompt included; 0 = what the context of the model and the token budget allow."""
    too_long: Literal["error", "skip", "cut"] = "error"
    """What becomes of longer ones: error = the run does not start, skip = they are left out, cut = they lose their end.
    The numbers are shown."""
    empty: Literal["error", "skip"] = "error"
    """What becomes of rows with an empty prompt, answer or text: error = the run does not start, skip = they are left
    out. The number is shown."""
    held_out: BelowOne = 0.05
    """Share of the rows that is held out, where no split is. A hash of the question decides; 0 = none."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("held_out",),
            ("path", "test_split"),
            lambda data: not data.held_out_split,
            "the rows of the test split are held out, because the path has {split} or data.test_split is set",
        ),
        Effect(
            ("columns", "format"),
            ("map",),
            lambda data: not data.map,
            "the function in --data.map makes the columns; remove --data.map",
        ),
    )

    def __post_init__(self) -> None:
        # A recipe in Python may give the function itself.
        if callable(self.map):
            object.__setattr__(self, "map", make_function_spec(self.map))

    @property
    def held_out_split(self) -> str:
        """The name of the split that is held out; "" = a share of the rows is."""
        return self.test_split or ("test" if "{split}" in self.path else "")

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if the same split is trained on and held out, or `map` names no function of a file.

        Ignores `user_settings`.
        """
        if self.held_out_split == self.train_split:
            raise ConfigError(
                f"data.train_split and data.test_split are both {self.train_split}, so what is trained on would be "
                "held out. Name another split with --data.test-split or --data.train-split."
            )
        file, _, name = self.map.rpartition(":")
        if self.map and not (file.endswith(".py") and name):
            raise ConfigError(
                f'data.map is "{self.map}", which names no function of a file. Write --data.map with '
                "path/to/file.py:FUNCTION."
            )


@dataclass(frozen=True, kw_only=True)
class Conversations(ExampleRows):
    """Conversations of a file: messages, ShareGPT, prompt and completion, Alpaca, or plain text."""

    format: Literal["auto", "messages", "sharegpt", "prompt", "alpaca", "text"] = "auto"
    """The format of the rows; auto = each row shows it by its columns."""


@dataclass(frozen=True, kw_only=True)
class TaskAnswers(Section):
    """The right answers of the run's task (--task): its own prompts, each with the answer that the task gives."""

    max_tokens: AtLeast0 = 0
    """Limit of tokens, prompt included; 0 = what the context of the model and the token budget allow."""
    too_long: Literal["error", "skip", "cut"] = "error"
    """What becomes of longer ones: error = the run does not start, skip = they are left out, cut = they lose their end.
    The numbers are shown."""


@dataclass(frozen=True, kw_only=True)
class PairRows(ExampleRows):
    """Pairs of answers of a file: the columns prompt, chosen and rejected, as texts or as messages."""

    equal: Literal["error", "skip"] = "error"
    """What becomes of pairs whose two answers are the same: error = the run does not start, skip = they are left out.
    The number is shown."""


@dataclass(frozen=True, kw_only=True)
class SumPairs(Section):
    """Synthetic pairs about sums, for the bundled model: a right answer is better than a wrong one."""

    rows: AtLeast1 = 2000
    """Number of training pairs."""
    held_out_rows: AtLeast1 = 200
    """Number of held-out pairs, about sums that training does not have."""


DATA: Registry[type[Any]] = Registry(
    "data",
    {
        "traces": Traces,
        "conversations": Conversations,
        "task": TaskAnswers,
        "pairs": PairRows,
        "sum_pairs": SumPairs,
    },
    is_open=False,
)
"""The classes by the name that `--data` takes."""


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig(Section):
    """The size of a batch of examples. Microbatches are formed automatically."""

    examples: AtLeast1 = 32
    """Examples per step."""


@dataclass(frozen=True, kw_only=True)
class PairsConfig(Section):
    """The size of a batch of pairs. Microbatches are formed automatically; a pair is never split."""

    pairs: AtLeast1 = 32
    """Pairs per step."""


@dataclass(frozen=True, kw_only=True)
class AnswerSampling(Section):
    """How answers to the problems of the run's task are sampled, in evaluations."""

    max_tokens: AtLeast0 = 0
    """Longest answer, in tokens; 0 = what the task needs, as far as the model's context allows."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the tokenizer's end-of-turn tokens."""

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError for empty stop texts. Ignores `user_settings`."""
        if "" in self.stop:
            raise ConfigError(
                "sampling.stop has an empty text, which would end every answer at once; remove it from --sampling.stop."
            )


def _never(names: tuple[str, ...], reason: str) -> Effect:
    """Returns the effect of settings of every run that do nothing in a kind of run."""
    return Effect(names, (), lambda config: False, reason)


def _keep_few_rollouts() -> SaveConfig:
    """Returns the default of `save`. What a step trained on is kept for the last steps only: it is the user's data."""
    return SaveConfig(rollouts=10)


_NO_TASK = "the run has no task; name one with --task"
_OF_BOTH_KINDS = (
    _never(("eval.turns",), "every sample of this kind of run has only one turn"),
    Effect(
        (
            *("eval.samples", "eval.temperature", "eval.split", "eval.validation_share"),
            *("sampling.max_tokens", "sampling.stop"),
            *("scoring.workers", "scoring.concurrency", "scoring.seconds", "scoring.retries"),
            *("scoring.env", "scoring.sandbox"),
        ),
        ("task",),
        lambda config: config.task is not None,
        f"nothing is sampled in its evaluations, because {_NO_TASK}",
    ),
    Effect(
        ("steps",),
        ("passes",),
        lambda config: not config.passes,
        "the length of the run is given in passes; write --passes 0 beside it",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SFT(RunConfig):
    """Supervised fine-tuning: imitate the assistant's messages in given conversations."""

    kind: ClassVar[str] = "sft"
    variants: ClassVar[tuple[str, ...]] = ("data", "task")
    optional_variants: ClassVar[tuple[str, ...]] = ("task",)
    added: ClassVar[tuple[str, ...]] = (*RunConfig.added, "eval", "loss", "passes", "sampling")

    data: Traces | Conversations | TaskAnswers = field(default_factory=Traces)
    task: Any = None
    """The task whose accuracy is measured: an instance of a registered task class, or None."""
    sampling: AnswerSampling = field(default_factory=AnswerSampling)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    batch: ExamplesConfig = field(default_factory=ExamplesConfig)
    save: SaveConfig = field(default_factory=_keep_few_rollouts)
    loss: Literal["assistant", "last", "all"] = "assistant"
    """What is imitated: every answer of the assistant, its last one, or all tokens. Plain text is always imitated."""
    passes: FiniteAtLeast0 = 0.0
    """Length of the run in passes over the data; 0 = it has --steps steps. The run records the number of steps."""

    effects: ClassVar[tuple[Effect, ...]] = (
        *_OF_BOTH_KINDS,
        Effect(
            ("save.keep_best",),
            ("task",),
            lambda config: config.task is not None,
            f"the best checkpoint is that of the best accuracy, and {_NO_TASK}",
        ),
        Effect(
            ("loss", "passes"),
            ("data",),
            lambda config: not isinstance(config.data, Traces),
            "--data traces are synthetic conversations without end, of which every answer is imitated; set --data "
            "conversations",
        ),
        Effect(
            ("system", "eval.every", "eval.problems"),
            ("data", "task"),
            lambda config: not isinstance(config.data, Traces) or config.task is not None,
            "--data traces are synthetic conversations with system messages of their own, and nothing is held out; set "
            "--data conversations, or name a task with --task",
        ),
        _never(("learner.prefix_sharing",), "an example has one answer, so no prompt can be shared"),
    )

    @property
    def is_evaluated(self) -> bool:
        """Whether the run is evaluated: on its task, if there is one."""
        return self.task is not None

    @property
    def has_splits(self) -> bool:
        """Whether evaluations are of a split of a task."""
        return self.task is not None

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if data, task and template do not fit, or a step has fewer examples than minibatches.

        Also if the warm-up is as long as the run or longer, but only if `optim.warmup` is in `user_settings`, the full
        names of the settings that the user gave.
        """
        super().check(user_settings)
        if self.task is not None:
            self.scoring.require_keys(self.task)
        if not isinstance(self.data, Traces | Conversations | TaskAnswers):
            raise ConfigError("an sft run learns from conversations: set --data conversations (or task, or traces).")
        if isinstance(self.data, TaskAnswers) and self.task is None:
            raise ConfigError("--data task imitates the right answers of a task; name it with --task.")
        if self.template == "text" and isinstance(self.data, Traces):
            raise ConfigError(
                f"template is {self.template}, but the examples are conversations, which need a chat template. "
                "Set --template chat."
            )
        _check_minibatches(self, self.batch.examples, "batch.examples")


@dataclass(frozen=True, kw_only=True)
class DPO(RunConfig):
    """Preference optimisation: make the better of two answers more likely than the worse one."""

    kind: ClassVar[str] = "dpo"
    variants: ClassVar[tuple[str, ...]] = ("data", "loss", "task")
    optional_variants: ClassVar[tuple[str, ...]] = ("task",)
    added: ClassVar[tuple[str, ...]] = (*RunConfig.added, "sampling")

    data: PairRows | SumPairs = field(default_factory=PairRows)
    task: Any = None
    """The task whose accuracy is measured: an instance of a registered task class. None = that of held-out pairs is."""
    sampling: AnswerSampling = field(default_factory=AnswerSampling)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    batch: PairsConfig = field(default_factory=PairsConfig)
    save: SaveConfig = field(default_factory=_keep_few_rollouts)
    loss: PairLoss = field(default_factory=Sigmoid)
    reference: Literal["copy", "stored"] = "copy"
    """Where log-probabilities of the reference come from: copy = a frozen copy of the model (with adapters: the model
    without them); stored = they are computed once, before training, and kept in a file. No copy is kept in memory."""
    passes: FiniteAtLeast0 = 0.0
    """Length of the run in passes over the data; 0 = it has --steps steps. The run records the number of steps."""

    effects: ClassVar[tuple[Effect, ...]] = (
        *_OF_BOTH_KINDS,
        Effect(
            ("reference",),
            ("loss",),
            lambda config: config.loss.has_reference,
            "this loss has no reference; set --loss sigmoid, ipo, hinge or robust",
        ),
    )

    @property
    def has_splits(self) -> bool:
        """Whether evaluations are of a split of a task. Held-out pairs are of none."""
        return self.task is not None

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if the data are no pairs, or if there are more minibatches than pairs per step.

        `user_settings` is as in `SFT.check`.
        """
        super().check(user_settings)
        if self.task is not None:
            self.scoring.require_keys(self.task)
        if not isinstance(self.data, PairRows | SumPairs):
            raise ConfigError("a dpo run learns from pairs of answers: set --data pairs (or sum_pairs).")
        _check_minibatches(self, self.batch.pairs, "batch.pairs")


def _check_minibatches(config: RunConfig, size: int, name: str) -> None:
    """Raises a ConfigError if a step has fewer examples than minibatches. `name` is the setting of its size."""
    if config.learner.minibatches > size:
        raise ConfigError(
            f"learner.minibatches is {config.learner.minibatches}, but a step has only {size} {name.partition('.')[2]} "
            f"({name}) to divide. "
            f"Lower --learner.minibatches or raise --{name}."
        )


def describe_long_warmup(config: RunConfig) -> str:
    """Returns a warning if the warm-up covers half of the run's optimizer steps or more; else ""."""
    warmup, updates = config.optim.warmup, config.steps * config.learner.updates_per_batch
    if 2 * warmup < updates or not warmup:
        return ""
    return (
        f"optim.warmup is {warmup}, and the run makes only {updates} optimizer steps: for at least half of them the "
        "learning rate is below optim.lr. Set --optim.warmup 0, or train longer (--steps, --passes)"
    )
