"""Low-rank adapters: W = W0 + alpha / rank * B A, of which only A and B are trained (arXiv:2106.09685).

The decoder always holds the merged matrix W in its own storage. Sampling and the learner's forward pass are therefore
those of a plain model and cost nothing extra. Only the backward pass differs: a matrix with adapters gets no gradient.
Instead, its input x [T, in] and the gradient g [T, out] of its output give dB = s g^T (x A^T) and dA = s (g B)^T x,
with s = alpha / rank. These are thin matrices.

A and B are fp32 (float64 in a float64 decoder). So is the sum W before it is rounded to the decoder's type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from cohort.config.schema import TARGETS, LoraConfig
from cohort.errors import ModelError
from cohort.models.decoder import Decoder, hf_views, to_hf_shape
from cohort.models.functions import Collector
from cohort.models.nf4 import quantise

PIECE = 1 << 24  # entries of a matrix that are held in fp32 at one time: 64 MiB


class PlainBase:
    """Frozen base weights W0 of one matrix [out, in], unquantised. `QuantisedMatrix` is the 4-bit alternative."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.clone()

    @property
    def num_bytes(self) -> int:
        """The memory that the base weights take, in bytes."""
        return self.matrix.nbytes

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop` (exclusive) of the matrix, [stop - start, in], without copying."""
        return self.matrix[start:stop]


class Adapter(nn.Module):
    """The factors A [r, in] and B [out, r] of one matrix, and its base weights.

    `view` is the matrix in the decoder's storage, and `name` its Hugging Face name.
    """

    def __init__(self, name: str, view: Tensor, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        matrix = to_hf_shape(name, view)  # [out, in]
        num_out, num_in = matrix.shape
        exact = torch.promote_types(matrix.dtype, torch.float32)
        # A is kaiming-uniform and B zero, as in PEFT: the policy starts as the base.
        start = nn.init.kaiming_uniform_(torch.empty(config.rank, num_in), a=math.sqrt(5), generator=generator)
        self.A = nn.Parameter(start.to(matrix.device, exact))
        self.B = nn.Parameter(torch.zeros(num_out, config.rank, device=matrix.device, dtype=exact))
        self.view = view
        self.scale = config.alpha / config.rank
        self.base = PlainBase(matrix) if config.base == "keep" else quantise(matrix)

    @torch.no_grad()
    def write_matrix(self, factors: tuple[Tensor, Tensor] | None) -> None:
        """Overwrites the decoder's matrix with base weights + scale * B A, for `factors` = (A, B).

        None means the base weights alone.
        """
        # The view may be [K, heads, D, in]. Then one index of its first axis covers several rows of the matrix.
        rows_per_index = self.view[0].numel() // self.view.shape[-1]
        # Piece by piece, so that only a piece of the matrix exists in fp32 at a time.
        step = max(1, PIECE // self.view[0].numel())
        for i in range(0, self.view.shape[0], step):
            piece = self.view[i : i + step]
            first_row = i * rows_per_index
            rows = slice(first_row, first_row + piece.numel() // piece.shape[-1])
            matrix = self.base.read_rows(rows.start, rows.stop)
            if factors is not None:
                A, B = factors
                matrix = torch.addmm(matrix.to(A.dtype), B[rows], A, alpha=self.scale)
            piece.copy_(matrix.view(piece.shape))

    def add_gradient(self, grad: Tensor, x: Tensor) -> None:
        """Adds to A.grad and B.grad what one product of the matrix with x [T, in] contributes.

        `grad` [T, out] is the gradient of the product's output. It and x have the decoder's type. The sums have the
        type of A and B. If either gradient is None, both start from zero.
        """
        if self.A.grad is None or self.B.grad is None:
            self.A.grad, self.B.grad = torch.zeros_like(self.A), torch.zeros_like(self.B)
        A, B = self.A.detach().to(x.dtype), self.B.detach().to(x.dtype)
        self.B.grad.add_(grad.t() @ (x @ A.t()), alpha=self.scale)
        self.A.grad.add_((grad @ B).t() @ x, alpha=self.scale)


class Adapters(nn.Module):
    """The adapters of all target matrices of a decoder.

    Freezes the decoder's parameters. From then on they must keep their memory, because adapters write into it. `start`
    are factors to begin with, under the names of `tensors()`. They become part of the reference policy.
    """

    def __init__(
        self, decoder: Decoder, config: LoraConfig, seed: int = 0, start: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        if unknown := [name for name in config.targets if name not in TARGETS]:
            raise ModelError(
                f'learner.lora.targets names "{unknown[0]}", which is no matrix that can be adapted: '
                f"use some of {', '.join(TARGETS)}"
            )
        decoder.requires_grad_(False)
        self.layers = nn.ModuleList([nn.ModuleDict() for _ in decoder.layers])
        self.by_name: dict[str, Adapter] = {}  # by Hugging Face name, such as "model.layers.0.self_attn.q_proj"
        # On the CPU, so that the numbers are the same for every device.
        generator = torch.Generator().manual_seed(seed)
        parts: dict[str, list[Collector]] = {}  # by the decoder's own name of the matrix, such as "layers.0.qkv"
        views = dict(hf_views(decoder))
        # In a fixed order: the adapters draw their first A from one generator.
        for name, matrix, rows in _locate_views(decoder):
            target = name.split(".")[-2]
            if name.endswith(".bias") or target not in config.targets:
                continue
            adapter = Adapter(name, views[name], config, generator)
            layer = self.layers[int(name.split(".")[2])]
            assert isinstance(layer, nn.ModuleDict)
            layer[target] = adapter
            self.by_name[name.removesuffix(".weight")] = adapter
            parts.setdefault(matrix, []).append(_make_collector(adapter, rows))
        self._collectors = {matrix: _join_collectors(collectors) for matrix, collectors in parts.items()}
        self._start: dict[str, tuple[Tensor, Tensor]] = {}
        if start is None:
            self.merge()
        else:
            self.load(start)
            # Copies: training changes A and B, the reference policy keeps these.
            self._start = {name: (a.A.detach().clone(), a.B.detach().clone()) for name, a in self.by_name.items()}

    @property
    def num_params(self) -> int:
        """The number of trained parameters: the entries of A and B of all matrices."""
        return sum(p.numel() for p in self.parameters())

    @property
    def base_bytes(self) -> int:
        """The memory that the base weights of all adapted matrices take, in bytes."""
        return sum(adapter.base.num_bytes for adapter in self.by_name.values())

    def collectors(self) -> dict[str, Collector]:
        """Returns a collector per parameter that holds adapted matrices, by its name in the decoder.

        It is for `redirect_gradients`. A parameter such as "layers.0.qkv" holds several matrices. Its collector is
        called in the backward pass with the gradient of the parameter's product and the product's input, and adds to
        the gradients of all A and B in it.
        """
        return self._collectors

    def tensors(self) -> dict[str, Tensor]:
        """Returns A and B of every adapted matrix, without copying, by the names that the library PEFT gives them."""
        factors = ((name, letter, getattr(a, letter).data) for name, a in self.by_name.items() for letter in "AB")
        return {f"base_model.model.{name}.lora_{letter}.weight": tensor for name, letter, tensor in factors}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies `tensors` into A and B of every matrix and merges them into the decoder.

        Names are those of the method `tensors`. The reference policy does not change. Raises ModelError and changes
        nothing if names or shapes do not fit.
        """
        mine = self.tensors()
        for name in sorted(mine.keys() | tensors.keys()):
            if name not in tensors:
                raise ModelError(
                    f'the adapters lack "{name}": they are incomplete or of a model with fewer layers. Use the model '
                    "that they were trained on, or set learner.lora.load to other adapters"
                )
            if name not in mine:
                raise ModelError(
                    f'the adapters have "{name}", for which this run has no adapted matrix: use the model that they '
                    "were trained on, or set learner.lora.load to other adapters"
                )
            if mine[name].shape != tensors[name].shape:
                shape, needed = list(tensors[name].shape), list(mine[name].shape)
                raise ModelError(
                    f'adapter "{name}" is {shape}, but the model and rank {self.config.rank} need {needed}: use the '
                    "model that it was trained on, or set learner.lora.load to other adapters"
                )
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self.merge()

    def merge(self) -> None:
        """Writes base weights + alpha / rank * B A into the decoder, for every adapted matrix.

        Must be called whenever A or B have changed.
        """
        for adapter in self.by_name.values():
            adapter.write_matrix((adapter.A, adapter.B))

    def hold_base(self) -> AbstractContextManager[None]:
        """Returns a context manager within which the decoder has the base weights, without adapters.

        Afterwards the decoder has the current adapters again.
        """
        return self._hold_factors({})

    def hold_reference(self) -> AbstractContextManager[None]:
        """Returns a context manager within which the decoder is the reference policy.

        That is the base weights, with the adapters that were given as `start`, if any. Afterwards the decoder has the
        current adapters again.
        """
        return self._hold_factors(self._start)

    @contextmanager
    def _hold_factors(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Within the block, the decoder has the base weights plus `factors`; afterwards the current adapters again.

        `factors` are pairs (A, B) by the name of the matrix. A matrix that is not among them has its base weights.
        """
        for name, adapter in self.by_name.items():
            adapter.write_matrix(factors.get(name))
        try:
            yield
        finally:
            self.merge()


def _locate_views(decoder: Decoder) -> Iterator[tuple[str, str, Tensor]]:
    """Yields, for every weight: its Hugging Face name, the name of the parameter that holds it, and its rows there.

    The rows are indices [out] into the parameter, flattened to a matrix, in the order of the Hugging Face tensor. For
    norms and biases they mean nothing.
    """
    parameter_names = {p: name for name, p in decoder.named_parameters()}
    last: list[nn.Parameter] = []

    def number_rows(p: nn.Parameter) -> Tensor:
        """Returns a tensor of the parameter's shape in which every entry is the number of its row."""
        # hf_views is a generator: the parameter seen last is the one that the yielded view belongs to.
        last[:] = [p]
        return torch.arange(p.numel() // p.shape[-1]).view(*p.shape[:-1], 1).expand(p.shape)

    # Viewed as the weights are, row numbers tell where each weight's rows lie.
    for name, view in hf_views(decoder, select=number_rows):
        yield name, parameter_names[last[0]], view[..., 0].flatten()


def _make_collector(adapter: Adapter, rows: Tensor) -> Collector:
    """Returns a function that takes the gradient of a product with a matrix, and the product's input.

    It passes to `adapter.add_gradient` those columns of the gradient that belong to the matrix's `rows`, and the input.
    """
    start, stop = int(rows[0]), int(rows[-1]) + 1
    # Rows that lie side by side are a slice, which needs no copy.
    if len(rows) == stop - start:
        return lambda grad, x: adapter.add_gradient(grad[:, start:stop], x)
    rows = rows.to(adapter.A.device)
    return lambda grad, x: adapter.add_gradient(grad.index_select(1, rows), x)


def _join_collectors(collectors: Sequence[Collector]) -> Collector:
    """Returns one collector that calls all of `collectors`, in order, with its own two arguments."""

    def collect(grad: Tensor, x: Tensor) -> None:
        """Calls all collectors."""
        for collector in collectors:
            collector(grad, x)

    return collect
