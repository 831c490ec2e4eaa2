"""Options of the commands that are not training runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from cohort.errors import ConfigError


def _at_least(low: int, options: object, names: str) -> None:
    for name in names.split():
        if not getattr(options, name) >= low:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {getattr(options, name)}; it must be at least {low}.")


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How `cohort eval` samples and scores."""

    engine: Literal["native", "vllm", "server"] = "native"
    """native = Cohort's own; vllm = vLLM in this process; server = an OpenAI-compatible server at --url."""
    url: str = ""
    """Where the server is, such as http://localhost:8000; its key is read from COHORT_API_KEY or OPENAI_API_KEY."""
    template: Literal["chat", "text"] = "chat"
    """chat = the model's chat template; text = the prompt as raw text, for base models. Recorded with the result."""
    limit: int = 0
    """Only the first N problems; 0 = all of them."""
    samples: int = 1
    """Samples per problem: their mean is avg@n; more than one also gives pass@k."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    max_tokens: int = 0
    """Longest completion; 0 = what the task needs, as far as the model's context allows."""
    stop: tuple[str, ...] = ()
    """Stop strings, besides the tokenizer's end-of-turn ids."""
    too_long: Literal["error", "skip"] = "error"
    """A prompt that leaves no room in the model's context: error = refuse, skip = leave it out, count it, say so."""
    split: Literal["test", "train"] = "test"
    slots: int = 256
    """Samples decoded at once."""
    seed: int = 0
    threads: int = 0
    """CPU threads; 0 = all cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = a GPU if torch sees one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto = bfloat16 on a GPU, float32 on a CPU."""

    def check(self) -> None:
        """Refuse values that cannot work, and samples that would all be the same."""
        _at_least(1, self, "samples slots")
        _at_least(0, self, "limit temperature top_k min_p seed threads max_tokens")
        if (self.engine == "server") != bool(self.url):
            need = "--engine server needs --url" if not self.url else "--url has no effect without --engine server"
            raise ConfigError(f"{need}, such as --engine server --url http://localhost:8000.")
        if self.engine == "server" and (self.device != "auto" or self.dtype != "auto" or self.threads):
            raise ConfigError("--device, --dtype and --threads have no effect with --engine server; drop them.")
        if not math.isfinite(self.temperature) or "" in self.stop:
            raise ConfigError("--temperature must be a finite number, and --stop no empty text.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; it must be above 0 and at most 1.")
        if self.min_p >= 1:
            raise ConfigError(f"--min-p is {self.min_p}; it must be below 1.")
        if self.temperature == 0:
            if self.samples > 1:
                raise ConfigError("--samples has no effect at temperature 0: all would be equal; set --temperature.")
            if self.top_p < 1 or self.top_k or self.min_p:
                raise ConfigError("--top-p, --top-k and --min-p have no effect at temperature 0; drop them.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The shape that is measured: a batch of `prompts` x `samples`."""

    model: str = "tiny"
    """A bundled or pulled name (see `cohort models`), or a folder in Hugging Face format."""
    prompts: int = 8
    samples: int = 8
    """Samples per prompt."""
    prompt_tokens: int = 64
    completion_tokens: int = 64
    repeats: int = 3
    """The median is reported; one more run warms up."""
    threads: int = 0
    """CPU threads; 0 = all cores."""
    weights: Literal["files", "random"] = "files"
    """random = the shape --model names with random weights, for which no files are needed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = a GPU if torch sees one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto = bfloat16 on a GPU, float32 on a CPU."""

    def check(self) -> None:
        _at_least(1, self, "prompts samples prompt_tokens completion_tokens repeats")
        _at_least(0, self, "threads")


@dataclass(frozen=True, kw_only=True)
class EngineBenchOptions(BenchOptions):
    """Sampling alone."""

    lengths: Literal["fixed", "lognormal"] = "fixed"
    """lognormal = every completion has its own length, a third of --completion-tokens on average and never more."""
    slots: int = 0
    """Samples decoded at once; 0 = 64 on a CPU, all of them on a GPU."""
    copies: Literal["shared", "packed", "fp16"] = "shared"
    """As engine.weights in training."""

    def check(self) -> None:
        super().check()
        _at_least(0, self, "slots")
        if self.device == "cuda" and self.copies != "shared":
            raise ConfigError(f"--copies {self.copies} is for CPUs: on a GPU drop it and choose --dtype.")


@dataclass(frozen=True, kw_only=True)
class LearnerBenchOptions(BenchOptions):
    """Forward, backward and optimizer step alone."""

    token_budget: int = 0
    """Most tokens in one forward/backward; 0 = 4096 on a CPU, what fits into the memory of a GPU."""
    prefix_sharing: bool = True
    """Train a group's prompt once instead of once a sample."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What a benchmark found; `limit` says against which hardware limit `fraction` is counted."""

    what: str
    seconds: float  # median of the repeats
    tokens_per_second: float
    fraction: float  # of the limit, 0..1
    limit: str  # for example "48 GFLOP/s, matmul measured on this machine"
    setting: str = "cpu, float32"  # device and type
    details: dict[str, float] = field(default_factory=dict)  # more numbers, by label
