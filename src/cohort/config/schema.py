"""The settings of a run, typed, section by section, and `RunConfig`: what every run has, whatever its kind.

A recipe returns a config of a kind (`cohort.config.kinds`); the resolved one is written to the run. A class has at most
12 fields; a value that can be computed is not a field; only the chosen variant of a section exists, so a setting that
has no effect cannot be written. Bounds and rules stand beside the fields they speak of (`cohort.config.section`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from cohort.config.algos import ALGOS, GRPO, DrGRPO, Policy
from cohort.config.engines import ENGINES, NativeEngine
from cohort.config.rollout import RolloutConfig
from cohort.config.section import (
    AtLeast0,
    AtLeast1,
    BelowOne,
    Bound,
    Effect,
    Finite,
    FiniteAbove0,
    FiniteAtLeast0,
    Section,
    Share,
)
from cohort.errors import ConfigError, nearest

__all__ = ["ALGOS", "ENGINES", "GRPO", "DrGRPO", "NativeEngine", "Policy", "RolloutConfig", "RunConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """One batch concept: prompts per step x samples per prompt. Micro-batching is automatic."""

    prompts: AtLeast1 = 32
    """Prompts per step."""
    samples: AtLeast1 = 8
    """Samples per prompt: the group."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """How the policy acts in training."""

    max_tokens: AtLeast1 = 256
    """Longest completion; a longer one is cut and finishes with `length`."""
    temperature: FiniteAbove0 = 1.0
    """The learner divides its logits by the same temperature."""
    top_p: Annotated[float, Bound("above 0 and at most 1", lambda x: 0 < x <= 1)] = 1.0
    """Below 1 the policy that acts is not the one that is trained: needs allow_truncation."""
    top_k: AtLeast0 = 0
    """0 = off; otherwise as top_p."""
    min_p: BelowOne = 0.0
    """0 = off; otherwise as top_p."""
    stop: tuple[str, ...] = ()
    """Stop strings, besides the tokenizer's end-of-turn ids."""
    allow_truncation: bool = False
    """Permit top-p/top-k/min-p in training; the kept probability mass is recorded."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("allow_truncation",),
            ("top_p", "top_k", "min_p"),
            lambda sampling: sampling.truncates,
            "nothing is truncated; set --sampling.top-p, --sampling.top-k or --sampling.min-p",
        ),
    )

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def check(self, given: Collection[str]) -> None:
        if self.truncates and not self.allow_truncation:
            raise ConfigError(
                "top-p, top-k and min-p make the policy that acts differ from the one that is trained; "
                "remove them or add --sampling.allow-truncation True."
            )
        if "" in self.stop:
            raise ConfigError("sampling.stop holds an empty string, which would stop at once; remove it.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """AdamW with fp32 master weights and moments."""

    lr: FiniteAtLeast0 = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or decay to lr_floor x lr at the last step."""
    warmup: AtLeast0 = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    lr_floor: Share = 0.0
    """Final learning rate as a share of lr."""
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.999
    eps: FiniteAbove0 = 1e-8
    weight_decay: FiniteAtLeast0 = 0.0
    clip_norm: FiniteAtLeast0 = 1.0
    """Largest global gradient norm; 0 = off."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("lr_floor",),
            ("schedule",),
            lambda optim: optim.schedule != "constant",
            "the schedule is constant; set --optim.schedule linear or cosine",
        ),
    )


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): of W + alpha / rank * B A only A and B are trained."""

    rank: AtLeast0 = 0
    """0 = no adapters: every weight is trained."""
    alpha: FiniteAbove0 = 32.0
    """The adapters' product is multiplied by alpha / rank."""
    targets: tuple[Target, ...] = TARGETS
    """Which matrices of each layer get adapters."""
    base: Literal["keep", "nf4"] = "keep"
    """How their frozen weights are kept: as they are, or in 4 bits (QLoRA, arXiv:2305.14314), which rounds them."""
    load: str = ""
    """Start from the adapters in this folder (PEFT format), which brings rank, alpha and targets."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("alpha", "targets", "base"),
            ("rank", "load"),
            lambda lora: lora.on,
            "there are no adapters; set --learner.lora.rank above 0",
        ),
        Effect(
            ("rank", "alpha", "targets"),
            ("load",),
            lambda lora: lora.load == "",
            "it comes with the adapters of --learner.lora.load",
        ),
    )

    @property
    def on(self) -> bool:
        return self.rank > 0 or self.load != ""

    def check(self, given: Collection[str]) -> None:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"learner.lora.targets is {list(self.targets)}; name one matrix or more, each once.")
        for target in self.targets:
            if target not in TARGETS:
                raise ConfigError(f'learner.lora.targets has no "{target}".{nearest(target, TARGETS)}')


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Section):
    """How a batch becomes an update."""

    epochs: AtLeast1 = 1
    """Passes over each batch of rollouts."""
    minibatches: AtLeast1 = 1
    """Optimizer steps per pass."""
    token_budget: AtLeast0 = 0
    """Most tokens in one forward/backward; changes memory and speed, never the result. 0 = 2048 on a CPU, what fits
    into the memory of a GPU."""
    prefix_sharing: bool = True
    """Train a group's prompt once instead of once a sample; changes speed, never the result."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute type; master weights, moments and gradients stay fp32 (float64 for tests). auto = bfloat16 on a GPU,
    float32 on a CPU."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def updates(self) -> int:
        """Optimizer steps per batch."""
        return self.epochs * self.minibatches


