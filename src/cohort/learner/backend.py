"""Under the step logic: how one model computes log-probabilities and gradients, and where these add up.

`FusedBackend` is the native decoder: attention over packed streams, both ends of the gradient by hand, gradients of
bf16 matrices added to their fp32 masters by the products that form them. `AutogradBackend` is any other model behind
`AutoDecoder`: torch's autograd forms its gradients. They differ in a few lines; everything else is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from cohort.config.schema import OptimConfig
from cohort.data.batch import Microbatch
from cohort.learner.attention import packed_attention
from cohort.learner.head import Gradient, gradient_through_head, token_logprobs
from cohort.learner.optim import Optimizer
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.decoder import Decoder, collecting
from cohort.models.lora import Adapters

ADAPTER = "adapter/"  # what adapters are called in the learner's state, before their names


class Backend(Protocol):
    """One model as the step logic sees it. Everything here is of one rank."""

    decoder: AnyDecoder
    optimizer: Optimizer
    adapters: Adapters | None

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        """[N] of a microbatch's targets, on the host."""

    def backward(self, micro: Microbatch, temperature: float, gradient: Gradient, per_token: bool) -> None:
        """Add the gradient of a microbatch, which is on the model's device.

        `per_token` = `gradient` may be asked for any rows; otherwise it is asked once, for all of them.
        """

    def as_reference(self, reference: AnyDecoder | None) -> AbstractContextManager[None]:
        """Within, `logprobs` are those of the reference policy."""

    def step(self, lr: float, scale: float) -> None:
        """One optimizer step with the gradients multiplied by `scale`."""

    def state(self) -> dict[str, Tensor]:
        """Optimizer state by parameter name, in full shape; adapters, where these are trained."""

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Become a `state`."""


class _Shared:
    """What both backends do."""

    def __init__(self, decoder: AnyDecoder, optim: OptimConfig, adapters: Adapters | None) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.optimizer = Optimizer(decoder if adapters is None else adapters, optim)
        self._policy: AnyDecoder = decoder  # whose log-probabilities are asked for

    def logprobs(self, micro: Microbatch, temperature: float) -> Tensor:
        here = micro.to(self.decoder.embed.device)
        hidden = self._hidden(self._policy, here, None)
        head = self._policy.head_weight
        values, _ = token_logprobs(hidden, head, here.targets, temperature, with_entropy=False)
        return values.cpu()

    def backward(self, micro: Microbatch, temperature: float, gradient: Gradient, per_token: bool) -> None:
        head = self.decoder.head_weight
        with self._collecting():
            embedded = self._embedded(micro)
            hidden = self._hidden(self.decoder, micro, embedded)
            if not per_token:  # all log-probabilities first: the logits are computed once more for the gradient
                gradient = _known(gradient(slice(None), *token_logprobs(hidden, head, micro.targets, temperature)))
            # By hand: autograd would fill and add a table of the vocabulary's size each time.
            total = self.optimizer.grad_of(head) if head.requires_grad else None
            d_hidden = gradient_through_head(hidden, head, total, micro.targets, temperature, gradient)
            if d_hidden.is_cuda or bool(d_hidden.any()):  # to look would wait for the GPU
                hidden.backward(d_hidden)
                self._add_embedding(micro, embedded)
        self.optimizer.collect_grads()

    @contextmanager
    def as_reference(self, reference: AnyDecoder | None) -> Iterator[None]:
        if self.adapters is not None:
            with self.adapters.reference():
                yield
            return
        assert reference is not None, "the algorithm needs a reference policy and the learner has none"
        self._policy = reference
        try:
            yield
        finally:
            self._policy = self.decoder

    def step(self, lr: float, scale: float) -> None:
        self.optimizer.step(lr, scale)
        if self.adapters is not None:
            self.adapters.merge()

    def state(self) -> dict[str, Tensor]:
        adapters = {} if self.adapters is None else self.adapters.tensors()
        return self.optimizer.state() | {ADAPTER + name: tensor for name, tensor in adapters.items()}

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        self.optimizer.load_state(tensors, num_steps)
        if self.adapters is not None:
            self.adapters.load(adapter_tensors(tensors))

    # ---- where the two differ

    def _collecting(self) -> AbstractContextManager[None]:
        """Within, gradients of low-precision matrices go to their masters as they are formed."""
        return nullcontext()

    def _embedded(self, micro: Microbatch) -> Tensor | None:
        """The embeddings of the tokens [T, d], where their gradient is formed by hand."""
        return None

    def _hidden(self, decoder: Any, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        """Hidden states where the targets are predicted, [N, d]: the head runs on these only."""
        raise NotImplementedError

    def _add_embedding(self, micro: Microbatch, embedded: Tensor | None) -> None:
        """Add the gradient of the embedding table, where it is formed by hand."""


class FusedBackend(_Shared):
    """The native decoder."""

    decoder: Decoder

    def _collecting(self) -> AbstractContextManager[None]:
        return collecting(self.decoder, (self.adapters or self.optimizer).collectors())

    def _embedded(self, micro: Microbatch) -> Tensor:
        return self.decoder.embed.detach().index_select(0, micro.tokens).requires_grad_()

    def _hidden(self, decoder: Decoder, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        attend = packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
        hidden: Tensor = decoder(micro.tokens, micro.positions, attend, embedded)
        return hidden.index_select(0, micro.source)

    def _add_embedding(self, micro: Microbatch, embedded: Tensor | None) -> None:
        if self.decoder.embed.requires_grad:
            assert embedded is not None and embedded.grad is not None
            total = self.optimizer.grad_of(self.decoder.embed)
            total.index_add_(0, micro.tokens, embedded.grad.to(total.dtype))


class AutogradBackend(_Shared):
    """A model of transformers. It may scale its embedding, so autograd forms that gradient."""

    decoder: AutoDecoder

    def _hidden(self, decoder: AutoDecoder, micro: Microbatch, embedded: Tensor | None) -> Tensor:
        hidden: Tensor = decoder(micro.tokens, micro.layout)
        return hidden.index_select(0, micro.source)


def make_backend(decoder: AnyDecoder, optim: OptimConfig, adapters: Adapters | None) -> FusedBackend | AutogradBackend:
    """The backend for this decoder."""
    return (FusedBackend if decoder.is_native else AutogradBackend)(decoder, optim, adapters)


def adapter_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters in a learner's state, by their own names."""
    return {name.removeprefix(ADAPTER): t for name, t in tensors.items() if name.startswith(ADAPTER)}


def _known(found: tuple[Tensor, Tensor | None]) -> Gradient:
    """Gradients that were taken for all rows at once, handed out by rows."""
    d_logprobs, d_entropy = found

    def gradient(rows: slice, *_: Tensor) -> tuple[Tensor, Tensor | None]:
        return d_logprobs[rows], None if d_entropy is None else d_entropy[rows]

    return gradient
