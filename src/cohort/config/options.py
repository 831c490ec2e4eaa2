"""The options of `cohort eval` and `cohort bench`, which are not training runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cohort.config.rules import check_option_bounds
from cohort.config.schema import Conversation
from cohort.config.scoring import ScoringConfig
from cohort.config.section import (
    MAX_BATCH,
    AtLeast0,
    AtLeast1,
    BelowOne,
    Date,
    FiniteAbove0,
    InnerShare,
    Samples,
    Seed,
    Slots,
    TemperatureOr0,
    Template,
    Text,
    Threads,
    TopK,
    TopP,
)
from cohort.errors import ConfigError

CONVERSATION_OPTIONS = {
    "max_turns": "max_turns",
    "max_calls": "max_calls",
    "max_total": "max_total",
    "max_characters": "max_characters",
    "call_seconds": "seconds",
    "call_format": "format",
}
"""The options of `cohort eval` about conversations, with the names of the same settings of a run (`turns`)."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How `cohort eval` samples and scores."""

    engine: Literal["native", "vllm", "server"] = "native"
    """native = Cohort's own engine; vllm = vLLM in this process; server = an OpenAI-compatible server at --url."""
    url: str = ""
    """Address of the server, for example http://localhost:8000; its key is read from the environment variable
    COHORT_API_KEY or OPENAI_API_KEY."""
    template: Template = "chat"
    """How prompts are rendered: chat = by the model's chat template, text = as raw text, for base models, FILE.jinja =
    by the chat template in this file. It is recorded with the result."""
    system: Text = ""
    """System prompt: a text that is put before the messages of every prompt; empty = none besides the task's own. It is
    recorded with the result."""
    limit: AtLeast0 = 0
    """Number of problems, from the first on; 0 = all of them."""
    samples: Samples = 1
    """Samples per problem; their mean is avg@n, and more than one also gives pass@k."""
    temperature: TemperatureOr0 = 1.0
    """Divisor of the logits in sampling; 0 = the most probable token (greedy)."""
    top_p: TopP = 1.0
    """Sample from the most probable tokens that together have this probability; 1 = from all."""
    top_k: TopK = 0
    """Sample from the k most probable tokens; 0 = from all."""
    min_p: BelowOne = 0.0
    """Leave out tokens less probable than min_p x the most probable one; 0 = none."""
    max_tokens: AtLeast0 = 0
    """Longest completion, in tokens; 0 = what the task needs, as far as the model's context allows."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the tokenizer's end-of-turn tokens."""
    max_turns: AtLeast1 = 8
    """Most turns of the model per sample, for tasks with tools or an environment."""
    max_calls: AtLeast1 = 16
    """Most calls of tools per sample."""
    max_total: AtLeast0 = 0
    """Most tokens of a conversation after its prompt, replies included; 0 = what the context allows."""
    max_characters: AtLeast1 = 2_000
    """Most characters of a tool's result that the model is shown; the rest is cut."""
    call_seconds: FiniteAbove0 = 5.0
    """Time for the calls of one turn. A tool that takes longer is stopped, and the model is told."""
    call_format: Literal["auto", "hermes", "llama3", "tags"] = "auto"
    """How the model writes calls of tools: hermes = <tool_call>{...}</tool_call>, llama3 = a JSON object, tags =
    <tool:NAME>...</tool>; auto = by the model's chat template."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    reward: tuple[str, ...] = ()
    """Coefficients of reward parts, as in --reward brief=0.5, for a task without an accuracy, whose mean reward is
    measured; a part that is not named has 1."""
    too_long: Literal["error", "skip"] = "error"
    """If a prompt leaves no room in the model's context: error = stop, skip = leave it out and report how many were."""
    split: Literal["test", "validation", "train"] = "test"
    """The rows of the task to use: test = the held-out ones, train = those for training, validation = those of them
    that a run with --eval.split validation does not train on."""
    validation_share: InnerShare = 0.1
    """Share of the training rows that the validation split has; give what the run had as --eval.validation-share."""
    date: Date = ""
    """The day, as 2026-01-31, that chat templates which ask for it see as today; empty = the real one, or that of the
    evaluation which is continued. It is recorded with the result."""
    slots: Slots = 256
    """Samples that are decoded at the same time."""
    seed: Seed = 0
    """Seed of sampling."""
    threads: Threads = 0
    """Number of CPU threads; 0 = all cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to sample: auto = on a GPU if torch finds one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of weights and computation: auto = bfloat16 on a GPU, float32 on a CPU."""

    @property
    def conversation(self) -> Conversation:
        """The limits of conversations, for tasks with tools or an environment."""
        return Conversation(**{name: getattr(self, option) for option, name in CONVERSATION_OPTIONS.items()})

    def check(self) -> None:
        """Raises a ConfigError for values out of range, empty stop texts, a server without address and unset variables.

        Also for options without effect: --url without a server; --device, --dtype and --threads with one; several
        samples, top_p, top_k and min_p at temperature 0.
        """
        check_option_bounds(self)
        self.scoring.check(())
        self.scoring.require_variables()
        if self.engine == "server" and not self.url:
            raise ConfigError("--engine server needs --url. Add for example --url http://localhost:8000.")
        if self.engine != "server" and self.url:
            raise ConfigError("--url has no effect without --engine server. Add --engine server, or remove --url.")
        if self.engine == "server" and (self.device != "auto" or self.dtype != "auto" or self.threads):
            raise ConfigError(
                "--device, --dtype and --threads have no effect with --engine server; remove these flags."
            )
        if 0 < self.max_total < self.max_tokens:
            raise ConfigError(
                f"--max-total {self.max_total} is less than one turn of --max-tokens {self.max_tokens}. Raise "
                "--max-total, or lower --max-tokens."
            )
        if "" in self.stop:
            raise ConfigError(
                f"--stop is {list(self.stop)}; remove the empty text, which would end every completion at once."
            )
        if self.validation_share != EvalOptions.validation_share and self.split != "validation":
            raise ConfigError(
                "--validation-share has no effect without --split validation. Add that, or remove --validation-share."
            )
        if self.engine == "server" and self.template not in ("chat", "text"):
            raise ConfigError(
                f"--template {self.template} has no effect with --engine server, which has its own chat template; "
                "remove --template."
            )
        if self.date and (self.engine == "server" or self.template == "text"):
            raise ConfigError("--date has no effect with --engine server or --template text; remove --date.")
        if self.temperature == 0:
            if self.samples > 1:
                raise ConfigError(
                    "--samples has no effect at temperature 0, where all samples of a problem are equal. Set "
                    "--temperature above 0, or remove --samples."
                )
            if self.top_p < 1 or self.top_k or self.min_p:
                raise ConfigError("--top-p, --top-k and --min-p have no effect at temperature 0; remove these flags.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What a benchmark measures: a model, a batch of `prompts` x `samples`, and the machine's part of it."""

    model: str = "tiny"
    """The model: a bundled or pulled name (see `cohort models`), or a folder in Hugging Face format."""
    prompts: AtLeast1 = 8
    """Prompts in the batch."""
    samples: Samples = 8
    """Samples per prompt."""
    prompt_tokens: AtLeast1 = 64
    """Tokens per prompt."""
    completion_tokens: AtLeast1 = 64
    """Tokens per completion."""
    repeats: AtLeast1 = 3
    """Number of measurements, of which the median is reported; one more before them is not counted."""
    threads: Threads = 0
    """Number of CPU threads; 0 = all cores."""
    weights: Literal["files", "random"] = "files"
    """files = the weights of the model; random = random weights in the shape that --model names, without any files."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure: auto = on a GPU if torch finds one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of weights and computation: auto = bfloat16 on a GPU, float32 on a CPU."""

    def check(self) -> None:
        """Raises a ConfigError for numbers out of range."""
        check_option_bounds(self)
        if self.prompts * self.samples > MAX_BATCH:
            raise ConfigError(
                f"--prompts {self.prompts} x --samples {self.samples} is more than {MAX_BATCH:,} samples. Lower one of "
                "them."
            )


@dataclass(frozen=True, kw_only=True)
class EngineBenchOptions(BenchOptions):
    """The options of `cohort bench engine`, which measures sampling alone."""

    lengths: Literal["fixed", "lognormal"] = "fixed"
    """fixed = every completion has --completion-tokens tokens; lognormal = each has its own length, a third of
    --completion-tokens on average and never more than --completion-tokens."""
    slots: AtLeast0 = 0
    """Samples that are decoded at the same time; 0 = 64 on a CPU, all of them on a GPU."""
    copies: Literal["shared", "packed", "fp16"] = "shared"
    """The engine's copy of the weights: shared = none; only on a CPU: packed = fp32 in the processor's layout, fp16 =
    half the size. It is engine.weights in training."""

    def check(self) -> None:
        """Raises a ConfigError for numbers out of range, and for `copies` other than shared if `device` is cuda.

        With the device auto, `copies` is not checked here.
        """
        super().check()
        if self.device == "cuda" and self.copies != "shared":
            raise ConfigError(
                f"--copies {self.copies} is only for CPUs, but --device is cuda. Remove --copies, or set --device cpu."
            )


@dataclass(frozen=True, kw_only=True)
class LearnerBenchOptions(BenchOptions):
    """The options of `cohort bench learner`, which measures forward pass, backward pass and optimizer step alone."""

    token_budget: AtLeast0 = 0
    """Most tokens in one forward and backward pass; 0 = 4096 on a CPU, as many as fit into memory on a GPU."""
    prefix_sharing: bool = True
    """Compute a group's prompt once per group instead of once per sample."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The result of a benchmark: time, throughput, and how close it comes to the limit of the hardware."""

    what: str
    # The median of the repeats.
    seconds: float
    tokens_per_second: float
    # The share of `limit` that was reached, 0 to 1.
    fraction: float
    # The hardware limit in words, for example "48 GFLOP/s, matmul measured on this machine".
    limit: str
    # Device and number type.
    setting: str = "cpu, float32"
    # Further numbers by label.
    details: dict[str, float] = field(default_factory=dict)
