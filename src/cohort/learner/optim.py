"""AdamW on fp32 master weights, and the learning rate schedule with its warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from cohort.config.schema import OptimConfig
from cohort.errors import RunError
from cohort.models.functions import Collector, add_product


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


class Optimizer:
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

    def zero_grad(self) -> None:
        """Removes all gradients of parameters and of masters: they are None afterwards."""
        for name, p in self.params.items():
            p.grad = None
            self.masters[name].grad = None

    def collect_grads(self) -> None:
        """Adds the gradients of low-precision parameters to those of their fp32 masters, and removes them.

        It is called after every microbatch. Gradients that a collector (see `collectors`) has added already are None
        here.
        """
        for name, p in self.params.items():
            master = self.masters[name]
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
        add_product(self._ensure_grad(name).flatten(0, -2), grad, x)

    def master_grad(self, param: Tensor) -> Tensor:
        """Returns the gradient tensor of a parameter's master, to which the caller may add in place.

        If there is none, makes one of zeros. `param` must be one of the optimizer's own parameters, the same object.
        """
        return self._ensure_grad(next(n for n, p in self.params.items() if p is param))

    def _ensure_grad(self, name: str) -> Tensor:
        """Returns the gradient tensor of the master `name`. If there is none, makes one of zeros."""
        master = self.masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def grads(self) -> list[Tensor]:
        """Returns the gradient tensors of all masters that have one, not copied."""
        return [m.grad for m in self.masters.values() if m.grad is not None]

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
        self._apply_adamw([n for n in trained if self.masters[n].ndim > 1], lr, self.config.weight_decay)
        self._apply_adamw([n for n in trained if self.masters[n].ndim <= 1], lr, 0.0)
        for name, p in self.params.items():
            if self.masters[name] is not p:
                p.copy_(self.masters[name])

    def _apply_adamw(self, names: list[str], lr: float, weight_decay: float) -> None:
        """Updates the masters `names` and their moments by AdamW, in place. Each of these masters must have a gradient.

        It calls torch's kernel directly: torch's optimizer class imports the compiler, which takes a second per start.
        """
        masters: list[Tensor] = [self.masters[n] for n in names]
        if not masters:
            return
        count = torch.full((), float(self.num_steps), device=masters[0].device)
        torch._fused_adamw_(
            masters,
            [m.grad for m in masters if m.grad is not None],
            [self.moments[n][0] for n in names],
            [self.moments[n][1] for n in names],
            [],
            [count] * len(names),
            lr=lr,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            weight_decay=weight_decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """Returns, by name, the two moments of each parameter, and the masters of low-precision parameters; not copied.

        The names are "exp_avg/...", "exp_avg_sq/..." and "master/...", followed by the parameter's name.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors |= dict(zip(_moment_keys(name), self.moments[name], strict=True))
            if master is not self.params[name]:
                tensors[f"master/{name}"] = master.detach()
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. `num_steps` is the number of optimizer steps that were made until then.

        Raises RunError where a moment is missing. A master that is missing stays as it was. A parameter that is its own
        master is overwritten if `tensors` has a master for it; low-precision parameters are left to the caller.
        """
        self.num_steps = num_steps
        for name, master in self.masters.items():
            # A snapshot has masters of all parameters, a checkpoint only those that are copies.
            if f"master/{name}" in tensors:
                master.data.copy_(tensors[f"master/{name}"])
            for key, moment in zip(_moment_keys(name), self.moments[name], strict=True):
                if key not in tensors:
                    raise RunError(
                        f'the optimizer state of the checkpoint lacks the tensor "{key}". Move this checkpoint out of '
                        "the run's folder checkpoints, then use cohort resume RUN: it takes the newest one left."
                    )
                moment.copy_(tensors[key])


def _moment_keys(name: str) -> tuple[str, str]:
    """Returns the names under which `Optimizer.state` stores a parameter's first and second moment."""
    return f"exp_avg/{name}", f"exp_avg_sq/{name}"


def _make_master(p: nn.Parameter) -> nn.Parameter:
    """Returns the master of a parameter: the parameter itself in fp32 or fp64, else an fp32 copy."""
    return p if p.dtype in (torch.float32, torch.float64) else nn.Parameter(p.detach().float())


def global_norm(tensors: list[Tensor]) -> float:
    """Returns the Euclidean norm of all entries of all tensors together; 0 for an empty list."""
    return float(torch.stack(torch._foreach_norm(tensors)).double().norm()) if tensors else 0.0
