"""Faster matrix products while sampling on a CPU: copies of the decoder's matrices in a layout for the processor.

"packed" copies are fp32 and exact. "fp16" copies have half the bytes. Their difference to the learner's
log-probabilities is small; it is measured (`gap/*`) and can be corrected for.
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
from cohort.models.functions import HAS_ONEDNN, Product, multiply_by_onednn, substitute_products


class PackedWeights:
    """Copies of a decoder's matrices. Within `with packed.use():`, products with these matrices use the copies.

    The decoder's code knows nothing of packing. Copies are made at the first use and again after `drop_copies`, so
    they are never older than the weights and cost no memory while the learner works. `rows` is the number of rows of
    `x` that the layout is made for.
    """

    def __init__(self, decoder: Decoder, kind: Literal["packed", "fp16"], rows: int) -> None:
        if decoder.embed.dtype != torch.float32 or decoder.embed.device.type != "cpu":
            where = f"{decoder.embed.dtype} on {decoder.embed.device}".removeprefix("torch.")
            raise ConfigError(
                f'engine.weights = "{kind}" needs a float32 model on a CPU, and this one is {where}: use "shared" '
                "(cohort train: --engine.weights shared; cohort bench engine: --copies shared)."
            )
        engines = set(torch.backends.quantized.supported_engines)
        if not (HAS_ONEDNN if kind == "packed" else {"fbgemm", "x86"} & engines):
            raise ConfigError(
                f'engine.weights = "{kind}" needs an x86 processor with AVX2, and a torch that uses it: use "shared" '
                "(cohort train: --engine.weights shared; cohort bench engine: --copies shared)."
            )
        self.decoder = decoder
        self.kind, self.rows = kind, rows
        # Keyed by the address of the matrix, which all views of it share.
        self.products: dict[int, Product] = {}

    @contextmanager
    def use(self) -> Iterator[None]:
        """Returns a context in which products with the decoder's matrices use the copies. Makes missing ones."""
        if not self.products:
            # Leading dimensions are folded, because gate_up is [2, ff, d].
            self.products = {m.data_ptr(): self._pack(m.detach().flatten(0, -2)) for m in _list_matrices(self.decoder)}
        with substitute_products(self.products):
            yield

    def drop_copies(self) -> None:
        """Frees the copies, because the weights have changed or memory is needed. The next `use` makes new ones."""
        self.products = {}

    def _pack(self, matrix: Tensor) -> Product:
        """Returns a function (x, bias) that multiplies by a copy of the matrix [out, in] in the processor's layout."""
        if self.kind == "packed":
            return partial(_multiply_packed, torch.ops.mkldnn._reorder_linear_weight(matrix, self.rows))
        return partial(_multiply_fp16, torch.ops.quantized.linear_prepack_fp16(matrix, None))


def _list_matrices(decoder: Decoder) -> Iterator[Tensor]:
    """Yields the decoder's weight matrices that are used in products: the head, then four per layer."""
    yield decoder.head_weight
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        yield from (layer.qkv, layer.out, layer.gate_up, layer.down)


def _multiply_packed(copy: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x times the transposed matrix, plus bias (None = none), in fp32. `copy` is the packed matrix."""
    return multiply_by_onednn(x, copy, bias)


def _multiply_fp16(copy: torch.ScriptObject, x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x times the transposed matrix, plus bias (None = none), in fp32.

    `copy` is the packed matrix, rounded to fp16.
    """
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.contiguous(), copy)
    return product if bias is None else product + bias
