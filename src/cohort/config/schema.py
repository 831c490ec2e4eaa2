"""The settings of a run as typed classes, one per section, and `RunConfig`, which has the settings of every run.

A recipe returns a config of one kind (`cohort.config.kinds`). The run stores it in its config.yaml. The rules here: a
class has at most 12 settings, besides its sections; a value that can be computed is no field; of a section with
variants only the chosen one exists, so that settings of the others cannot be written. Bounds and rules are declared
beside the fields that they are about (`cohort.config.section`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from cohort.config.algos import ALGOS, GRPO, DrGRPO, Policy
from cohort.config.engines import ENGINES, NativeEngine
from cohort.config.rollout import RolloutConfig
from cohort.config.section import (
    FINITE,
    MAX_BATCH,
    AtLeast0,
    AtLeast1,
    BelowOne,
    Date,
    Effect,
    Finite,
    FiniteAbove0,
    FiniteAtLeast0,
    InnerShare,
    Samples,
    Section,
    Seed,
    Share,
    Temperature,
    TemperatureOr0,
    Template,
    Text,
    Threads,
    TopK,
    TopP,
    above,
    at_least,
    at_most,
)
from cohort.errors import ConfigError, suggest_name

__all__ = ["ALGOS", "ENGINES", "GRPO", "DrGRPO", "NativeEngine", "Policy", "RolloutConfig", "RunConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """The size of a batch: prompts per step x samples per prompt. Microbatches are formed automatically."""

    prompts: Annotated[int, at_least(1), at_most(1_000_000)] = 32
    """Prompts per step."""
    samples: Samples = 8
    """Samples per prompt, which together form a group."""
    too_long: Literal["error", "skip"] = "error"
    """If a prompt leaves no room for its completion: error = stop, skip = leave it out and report how many were."""

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if a batch has too many samples. Ignores `user_settings`."""
        if self.prompts * self.samples > MAX_BATCH:
            raise ConfigError(
                f"batch.prompts is {self.prompts} and batch.samples is {self.samples}, together more than "
                f"{MAX_BATCH:,} samples per step. Lower --batch.prompts or --batch.samples."
            )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """How completions are sampled in training."""

    max_tokens: AtLeast1 = 256
    """Longest completion, in tokens; a longer one is cut and its finish reason is `length`."""
    temperature: Temperature = 1.0
    """Divisor of the logits in sampling: larger = more random. The learner divides its logits by the same number."""
    top_p: TopP = 1.0
    """Sample from the most probable tokens that together have this probability; 1 = from all. Below 1 the policy that
    samples is not the one that is trained, so it needs allow_truncation."""
    top_k: TopK = 0
    """Sample from the k most probable tokens; 0 = from all. Above 0 it needs allow_truncation."""
    min_p: BelowOne = 0.0
    """Leave out tokens less probable than min_p x the most probable one; 0 = none. Above 0 it needs
    allow_truncation."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the tokenizer's end-of-turn tokens."""
    allow_truncation: bool = False
    """Permit top_p, top_k and min_p in training; the probability mass that they keep is recorded."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("allow_truncation",),
            ("top_p", "top_k", "min_p"),
            lambda sampling: sampling.truncates_distribution,
            "no token is left out; set --sampling.top-p, --sampling.top-k or --sampling.min-p",
        ),
    )

    @property
    def truncates_distribution(self) -> bool:
        """Whether top_p, top_k or min_p is on, so that some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError for top_p, top_k or min_p without `allow_truncation`, and for empty stop strings.

        Ignores `user_settings`.
        """
        if self.truncates_distribution and not self.allow_truncation:
            raise ConfigError(
                f"sampling.top_p is {self.top_p}, top_k is {self.top_k} and min_p is {self.min_p}, so the policy "
                "that samples is not the one that is trained. Set --sampling.top-p 1 --sampling.top-k 0 "
                "--sampling.min-p 0, or, with Cohort's own engine, add --sampling.allow-truncation True."
            )
        if "" in self.stop:
            raise ConfigError(
                "sampling.stop has an empty string, which would end every completion at once; remove it from "
                "--sampling.stop."
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """The optimizer: AdamW with fp32 master weights and moments."""

    lr: Annotated[float, FINITE, at_least(0), at_most(10)] = 1e-6
    """Learning rate after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant = it stays, linear or cosine = it decays to lr_floor x lr at the last
    step."""
    warmup: AtLeast0 = 0
    """Optimizer steps over which the learning rate rises linearly from 0; 0 = no warm-up."""
    lr_floor: Share = 0.0
    """Learning rate at the end of the schedule, as a share of lr."""
    beta1: BelowOne = 0.9
    """Decay of AdamW's first moment per optimizer step."""
    beta2: BelowOne = 0.999
    """Decay of AdamW's second moment per optimizer step."""
    eps: Annotated[float, FINITE, above(0), at_least(1e-30), at_most(1)] = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    weight_decay: FiniteAtLeast0 = 0.0
    """AdamW's weight decay; 0 = none."""
    clip_norm: FiniteAtLeast0 = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 = gradients are not clipped."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("lr_floor",),
            ("schedule",),
            lambda optim: optim.schedule != "constant",
            "optim.schedule is constant; set --optim.schedule linear or cosine",
        ),
    )


