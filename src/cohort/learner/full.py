"""The learner of ranks that divide weights, gradients, masters and moments among them (learner.shard = full).

The masters are the parts of a `DividedModel`. It is a copy: the engine samples from a whole model, and gets the weights
from `ShardedBackend.weights`, gathered parameter by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cohort.config.schema import OptimConfig
from cohort.data.batch import Microbatch
from cohort.data.layout import Layout, Span
from cohort.errors import ConfigError
from cohort.learner.base import StateTensor
from cohort.learner.divided import DividedModel, axis_of, cut_part, gather_parts
from cohort.learner.head import GradientFunction
from cohort.learner.optim import MasterPart, apply_adamw, moment_keys, read_state, squared_norm
from cohort.models.auto import AnyDecoder
from cohort.models.decoder import Decoder, hf_views, to_hf_shape
from cohort.models.functions import Collector
from cohort.models.lora import Adapters
from cohort.models.shards import TensorSpec
from cohort.world import World


class FullOptimizer:
    """AdamW on the parts of a divided model that this rank has: masters, gradients and moments. See `Optimizer`."""

    def __init__(self, model: DividedModel, config: OptimConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.num_steps = 0
        self.params = model.parts
        self.masters = {name: p.to_local().detach() for name, p in self.params.items()}
        self.moments = {n: (torch.zeros_like(m), torch.zeros_like(m)) for n, m in self.masters.items()}
        # Whether masters are wider than the weights, so that a checkpoint needs them beside the model.
        self._are_copies = model.compute_dtype != next(iter(self.masters.values())).dtype

    def zero_grad(self) -> None:
        """Removes all gradients."""
        for p in self.params.values():
            p.grad = None

    def collect_grads(self) -> None:
        """Does nothing: the gradients have the type of the masters already."""

    def collectors(self) -> dict[str, Collector]:
        """Returns no collectors: autograd forms all gradients."""
        return {}

    def master_grad(self, param: Tensor) -> Tensor:
        """Raises NotImplementedError: no rank has a whole gradient to which something could be added."""
        raise NotImplementedError

    def complete(self, param: Tensor) -> None:
        """Does nothing: the backward sums the gradients over all ranks."""

    def begin_reduce(self, world: World) -> None:
        """Does nothing: the backward sums the gradients over all ranks."""

    def reduce(self, world: World) -> None:
        """Does nothing: the backward has summed the gradients over all ranks."""
        assert world is self.world, "the parts are those of the optimizer's own ranks"

    def _read_grads(self) -> dict[str, Tensor]:
        """Returns this rank's parts of the gradients, not copied; {} if no rank had a microbatch."""
        found = {}
        for name, p in self.params.items():
            if p.grad is not None:
                assert isinstance(p.grad, DTensor)
                found[name] = p.grad.to_local()
        return found

    def grad_norm(self) -> float:
        """Returns the Euclidean norm of the whole gradient, the same on every rank; not finite if a part's is not."""
        parts = [grad for grad in self._read_grads().values() if grad.numel()]
        return math.sqrt(self.world.sum(squared_norm(parts)).item())

    def full_grads(self) -> dict[str, Tensor]:
        """Returns the summed gradient by parameter, on the host."""
        return {name: self._gather(name, grad).cpu() for name, grad in self._read_grads().items()}

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """Makes one AdamW step with learning rate `lr`, after multiplying the gradients by `scale` in place.

        Weight decay applies to matrices only.
        """
        self.num_steps += 1
        matrices: list[MasterPart] = []
        vectors: list[MasterPart] = []
        for name, grad in self._read_grads().items():
            # A rank may have no part of a small vector.
            if grad.numel():
                grad.mul_(scale)
                part = MasterPart(self.masters[name], grad, *self.moments[name])
                (matrices if self.params[name].ndim > 1 else vectors).append(part)
        apply_adamw(matrices, self.config, self.num_steps, lr, self.config.weight_decay)
        apply_adamw(vectors, self.config, self.num_steps, lr, 0.0)

    def _gather(self, name: str, part: Tensor) -> Tensor:
        """Returns a whole tensor with the shape of a parameter, from all ranks' parts. Every rank must call it."""
        p = self.params[name]
        return gather_parts(part, p.shape, axis_of(p), self.world)

    def gather_weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns a whole parameter, rounded to `dtype`. Every rank must call it."""
        return self._gather(name, self.masters[name].to(dtype))

    @torch.no_grad()
    def load_weight(self, name: str, whole: Tensor) -> None:
        """Replaces this rank's part of a parameter by that of a whole tensor."""
        self.masters[name].copy_(cut_part(whole, axis_of(self.params[name]), self.world))

    def state(self) -> dict[str, StateTensor]:
        """Returns, by name, the two moments of each parameter, and the masters where the model is of low precision.

        The names are "exp_avg/...", "exp_avg_sq/..." and "master/...", followed by the parameter's name.
        """
        entries: dict[str, StateTensor] = {}
        for name, p in self.params.items():
            parts = dict(zip(moment_keys(name), self.moments[name], strict=True))
            if self._are_copies:
                parts[f"master/{name}"] = self.masters[name]
            for key, part in parts.items():
                read = partial(self._gather, name, part)
                entries[key] = StateTensor(shape=tuple(p.shape), dtype=part.dtype, read=read)
        return entries

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned: this rank's parts of it. `num_steps` steps were made until then.

        Raises RunError where a moment is missing. A master that is missing stays as it was.
        """
        self.num_steps = num_steps
        for name, kind, tensor in read_state(tensors, self.params):
            target = (self.masters[name], *self.moments[name])[kind]
            target.copy_(cut_part(tensor, axis_of(self.params[name]), self.world))


@dataclass(frozen=True, slots=True)
class GatheredWeights:
    """The weights of a model that is divided among ranks, in the type in which it computes.

    Iterating yields (Hugging Face name, whole tensor). Every rank must iterate, in step. Parameters are gathered one by
    one, so a tensor is to be used before the next one is asked for.
    """

    module: Decoder
    optimizer: FullOptimizer
    dtype: torch.dtype

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and type of every whole weight, by Hugging Face name. Nothing is gathered for it."""
        return self.module.weight_specs(self.dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(p): name for name, p in self.optimizer.params.items()}
        last: dict[str, Tensor] = {}

        def gather(p: nn.Parameter) -> Tensor:
            """Returns a whole parameter. The last one is kept, because several weights are views of it."""
            name = names[id(p)]
            if name not in last:
                last.clear()
                last[name] = self.optimizer.gather_weight(name, self.dtype)
            return last[name]

        return ((name, to_hf_shape(name, view)) for name, view in hf_views(self.module, gather))


