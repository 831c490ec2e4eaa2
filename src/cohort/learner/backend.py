"""Backends of the learner: how one model computes log-probabilities and gradients, and where the gradients add up.

`FusedBackend` is for the native decoder. It attends over packed streams and forms the gradients of embedding and head
by hand. Matrix products add the gradients of bf16 matrices directly to those of their fp32 masters. `AutogradBackend`
is for any other model behind `AutoDecoder`: torch's autograd forms its gradients. The two differ in a few lines;
everything else is in `_BaseBackend`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from cohort.config.schema import OptimConfig
from cohort.data.batch import Microbatch
from cohort.learner.attention import make_packed_attention
from cohort.learner.base import CurrentWeights, LiveWeights, StateTensor
from cohort.learner.head import GradientFunction, gradient_through_head, token_logprobs
from cohort.learner.minibatch import slice_gradients
from cohort.learner.optim import Optimizer, WholeOptimizer
from cohort.learner.sharded import ShardedOptimizer
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.decoder import Decoder, redirect_gradients
from cohort.models.functions import widen
from cohort.models.lora import Adapters
from cohort.world import Grid

# Prefix of the names of adapter tensors in the learner's state.
ADAPTER_PREFIX = "adapter/"


class Backend(Protocol):
    """One model as the step logic of the learner sees it. Everything here concerns one rank."""

    @property
    def decoder(self) -> AnyDecoder:
        """The model that is trained."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with master weights and gradients."""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained; None = the weights of the decoder are trained."""

    @property
    def can_retry(self) -> bool:
        """Whether a rank may repeat its passes without the others."""

    def in_step(self, num_passes: int) -> AbstractContextManager[None]:
        """Returns a context for all passes of this rank over a minibatch, of which there are `num_passes`.

        Where ranks must make equally many passes, one with fewer than others makes the missing ones at the end, without
        effect. All ranks must enter it.
        """

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's N target tokens, on the host, without gradient.

        The logits are divided by `temperature` first. The tensors of `micro` must be on the host.
        """

    def backward(self, micro: Microbatch, temperature: float, gradient: GradientFunction, per_token: bool) -> None:
        """Runs forward and backward on a microbatch and adds its gradient to the gradients of the master weights.

        The tensors of `micro` must be on the model's device. `gradient` takes rows of targets with their
        log-probabilities and entropies, and returns the gradients of the loss on both. With `per_token` it may be
        called for one chunk of rows after the other; otherwise it is called once, for all rows.
        """

    def divide_reference(self, reference: AnyDecoder | None) -> AnyDecoder | None:
        """Returns the reference as this backend uses it: divided among the ranks if they divide the model.

        None = there is no reference. The one that is passed must not be used any more.
        """

    def as_reference(self, reference: AnyDecoder | None) -> AbstractContextManager[None]:
        """Returns a context in which `logprobs` uses the reference policy in place of the trained one.

        `reference` is the model to use. It is ignored where adapters are trained: then the reference is the decoder
        with the adapters from which training started, or with none.
        """

    def step(self, lr: float, scale: float) -> None:
        """Makes one optimizer step with learning rate `lr`, after multiplying the gradients by `scale` in place."""

    def weights(self) -> CurrentWeights:
        """Returns the current weights. Iterating over them yields (Hugging Face name, tensor)."""

    def load_weights(self, decoder: AnyDecoder) -> None:
        """Replaces the weights by those of `decoder`. Does nothing where that is the decoder that is trained."""

    def refresh(self, reference: AnyDecoder) -> None:
        """Replaces the weights of the reference by the current ones."""

    def reference_state(self, reference: AnyDecoder) -> dict[str, StateTensor]:
        """Returns the weights of the reference by parameter name, in at least fp32."""

    def load_reference(self, reference: AnyDecoder, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the weights of the reference by those that `reference_state` returned."""

    def state(self) -> dict[str, StateTensor]:
        """Returns the optimizer's tensors by name (moments, copied masters), and the adapters where they are trained.

        The names of adapter tensors begin with ADAPTER_PREFIX.
        """

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. `num_steps` is the number of optimizer steps that were made until then.

        Raises RunError where a moment is missing, and ModelError where adapters do not fit.
        """


class _BaseBackend:
    """The code that both backends share."""

    can_retry = True

    def __init__(self, decoder: AnyDecoder, optimizer: Optimizer, adapters: Adapters | None) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.optimizer = optimizer
        self._policy: AnyDecoder = decoder  # the model that `logprobs` uses: the decoder, or the reference

    def in_step(self, num_passes: int) -> AbstractContextManager[None]:
        """Returns a context that does nothing: passes of this rank concern no other."""
        return nullcontext()

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's N target tokens, on the host, without gradient.

        The logits are divided by `temperature` first. Inside `as_reference` the model is the reference policy. The
        tensors of `micro` must be on the host. The caller turns autograd off; otherwise the forward keeps its
        activations.
        """
        on_device = micro.to(self.decoder.embed.device)
        hidden = self._compute_hidden(self._policy, on_device, None)
        values, _ = self._token_logprobs(self._policy, hidden, on_device.targets, temperature, with_entropy=False)
        return values.cpu()

    def backward(self, micro: Microbatch, temperature: float, gradient: GradientFunction, per_token: bool) -> None:
        """Runs forward and backward on a microbatch and adds its gradient to the gradients of the master weights.

        The tensors of `micro` must be on the model's device. `gradient` returns the gradients of the loss on the
        log-probabilities and entropies (at `temperature`) of some rows of targets. With `per_token` it is called once
        per chunk of rows, otherwise once for all rows.
        """
        head = self.decoder.head_weight
        with self._gradient_context():
            embedded = self._embed(micro)
            hidden = self._compute_hidden(self.decoder, micro, embedded)
            if not per_token:
                # Such a loss needs all log-probabilities first. The logits are computed again for the gradient.
                found = self._token_logprobs(self.decoder, hidden, micro.targets, temperature)
                gradient = slice_gradients(gradient(slice(None), *found))
            # The head's gradient is added by hand: autograd would fill and add a table of vocabulary size each time.
            total = self.optimizer.master_grad(head) if head.requires_grad else None
            d_hidden = self._gradient_through_head(hidden, total, micro.targets, temperature, gradient)
            if total is not None and head is not self.decoder.embed:
                self.optimizer.complete(head)
            # Without any signal the backward is skipped. On a GPU that is not checked: the host would have to wait.
            if d_hidden.is_cuda or bool(d_hidden.any()):
                hidden.backward(d_hidden)
                self._add_embedding_gradient(micro, embedded)
        self.optimizer.collect_grads()

    def divide_reference(self, reference: AnyDecoder | None) -> AnyDecoder | None:
        """Returns the reference itself: every rank has a whole model."""
        return reference

    @contextmanager
    def as_reference(self, reference: AnyDecoder | None) -> Iterator[None]:
        """Context in which `logprobs` uses the reference policy in place of the trained one.

        Where adapters are trained, the reference is the decoder with the adapters from which training started (or with
        none), and `reference` is ignored; otherwise `reference` must not be None.
        """
        # With adapters, the reference is the decoder without what was trained: no second model is needed.
        if self.adapters is not None:
            with self.adapters.hold_reference():
                yield
            return
        assert reference is not None, "the algorithm needs a reference policy and the learner has none"
        self._policy = reference
        try:
            yield
        finally:
            self._policy = self.decoder

    def step(self, lr: float, scale: float) -> None:
        """Makes one optimizer step with learning rate `lr`, after multiplying the gradients by `scale` in place.

        Trained adapters are then merged into the decoder's weights.
        """
        self.optimizer.step(lr, scale)
        # The decoder always holds the merged weights.
        if self.adapters is not None:
            self.adapters.merge()

    def weights(self) -> LiveWeights:
        """Returns the current weights, not copied. Iterating over them yields (Hugging Face name, tensor)."""
        return LiveWeights(self.decoder)

    def load_weights(self, decoder: AnyDecoder) -> None:
        """Replaces the weights by those of `decoder`, in place. Does nothing where that is the trained one."""
        if decoder is not self.decoder:
            self.decoder.load_state_dict(decoder.state_dict())

    def refresh(self, reference: AnyDecoder) -> None:
        """Replaces the weights of the reference by the current ones, in place."""
        reference.load_state_dict(self.decoder.state_dict())

    def reference_state(self, reference: AnyDecoder) -> dict[str, StateTensor]:
        """Returns the weights of the reference by parameter name, in at least fp32, because checkpoints store that."""
        return {name: StateTensor.wrap(widen(p.detach())) for name, p in reference.named_parameters()}

    def load_reference(self, reference: AnyDecoder, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the weights of the reference by those that `reference_state` returned, in place."""
        for name, p in reference.named_parameters():
            p.data.copy_(tensors[name])

    def state(self) -> dict[str, StateTensor]:
        """Returns the optimizer's tensors by name (moments, copied masters), and adapters where they are trained.

        The names of adapter tensors begin with ADAPTER_PREFIX.
        """
        adapters = {} if self.adapters is None else self.adapters.tensors()
        entries = {ADAPTER_PREFIX + name: StateTensor.wrap(tensor) for name, tensor in adapters.items()}
        return self.optimizer.state() | entries

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. `num_steps` is the number of optimizer steps that were made until then.

        Adapters are merged into the decoder's weights. Raises RunError where a moment is missing, and ModelError where
        adapters do not fit.
        """
        self.optimizer.load_state(tensors, num_steps)
        if self.adapters is not None:
            self.adapters.load(select_adapter_tensors(tensors))

    # ---- where backends differ

    def _token_logprobs(
        self, decoder: Any, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies [N] of targets [N] from hidden states [N, d], by a decoder's head."""
        return token_logprobs(hidden, decoder.head_weight, targets, temperature, with_entropy)

    def _gradient_through_head(
        self, hidden: Tensor, total: Tensor | None, targets: Tensor, temperature: float, gradient: GradientFunction
    ) -> Tensor:
        """Returns the gradient of the loss on hidden states [N, d], and adds that of the head to `total`, if given."""
        return gradient_through_head(hidden, self.decoder.head_weight, total, targets, temperature, gradient)

    def _gradient_context(self) -> AbstractContextManager[None]:
        """Returns the context in which `backward` runs forward and backward. Here it does nothing.

        A subclass may return a context that adds the gradients of matrices to those of their masters as they are
        formed.
        """
        return nullcontext()

    def _embed(self, micro: Microbatch) -> Tensor | None:
        """Returns None: autograd forms the gradient of the embedding table.

        A subclass that forms it by hand returns the embeddings [T, d] of the microbatch's tokens, detached from the
        table.
        """
        return None

    def _compute_hidden(self, decoder: Any, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        """Returns the hidden states [N, d] that predict the N targets. Only these go through the head.

        `decoder` is the model to run. `embedded` [T, d] is what `_embed` returned; None = the decoder embeds the
        tokens.
        """
        raise NotImplementedError

    def _add_embedding_gradient(self, micro: Microbatch, embedded: Tensor | None) -> None:
        """Does nothing. A subclass that overrides `_embed` adds the embeddings' gradient to that of the table."""


class FusedBackend(_BaseBackend):
    """Backend of the native decoder."""

    decoder: Decoder

    def _gradient_context(self) -> AbstractContextManager[None]:
        """Returns a context in which matrices of the layers hand their gradients to collectors instead of autograd.

        A collector adds a matrix's gradient to the gradient of its fp32 master, or to the gradients of its adapters
        where these are trained. Without adapters only low-precision matrices have collectors: an fp32 decoder is left
        to autograd.
        """
        return redirect_gradients(self.decoder, (self.adapters or self.optimizer).collectors())

    def _embed(self, micro: Microbatch) -> Tensor:
        """Returns the embeddings [T, d] of the tokens, detached from the table. Autograd stores a gradient in them."""
        return self.decoder.embed.detach().index_select(0, micro.tokens).requires_grad_()

    def _compute_hidden(self, decoder: Decoder, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        """Returns the hidden states [N, d] that predict the N targets, from attention over the packed stream.

        `embedded` [T, d] replaces the embeddings of the tokens; None = the decoder looks them up.
        """
        attend = make_packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
        hidden: Tensor = decoder(micro.tokens, micro.positions, attend, embedded)
        return hidden.index_select(0, micro.source)

    def _add_embedding_gradient(self, micro: Microbatch, embedded: Tensor | None) -> None:
        """Adds the gradient stored in `embedded` to the master gradient of the embedding table, if it is trained."""
        if self.decoder.embed.requires_grad:
            total = self.optimizer.master_grad(self.decoder.embed)
            assert embedded is not None and embedded.grad is not None and total is not None
            total.index_add_(0, micro.tokens, embedded.grad.to(total.dtype))


class AutogradBackend(_BaseBackend):
    """Backend of a transformers model. The model may scale its embedding, so autograd forms that gradient."""

    decoder: AutoDecoder

    def _compute_hidden(self, decoder: AutoDecoder, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        """Returns the hidden states [N, d] that predict the N targets. `embedded` is not used."""
        hidden: Tensor = decoder(micro.tokens, micro.layout)
        return hidden.index_select(0, micro.source)


def make_backend(
    decoder: AnyDecoder, optim: OptimConfig, adapters: Adapters | None, shard: str = "none", grid: Grid | None = None
) -> Backend:
    """Returns the backend for this decoder: a FusedBackend for the native decoder, an AutogradBackend for any other.

    It trains the `adapters`, or where they are None the decoder's weights. `shard` says what the ranks with other data
    divide among them, as the setting learner.shard does; auto stands for none, and one rank has nothing to divide. With
    full it is a `ShardedBackend`, and where several ranks of `grid` hold one model a `TensorBackend`. Both train a copy
    of the decoder.
    """
    world = None if grid is None else grid.data
    if grid is not None and grid.tensor.size > 1:
        from cohort.learner.tensor_backend import make_tensor_backend

        return make_tensor_backend(decoder, optim, adapters, shard, grid.tensor)
    is_divided = world is not None and world.size > 1
    if is_divided and shard == "full":
        # Imported here because it imports much of torch.distributed, which one process does not need.
        from cohort.learner.full import make_sharded_backend

        assert world is not None
        return make_sharded_backend(decoder, optim, adapters, world)
    module = decoder if adapters is None else adapters
    optimizer: Optimizer
    if is_divided and shard == "optimizer":
        assert world is not None
        optimizer = ShardedOptimizer(module, optim, world)
    else:
        optimizer = WholeOptimizer(module, optim)
    return (FusedBackend if decoder.is_native else AutogradBackend)(decoder, optimizer, adapters)


def select_adapter_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those tensors of a learner's state that belong to adapters, by name without ADAPTER_PREFIX."""
    # Names first: a mapping may read its tensors from a file.
    return {name.removeprefix(ADAPTER_PREFIX): tensors[name] for name in tensors if name.startswith(ADAPTER_PREFIX)}
