"""Log-probabilities and entropy of chosen tokens where several ranks have a part of the head's vocabulary each.

The chunks of rows are as in `cohort.learner.head`, and the same on all ranks. A rank computes the logits of its own
vocabulary. What it hands to the others is three numbers per row, never logits: the log-sum-exp of its logits, their
mean under its own softmax, and the target's logit if the target is its own. From those of all ranks, every rank
computes the same log-probabilities and entropies, to the last bit.

Letters: N rows, n rows of a chunk, v token ids of this rank, d hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.learner.head import GradientFunction, compute_logits, split_rows
from cohort.models.functions import add_product, has_kernels, multiply
from cohort.models.tensor import VocabularySpan

# Numbers per row that a rank hands to the others.
NUM_SHARED = 3


@torch.no_grad()
def sliced_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: VocabularySpan,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns (log p(target) [N], entropy of the next-token distribution [N]) for hidden [N, d], without gradient.

    `weight` [v, d] is this rank's part of the head, `vocabulary` its token ids. The rest is as in `token_logprobs` of
    `cohort.learner.head`. Collective.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logprobs, entropy = torch.zeros(2, len(hidden), dtype=wide, device=hidden.device)
    for rows in split_rows(hidden, vocabulary.largest):
        chunk = _LogitBlock(hidden[rows], weight, targets[rows], temperature, vocabulary)
        logprobs[rows], entropy[rows], _ = chunk.measure(with_entropy)
    return logprobs, entropy


@torch.no_grad()
def gradient_through_sliced_head(
    hidden: Tensor,
    weight: Tensor,
    d_weight: Tensor | None,
    targets: Tensor,
    temperature: float,
    gradient: GradientFunction,
    vocabulary: VocabularySpan,
) -> Tensor:
    """Returns the gradient of the loss on the hidden states [N, d], the same on every rank.

    `weight` and `d_weight` [v, d] are this rank's part of the head and of its gradient, `vocabulary` its token ids. The
    rest is as in `gradient_through_head` of `cohort.learner.head`. Collective.
    """
    d_hidden = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for rows in split_rows(hidden, vocabulary.largest):
        chunk = _LogitBlock(hidden[rows], weight, targets[rows], temperature, vocabulary)
        logprobs, entropy, log_z = chunk.measure()
        d_logprobs, d_entropy = gradient(rows, logprobs, entropy)
        d_logits = chunk.logits_gradient(entropy, log_z, d_logprobs, d_entropy)
        d_hidden[rows] = multiply(d_logits, weight.t())
        if d_weight is not None:
            add_product(d_weight, d_logits, hidden[rows])
        # Freed here: otherwise two chunks would be in memory while the next one is made.
        del chunk, d_logits
    # A rank's own logits give a part of the gradient.
    return vocabulary.world.sum(d_hidden).to(hidden.dtype)


class _LogitBlock:
    """The logits of this rank for n rows, while they exist."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocabulary: VocabularySpan
    ) -> None:
        self.dtype = hidden.dtype
        self.temperature = temperature
        self.world = vocabulary.world
        self.places, self.is_own = vocabulary.locate(targets)
        self.uses_kernels = has_kernels(hidden)
        # Kernels divide by the temperature themselves.
        self.logits = compute_logits(hidden, weight, 1.0 if self.uses_kernels else temperature)

    def measure(self, with_entropy: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log p(target), entropy, log of the softmax normaliser), each [n], over the logits of all ranks.

        Collective. Without `with_entropy` the entropies are not meant to be used.
        """
        mine = self._measure_own(with_entropy)
        shared = self.world.join(torch.cat(mine)).view(self.world.size, NUM_SHARED, -1)
        log_zs, means, chosen = shared.unbind(1)  # [ranks, n] each
        log_z = torch.logsumexp(log_zs, dim=0)
        # The entropy is log z - sum of p x, and a rank's logits have the share exp(log z of the rank - log z) of all p.
        entropy = log_z - ((log_zs - log_z).exp() * means).sum(0)
        return chosen.sum(0) - log_z, entropy, log_z

    def _measure_own(self, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (log-sum-exp, mean under the own softmax, target's logit or 0), each [n], of this rank's logits.

        Without `with_entropy` the means may be zeros.
        """
        if self.uses_kernels:
            from cohort.learner import kernels

            logprobs, entropy, log_z = kernels.logprobs_and_entropy(self.logits, self.places, self.temperature)
            return log_z, log_z - entropy, (logprobs + log_z).masked_fill(~self.is_own, 0)
        log_z = torch.logsumexp(self.logits, dim=-1)
        mean = torch.zeros_like(log_z)
        if with_entropy:
            mean = torch.linalg.vecdot((self.logits - log_z[:, None]).exp_(), self.logits)
        chosen = self.logits.gather(1, self.places[:, None])[:, 0]
        return log_z, mean, chosen.masked_fill(~self.is_own, 0)

    def logits_gradient(self, entropy: Tensor, log_z: Tensor, g: Tensor, e: Tensor | None) -> Tensor:
        """Returns the gradient of the loss on this rank's raw logits [n, v], before the division by the temperature.

        `entropy` and `log_z` [n] are results of `measure`. `g` and `e` [n] are the gradients of the loss on
        log-probabilities and entropies; None = none on the entropies. The logits are overwritten.
        """
        if self.uses_kernels:
            from cohort.learner import kernels

            # No logit is at the place -1.
            places = self.places.masked_fill(~self.is_own, -1)
            return kernels.logits_gradient(self.logits, places, entropy, log_z, g, e, self.temperature, self.dtype)
        # d log p(target) / d logit = (1 at the target, else 0) - p, and d H / d logit = -p (log p + H).
        logp = self.logits.sub_(log_z[:, None])
        if e is not None:
            d_logits = logp.exp().mul_(-g[:, None] - e[:, None] * (logp + entropy[:, None]))
        else:
            d_logits = logp.exp_().mul_(-g[:, None])
        d_logits.scatter_add_(1, self.places[:, None], g.masked_fill(~self.is_own, 0)[:, None])
        if self.temperature != 1.0:
            d_logits.div_(self.temperature)
        return d_logits.to(self.dtype)
