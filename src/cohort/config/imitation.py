"""The kinds of run that learn from given answers: supervised fine-tuning (SFT) and preference optimisation (DPO).

`DATA` maps the names of `--data` to the classes that say where the examples come from.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cohort.config.preferences import PairLoss, Sigmoid
from cohort.config.schema import RunConfig, SaveConfig
from cohort.config.section import AtLeast0, AtLeast1, BelowOne, Effect, FiniteAtLeast0, Section, Text
from cohort.errors import ConfigError
from cohort.registry import Registry
from cohort.tasks.traces.styles import Mix


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
    columns: tuple[str, ...] = ()
    """Columns that have another name in the file, as ours=theirs."""
    max_tokens: AtLeast0 = 0
    """Limit of tokens, prompt included; 0 = what the context of the model and the token budget allow."""
    too_long: Literal["error", "skip", "cut"] = "error"
    """What becomes of longer ones: error = the run does not start, skip = they are left out, cut = they lose their end.
    The numbers are shown."""
    held_out: BelowOne = 0.05
    """Share of the rows that is held out, where the path has no {split}. A hash of the question decides; 0 = none."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("held_out",),
            ("path",),
            lambda data: "{split}" not in data.path,
            "the path has {split}, so the rows of the test file are held out",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Conversations(ExampleRows):
    """Conversations of a file: messages, ShareGPT, prompt and completion, Alpaca, or plain text."""

    format: Literal["auto", "messages", "sharegpt", "prompt", "alpaca", "text"] = "auto"
    """The format of the rows; auto = each row shows it by its columns."""


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
    {"traces": Traces, "conversations": Conversations, "pairs": PairRows, "sum_pairs": SumPairs},
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


def _never(names: tuple[str, ...], reason: str) -> Effect:
    """Returns the effect of settings of every run that do nothing in a kind of run."""
    return Effect(names, (), lambda config: False, reason)


def _keep_few_rollouts() -> SaveConfig:
    """Returns the default of `save`. What a step trained on is kept for the last steps only: it is the user's data."""
    return SaveConfig(rollouts=10)


_NOT_SAMPLED = (
    _never(
        ("eval.samples", "eval.temperature", "eval.turns", "eval.split", "eval.validation_share"),
        "nothing is sampled in evaluations of this kind of run (measure its model with cohort eval)",
    ),
    Effect(
        ("steps",),
        ("passes",),
        lambda config: not config.passes,
        "the length of the run is given in passes; remove --passes or --steps",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SFT(RunConfig):
    """Supervised fine-tuning: imitate the assistant's messages in given conversations."""

    kind: ClassVar[str] = "sft"
    variants: ClassVar[tuple[str, ...]] = ("data",)
    has_accuracy: ClassVar[bool] = False
    has_splits: ClassVar[bool] = False
    added: ClassVar[tuple[str, ...]] = (*RunConfig.added, "eval", "loss", "passes")

    data: Traces | Conversations = field(default_factory=Traces)
    batch: ExamplesConfig = field(default_factory=ExamplesConfig)
    save: SaveConfig = field(default_factory=_keep_few_rollouts)
    loss: Literal["assistant", "last", "all"] = "assistant"
    """What is imitated: every answer of the assistant, its last one, or all tokens. Plain text is always imitated."""
    passes: FiniteAtLeast0 = 0.0
    """Length of the run in passes over the data; 0 = it has --steps steps. The run records the number of steps."""

    effects: ClassVar[tuple[Effect, ...]] = (
        *_NOT_SAMPLED,
        _never(("save.keep_best",), "the best checkpoint is that of the best accuracy, which an sft run does not have"),
        Effect(
            ("system", "loss", "passes", "eval.every", "eval.problems"),
            ("data",),
            lambda config: not isinstance(config.data, Traces),
            "--data traces are synthetic conversations without end, with system messages of their own, and nothing is "
            "held out; set --data conversations",
        ),
        _never(("learner.prefix_sharing",), "an example has one answer, so no prompt can be shared"),
    )

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if data and template do not fit, or a step has fewer examples than minibatches.

        Also if the warm-up is as long as the run or longer, but only if `optim.warmup` is in `user_settings`, the full
        names of the settings that the user gave.
        """
        super().check(user_settings)
        if not isinstance(self.data, Traces | Conversations):
            raise ConfigError("an sft run learns from conversations: set --data conversations (or traces).")
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
    variants: ClassVar[tuple[str, ...]] = ("data", "loss")
    has_splits: ClassVar[bool] = False

    data: PairRows | SumPairs = field(default_factory=PairRows)
    batch: PairsConfig = field(default_factory=PairsConfig)
    save: SaveConfig = field(default_factory=_keep_few_rollouts)
    loss: PairLoss = field(default_factory=Sigmoid)
    reference: Literal["copy", "stored"] = "copy"
    """Where log-probabilities of the reference come from: copy = a frozen copy of the model (with adapters: the model
    without them); stored = they are computed once at the start, and no copy is kept in memory."""
    passes: FiniteAtLeast0 = 0.0
    """Length of the run in passes over the data; 0 = it has --steps steps. The run records the number of steps."""

    effects: ClassVar[tuple[Effect, ...]] = (
        *_NOT_SAMPLED,
        Effect(
            ("reference",),
            ("loss",),
            lambda config: config.loss.has_reference,
            "this loss has no reference; set --loss sigmoid, ipo, hinge or robust",
        ),
    )

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if the data are no pairs, or if there are more minibatches than pairs per step.

        `user_settings` is as in `SFT.check`.
        """
        super().check(user_settings)
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
