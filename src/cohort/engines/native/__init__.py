"""Continuous batching on the learner's own weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from cohort.engines.native.engine import NativeEngine
from cohort.models.decoder import Decoder

if TYPE_CHECKING:
    from cohort.engines.native.cuda.engine import GraphEngine

__all__ = ["NativeEngine", "native_engine"]

HEAD_SIZES, DTYPES = (32, 64, 128), (torch.float32, torch.bfloat16, torch.float16)  # what the kernels take


def native_engine(
    decoder: Decoder,
    tokenizer_decode: Callable[[list[int]], str],
    *,
    slots: int,
    max_context: int,
    weights: Literal["shared", "packed", "fp16"] = "shared",
    window: int | None = None,
    reserve: int = 0,
) -> NativeEngine | GraphEngine:
    """The fastest native engine for where the decoder is: CUDA graphs with Triton, else plain torch.

    `reserve` = bytes of GPU memory that others need between rollouts.
    """
    embed = decoder.embed
    suited = decoder.config.head_dim in HEAD_SIZES and embed.dtype in DTYPES
    if embed.device.type != "cuda" or weights != "shared" or not suited or find_spec("triton") is None:
        return NativeEngine(decoder, tokenizer_decode, slots, max_context, weights, window or 8)
    from cohort.engines.native.cuda.engine import GraphEngine

    return GraphEngine(decoder, tokenizer_decode, slots, max_context, window or 16, reserve=reserve)
