"""The native engines: continuous batching on the learner's own weights, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from cohort.engines.native.engine import NativeEngine
from cohort.models.decoder import Decoder

if TYPE_CHECKING:
    from cohort.engines.native.cuda.engine import GraphEngine

__all__ = ["NativeEngine", "make_native_engine"]

# What the Triton kernels of the GPU engine support.
HEAD_SIZES = (32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_native_engine(
    decoder: Decoder,
    tokenizer_decode: Callable[[list[int]], str],
    *,
    slots: int,
    max_context: int,
    weights: Literal["shared", "packed", "fp16"] = "shared",
    window: int | None = None,
    reserve: int = 0,
) -> NativeEngine | GraphEngine:
    """Returns the fastest engine for the decoder: GraphEngine (CUDA graphs, Triton) where it can run, or NativeEngine.

    GraphEngine needs a GPU, Triton, `weights` = "shared", and a head size and type that its kernels support.
    `tokenizer_decode` turns token ids into text. `slots` is the most requests that are decoded together, `max_context`
    the most tokens of a prompt and its completion. `weights` other than "shared" are copies for a CPU, see
    `NativeEngine`; ConfigError is raised where they are impossible. `window` is the most steps between reports (None =
    the engine's usual number). `reserve` is the number of bytes of GPU memory that others, such as the learner, need
    between rollouts; only GraphEngine uses it.
    """
    embed = decoder.embed
    has_kernels = decoder.config.head_dim in HEAD_SIZES and embed.dtype in DTYPES
    if embed.device.type != "cuda" or weights != "shared" or not has_kernels or find_spec("triton") is None:
        return NativeEngine(decoder, tokenizer_decode, slots, max_context, weights, window or 8)
    # Imported only here, because the module needs Triton.
    from cohort.engines.native.cuda.engine import GraphEngine

    return GraphEngine(decoder, tokenizer_decode, slots, max_context, window or 16, reserve=reserve)