@dataclass(frozen=True, kw_only=True)
class SingleTurn(Section):
    """One prompt, one answer."""


@dataclass(frozen=True, kw_only=True)
class ThinkAgain(Section):
    """A low reward is answered by a user's turn that asks for another attempt, which is then scored instead."""

    attempts: AtLeast1 = 1
    """Further attempts at most."""
    below: Finite = 0.1
    """The reward at or under which there is another."""
    max_tokens: AtLeast0 = 0
    """Longest further attempt; 0 = sampling.max_tokens."""
    cost: FiniteAtLeast0 = 0.0
    """What each further attempt takes from the reward."""
    words: tuple[str, ...] = (
        "That does not look right. Think again and give your final answer.",
        "Check your work step by step, then answer again in the same format.",
        "Are you sure? Go through it once more and answer again.",
    )
    """The user's turn is one of these."""

    def check(self, given: Collection[str]) -> None:
        if not self.words or not all(words.strip() for words in self.words):
            raise ConfigError("turns.words must be one text or more, none of them empty.")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Section):
    """Rollouts used again. The policy has moved on since, so this needs algo.correction."""

    prompts: AtLeast0 = 0
    """Groups of earlier steps that join each batch; 0 = none."""
    steps: AtLeast1 = 4
    """How many steps old they may be at most."""

    optional: ClassVar[bool] = True
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("steps",),
            ("prompts",),
            lambda replay: replay.on,
            "nothing is used again; set --replay.prompts above 0",
        ),
    )

    @property
    def on(self) -> bool:
        return self.prompts > 0


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluation before, during and after training, on the held-out split."""

    every: AtLeast0 = 0
    """Steps between evaluations; 0 = only before the first and after the last step."""
    problems: AtLeast0 = 0
    """How many held-out problems; 0 = all of them."""
    samples: AtLeast1 = 1
    """Samples per problem."""
    temperature: FiniteAtLeast0 = 1.0
    turns: Literal["first", "all"] = "first"
    """first = the first attempt counts, whatever `turns` trains; all = as in training."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            ("samples",),
            ("temperature",),
            lambda evaluation: evaluation.temperature > 0 or evaluation.samples == 1,
            "at temperature 0 all samples of a problem are equal; set --eval.temperature above 0",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SaveConfig(Section):
    """What is kept on disk."""

    every: AtLeast1 = 20
    """Steps between checkpoints; one is always written at the end."""
    keep_last: AtLeast1 = 2
    """Older checkpoints are removed."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out accuracy besides."""
    rollouts: AtLeast0 = 0
    """Keep the rollout files of the last N steps; 0 = all."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """What every run has. A run is always of a kind, which adds its own: `RL` or `SFT`."""

    kind: ClassVar[str]
    variants: ClassVar[tuple[str, ...]] = ()  # its fields whose class is chosen by name
    unused: ClassVar[tuple[str, ...]] = ()  # its fields that do nothing in this kind, and are not written
    since_format_1: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # sections that came later: what was done before

    recipe: str = ""
    """Name of the recipe this came from; filled in by the loader."""
    model: str = "tiny"
    """A bundled or pulled name (see `cohort models`), a folder in Hugging Face format, or owner/name on its hub."""
    steps: AtLeast1 = 100
    """Training steps."""
    seed: AtLeast0 = 0
    threads: AtLeast0 = 0
    """CPU threads; 0 = all cores. Part of the checkpoint: sums depend on it."""
    template: Literal["chat", "text"] = "chat"
    """How prompts are rendered: by the model's chat template, or as raw text (for base models)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to sample and train; auto = on a GPU if torch sees one. The run records which, and goes on there."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    def __new__(cls, **settings: Any) -> Self:
        if cls is RunConfig:
            raise ConfigError("RunConfig is what every kind of run has: write RL(...) instead, or SFT(...).")
        return super().__new__(cls)

    def require_complete(self) -> None:
        """Raise a ConfigError where something is missing without which the config cannot even be read."""

    def records(self) -> dict[str, Any]:
        """The fields that are dicts, as records: their settings depend on other fields, and become flags."""
        return {}

    def with_variant(self, name: str, value: Any) -> Self:
        """With another variant of the field `name`, and without what was set for the former one."""
        return replace(self, **{name: value})

    def check(self, given: Collection[str]) -> None:
        updates = self.steps * self.learner.updates
        if "optim.warmup" in given and self.optim.warmup >= updates:
            raise ConfigError(
                f"optim.warmup is {self.optim.warmup}, but the run makes only {updates} optimizer steps: "
                "the learning rate would never be reached; lower --optim.warmup."
            )


TURNS: dict[str, type] = {"single": SingleTurn, "think_again": ThinkAgain}
