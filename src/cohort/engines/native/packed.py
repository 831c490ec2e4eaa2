"""Faster products while sampling on a CPU: copies of the decoder's matrices, laid out for the processor.

"packed" is fp32, exact. "fp16" halves the bytes; its difference to the learner's log-probabilities is small, measured
(`gap/*`) and open to correction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.models.decoder import Decoder, Layer
from cohort.models.functions import HAS_ONEDNN, Product, onednn, substituted


class PackedLinears:
    """Within `with packed.used():`, products with the decoder's matrices use their copies.

    The decoder stays one code path that knows nothing of packing. Copies are made at the first use and again after
    `drop`, so they are never older than the weights and cost no memory while the learner works.
    """

    def __init__(self, decoder: Decoder, kind: Literal["packed", "fp16"], rows: int) -> None:
        if decoder.embed.dtype != torch.float32 or decoder.embed.device.type != "cpu":
            where = f"{decoder.embed.dtype} on {decoder.embed.device}".removeprefix("torch.")
            raise ConfigError(f'engine.weights = "{kind}" needs a float32 model on CPU, not {where}; use "shared".')
        engines = set(torch.backends.quantized.supported_engines)
        if not (HAS_ONEDNN if kind == "packed" else {"fbgemm", "x86"} & engines):
            raise ConfigError(f'engine.weights = "{kind}" needs an x86 processor; use "shared".')
        self.decoder, self.kind, self.rows = decoder, kind, rows
        self.products: dict[int, Product] = {}  # by the address of the matrix, which views of it share

    @contextmanager
    def used(self) -> Iterator[None]:
        if not self.products:
            self.products = {m.data_ptr(): self._pack(m.detach().flatten(0, -2)) for m in _matrices(self.decoder)}
        with substituted(self.products):
            yield

    def drop(self) -> None:
        self.products = {}

    def _pack(self, matrix: Tensor) -> Product:
        if self.kind == "packed":
            return partial(_packed, torch.ops.mkldnn._reorder_linear_weight(matrix, self.rows))
        return partial(_fp16, torch.ops.quantized.linear_prepack_fp16(matrix, None))


def _matrices(decoder: Decoder) -> Iterator[Tensor]:
    yield decoder.head_weight
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        yield from (layer.qkv, layer.out, layer.gate_up, layer.down)


def _packed(copy: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return onednn(x, copy, bias)


def _fp16(copy: torch.ScriptObject, x: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.contiguous(), copy)
    return product if bias is None else product + bias
