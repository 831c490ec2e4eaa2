"""AdamW on fp32 master weights, and the learning rate schedule with its warm-up.

`WholeOptimizer` has all master weights on every rank. Those that divide them are in `sharded.py` and `full.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cohort.config.schema import OptimConfig
from cohort.errors import RunError
from cohort.learner.base import StateTensor
from cohort.learner.buckets import GradientBuckets, make_buckets
from cohort.models.functions import Collector, add_product
from cohort.world import World


def learning_rate(config: OptimConfig, update: int, num_updates: int) -> float:
    """Returns the learning rate of update number `update` (from 0) of `num_updates`.

    It rises linearly over the first `config.warmup` updates to `config.lr`. Then, by `config.schedule`, it stays there
    or falls (linear or cosine) towards `config.lr_floor` x `config.lr`, where it stays from update `num_updates` on.

    >>> c = OptimConfig(lr=1.0, warmup=4, schedule="linear")
    >>> [learning_rate(c, i, 8) for i in range(8)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    # The warm-up ends at the full rate, and the first update does not have rate 0.
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    progress = min(1.0, (update - config.warmup) / max(1, num_updates - config.warmup))
    if config.schedule == "constant":
        return config.lr
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.lr_floor + (1.0 - config.lr_floor) * remaining)


class Optimizer(Protocol):
    """What a learner needs of an optimizer, however many ranks there are and whatever they divide among them."""

    config: OptimConfig
    num_steps: int  # that were made

    def zero_grad(self) -> None:
        """Removes all gradients."""

    def collect_grads(self) -> None:
        """Adds the gradients of low-precision parameters to those of their masters. Called after every microbatch."""

    def collectors(self) -> dict[str, Collector]:
        """Returns, by parameter name, a function per low-precision matrix that adds its gradient to its master's."""

    def master_grad(self, param: Tensor) -> Tensor | None:
        """Returns the gradient tensor of a parameter's master, to which the caller may add in place.

        None = its sum over ranks has begun, and nothing may be added any more.
        """

    def complete(self, param: Tensor) -> None:
        """Notes that nothing will be added any more, in this microbatch, to what `master_grad` returned for `param`.

        It need not be called: then the gradient is complete when `reduce` is called.
        """

    def begin_reduce(self, world: World) -> None:
        """Allows the next backward, which is that of the last microbatch, to begin sums of gradients over ranks."""

    def reduce(self, world: World) -> None:
        """Replaces the gradients by their sums over all ranks. Every rank must call it, after its last microbatch."""

    def grad_norm(self) -> float:
        """Returns the Euclidean norm of the whole gradient, the same on every rank. Every rank must call it."""

    def full_grads(self) -> dict[str, Tensor]:
        """Returns the summed gradient by parameter, as copies on the host. Every rank must call it.

        A parameter without gradient may be left out.
        """

    def step(self, lr: float, scale: float) -> None:
        """Makes one AdamW step with learning rate `lr`, after multiplying the gradients by `scale` in place.

        Every rank must call it.
        """

    def state(self) -> dict[str, StateTensor]:
        """Returns, by name, the two moments of each parameter and the masters of low-precision parameters.

        The names are "exp_avg/...", "exp_avg_sq/..." and "master/...", followed by the parameter's name.
        """

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned, read by name. `num_steps` is the number of steps that were made until then.

        Raises RunError where a moment is missing. Every rank must call it.
        """


@dataclass(frozen=True, slots=True)
class MasterPart:
    """What AdamW needs of a master weight, or of a part of one: tensors of one shape, which it changes in place."""

    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def apply_adamw(
    parts: Sequence[MasterPart], config: OptimConfig, num_steps: int, lr: float, weight_decay: float
) -> None:
    """Updates masters and moments by AdamW, in place. This is optimizer step number `num_steps`, counted from 1.

    It calls torch's kernel directly: torch's optimizer class imports the compiler, which takes a second per start.
    """
    if not parts:
        return
    count = torch.full((), float(num_steps), device=parts[0].master.device)
    torch._fused_adamw_(
        [p.master for p in parts],
        [p.grad for p in parts],
        [p.exp_avg for p in parts],
        [p.exp_avg_sq for p in parts],
        [],
        [count] * len(parts),
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )


class WholeOptimizer:
    """AdamW with master weights, gradients and moments of `module` in fp32 (fp64 for an fp64 module).

    An fp32 parameter is its own master. A parameter of lower precision has a master copy. The gradient of every
    microbatch is added to the master's gradient before the next microbatch starts. After a step the parameter is
    rounded from its master.
    """

    def __init__(self, module: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.params = dict(module.named_parameters())
        self.masters = {n: _make_master(p) for n, p in self.params.items()}
        self.moments = {n: (torch.zeros_like(m.data), torch.zeros_like(m.data)) for n, m in self.masters.items()}
        self.num_steps = 0
        # Whether sums over ranks begin during the backward. On a CPU they would take the cores that compute it.
        self.overlaps = next(iter(self.params.values())).is_cuda
        self._buckets: GradientBuckets | None = None  # of this minibatch; None = they begin in `reduce`
        self._hooks: list[RemovableHandle] = []  # on parameters, while there are `_buckets`

    def zero_grad(self) -> None:
        """Removes all gradients of parameters and of masters: they are None afterwards.

        Those whose sums over ranks have begun come back with `reduce`. That is so where memory ran out in between.
        """
        for name, p in self.params.items():
            p.grad = None
            self.masters[name].grad = None
        if self._buckets is not None:
            self._buckets.start_again()

    def collect_grads(self) -> None:
        """Adds the gradients of low-precision parameters to those of their fp32 masters, and removes them.

        It is called after every microbatch. Gradients that a collector (see `collectors`) has added already are None
        here.
        """
        for name in self.params:
            self._collect_grad(name)

    def _collect_grad(self, name: str) -> None:
        """Adds the gradient of a low-precision parameter to that of its fp32 master, if it has one, and removes it."""
        p, master = self.params[name], self.masters[name]
        if master is not p and p.grad is not None:
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

    def collectors(self) -> dict[str, Collector]:
        """Returns, by parameter name, a function per low-precision matrix that adds its gradient to its master's.

        For a product x W^T, the function is called with the gradient [T, n] of the product and with x [T, d], in place
        of autograd's gradient of W. The sum is formed in fp32. Parameters that are their own masters have no function.
        """
        low_precision = [n for n, p in self.params.items() if p.ndim > 1 and self.masters[n] is not p]
        return {n: partial(self._add_to_master_grad, n) for n in low_precision}

    def _add_to_master_grad(self, name: str, grad: Tensor, x: Tensor) -> None:
        """Adds grad^T x to the gradient of the master of the matrix `name`.

        `grad` [T, n] is the gradient of a product x W^T, and x [T, d] its input, so grad^T x is the gradient of W.
        """
        if not self._has_begun(name):
            add_product(self._ensure_grad(name).flatten(0, -2), grad, x)
            self._note_complete(name)

    def master_grad(self, param: Tensor) -> Tensor | None:
        """Returns the gradient tensor of a parameter's master, to which the caller may add in place.

        If there is none, makes one of zeros. `param` must be one of the optimizer's own parameters, the same object.
        None = its sum over ranks has begun, and nothing may be added any more.
        """
        name = self._find_name(param)
        return None if self._has_begun(name) else self._ensure_grad(name)

    def _find_name(self, param: Tensor) -> str:
        """Returns the name of one of the optimizer's own parameters."""
        return next(n for n, p in self.params.items() if p is param)

    def _ensure_grad(self, name: str) -> Tensor:
        """Returns the gradient tensor of the master `name`. If there is none, makes one of zeros."""
        master = self.masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def grads(self) -> list[Tensor]:
        """Returns the gradient tensors of all masters that have one, not copied."""
        return [m.grad for m in self.masters.values() if m.grad is not None]

    def complete(self, param: Tensor) -> None:
        """Notes that nothing will be added any more, in this microbatch, to what `master_grad` returned for `param`."""
        self._note_complete(self._find_name(param))

    def begin_reduce(self, world: World) -> None:
        """Allows the next backward, which is that of the last microbatch, to begin sums of gradients over ranks.

        Does nothing with one rank, and where sums do not overlap with the backward.
        """
        if world.size == 1 or not self.overlaps:
            return
        if self._buckets is None:
            self._buckets = self._make_buckets(world)
            trained = ((n, p) for n, p in self.params.items() if p.requires_grad)
            self._hooks = [p.register_post_accumulate_grad_hook(partial(self._note_grad, n)) for n, p in trained]
        self._buckets.is_open = True

    def _make_buckets(self, world: World) -> GradientBuckets:
        """Returns buckets of all gradients, of which no sum has begun. A missing gradient becomes zeros."""
        names = make_buckets({name: p.numel() for name, p in self.params.items() if p.requires_grad})
        return GradientBuckets(world, names, self._ensure_grad)

    def _has_begun(self, name: str) -> bool:
        """Returns whether the sum over ranks of a parameter's gradient has begun."""
        return self._buckets is not None and self._buckets.has_begun(name)

    def _note_complete(self, name: str) -> None:
        """Notes that a parameter's gradient has the parts of all microbatches, if this microbatch is the last one."""
        if self._buckets is not None and self._buckets.is_open:
            self._buckets.complete(name)

    def _note_grad(self, name: str, param: Tensor) -> None:
        """Collects a gradient that autograd has formed, and notes that it is complete. Called by autograd."""
        if self._has_begun(name):
            # Memory ran out, and this is the second time.
            param.grad = None
        else:
            self._collect_grad(name)
            self._note_complete(name)

    def reduce(self, world: World) -> None:
        """Replaces the gradients of the masters by their sums over all ranks. Every rank must call it.

        With several ranks a missing gradient becomes zeros first. With one rank nothing happens.
        """
        if world.size == 1:
            return
        # Every rank must join every sum, also one that had no microbatch and so has no gradient.
        buckets = self._buckets or self._make_buckets(world)
        for name, grad in buckets.finish():
            self.masters[name].grad = grad
        for hook in self._hooks:
            hook.remove()
        self._buckets, self._hooks = None, []

    def grad_norm(self) -> float:
        """Returns the Euclidean norm of all gradients together; 0 if there are none."""
        return global_norm(self.grads())

    def full_grads(self) -> dict[str, Tensor]:
        """Returns the gradients of all masters that have one, by parameter, as copies on the host."""
        masters = self.masters.items()
        return {name: m.grad.detach().to("cpu", copy=True) for name, m in masters if m.grad is not None}

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """Makes one AdamW step with learning rate `lr`, after multiplying the gradients by `scale` in place.

        Weight decay applies to matrices only. Masters without gradient stay unchanged. All low-precision parameters are
        then rounded from their masters. The gradients are kept.
        """
        if scale != 1.0:
            torch._foreach_mul_(self.grads(), scale)
        self.num_steps += 1
        trained = [n for n, m in self.masters.items() if m.grad is not None]
        # Weight decay is for matrices; norms and biases are not shrunk.
        for names, weight_decay in (
            ([n for n in trained if self.masters[n].ndim > 1], self.config.weight_decay),
            ([n for n in trained if self.masters[n].ndim <= 1], 0.0),
        ):
            parts = [MasterPart(self.masters[n], self._ensure_grad(n), *self.moments[n]) for n in names]
            apply_adamw(parts, self.config, self.num_steps, lr, weight_decay)
        for name, p in self.params.items():
            if self.masters[name] is not p:
                p.copy_(self.masters[name])

    def state(self) -> dict[str, StateTensor]:
        """Returns, by name, the two moments of each parameter, and the masters of low-precision parameters; not copied.

        The names are "exp_avg/...", "exp_avg_sq/..." and "master/...", followed by the parameter's name.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors |= dict(zip(moment_keys(name), self.moments[name], strict=True))
            if master is not self.params[name]:
                tensors[f"master/{name}"] = master.detach()
        return {name: StateTensor.wrap(tensor) for name, tensor in tensors.items()}

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. `num_steps` is the number of optimizer steps that were made until then.

        Raises RunError where a moment is missing. A master that is missing stays as it was. A parameter that is its own
        master is overwritten if `tensors` has a master for it; low-precision parameters are left to the caller.
        """
        self.num_steps = num_steps
        targets = {n: (m.data, *self.moments[n]) for n, m in self.masters.items()}
        for name, kind, tensor in read_state(tensors, targets):
            targets[name][kind].copy_(tensor)


