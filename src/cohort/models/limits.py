"""Lower limits on the time that sampling and training take on this hardware, for `cohort bench`.

Counts follow the usual accounting: two floating-point operations per weight and token in the forward pass, four in the
backward pass. A shared prompt counts once per group. The head counts on completion tokens only, and the last token of a
sample is no input of the model. On a CPU the limit is the arithmetic alone, at the measured rate of matrix products. On
a GPU, decoding is limited by what every step has to read. There the limit adds up step by step: the weights (the time
to read them or to compute with them, whichever is longer), the keys and values (those of a prompt once per group), and
the logits. The limit assumes that launches and waits take no time and that all samples are decoded together from the
start.

Everywhere, `width` is the number of bytes per stored number.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cohort.models.config import ModelConfig

LOGNORMAL_SIGMA = 0.8
# As a share of the cap. The mean of lengths cut off at the cap is then 0.363 of the cap: 186 tokens of 512.
LOGNORMAL_MEDIAN = 0.284


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a batch of groups. Completions all have one length, or each has its own."""

    prompts: int
    samples: int  # per prompt
    prompt_tokens: int  # per prompt
    completion_tokens: int  # per completion; with `lengths`, the longest allowed
    lengths: tuple[int, ...] = ()  # of the completions, group after group; empty = all have completion_tokens

    @property
    def completion_lengths(self) -> tuple[int, ...]:
        """The length in tokens of every completion, group after group."""
        return self.lengths or (self.completion_tokens,) * (self.prompts * self.samples)

    @property
    def num_completion_tokens(self) -> int:
        """The number of tokens of all completions together."""
        return sum(self.completion_lengths)

    def without_sharing(self) -> BatchShape:
        """Returns the shape of the same batch with a copy of the prompt per completion: one sample per prompt."""
        return replace(self, prompts=self.prompts * self.samples, samples=1)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does per second, as measured on it."""

    flops: float  # floating-point operations per second, in a large matrix product
    bytes: float  # bytes read plus bytes written per second, in a large copy


@dataclass(frozen=True, kw_only=True)
class MinimumSeconds:
    """The least number of seconds that sampling a batch can take, by phase."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """The seconds of prefill and decoding together."""
        return self.prefill + self.decode


# ---- counts


def count_layer_params(c: ModelConfig) -> int:
    """Returns the number of weights in the matrices of all layers, without embedding, head, norms and biases."""
    attention = c.hidden * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden * c.ff)


def count_forward_flops(c: ModelConfig, shape: BatchShape) -> float:
    """Returns the floating-point operations of one forward pass over a batch, in which a group's prompt counts once.

    They are those of the layers' matrices, attention, and the head on completion tokens. The number is the same for
    sampling with a KV cache and for training.
    """
    P = shape.prompt_tokens
    n = shape.prompts
    # The last token of a sample is no input: nothing is predicted from it.
    inputs = [R - 1 for R in shape.completion_lengths]
    linear = (
        2.0 * count_layer_params(c) * (n * P + sum(inputs))
        + 2.0 * c.vocab_size * c.hidden * shape.num_completion_tokens
    )
    # Pairs of a query and a key that it sees: half of a square for causal attention, and the whole prompt.
    pairs = n * P * P / 2 + sum(P * r + r * r / 2 for r in inputs)
    return linear + 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs


def count_kv_bytes(c: ModelConfig, width: int) -> int:
    """Returns the bytes of the keys and values of one token in all layers, at `width` bytes per number."""
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * width


def draw_lognormal_lengths(num: int, cap: int, seed: int = 0) -> tuple[int, ...]:
    """Returns `num` random lengths in tokens, from 1 to `cap`: many are short, few are long, as with real completions.

    They follow a lognormal distribution whose median is 0.284 of the cap, cut off at the cap. The same seed gives the
    same lengths.
    """
    rng = random.Random(seed)
    drawn = (LOGNORMAL_MEDIAN * cap * math.exp(LOGNORMAL_SIGMA * rng.gauss(0, 1)) for _ in range(num))
    return tuple(min(max(round(length), 1), cap) for length in drawn)


# ---- the limit on a GPU


def estimate_sampling_seconds(c: ModelConfig, shape: BatchShape, rates: Rates, width: int) -> MinimumSeconds:
    """Returns the least seconds that sampling a batch takes on a GPU with the given rates, by phase.

    `width` is the number of bytes per stored number. The module's docstring says what is counted.
    """
    P = shape.prompt_tokens
    G = shape.samples
    ends = shape.completion_lengths
    group_ends = [max(ends[low : low + G]) for low in range(0, len(ends), G)]
    # Samples and groups that still decode, at each step.
    alive = _count_alive(ends)
    groups = _count_alive(group_ends)
    decode = sum(estimate_head_seconds(c, rates, width, n) for n in alive)
    # From step 1 on: the layers' states for the first token come from the prefill, so step 0 needs the head alone.
    for s in range(1, len(alive)):
        # Each sample reads its own s tokens, and each group reads its prompt once.
        decode += estimate_layers_seconds(c, rates, width, alive[s], alive[s] * s + groups[s] * P)
    return MinimumSeconds(prefill=estimate_prefill_seconds(c, shape, rates, width), decode=decode)


def estimate_prefill_seconds(c: ModelConfig, shape: BatchShape, rates: Rates, width: int) -> float:
    """Returns the least seconds for running every prompt once through the layers, attention included, without the head.

    `width` is the number of bytes per stored number.
    """
    pairs = shape.prompts * shape.prompt_tokens**2 / 2
    attention = 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs / rates.flops
    return (
        _estimate_product_seconds(count_layer_params(c), shape.prompts * shape.prompt_tokens, rates, width) + attention
    )


def estimate_layers_seconds(c: ModelConfig, rates: Rates, width: int, alive: int, num_read: int) -> float:
    """Returns the least seconds for running one new token of each of `alive` samples through the layers.

    `num_read` is the number of tokens whose keys and values are read, at `width` bytes per stored number. The
    arithmetic of attention is not counted.
    """
    return (
        _estimate_product_seconds(count_layer_params(c), alive, rates, width)
        + count_kv_bytes(c, width) * num_read / rates.bytes
    )


def estimate_head_seconds(c: ModelConfig, rates: Rates, width: int, alive: int) -> float:
    """Returns the least seconds for the logits of one token of each of `alive` samples.

    It is the product with the head, and writing and reading the logits once, at `width` bytes per stored number.
    """
    return (
        _estimate_product_seconds(c.vocab_size * c.hidden, alive, rates, width)
        + 2.0 * width * c.vocab_size * alive / rates.bytes
    )


def _estimate_product_seconds(params: int, rows: int, rates: Rates, width: int) -> float:
    """Returns the least seconds for the product of `rows` vectors with matrices that have `params` weights in all.

    It is the time to read the weights (`width` bytes each) or to compute with them, whichever is longer.
    """
    return max(width * params / rates.bytes, 2.0 * params * rows / rates.flops)


def _count_alive(ends: tuple[int, ...] | list[int]) -> list[int]:
    """Returns, for every step s below the longest length in `ends`, how many of the lengths are greater than s.

    `ends` must not be empty, and its longest length at least 1.

    >>> _count_alive([4, 2, 2])
    [3, 3, 1, 1]
    """
    ending = [0] * (max(ends) + 1)
    for end in ends:
        ending[end] += 1
    alive = [len(ends) - ending[0]]
    for gone in ending[1:-1]:
        alive.append(alive[-1] - gone)
    return alive


# ---- rates


def measure_matmul_rate(seconds: float = 0.5, size: int = 1536, dtype: torch.dtype = torch.float32) -> float:
    """Returns the floating-point operations per second of a matrix product on the CPU, the best of several runs.

    Repeats a product of two matrices [size, size] of type `dtype` for `seconds`, at least once.
    """
    a, b = torch.randn(2, size, size).to(dtype)
    best = 0.0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or not best:
        start = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def measure_gpu_rates(dtype: torch.dtype, size: int = 8192, num_bytes: int = 1 << 31) -> Rates:
    """Returns the rates of the current GPU, each the best of several runs. Frees the memory that it used.

    They are measured by a product of two matrices [size, size] of type `dtype`, and by a copy of `num_bytes` bytes.
    """
    rates = Rates(flops=_measure_product_rate(dtype, size), bytes=_measure_copy_rate(num_bytes))
    torch.cuda.empty_cache()
    return rates


def _measure_product_rate(dtype: torch.dtype, size: int) -> float:
    """Returns the floating-point operations per second of a product of matrices [size, size] on the GPU, at best."""
    a, b = torch.randn(2, size, size, device="cuda", dtype=dtype)
    product = torch.empty_like(a)
    return 2.0 * size**3 / _time_on_gpu(lambda: torch.mm(a, b, out=product))


def _measure_copy_rate(num_bytes: int) -> float:
    """Returns the bytes read plus written per second when `num_bytes` are copied on the GPU, at best."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _time_on_gpu(lambda: target.copy_(source))


def _time_on_gpu(run: Callable[[], object], repeats: int = 20) -> float:
    """Calls `run` `repeats` times, after three calls to warm up. Returns the least seconds, by the GPU's clock."""
    best = math.inf
    for n in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if n >= 3:
            best = min(best, begin.elapsed_time(end) / 1e3)
    return best
