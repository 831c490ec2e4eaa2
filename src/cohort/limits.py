"""The least time the hardware needs for a step: arithmetic at the measured matrix-product rate.

Counts follow the usual accounting: two floating-point operations per weight and token forward, four backward; a
shared prompt once per group; the head on completion tokens only. On a GPU decoding is bound by memory instead; this
module speaks of machines where arithmetic is the bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from cohort.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of fixed lengths."""

    prompts: int
    samples: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def num_completion(self) -> int:
        return self.prompts * self.samples * self.completion_tokens


def layer_params(c: ModelConfig) -> int:
    """Weights of the matrix products, the head aside."""
    attention = c.hidden * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden * c.ff)


def forward_flops(c: ModelConfig, shape: Shape) -> float:
    """One pass over a batch of groups, each prompt once. The same for sampling (with a KV cache) and for training."""
    P, R, G = shape.prompt_tokens, shape.completion_tokens, shape.samples
    linear = 2.0 * layer_params(c) * (P + G * R) + 2.0 * c.vocab_size * c.hidden * G * R
    attention = 4.0 * c.num_layers * c.num_heads * c.head_dim * (P * P / 2 + G * (P * R + R * R / 2))
    return shape.prompts * (linear + attention)


def matmul_rate(seconds: float = 0.5, size: int = 1536) -> float:
    """Floating-point operations per second of a large fp32 matrix product here, best of several."""
    a, b = torch.randn(2, size, size)
    best, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < seconds or not best:
        start = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best