# The matrices of a layer that can have adapters, by their names in model files.
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): of W + alpha / rank * B A only A and B are trained."""

    rank: Annotated[int, at_least(0), at_most(4_096)] = 0
    """Rank of the adapters; 0 = no adapters, all weights are trained."""
    alpha: FiniteAbove0 = 32.0
    """The product B A of an adapter is multiplied by alpha / rank."""
    targets: tuple[Target, ...] = TARGETS
    """The matrices of each layer that get an adapter."""
    base: Literal["keep", "nf4"] = "keep"
    """Storage of the frozen matrices under the adapters: keep = unchanged, nf4 = rounded to 4 bits (QLoRA,
    arXiv:2305.14314)."""
    load: str = ""
    """Folder of adapters in PEFT format to start from; they determine rank, alpha and targets. Empty = new adapters."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("alpha", "targets", "base"),
            ("rank", "load"),
            lambda lora: lora.is_on,
            "there are no adapters; set --learner.lora.rank above 0",
        ),
        # Adapters from a folder have their own rank, alpha and targets.
        Effect(
            ("rank", "alpha", "targets"),
            ("load",),
            lambda lora: lora.load == "",
            "the adapters in --learner.lora.load have their own value; remove --learner.lora.load",
        ),
    )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained instead of all weights: `rank` is above 0, or `load` names a folder."""
        return self.rank > 0 or self.load != ""

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError unless `targets` has at least one matrix, only known ones and each once.

        `targets` is checked even if there are no adapters. Ignores `user_settings`.
        """
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                f"learner.lora.targets is {list(self.targets)}; name one matrix or more, each once, after "
                "--learner.lora.targets, or remove it."
            )
        # The command line checks the names already. A recipe in Python can contain any text.
        for target in self.targets:
            if target not in TARGETS:
                raise ConfigError(
                    f'learner.lora.targets: unknown matrix "{target}".{suggest_name(target, TARGETS)} Correct the name '
                    "in the recipe."
                )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Section):
    """How a batch is turned into an update of the weights."""

    epochs: Annotated[int, at_least(1), at_most(10_000)] = 1
    """Passes over each batch."""
    minibatches: AtLeast1 = 1
    """Minibatches that a batch is divided into, with one optimizer step each per pass."""
    token_budget: AtLeast0 = 0
    """Most tokens in one forward and backward pass; it changes memory and speed, never the result. 0 = 2048 on a CPU,
    as many as fit into memory on a GPU."""
    prefix_sharing: bool = True
    """Compute a group's prompt once per group instead of once per sample; it changes speed, never the result."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number type of the computation: auto = bfloat16 on a GPU, float32 on a CPU; float64 is for tests. Master weights,
    moments and gradients are fp32 in any case except float64."""
    shard: Literal["auto", "none", "optimizer", "full"] = "auto"
    """What several ranks divide among them: none = nothing, optimizer = master weights and moments, full = the weights
    and gradients too; auto = none, or the first of these that fits into memory."""
    tensor: Annotated[int, at_least(1), at_most(64)] = 1
    """Ranks that hold one model together, each a part of every matrix; it must divide the number of ranks."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def updates_per_batch(self) -> int:
        """Number of optimizer steps per batch: epochs x minibatches."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, kw_only=True)
class SingleTurn(Section):
    """One prompt and one completion per sample."""