class ShardedBackend:
    """Backend of a native decoder that the ranks of `world` divide among them. `decoder` itself stays as it is.

    With `reduce_once` gradients are summed over ranks only in the last pass of a minibatch. Until then every rank keeps
    the whole gradient, which needs as much memory as if only the optimizer were divided.
    """

    adapters = None
    can_retry = False  # the others would wait

    def __init__(self, decoder: Decoder, optim: OptimConfig, world: World, reduce_once: bool = False) -> None:
        self.world = world
        exact = torch.promote_types(decoder.embed.dtype, torch.float32)
        self._model = DividedModel(decoder, world, exact)
        self._reference: DividedModel | None = None
        self._policy = self._model  # the model that `logprobs` uses
        self.decoder = self._model.decoder
        self.optimizer = FullOptimizer(self._model, optim, world)
        self.reduce_once = reduce_once
        self._num_passes_left = 0  # backward passes of all ranks in this minibatch
        self._idle = _make_idle_microbatch().to(self._device)

    @property
    def _device(self) -> torch.device:
        """The device of the weights."""
        return self.decoder.embed.device

    @contextmanager
    def in_step(self, num_passes: int) -> Iterator[None]:
        """Context for all passes of this rank over a minibatch. Every rank must enter it.

        A rank with fewer passes than others makes the missing ones at the end, on one token, with gradient 0.
        """
        most = max(self.world.gather(num_passes))
        self._num_passes_left = most
        yield
        for _ in range(most - num_passes):
            if torch.is_grad_enabled():
                self.backward(self._idle, 1.0, _return_zeros, True)
            else:
                self._policy.logprobs(self._idle, 1.0)

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's N targets, on the host, without gradient.

        The logits are divided by `temperature` first. Inside `as_reference` the model is the reference policy.
        """
        return self._policy.logprobs(micro.to(self._device), temperature).cpu()

    def backward(self, micro: Microbatch, temperature: float, gradient: GradientFunction, per_token: bool) -> None:
        """Runs forward and backward on a microbatch. Each rank gets its parts of the gradient, summed over ranks.

        The arguments are those of `Backend.backward`.
        """
        self._num_passes_left -= 1
        self._model.reduce_next(not self.reduce_once or self._num_passes_left <= 0)
        self._model(micro, temperature, gradient, per_token).backward()

    def divide_reference(self, reference: AnyDecoder | None) -> AnyDecoder | None:
        """Divides the reference in place, as the model is, and returns it. None = there is none."""
        if reference is not None:
            assert isinstance(reference, Decoder)
            self._reference = DividedModel(reference.requires_grad_(False), self.world)
        return reference

    @contextmanager
    def as_reference(self, reference: AnyDecoder | None) -> Iterator[None]:
        """Context in which `logprobs` uses the reference policy in place of the trained one."""
        assert self._reference is not None, "the algorithm needs a reference policy and the learner has none"
        self._policy = self._reference
        try:
            yield
        finally:
            self._policy = self._model

    def step(self, lr: float, scale: float) -> None:
        """Makes one optimizer step with learning rate `lr`, after multiplying the gradients by `scale` in place."""
        self.optimizer.step(lr, scale)

    def weights(self) -> GatheredWeights:
        """Returns the current weights. Iterating over them gathers one after the other: every rank must do it."""
        return GatheredWeights(self.decoder, self.optimizer, self._model.compute_dtype)

    def load_weights(self, decoder: AnyDecoder) -> None:
        """Replaces the weights by those of a whole `decoder`, which every rank has."""
        for name, p in decoder.named_parameters():
            self.optimizer.load_weight(name, p.detach())

    @torch.no_grad()
    def refresh(self, reference: AnyDecoder) -> None:
        """Replaces the weights of the reference by the current ones, in place."""
        assert self._reference is not None
        for name, p in self._reference.parts.items():
            p.to_local().copy_(self.optimizer.masters[name])

    def reference_state(self, reference: AnyDecoder) -> dict[str, StateTensor]:
        """Returns the weights of the reference by parameter name, in at least fp32."""
        assert self._reference is not None
        entries = {}
        for name, p in self._reference.parts.items():
            exact = torch.promote_types(p.dtype, torch.float32)
            part = p.to_local().to(exact)
            read = partial(gather_parts, part, p.shape, axis_of(p), self.world)
            entries[name] = StateTensor(shape=tuple(p.shape), dtype=exact, read=read)
        return entries

    @torch.no_grad()
    def load_reference(self, reference: AnyDecoder, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the weights of the reference by those that `reference_state` returned."""
        assert self._reference is not None
        for name, p in self._reference.parts.items():
            p.to_local().copy_(cut_part(tensors[name], axis_of(p), self.world))

    def state(self) -> dict[str, StateTensor]:
        """Returns the optimizer's tensors by name: moments, and masters where the model is of low precision."""
        return self.optimizer.state()

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. `num_steps` is the number of optimizer steps that were made until then."""
        self.optimizer.load_state(tensors, num_steps)


def make_sharded_backend(
    decoder: AnyDecoder, optim: OptimConfig, adapters: Adapters | None, world: World
) -> ShardedBackend:
    """Returns the backend of ranks that divide everything. Raises ConfigError for what they cannot divide."""
    if adapters is not None:
        raise ConfigError(
            "learner.shard = full divides the weights that are trained, and adapters are trained beside whole weights: "
            "use --learner.shard optimizer with adapters."
        )
    if not isinstance(decoder, Decoder):
        raise ConfigError(
            "learner.shard = full is for the architectures that Cohort implements itself, and this model is run by the "
            "library transformers: use --learner.shard optimizer."
        )
    return ShardedBackend(decoder, optim, world)


def _make_idle_microbatch() -> Microbatch:
    """Returns a microbatch of one token, for a rank that has nothing to compute while others have."""
    zero, one = torch.zeros(1), torch.ones(1)
    return Microbatch(
        tokens=zero.long(),
        positions=zero.long(),
        layout=Layout(spans=[Span(0, 1, 0, 0)], num_tokens=1),
        source=zero.long(),
        targets=zero.long(),
        segments=zero.long(),
        lengths=one.long(),
        group_lengths=one.long(),
        advantages=zero,
        sampler_logprobs=zero,
        num_samples=1,
    )


def _return_zeros(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, None]:
    """Returns a gradient of 0 for every row."""
    return torch.zeros_like(logprobs), None
