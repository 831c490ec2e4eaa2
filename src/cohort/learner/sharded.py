"""AdamW whose master weights and moments are divided among the ranks (the setting learner.shard = optimizer).

Every rank has all weights and, during an update, the whole gradient in one flat tensor. All matrices lie in it one
after another, then all vectors. It is cut into one slice per rank, of equal length. An optimizer step sums the gradient
over the ranks, such that each gets the sum for its slice. It changes the masters of its slice, and gathers the new
weights of all slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from cohort.config.schema import OptimConfig
from cohort.learner.base import StateTensor
from cohort.learner.optim import MasterPart, apply_adamw, moment_keys, read_state, squared_norm
from cohort.models.functions import Collector, add_product
from cohort.world import World

# Numbers of a slice that are gathered at one time: the weights of all ranks for so many need memory of their own.
JOINED_NUMBERS = 1 << 24
# Integers as wide as a type. Sums of tensors of which all but one are zero keep every bit as integers; as floats,
# -0.0 + 0.0 would become 0.0.
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True, slots=True)
class Piece:
    """The entries `start` to `stop` of a parameter, flattened, which begin at `place` in the slice of a rank."""

    name: str
    start: int
    stop: int
    place: int


class FlatLayout:
    """Places of parameters in a flat tensor, and of its slices. `shapes` are those of the parameters by name.

    Matrices come first, because weight decay applies to them alone. The end is padded, so that all slices are of
    `slice_size` entries.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], num_ranks: int) -> None:
        # A stable sort: parameters keep their order among matrices and among vectors.
        self.shapes = dict(sorted(shapes.items(), key=lambda item: len(item[1]) <= 1))
        counts = [shape.numel() for shape in self.shapes.values()]
        self.starts = dict(zip(self.shapes, accumulate(counts, initial=0), strict=False))
        self.slice_size = -(-sum(counts) // num_ranks)
        self.size = self.slice_size * num_ranks

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Returns the view of a flat tensor that has the place and shape of a parameter."""
        shape = self.shapes[name]
        return flat[self.starts[name] : self.starts[name] + shape.numel()].view(shape)

    def pieces(self, rank: int) -> list[Piece]:
        """Returns the parts of parameters that lie in the slice of a rank, in their order there."""
        begin = rank * self.slice_size
        found = []
        for name, first in self.starts.items():
            low = max(begin, first)
            high = min(begin + self.slice_size, first + self.shapes[name].numel())
            if low < high:
                found.append(Piece(name, low - first, high - first, low - begin))
        return found


class ShardedOptimizer:
    """AdamW with all gradients of `module` on every rank, and masters and moments for one slice per rank.

    Masters are fp32 (fp64 for an fp64 module). The slice of fp32 parameters is a view of the parameters themselves.
    Parameters keep their memory. Every rank must make the same calls.
    """

    def __init__(self, module: nn.Module, config: OptimConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.params = dict(module.named_parameters())
        self.num_steps = 0
        self.layout = FlatLayout({name: p.shape for name, p in self.params.items()}, world.size)
        self.pieces = self.layout.pieces(world.rank)
        types = {p.dtype for p in self.params.values()}
        has_doubles = torch.float64 in types
        self.dtype = torch.float64 if has_doubles else torch.float32  # of masters, moments and gradients
        # Weights are gathered in their own type, or exactly where there are several.
        self._joined_dtype = types.pop() if len(types) == 1 else self.dtype
        self._device = next(iter(self.params.values())).device
        size = self.layout.slice_size
        self.exp_avg, self.exp_avg_sq = (torch.zeros(size, dtype=self.dtype, device=self._device) for _ in range(2))
        self.masters = [self._make_master(piece) for piece in self.pieces]
        self._grad: Tensor | None = None  # of this rank's microbatches, flat; None = none, or summed over ranks already
        self._slice_grad: Tensor | None = None  # the sum over ranks for this rank's slice; None = not summed yet

    def _make_master(self, piece: Piece) -> Tensor:
        """Returns the master of a piece: a view of the parameter if that has the type of masters, else a copy."""
        values = self.params[piece.name].data.view(-1)[piece.start : piece.stop]
        return values.to(self.dtype)

    def _is_own_master(self, name: str) -> bool:
        """Returns whether a parameter has the type of masters, so that its masters are views of it."""
        return self.params[name].dtype == self.dtype

    # ---- gradients

    def zero_grad(self) -> None:
        """Replaces the gradient by zeros. Parameters that are their own masters have views of it as gradients."""
        self._drop_grads()
        self._grad = torch.zeros(self.layout.size, dtype=self.dtype, device=self._device)
        # Autograd adds to a gradient that is there, in place.
        for name, p in self.params.items():
            if self._is_own_master(name):
                p.grad = self.layout.view(self._grad, name)

    def _drop_grads(self) -> None:
        """Removes all gradients and frees their memory."""
        self._grad = self._slice_grad = None
        for p in self.params.values():
            p.grad = None

    def _view_grad(self, name: str) -> Tensor:
        """Returns the gradient of a parameter as a view of the flat one. If there is none, makes one of zeros."""
        if self._grad is None:
            self.zero_grad()
        assert self._grad is not None
        return self.layout.view(self._grad, name)

    def collect_grads(self) -> None:
        """Adds the gradients of low-precision parameters to the flat one, and removes them.

        It is called after every microbatch.
        """
        for name, p in self.params.items():
            if p.grad is not None and not self._is_own_master(name):
                self._view_grad(name).add_(p.grad)
                p.grad = None

    def collectors(self) -> dict[str, Collector]:
        """Returns, by parameter name, a function per low-precision matrix that adds its gradient to the flat one.

        For a product x W^T, the function is called with the gradient [T, n] of the product and with x [T, d].
        """
        names = [n for n, p in self.params.items() if p.ndim > 1 and not self._is_own_master(n)]
        return {n: partial(self._add_to_grad, n) for n in names}

    def _add_to_grad(self, name: str, grad: Tensor, x: Tensor) -> None:
        """Adds grad^T x to the gradient of the matrix `name`."""
        add_product(self._view_grad(name).flatten(0, -2), grad, x)

    def master_grad(self, param: Tensor) -> Tensor:
        """Returns the gradient of a parameter, to which the caller may add in place: a view of the flat one."""
        return self._view_grad(next(n for n, p in self.params.items() if p is param))

    def complete(self, param: Tensor) -> None:
        """Does nothing: all gradients are summed at once, in `reduce`."""

    def begin_reduce(self, world: World) -> None:
        """Does nothing: all gradients are summed at once, in `reduce`."""

    def reduce(self, world: World) -> None:
        """Sums the gradient over all ranks. Every rank keeps the sum for its slice, and frees the rest."""
        assert world is self.world, "the slices are those of the optimizer's own ranks"
        assert self._grad is not None, "`zero_grad` must come first"
        summed = world.sum_scattered(self._grad)
        self._drop_grads()
        self._slice_grad = summed

    def grad_norm(self) -> float:
        """Returns the Euclidean norm of the whole gradient, the same on every rank; not finite if a rank's is not."""
        assert self._slice_grad is not None, "`reduce` must come first"
        total = squared_norm([self._cut(self._slice_grad, piece) for piece in self.pieces])
        return math.sqrt(self.world.sum(total).item())

    def full_grads(self) -> dict[str, Tensor]:
        """Returns the summed gradient by parameter, on the host."""
        assert self._slice_grad is not None, "`reduce` must come first"
        parts = [self._cut(self._slice_grad, piece) for piece in self.pieces]
        return {name: self._gather(name, parts).cpu() for name in self.params}

    @staticmethod
    def _cut(values: Tensor, piece: Piece) -> Tensor:
        """Returns the entries of a piece in a tensor of the slice's size, as a view."""
        return values[piece.place : piece.place + piece.stop - piece.start]

    # ---- the step

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """Makes one AdamW step with learning rate `lr`, after multiplying the gradient by `scale` in place.

        Weight decay applies to matrices only. Afterwards every rank has the new weights of all slices.
        """
        assert self._slice_grad is not None, "`reduce` must come first"
        if scale != 1.0:
            self._slice_grad.mul_(scale)
        self.num_steps += 1
        matrices: list[MasterPart] = []
        vectors: list[MasterPart] = []
        for piece, master in zip(self.pieces, self.masters, strict=True):
            moments = (self._cut(self.exp_avg, piece), self._cut(self.exp_avg_sq, piece))
            part = MasterPart(master, self._cut(self._slice_grad, piece), *moments)
            (matrices if len(self.layout.shapes[piece.name]) > 1 else vectors).append(part)
        apply_adamw(matrices, self.config, self.num_steps, lr, self.config.weight_decay)
        apply_adamw(vectors, self.config, self.num_steps, lr, 0.0)
        self._join_weights()

    def _join_weights(self) -> None:
        """Writes the weights of all slices into the parameters, in place."""
        pieces = [self.layout.pieces(rank) for rank in range(self.world.size)]
        for begin in range(0, self.layout.slice_size, JOINED_NUMBERS):
            end = min(begin + JOINED_NUMBERS, self.layout.slice_size)
            own = torch.zeros(end - begin, dtype=self._joined_dtype, device=self._device)
            for piece, master in zip(self.pieces, self.masters, strict=True):
                if overlap := _overlap(piece, begin, end):
                    inside, here = overlap
                    own[here].copy_(master[inside])
            rows = self.world.join(own).view(self.world.size, -1)
            for rank, row in enumerate(rows):
                for piece in pieces[rank]:
                    if overlap := _overlap(piece, begin, end):
                        inside, here = overlap
                        flat = self.params[piece.name].data.view(-1)
                        flat[piece.start : piece.stop][inside].copy_(row[here])

    # ---- state

    def state(self) -> dict[str, StateTensor]:
        """Returns, by name, the two moments of each parameter, and the masters of low-precision parameters.

        The names are "exp_avg/...", "exp_avg_sq/..." and "master/...", followed by the parameter's name.
        """
        moments = [[self._cut(m, piece) for piece in self.pieces] for m in (self.exp_avg, self.exp_avg_sq)]
        entries: dict[str, StateTensor] = {}
        for name, p in self.params.items():
            parts = dict(zip(moment_keys(name), moments, strict=True))
            if not self._is_own_master(name):
                parts[f"master/{name}"] = self.masters
            for key, values in parts.items():
                read = partial(self._gather, name, values)
                entries[key] = StateTensor(shape=tuple(p.shape), dtype=self.dtype, read=read)
        return entries

    @torch.no_grad()
    def _gather(self, name: str, parts: list[Tensor]) -> Tensor:
        """Returns a whole tensor with the shape of the parameter `name`, bit for bit. Every rank must call it.

        `parts` has the values of this rank's pieces, of all parameters.
        """
        shape = self.layout.shapes[name]
        whole = torch.zeros(shape.numel(), dtype=self.dtype, device=self._device)
        for piece, values in zip(self.pieces, parts, strict=True):
            if piece.name == name:
                whole[piece.start : piece.stop].copy_(values)
        self.world.sum(whole.view(INTEGERS[self.dtype]))
        return whole.view(shape)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned: this rank's slices of it. `num_steps` steps were made until then.

        Raises RunError where a moment is missing. A master that is missing stays as it was.
        """
        self.num_steps = num_steps
        for name, kind, tensor in read_state(tensors, self.params):
            for piece, master in zip(self.pieces, self.masters, strict=True):
                if piece.name == name:
                    targets = (master, self._cut(self.exp_avg, piece), self._cut(self.exp_avg_sq, piece))
                    targets[kind].copy_(tensor.reshape(-1)[piece.start : piece.stop])


def _overlap(piece: Piece, begin: int, end: int) -> tuple[slice, slice] | None:
    """Returns which entries of a piece lie between `begin` and `end` of its slice, and where there; None = none.

    The second result is counted from `begin`.
    """
    low = max(begin, piece.place)
    high = min(end, piece.place + piece.stop - piece.start)
    return (slice(low - piece.place, high - piece.place), slice(low - begin, high - begin)) if low < high else None
