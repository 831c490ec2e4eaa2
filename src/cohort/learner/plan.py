"""What a GPU's memory will hold, predicted from shapes before anything runs. The first step tells how well.

Counts follow what the code keeps: every tensor saved for the backward of a layer (see `models.functions` and
`learner.flash`), one layer's work, one chunk of logits. Letters: as in `models.config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.errors import ConfigError
from cohort.learner.head import GPU_CHUNK_LOGITS
from cohort.models.config import ModelConfig
from cohort.models.limits import kv_bytes, layer_params

SHARE = 0.92  # of the device's memory: the rest is the driver's, the libraries' and lost between blocks
WORK = 1 << 30  # workspaces of matrix products, a captured step's own memory
MOST = 32768  # tokens in one forward/backward beyond which nothing gets faster
ENOUGH = 8192  # tokens below which matrix products get slower: worth releasing KV or computing twice


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run asks of the device."""

    model: ModelConfig
    width: int  # bytes of a number while computing
    longest: int  # tokens of the longest sample with its prompt
    batch_tokens: int  # most tokens of a batch
    kv_tokens: int  # most tokens whose keys and values are held at once
    has_reference: bool = False
    trained: int | None = None  # parameters that are trained, where not all are
    base: int = 0  # bytes of frozen weights beside those that adapters are merged into


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run uses the memory it has. Bytes."""

    token_budget: int
    recompute: bool  # a layer's activations in the backward, instead of keeping them
    keep_kv: bool  # between rollouts
    state: int  # weights, masters, moments
    update: int  # besides the state while training: gradients, activations, logits
    per_token: int  # of that, kept of a token
    kv: int
    available: int

    @property
    def peak(self) -> int:
        """Of training, which is also when KV that is kept lies idle."""
        return self.state + self.update + (self.kv if self.keep_kv else 0)

    def update_of(self, tokens: int) -> int:
        """`update` where the largest microbatch is smaller than the budget."""
        return self.update - (self.token_budget - tokens) * self.per_token

    @property
    def words(self) -> str:
        gib = 2**30
        parts = [
            f"memory plan: {self.peak / gib:.1f} of {self.available / gib:.1f} GiB while training "
            f"(weights and optimizer {self.state / gib:.1f}, update {self.update / gib:.1f}, KV {self.kv / gib:.1f}"
            f"{'' if self.keep_kv else ', released between rollouts'})",
            f"{self.token_budget} tokens a microbatch",
        ]
        return ", ".join(parts + ["activations computed twice"] * self.recompute)


def num_params(c: ModelConfig) -> int:
    """Matrices alone: norms and biases are a thousandth of them."""
    return layer_params(c) + (1 if c.tied else 2) * c.vocab_size * c.hidden


def state_bytes(load: Load) -> int:
    params = num_params(load.model)
    trained = params if load.trained is None else load.trained
    masters = 0 if load.width >= 4 and load.trained is None else 4 * trained
    copies = 2 if load.has_reference else 1
    return copies * params * load.width + load.base + masters + 8 * trained


def kept_bytes(c: ModelConfig, width: int, recompute: bool) -> int:
    """Of a token from forward to backward."""
    stream, ends = 4 * c.hidden, 3 * (4 + width) * c.hidden  # fp32; embedding, final norm and what the head reads
    # computed twice: a layer's inputs alone, the stream and what is to be added to it
    return c.num_layers * (stream + width * c.hidden if recompute else layer_bytes(c, width)) + ends


def layer_bytes(c: ModelConfig, width: int) -> int:
    """Of one layer: two sums of the stream, two normed, q, k, v, mixed and its normalisers, gate and up."""
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    normed = (width * c.head_dim + 4) * (c.num_heads + c.num_kv_heads) if c.qk_norm else 0  # q and k before it
    return 2 * 4 * c.hidden + width * (2 * c.hidden + heads + 2 * c.ff) + 4 * c.num_heads + 8 + normed


def work_bytes(c: ModelConfig, width: int, recompute: bool) -> int:
    """Of a token while a layer's backward runs: gradients of gate and up, the product once more and its own."""
    again = layer_bytes(c, width) if recompute else 0
    return width * (4 * c.ff + 3 * c.hidden) + 3 * 4 * c.hidden + again


def head_bytes(load: Load, budget: int) -> int:
    """A chunk of logits with its gradient; or, the logits gone, that gradient and the chunk's of the head."""
    c = load.model
    logits = min(GPU_CHUNK_LOGITS, budget * c.vocab_size)
    own = 4 * c.vocab_size * c.hidden if load.trained is None else 0
    return logits * load.width + max(4 * logits, own)


def update_bytes(load: Load, budget: int, recompute: bool) -> int:
    """The masters' gradients, what is kept, and the larger of what head and layers need, one after the other."""
    trained = num_params(load.model) if load.trained is None else load.trained
    c, width = load.model, load.width
    work = max(head_bytes(load, budget), budget * work_bytes(c, width, recompute))
    return 4 * trained + budget * kept_bytes(c, width, recompute) + work


def plan_memory(load: Load, available: int, token_budget: int = 0) -> Plan:
    """The fastest way to use `available` bytes; a given budget is kept.

    Nothing recomputed and KV kept, if that leaves room for large microbatches; else KV is released between rollouts,
    else activations are computed twice, else both.
    """
    state, kv = state_bytes(load), kv_bytes(load.model, load.width) * load.kv_tokens
    most = token_budget or max(load.longest, min(MOST, load.batch_tokens))
    least = token_budget or load.longest
    for enough in (token_budget or min(ENOUGH, most), least):
        for recompute, keep in ((False, True), (False, False), (True, True), (True, False)):
            room = int(SHARE * available) - WORK - state - (kv if keep else 0)
            budget = _fitting(load, room, recompute, most)
            if budget >= max(enough, least):
                return Plan(
                    token_budget=budget,
                    recompute=recompute,
                    keep_kv=keep,
                    state=state,
                    update=update_bytes(load, budget, recompute),
                    per_token=kept_bytes(load.model, load.width, recompute),
                    kv=kv,
                    available=available,
                )
    need = state + update_bytes(load, least, True) + WORK
    raise ConfigError(
        f"the model does not fit: one microbatch of {least} tokens needs {need / SHARE / 2**30:.1f} GiB (weights and "
        f"optimizer {state / 2**30:.1f}) and the device has {available / 2**30:.1f}; use a smaller model, shorter "
        "samples, or train adapters (--learner.lora.rank 16)."
    )


def _fitting(load: Load, room: int, recompute: bool, most: int) -> int:
    """The largest budget up to `most` whose update takes no more than `room`; 0 if none does. Bisected."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if update_bytes(load, middle, recompute) <= room:
            low = middle
        else:
            high = middle - 1
    return low if update_bytes(load, low, recompute) <= room else 0
