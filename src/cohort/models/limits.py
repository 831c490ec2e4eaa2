"""The least time the hardware needs: arithmetic at the measured matrix-product rate and, on a GPU, memory traffic.

Counts follow the usual accounting: two floating-point operations per weight and token forward, four backward; a shared
prompt once per group; the head on completion tokens only, of which a sample's last is no input. A CPU is held to its
arithmetic alone. On a GPU decoding is bound by what every step has to read, so there the limit adds up, step by step,
the weights (read, or computed with, whichever takes longer), the keys and values (a prompt's once a group) and the
logits. Nothing is overlapped, launched or waited for, and every sample is admitted at once.
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
LOGNORMAL_MEDIAN = 0.284  # of the cap: the mean of what is cut off there is 0.363 of it, 186 tokens of 512


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch: all completions of one length, or each of its own."""

    prompts: int
    samples: int
    prompt_tokens: int
    completion_tokens: int  # the longest allowed, where there are `lengths`
    lengths: tuple[int, ...] = ()  # of the completions, group after group; empty = all completion_tokens

    @property
    def completions(self) -> tuple[int, ...]:
        return self.lengths or (self.completion_tokens,) * (self.prompts * self.samples)

    @property
    def num_completion(self) -> int:
        return sum(self.completions)

    def unshared(self) -> Shape:
        """The same completions, each after a prompt of its own."""
        return replace(self, prompts=self.prompts * self.samples, samples=1)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second, measured on it."""

    flops: float  # of a large matrix product
    bytes: float  # read and written, of a large copy


@dataclass(frozen=True, kw_only=True)
class Least:
    """Seconds that sampling a batch takes at least, by phase."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


# ---- counts


def layer_params(c: ModelConfig) -> int:
    """Weights of the matrix products, the head aside."""
    attention = c.hidden * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden * c.ff)


def forward_flops(c: ModelConfig, shape: Shape) -> float:
    """One pass over a batch of groups, each prompt once. The same for sampling (with a KV cache) and for training."""
    P, n = shape.prompt_tokens, shape.prompts
    inputs = [R - 1 for R in shape.completions]  # nothing is predicted from a sample's last token
    linear = 2.0 * layer_params(c) * (n * P + sum(inputs)) + 2.0 * c.vocab_size * c.hidden * shape.num_completion
    pairs = n * P * P / 2 + sum(P * r + r * r / 2 for r in inputs)  # of query and key
    return linear + 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs


def kv_bytes(c: ModelConfig, width: int) -> int:
    """Keys and values of one token, at `width` bytes a number."""
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * width


def lognormal_lengths(num: int, cap: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths as completions have them: many short, a long tail, the longest cut off at `cap`."""
    rng = random.Random(seed)
    drawn = (LOGNORMAL_MEDIAN * cap * math.exp(LOGNORMAL_SIGMA * rng.gauss(0, 1)) for _ in range(num))
    return tuple(min(max(round(length), 1), cap) for length in drawn)


# ---- the limit on a GPU: `width` is the bytes of a number


def least_seconds(c: ModelConfig, shape: Shape, rates: Rates, width: int) -> Least:
    """What sampling a batch takes at least. The first token comes from the prefill: it needs the head alone."""
    P, G = shape.prompt_tokens, shape.samples
    ends = shape.completions
    group_ends = [max(ends[low : low + G]) for low in range(0, len(ends), G)]
    alive, groups = _alive(ends), _alive(group_ends)  # at each step
    decode = sum(head_seconds(c, rates, width, n) for n in alive)
    for s in range(1, len(alive)):
        decode += layers_seconds(c, rates, width, alive[s], alive[s] * s + groups[s] * P)
    return Least(prefill=prefill_seconds(c, shape, rates, width), decode=decode)


def prefill_seconds(c: ModelConfig, shape: Shape, rates: Rates, width: int) -> float:
    """Every prompt once through the layers."""
    pairs = shape.prompts * shape.prompt_tokens**2 / 2
    attention = 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs / rates.flops
    return _product(layer_params(c), shape.prompts * shape.prompt_tokens, rates, width) + attention


def layers_seconds(c: ModelConfig, rates: Rates, width: int, alive: int, num_read: int) -> float:
    """One step of `alive` samples through the layers, reading the keys and values of `num_read` tokens."""
    return _product(layer_params(c), alive, rates, width) + kv_bytes(c, width) * num_read / rates.bytes


def head_seconds(c: ModelConfig, rates: Rates, width: int, alive: int) -> float:
    """Logits of `alive` samples, written once and read once."""
    return _product(c.vocab_size * c.hidden, alive, rates, width) + 2.0 * width * c.vocab_size * alive / rates.bytes


def _product(params: int, rows: int, rates: Rates, width: int) -> float:
    """A matrix product reads its weights or computes with them, whichever takes longer."""
    return max(width * params / rates.bytes, 2.0 * params * rows / rates.flops)


def _alive(ends: tuple[int, ...] | list[int]) -> list[int]:
    """How many are longer than s, for every s below the longest.

    >>> _alive([3, 1, 1])
    [3, 1, 1]
    """
    ending = [0] * (max(ends) + 1)
    for end in ends:
        ending[end] += 1
    alive = [len(ends) - ending[0]]
    for gone in ending[1:-1]:
        alive.append(alive[-1] - gone)
    return alive


# ---- rates


def matmul_rate(seconds: float = 0.5, size: int = 1536, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of a large matrix product on the CPU, best of several."""
    a, b = torch.randn(2, size, size).to(dtype)
    best, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < seconds or not best:
        start = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def gpu_rates(dtype: torch.dtype, size: int = 8192, num_bytes: int = 1 << 31) -> Rates:
    """Rates of the current CUDA device, each the best of several; gives back the memory it used."""
    rates = Rates(flops=_product_rate(dtype, size), bytes=_copy_rate(num_bytes))
    torch.cuda.empty_cache()
    return rates


def _product_rate(dtype: torch.dtype, size: int) -> float:
    a, b = torch.randn(2, size, size, device="cuda", dtype=dtype)
    product = torch.empty_like(a)
    return 2.0 * size**3 / _best_on_gpu(lambda: torch.mm(a, b, out=product))


def _copy_rate(num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _best_on_gpu(lambda: target.copy_(source))


def _best_on_gpu(run: Callable[[], object], repeats: int = 20) -> float:
    """Seconds by the device's own clock, after a few runs that wake it up."""
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