def read_state(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, int, Tensor]]:
    """Yields (parameter, kind, tensor) of the stored state of the parameters `names`, one tensor at a time.

    The kind is 0 for a master, 1 and 2 for the first and second moment. Masters that are not in `tensors` are left out.
    Raises RunError where a moment is missing, before anything is read.
    """
    names = list(names)
    for key in (key for name in names for key in moment_keys(name)):
        if key not in tensors:
            raise RunError(
                f'the optimizer state of the checkpoint lacks the tensor "{key}". Move this checkpoint out of '
                "the run's folder checkpoints, then use cohort resume RUN: it takes the newest one left."
            )
    for name in names:
        # A snapshot has masters of all parameters, a checkpoint only those that are copies.
        for kind, key in enumerate((f"master/{name}", *moment_keys(name))):
            if kind or key in tensors:
                yield name, kind, tensors[key]


def moment_keys(name: str) -> tuple[str, str]:
    """Returns the names under which `Optimizer.state` has a parameter's first and second moment."""
    return f"exp_avg/{name}", f"exp_avg_sq/{name}"


def _make_master(p: nn.Parameter) -> nn.Parameter:
    """Returns the master of a parameter: the parameter itself in fp32 or fp64, else an fp32 copy."""
    return p if p.dtype in (torch.float32, torch.float64) else nn.Parameter(p.detach().float())


def global_norm(tensors: list[Tensor]) -> float:
    """Returns the Euclidean norm of all entries of all tensors together; 0 for an empty list."""
    return float(torch.stack(torch._foreach_norm(tensors)).double().norm()) if tensors else 0.0


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Returns the sum of the squares of all entries of all tensors, as a float64 number on the host."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum().cpu()
