"""Every setting of a run, typed. A recipe returns one `RunConfig`; the resolved one is written to the run.

Rules: at most about 80 leaves in all and 12 a class; a value that can be computed is not a field; only the
chosen variant of `task`, `turns`, `engine` and `algo` exists, so a setting that has no effect cannot be written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cohort.config.algos import ALGOS, GRPO, DrGRPO, Policy
from cohort.config.engines import ENGINES, EngineConfig, NativeEngine
from cohort.config.rollout import RolloutConfig

__all__ = ["ALGOS", "ENGINES", "GRPO", "DrGRPO", "NativeEngine", "Policy", "RunConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """One batch concept: prompts per step x samples per prompt. Micro-batching is automatic."""

    prompts: int = 32
    """Prompts per step."""
    samples: int = 8
    """Samples per prompt: the group."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the policy acts in training."""

    max_tokens: int = 256
    """Longest completion; a longer one is cut and finishes with `length`."""
    temperature: float = 1.0
    """The learner divides its logits by the same temperature."""
    top_p: float = 1.0
    """Below 1 the policy that acts is not the one that is trained: needs allow_truncation."""
    top_k: int = 0
    """0 = off; otherwise as top_p."""
    min_p: float = 0.0
    """0 = off; otherwise as top_p."""
    stop: tuple[str, ...] = ()
    """Stop strings, besides the tokenizer's end-of-turn ids."""
    allow_truncation: bool = False
    """Permit top-p/top-k/min-p in training; the kept probability mass is recorded."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with fp32 master weights and moments."""

    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or decay to lr_floor x lr at the last step."""
    warmup: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    lr_floor: float = 0.0
    """Final learning rate as a share of lr."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 = off."""


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): of W + alpha / rank * B A only A and B are trained."""

    rank: int = 0
    """0 = no adapters: every weight is trained."""
    alpha: float = 32.0
    """The adapters' product is multiplied by alpha / rank."""
    targets: tuple[Target, ...] = TARGETS
    """Which matrices of each layer get adapters."""
    base: Literal["keep", "nf4"] = "keep"
    """How their frozen weights are kept: as they are, or in 4 bits (QLoRA, arXiv:2305.14314), which rounds them."""
    load: str = ""
    """Start from the adapters in this folder (PEFT format), which brings rank, alpha and targets."""

    @property
    def on(self) -> bool:
        return self.rank > 0 or self.load != ""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How a batch becomes an update."""

    epochs: int = 1
    """Passes over each batch of rollouts."""
    minibatches: int = 1
    """Optimizer steps per pass."""
    token_budget: int = 0
    """Most tokens in one forward/backward; changes memory and speed, never the result. 0 = 2048 on a CPU, what fits
    into the memory of a GPU."""
    prefix_sharing: bool = True
    """Train a group's prompt once instead of once a sample; changes speed, never the result."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Compute type; master weights, moments and gradients stay fp32 (float64 for tests). auto = bfloat16 on a GPU,
    float32 on a CPU."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class SingleTurn:
    """One prompt, one answer."""


@dataclass(frozen=True, kw_only=True)
class ThinkAgain:
    """A low reward is answered by a user's turn that asks for another attempt, which is then scored instead."""

    attempts: int = 1
    """Further attempts at most."""
    below: float = 0.1
    """The reward at or under which there is another."""
    max_tokens: int = 0
    """Longest further attempt; 0 = sampling.max_tokens."""
    cost: float = 0.0
    """What each further attempt takes from the reward."""
    words: tuple[str, ...] = (
        "That does not look right. Think again and give your final answer.",
        "Check your work step by step, then answer again in the same format.",
        "Are you sure? Go through it once more and answer again.",
    )
    """The user's turn is one of these."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Rollouts used again. The policy has moved on since, so this needs algo.correction."""

    prompts: int = 0
    """Groups of earlier steps that join each batch; 0 = none."""
    steps: int = 4
    """How many steps old they may be at most."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation before, during and after training, on the held-out split."""

    every: int = 0
    """Steps between evaluations; 0 = only before the first and after the last step."""
    problems: int = 0
    """How many held-out problems; 0 = all of them."""
    samples: int = 1
    """Samples per problem."""
    temperature: float = 1.0
    turns: Literal["first", "all"] = "first"
    """first = the first attempt counts, whatever `turns` trains; all = as in training."""


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """What is kept on disk."""

    every: int = 20
    """Steps between checkpoints; one is always written at the end."""
    keep_last: int = 2
    """Older checkpoints are removed."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out accuracy besides."""
    rollouts: int = 0
    """Keep the rollout files of the last N steps; 0 = all."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A complete run."""

    recipe: str = ""
    """Name of the recipe this came from; filled in by the loader."""
    model: str = "tiny"
    """A bundled or pulled name (see `cohort models`), a folder in Hugging Face format, or owner/name on its hub."""
    steps: int = 100
    """Training steps."""
    seed: int = 0
    threads: int = 0
    """CPU threads; 0 = all cores. Part of the checkpoint: sums depend on it."""
    template: Literal["chat", "text"] = "chat"
    """How prompts are rendered: by the model's chat template, or as raw text (for base models)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to sample and train; auto = on a GPU if torch sees one. The run records which, and goes on there."""
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
    optim: OptimConfig = field(default_factory=OptimConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    @property
    def max_sampled(self) -> int:
        """The most tokens the policy draws for one sample, in all its turns."""
        first, turns = self.sampling.max_tokens, self.turns
        return first + (turns.attempts * (turns.max_tokens or first) if isinstance(turns, ThinkAgain) else 0)


TURNS: dict[str, type] = {"single": SingleTurn, "think_again": ThinkAgain}
VARIANTS: dict[str, dict[str, type]] = {"turns": TURNS, "algo": ALGOS, "engine": ENGINES}
"""What is chosen by name, besides the task: of each only the chosen one's settings exist."""
