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
from cohort.learner.head import GradientFunction, gradient_through_head, token_logprobs
from cohort.learner.optim import Optimizer
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.decoder import Decoder, redirect_gradients
from cohort.models.lora import Adapters

# Prefix of the names of adapter tensors in the learner's state.
ADAPTER_PREFIX = "adapter/"


class Backend(Protocol):
    """One model as the step logic of the learner sees it. Everything here concerns one rank."""

    decoder: AnyDecoder
    optimizer: Optimizer
    adapters: Adapters | None

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's targets, on the host."""

    def backward(self, micro: Microbatch, temperature: float, gradient: GradientFunction, per_token: bool) -> None:
        """Adds the gradient of a microbatch, whose tensors are on the model's device.

        With `per_token`, `gradient` may be called for any rows; otherwise it is called once, for all of them.
        """

    def as_reference(self, reference: AnyDecoder | None) -> AbstractContextManager[None]:
        """Returns a context in which `logprobs` returns those of the reference policy."""

    def step(self, lr: float, scale: float) -> None:
        """Makes one optimizer step with the gradients multiplied by `scale`."""

    def state(self) -> dict[str, Tensor]:
        """Returns the optimizer state by parameter name, in full shape, and the adapters where they are trained."""

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. `num_steps` is the number of optimizer steps made before."""


class _BaseBackend:
    """The code that both backends share."""

    def __init__(self, decoder: AnyDecoder, optim: OptimConfig, adapters: Adapters | None) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.optimizer = Optimizer(decoder if adapters is None else adapters, optim)
        self._policy: AnyDecoder = decoder  # the model that `logprobs` uses: the decoder, or the reference

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """Returns the log-probabilities [N] of a microbatch's targets, on the host."""
        on_device = micro.to(self.decoder.embed.device)
        hidden = self._compute_hidden(self._policy, on_device, None)
        head = self._policy.head_weight
        values, _ = token_logprobs(hidden, head, on_device.targets, temperature, with_entropy=False)
        return values.cpu()

    def backward(self, micro: Microbatch, temperature: float, gradient: GradientFunction, per_token: bool) -> None:
        """Adds the gradient of a microbatch to the gradients of the masters."""
        head = self.decoder.head_weight
        with self._collect_gradients():
            embedded = self._embed(micro)
            hidden = self._compute_hidden(self.decoder, micro, embedded)
            if not per_token:
                # Such a loss needs all log-probabilities first. The logits are computed again for the gradient.
                row_gradients = gradient(slice(None), *token_logprobs(hidden, head, micro.targets, temperature))
                gradient = _slice_gradients(row_gradients)
            # The head's gradient is added by hand: autograd would fill and add a table of vocabulary size each time.
            total = self.optimizer.master_grad(head) if head.requires_grad else None
            d_hidden = gradient_through_head(hidden, head, total, micro.targets, temperature, gradient)
            # Without any signal the backward is skipped. On a GPU that is not checked: the host would have to wait.
            if d_hidden.is_cuda or bool(d_hidden.any()):
                hidden.backward(d_hidden)
                self._add_embedding_gradient(micro, embedded)
        self.optimizer.collect_grads()

    @contextmanager
    def as_reference(self, reference: AnyDecoder | None) -> Iterator[None]:
        """Context in which `logprobs` returns those of the reference policy."""
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
        """Makes one optimizer step with the gradients multiplied by `scale`."""
        self.optimizer.step(lr, scale)
        # The decoder always holds the merged weights.
        if self.adapters is not None:
            self.adapters.merge()

    def state(self) -> dict[str, Tensor]:
        """Returns the optimizer state by parameter name, and the adapters where they are trained."""
        adapters = {} if self.adapters is None else self.adapters.tensors()
        return self.optimizer.state() | {ADAPTER_PREFIX + name: tensor for name, tensor in adapters.items()}

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores what `state` returned. `num_steps` is the number of optimizer steps made before."""
        self.optimizer.load_state(tensors, num_steps)
        if self.adapters is not None:
            self.adapters.load(adapter_tensors(tensors))

    # ---- where the two backends differ

    def _collect_gradients(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients of low-precision matrices are added to their masters at once."""
        return nullcontext()

    def _embed(self, micro: Microbatch) -> Tensor | None:
        """Returns the embeddings [T, d] of the tokens if their gradient is formed by hand, else None."""
        return None

    def _compute_hidden(self, decoder: Any, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        """Returns the hidden states [N, d] that predict the targets: the head runs on these only."""
        raise NotImplementedError

    def _add_embedding_gradient(self, micro: Microbatch, embedded: Tensor | None) -> None:
        """Adds the gradient of the embedding table, if it is formed by hand."""


class FusedBackend(_BaseBackend):
    """Backend of the native decoder."""

    decoder: Decoder

    def _collect_gradients(self) -> AbstractContextManager[None]:
        return redirect_gradients(self.decoder, (self.adapters or self.optimizer).collectors())

    def _embed(self, micro: Microbatch) -> Tensor:
        return self.decoder.embed.detach().index_select(0, micro.tokens).requires_grad_()

    def _compute_hidden(self, decoder: Decoder, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        attend = make_packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
        hidden: Tensor = decoder(micro.tokens, micro.positions, attend, embedded)
        return hidden.index_select(0, micro.source)

    def _add_embedding_gradient(self, micro: Microbatch, embedded: Tensor | None) -> None:
        if self.decoder.embed.requires_grad:
            assert embedded is not None and embedded.grad is not None
            total = self.optimizer.master_grad(self.decoder.embed)
            total.index_add_(0, micro.tokens, embedded.grad.to(total.dtype))


class AutogradBackend(_BaseBackend):
    """Backend of a transformers model. The model may scale its embedding, so autograd forms that gradient."""

    decoder: AutoDecoder

    def _compute_hidden(self, decoder: AutoDecoder, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        hidden: Tensor = decoder(micro.tokens, micro.layout)
        return hidden.index_select(0, micro.source)


def make_backend(decoder: AnyDecoder, optim: OptimConfig, adapters: Adapters | None) -> FusedBackend | AutogradBackend:
    """Returns the backend for this decoder. `adapters` are trained in place of its weights; None = the weights are."""
    return (FusedBackend if decoder.is_native else AutogradBackend)(decoder, optim, adapters)


def adapter_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the adapter tensors in a learner's state, by their names without the prefix."""
    return {name.removeprefix(ADAPTER_PREFIX): t for name, t in tensors.items() if name.startswith(ADAPTER_PREFIX)}


def _slice_gradients(row_gradients: tuple[Tensor, Tensor | None]) -> GradientFunction:
    """Returns a gradient function that returns parts of gradients which were computed for all rows at once.

    `row_gradients` has the gradients on log-probabilities and on entropies; None = no gradient on entropies.
    """
    d_logprobs, d_entropy = row_gradients

    def gradient(rows: slice, *_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of these rows."""
        return d_logprobs[rows], None if d_entropy is None else d_entropy[rows]

    return gradient
