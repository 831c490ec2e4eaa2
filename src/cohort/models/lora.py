"""Low-rank adapters: W = W0 + alpha / rank * B A, of which only A and B are trained (arXiv:2106.09685).

The decoder always holds the merged W, in its own storage: sampling and the learner's forward are those of a plain
model and cost nothing more. Only backward differs. A matrix with adapters gets no gradient of its own; from what that
would be made of, the input x [T, in] and the output's gradient g [T, out], come dB = s g^T (x A^T) and
dA = s (g B)^T x, which are thin.

A and B are fp32 (float64 in a float64 decoder), and so is the sum before it is rounded to the decoder's type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from cohort.config.schema import TARGETS, LoraConfig
from cohort.errors import ModelError, nearest
from cohort.models.decoder import Decoder, hf_shaped, hf_views
from cohort.models.functions import Collector
from cohort.models.nf4 import quantise

PIECE = 1 << 24  # entries of a matrix that are fp32 at one time: 64 MiB


class Kept:
    """Frozen weights as they are."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.clone()

    @property
    def num_bytes(self) -> int:
        return self.matrix.nbytes

    def rows(self, start: int, stop: int) -> Tensor:
        return self.matrix[start:stop]


class Adapter(nn.Module):
    """A [r, in] and B [out, r] of one matrix, which is `view` of the decoder's storage."""

    def __init__(self, name: str, view: Tensor, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        matrix = hf_shaped(name, view)  # [out, in]
        (num_out, num_in), exact = matrix.shape, torch.promote_types(matrix.dtype, torch.float32)
        # as PEFT begins: kaiming-uniform and zero, so that the first policy is the base
        start = nn.init.kaiming_uniform_(torch.empty(config.rank, num_in), a=math.sqrt(5), generator=generator)
        self.A = nn.Parameter(start.to(matrix.device, exact))
        self.B = nn.Parameter(torch.zeros(num_out, config.rank, device=matrix.device, dtype=exact))
        self.view, self.scale = view, config.alpha / config.rank
        self.base = Kept(matrix) if config.base == "keep" else quantise(matrix)

    @torch.no_grad()
    def write(self, factors: tuple[Tensor, Tensor] | None) -> None:
        """Make the decoder's matrix the base, plus the product of these factors if there are any."""
        heads = self.view[0].numel() // self.view.shape[-1]  # rows under one index of the view's first axis
        step = max(1, PIECE // self.view[0].numel())
        for i in range(0, self.view.shape[0], step):
            piece = self.view[i : i + step]
            rows = slice(i * heads, i * heads + piece.numel() // piece.shape[-1])
            matrix = self.base.rows(rows.start, rows.stop)
            if factors is not None:
                A, B = factors
                matrix = torch.addmm(matrix.to(A.dtype), B[rows], A, alpha=self.scale)
            piece.copy_(matrix.view(piece.shape))

    def add_gradient(self, grad: Tensor, x: Tensor) -> None:
        """grad [T, out], x [T, in], both in the decoder's type; the sums are in that of A and B."""
        if self.A.grad is None or self.B.grad is None:
            self.A.grad, self.B.grad = torch.zeros_like(self.A), torch.zeros_like(self.B)
        A, B = self.A.detach().to(x.dtype), self.B.detach().to(x.dtype)
        self.B.grad.add_(grad.t() @ (x @ A.t()), alpha=self.scale)
        self.A.grad.add_((grad @ B).t() @ x, alpha=self.scale)


class Adapters(nn.Module):
    """Adapters for the targets of every layer. Freezes `decoder`, which must stay where it is from now on.

    `start` are factors to begin with, named as `tensors` names them; the reference policy then has them too.
    """

    def __init__(
        self, decoder: Decoder, config: LoraConfig, seed: int = 0, start: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        if unknown := [name for name in config.targets if name not in TARGETS]:
            raise ModelError(f'there is no matrix "{unknown[0]}" to adapt.{nearest(unknown[0], TARGETS)}')
        decoder.requires_grad_(False)
        self.layers = nn.ModuleList([nn.ModuleDict() for _ in decoder.layers])
        self.by_name: dict[str, Adapter] = {}  # "model.layers.0.self_attn.q_proj"
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers for every device
        parts: dict[str, list[Collector]] = {}  # by the name of the stored matrix
        views = dict(hf_views(decoder))
        for name, matrix, rows in _places(decoder):
            target = name.split(".")[-2]
            if name.endswith(".bias") or target not in config.targets:
                continue
            adapter = Adapter(name, views[name], config, generator)
            layer = self.layers[int(name.split(".")[2])]
            assert isinstance(layer, nn.ModuleDict)
            layer[target] = adapter
            self.by_name[name.removesuffix(".weight")] = adapter
            parts.setdefault(matrix, []).append(_part(adapter, rows))
        self._collectors = {matrix: _each(collectors) for matrix, collectors in parts.items()}
        self._start: dict[str, tuple[Tensor, Tensor]] = {}
        if start is None:
            self.merge()
        else:
            self.load(start)
            self._start = {name: (a.A.detach().clone(), a.B.detach().clone()) for name, a in self.by_name.items()}

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def base_bytes(self) -> int:
        return sum(adapter.base.num_bytes for adapter in self.by_name.values())

    def collectors(self) -> dict[str, Collector]:
        """For the decoder's matrices, by name: what their gradients are made of goes into those of A and B."""
        return self._collectors

    def tensors(self) -> dict[str, Tensor]:
        """A and B of every matrix, under the names that PEFT gives them."""
        factors = ((name, letter, getattr(a, letter).data) for name, a in self.by_name.items() for letter in "AB")
        return {f"base_model.model.{name}.lora_{letter}.weight": tensor for name, letter, tensor in factors}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Become these, named as `tensors` names them."""
        mine = self.tensors()
        for name in sorted(mine.keys() | tensors.keys()):
            if name not in tensors:
                raise ModelError(f'the adapters lack "{name}": they are incomplete, or of a model with fewer layers')
            if name not in mine:
                raise ModelError(f'the adapters have "{name}", which the model or learner.lora.targets has not')
            if mine[name].shape != tensors[name].shape:
                found, needed = list(tensors[name].shape), list(mine[name].shape)
                raise ModelError(f'adapter "{name}" is {found}, the model needs {needed}: it is of another model')
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self.merge()

    def merge(self) -> None:
        """Make the decoder the base with the adapters as they are now: due whenever they have changed."""
        for adapter in self.by_name.values():
            adapter.write((adapter.A, adapter.B))

    def off(self) -> AbstractContextManager[None]:
        """Within, the decoder is the base; after it, merged again, to the last bit."""
        return self._holding({})

    def reference(self) -> AbstractContextManager[None]:
        """Within, the decoder is the policy that training began with: the base, with what adapters it had then."""
        return self._holding(self._start)

    @contextmanager
    def _holding(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
        for name, adapter in self.by_name.items():
            adapter.write(factors.get(name))
        try:
            yield
        finally:
            self.merge()


def _places(decoder: Decoder) -> Iterator[tuple[str, str, Tensor]]:
    """(Hugging Face name, the name of the stored matrix it is a part of, its rows there)."""
    stored = {p: name for name, p in decoder.named_parameters()}
    last: list[nn.Parameter] = []

    def rows(p: nn.Parameter) -> Tensor:
        last[:] = [p]
        return torch.arange(p.numel() // p.shape[-1]).view(*p.shape[:-1], 1).expand(p.shape)

    for name, view in hf_views(decoder, of=rows):
        yield name, stored[last[0]], view[..., 0].flatten()


def _part(adapter: Adapter, rows: Tensor) -> Collector:
    """Collects for an adapter what concerns its rows of a matrix."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if len(rows) == stop - start:  # side by side: no copy
        return lambda grad, x: adapter.add_gradient(grad[:, start:stop], x)
    rows = rows.to(adapter.A.device)
    return lambda grad, x: adapter.add_gradient(grad.index_select(1, rows), x)


def _each(collectors: Sequence[Collector]) -> Collector:
    def collect(grad: Tensor, x: Tensor) -> None:
        for one in collectors:
            one(grad, x)

    return collect
