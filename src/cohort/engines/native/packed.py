"""A faster, inexact sampler on CPU: the decoder's matrices as packed fp16 copies, activations in fp32.

The difference to the learner's fp32 log-probabilities is small, measured (`gap/*`) and open to correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cohort.errors import ConfigError
from cohort.models.decoder import Decoder, Layer


class PackedLinears(TorchFunctionMode):
    """Within `with packed:`, products with the decoder's matrices use their packed copies.

    A mode, so that the decoder stays one code path that knows nothing of packing. Copies are as old as the
    last `pack()`.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if decoder.embed.dtype != torch.float32 or decoder.embed.device.type != "cpu":
            where = f"{decoder.embed.dtype} on {decoder.embed.device}".removeprefix("torch.")
            raise ConfigError(f'engine.weights = "fp16" needs a float32 model on CPU, not {where}; use "shared".')
        if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
            raise ConfigError('engine.weights = "fp16" needs an x86 processor; use "shared".')
        self.decoder = decoder
        self.copies: dict[int, Any] = {}  # by the address of the matrix, which views of it share
        self.pack()

    @torch.no_grad()
    def pack(self) -> None:
        matrices = [self.decoder.head_weight]
        for layer in self.decoder.layers:
            assert isinstance(layer, Layer)
            matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
        pack = torch.ops.quantized.linear_prepack_fp16
        self.copies = {m.data_ptr(): pack(m.detach().flatten(0, -2), None) for m in matrices}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and (copy := self.copies.get(args[1].data_ptr())) is not None:
            product: Tensor = torch.ops.quantized.linear_dynamic_fp16(args[0].contiguous(), copy)
            bias = args[2] if len(args) > 2 else None
            return product if bias is None else product + bias
        return func(*args, **(kwargs or {}))