@dataclass(frozen=True, kw_only=True)
class ThinkAgain(Section):
    """After a low reward a user's turn asks for another attempt. The last attempt is the one whose score counts."""

    attempts: Annotated[int, at_least(1), at_most(1_000)] = 1
    """Most further attempts per sample."""
    below: Finite = 0.1
    """Largest reward after which another attempt follows."""
    max_tokens: AtLeast0 = 0
    """Longest further attempt, in tokens; 0 = sampling.max_tokens."""
    cost: FiniteAtLeast0 = 0.0
    """Amount subtracted from the reward for each further attempt; 0 = nothing."""
    words: tuple[str, ...] = (
        "That does not look right. Think again and give your final answer.",
        "Check your work step by step, then answer again in the same format.",
        "Are you sure? Go through it once more and answer again.",
    )
    """Texts for the user's turn; each time one of them is drawn."""

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if there is no text for the user's turn, or one that is empty or only white space.

        Ignores `user_settings`.
        """
        if not self.words or not all(words.strip() for words in self.words):
            raise ConfigError(
                f"turns.words is {list(self.words)}; it needs one text or more, none of them empty or only spaces. "
                "Write the texts after --turns.words, each in quotes."
            )


@dataclass(frozen=True, kw_only=True)
class Conversation(Section):
    """Turns of tasks with tools or an environment: the model calls tools and is answered until it is done."""

    max_turns: Annotated[int, at_least(1), at_most(1_000)] = 8
    """Most turns of the model per sample. sampling.max_tokens is the limit of each."""
    max_calls: Annotated[int, at_least(1), at_most(10_000)] = 16
    """Most calls of tools per sample."""
    max_total: AtLeast0 = 0
    """Most tokens per sample after the prompt, replies included; 0 = what the context and the token budget allow."""
    max_characters: Annotated[int, at_least(1), at_most(1_000_000)] = 2_000
    """Most characters of a tool's result that the model is shown; the rest is cut."""
    seconds: Annotated[float, at_least(0.001), at_most(3_600)] = 5.0
    """Time for the calls of one turn. A tool that takes longer is stopped, and the model is told."""
    format: Literal["auto", "hermes", "llama3", "tags"] = "auto"
    """How the model writes calls: hermes = <tool_call>{...}</tool_call>, llama3 = a JSON object, tags =
    <tool:NAME>...</tool>, described in the system prompt; auto = by the model's chat template."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Section):
    """Groups of earlier steps that are trained on again. The policy has changed since, so it needs algo.correction."""

    prompts: AtLeast0 = 0
    """Groups of earlier steps that are added to each batch; 0 = none."""
    steps: AtLeast1 = 4
    """Largest age of such a group, in steps."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("steps",),
            ("prompts",),
            lambda replay: replay.is_on,
            "replay.prompts is 0; set --replay.prompts above 0",
        ),
    )

    @property
    def is_on(self) -> bool:
        """Whether groups of earlier steps are used at all, that is, `prompts` is above 0."""
        return self.prompts > 0


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluations on the held-out split, before, during and after training."""

    every: AtLeast0 = 0
    """Steps between evaluations; 0 = only before the first step and after the last one."""
    problems: AtLeast0 = 0
    """Number of held-out problems; 0 = all of them."""
    samples: Samples = 1
    """Samples per problem."""
    temperature: TemperatureOr0 = 1.0
    """Divisor of the logits in sampling; 0 = the most probable token (greedy)."""
    turns: Literal["first", "all"] = "first"
    """first = only the first attempt of a sample counts; all = further attempts follow as in training (see --turns)."""
    split: Literal["test", "validation"] = "test"
    """The problems: test = the task's test rows, validation = some of its training rows, which are then not trained
    on. With validation the best checkpoint is chosen without a look at the test rows."""
    validation_share: InnerShare = 0.1
    """Share of the training rows that the validation split gets. A hash of a row's id decides."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("samples",),
            ("temperature",),
            lambda evaluation: evaluation.temperature > 0 or evaluation.samples == 1,
            "at temperature 0 all samples of a problem are equal; set --eval.temperature above 0",
        ),
        Effect(
            ("validation_share",),
            ("split",),
            lambda evaluation: evaluation.split == "validation",
            "the problems are test rows; set --eval.split validation",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SaveConfig(Section):
    """The files of a run that are written and kept."""

    every: AtLeast1 = 20
    """Steps between checkpoints; one is always written at the end."""
    keep_last: AtLeast1 = 2
    """Number of newest checkpoints that are kept; older ones are removed."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out accuracy or reward."""
    rollouts: AtLeast0 = 0
    """Number of last steps whose rollout files are kept; 0 = those of all steps."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The settings of every run. A run always has a kind, which adds its own settings: `RL` or `SFT`."""

    # The name of the kind in config.yaml.
    kind: ClassVar[str]
    # The fields whose class is chosen by name, such as the algorithm.
    variants: ClassVar[tuple[str, ...]] = ()
    # Those of them that may be None, which is called "none" on a command line and is not written to config.yaml.
    optional_variants: ClassVar[tuple[str, ...]] = ()
    # The settings outside of sections that earlier files of this format do not have. Their defaults give what was then.
    added: ClassVar[tuple[str, ...]] = ("date", "system")
    # The sections that files of format 1 do not have, with the settings that give what Cohort did at that time.
    since_format_1: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    recipe: str = ""
    """Name of the recipe that returned this config; the loader sets it."""
    model: str = "tiny"
    """The model to train: a bundled or pulled name (see `cohort models`), a folder in Hugging Face format, owner/name
    on the Hugging Face hub, or a checkpoint of a run: RUN (its last), RUN@STEP, RUN@best."""
    steps: AtLeast1 = 100
    """Number of training steps."""
    seed: Seed = 0
    """Seed of all random choices of the run."""
    threads: Threads = 0
    """Number of CPU threads; 0 = all cores. It is stored in checkpoints, because the rounding of sums depends on it."""
    template: Template = "chat"
    """How prompts are rendered: chat = by the model's chat template, text = as raw text, for base models, FILE.jinja =
    by the chat template in this file."""
    system: Text = ""
    """System prompt: a text that is put before the messages of every prompt; empty = none besides the task's own."""
    date: Date = ""
    """The day, as 2026-01-31, that chat templates which ask for it see as today; empty = the day on which the run
    starts. The run records it, so that its prompts stay the same."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to sample and train: auto = on a GPU if torch finds one. The run records the choice and resumes there."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    def __new__(cls, **settings: Any) -> Self:
        # Recipes from before there were kinds return RunConfig(...). Without this they would fail later and unclearly.
        if cls is RunConfig:
            raise ConfigError(
                "RunConfig(...) has no kind, but every run needs one. Write RL(...) or SFT(...) instead in the recipe."
            )
        return super().__new__(cls)

    @property
    def is_evaluated(self) -> bool:
        """Whether the run is evaluated, if there are held-out rows."""
        return True

    @property
    def measure(self) -> str:
        """What evaluations measure: "accuracy", or "reward" where the task has no accuracy."""
        return "reward" if getattr(getattr(self, "task", None), "accuracy", "") is None else "accuracy"

    @property
    def has_splits(self) -> bool:
        """Whether evaluations are of a split of a task, which the user chooses."""
        return True

    def require_complete(self) -> None:
        """Raises a ConfigError if something is missing on which the list of flags depends, such as the task.

        This base method does nothing and raises nothing; a kind of run can override it.
        """

    def make_flag_records(self) -> dict[str, Any]:
        """Returns a dataclass instance for each field that is a dict, by field name, so that its keys become flags.

        An example is `reward`, whose keys are the reward parts of the task. This base method returns {}.
        """
        return {}

    def replace_variant(self, name: str, value: Any) -> Self:
        """Returns a copy of the config with `value` in the field `name`, such as another algorithm in `algo`.

        Nothing is checked. A kind of run can override it, to reset settings that fitted only the former value.
        """
        return replace(self, **{name: value})

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if the user asked for a warm-up or a number of steps that is too long for the run.

        The warm-up must be shorter than the run; `eval.every` and `save.every` may be as long. `user_settings` are the
        full names of the settings that the user gave. Only these are checked: those of a recipe may be too long.
        Nothing is checked where the length is given in passes over data that are not read yet.
        """
        if getattr(self, "passes", 0.0):
            return
        for name, every in (("eval.every", self.eval.every), ("save.every", self.save.every)):
            if name in user_settings and every > self.steps:
                raise ConfigError(
                    f"{name} is {every}, but the run has only {self.steps} steps, so it would have no effect. Lower "
                    f"--{name} to at most {self.steps}, raise --steps, or remove --{name}."
                )
        updates = self.steps * self.learner.updates_per_batch
        if "optim.warmup" in user_settings and self.optim.warmup >= updates:
            raise ConfigError(
                f"optim.warmup is {self.optim.warmup}, but the run makes only {updates} optimizer steps, so it would "
                f"never reach its learning rate. Set --optim.warmup below {updates}."
            )


TURNS: dict[str, type] = {"single": SingleTurn, "think_again": ThinkAgain, "conversation": Conversation}
