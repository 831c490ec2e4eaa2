"""Plan of a GPU's memory, predicted from shapes before anything runs. The first update reports how far off it was.

The counts follow what the code keeps: every tensor saved for the backward of a layer (see `models.functions` and
`learner.flash`), the work of one layer, one chunk of logits. The letters are those of `models.config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from cohort.errors import ConfigError
from cohort.learner.head import GPU_CHUNK_LOGITS
from cohort.models.config import ModelConfig
from cohort.models.limits import count_kv_bytes, count_layer_params

# Share of the device's memory that is planned. The driver and libraries use the rest, or it is lost between blocks.
USABLE_SHARE = 0.92
# Workspaces of matrix products, and the memory of a captured decode step.
WORKSPACE_BYTES = 1 << 30
# Tokens in one forward and backward beyond which nothing gets faster.
MAX_BUDGET = 32768
# Tokens below which matrix products get slower: then it is worth releasing KV or recomputing activations.
GOOD_BUDGET = 8192


@dataclass(frozen=True, kw_only=True)
class MemoryDemand:
    """The sizes of a run that decide how much memory it needs."""

    model: ModelConfig
    bytes_per_number: int  # while computing
    longest: int  # tokens of the longest sample with its prompt
    batch_tokens: int  # most tokens of a batch
    kv_tokens: int  # most tokens whose keys and values are stored at once
    has_reference: bool = False
    num_trained: int | None = None  # trained parameters; None = all
    frozen_bytes: int = 0  # frozen weights stored beside the merged ones, where adapters are trained
    ranks: int = 1  # that train together, on a GPU each
    shard: str = "none"  # what they divide among them: none, optimizer or full
    tensor: int = 1  # ranks that hold one model together, each a slice of every matrix


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a run uses the memory of its GPU. Sizes are in bytes."""

    token_budget: int
    recompute: bool  # whether the backward computes a layer's activations again, instead of keeping them
    keep_kv: bool  # whether KV memory is kept between rollouts
    state: int  # weights, masters, moments
    update: int  # needed while training, besides the state: gradients, activations, logits
    per_token: int  # the part of `update` that is kept per token of a microbatch
    kv: int
    available: int

    @property
    def peak(self) -> int:
        """The most bytes in use while training: state, update, and KV memory if it is kept between rollouts."""
        return self.state + self.update + (self.kv if self.keep_kv else 0)

    def update_bytes_for(self, tokens: int) -> int:
        """Returns the bytes that an update needs besides the state if its largest microbatch has `tokens` tokens.

        It is `update` less what is kept per token for the tokens below the token budget. The work of one layer or of
        the head stays as planned.
        """
        return self.update - (self.token_budget - tokens) * self.per_token

    @property
    def description(self) -> str:
        """The plan as one line for the log: memory used of memory available, its parts, and tokens per microbatch."""
        gib = 2**30
        parts = [
            f"memory plan: {self.peak / gib:.1f} of {self.available / gib:.1f} GiB while training "
            f"(weights and optimizer {self.state / gib:.1f}, update {self.update / gib:.1f}, KV {self.kv / gib:.1f}"
            f"{'' if self.keep_kv else ', released between rollouts'})",
            f"{self.token_budget} tokens per microbatch",
        ]
        return ", ".join(parts + ["activations computed twice"] * self.recompute)


@contextmanager
def measure_memory(
    plan: MemoryPlan, device: torch.device, tokens: int, notices: list[tuple[str, str]]
) -> Iterator[None]:
    """Context around an update on a GPU, whose largest microbatch has `tokens` tokens.

    Afterwards it adds two notices (level, text): the plan, and by how many percent it was off.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield
    used = torch.cuda.max_memory_allocated(device) - before
    percent_off = 100 * (plan.update_bytes_for(tokens) / used - 1)
    took = f"{used / 2**30:.1f} GiB with {tokens} tokens at a time"
    notices.append(("info", plan.description))
    notices.append(("info", f"the first update took {took}: the plan is {percent_off:+.0f}% off"))


def num_params(c: ModelConfig) -> int:
    """Returns the number of parameters in all matrices of a model. Norms and biases (a thousandth) do not count.

    Where the head is tied to the embedding, their common matrix counts once.
    """
    return count_layer_params(c) + (1 if c.tied else 2) * c.vocab_size * c.hidden


def state_bytes(demand: MemoryDemand) -> int:
    """Returns the bytes that are in use all the time: weights, reference, frozen weights, masters and AdamW moments.

    Masters are not counted where the model is fp32 and all of its weights are trained; adapters are fp32 masters. Ranks
    that divide the optimizer have a part of masters and moments each. Ranks that divide everything have a part of the
    reference too, and masters of any model beside the whole weights, from which they sample. So have ranks that hold
    one model together, and besides their slices of the weights.
    """
    params = num_params(demand.model)
    num_trained = params if demand.num_trained is None else demand.num_trained
    is_full = _divides(demand, "full")
    # fp32 weights are their own masters. Adapters are fp32 masters beside the weights.
    is_own_master = demand.bytes_per_number >= 4 and demand.num_trained is None and not is_full
    # Masters take 4 bytes per trained parameter, and two fp32 moments 8.
    per_trained = 8 if is_own_master else 12
    weights = params * demand.bytes_per_number
    reference = weights if demand.has_reference else 0
    if is_full:
        reference = _part(reference, demand)
    trained = per_trained * num_trained
    if demand.tensor > 1:
        return weights + -(-(weights + reference + trained) // demand.tensor)
    if _divides(demand, "optimizer", "full"):
        trained = _part(trained, demand)
    return weights + reference + demand.frozen_bytes + trained


def _divides(demand: MemoryDemand, *shards: str) -> bool:
    """Returns whether there are several ranks that divide one of these among them."""
    return demand.ranks > 1 and demand.shard in shards


def _part(num_bytes: int, demand: MemoryDemand) -> int:
    """Returns one rank's part of so many bytes."""
    return -(-num_bytes // demand.ranks)


def kept_bytes_per_token(c: ModelConfig, bytes_per_number: int, recompute: bool) -> int:
    """Returns the bytes per token that the model keeps from the forward to the backward: layers, embedding, head input.

    With `recompute` a layer keeps only its inputs, and computes the rest again in the backward.
    """
    stream = 4 * c.hidden  # fp32
    ends = 3 * (4 + bytes_per_number) * c.hidden  # embedding, final norm and the input of the head
    # With recomputation only a layer's inputs are kept: the residual stream and what is to be added to it.
    inputs = stream + bytes_per_number * c.hidden
    return c.num_layers * (inputs if recompute else layer_bytes_per_token(c, bytes_per_number)) + ends


def layer_bytes_per_token(c: ModelConfig, bytes_per_number: int) -> int:
    """Returns the bytes per token that one layer keeps for its backward, without recomputation.

    They hold two sums of the residual stream, two normed inputs, q, k, v, mixed values with their normalisers, gate and
    up; also q and k from before their norm, where the model normalises them.
    """
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    # Models that normalise q and k keep both from before the norm too.
    normed = (bytes_per_number * c.head_dim + 4) * (c.num_heads + c.num_kv_heads) if c.qk_norm else 0
    return 2 * 4 * c.hidden + bytes_per_number * (2 * c.hidden + heads + 2 * c.ff) + 4 * c.num_heads + 8 + normed


def work_bytes_per_token(c: ModelConfig, bytes_per_number: int, recompute: bool) -> int:
    """Returns the bytes per token that exist only while the backward of one layer runs.

    They hold the gradients of gate and up, their product computed again, and its gradient, and six tensors of the
    hidden size, three of them in fp32; with `recompute` also everything that the layer computes again.
    """
    recomputed = layer_bytes_per_token(c, bytes_per_number) if recompute else 0
    return bytes_per_number * (4 * c.ff + 3 * c.hidden) + 3 * 4 * c.hidden + recomputed


def head_bytes(demand: MemoryDemand, budget: int) -> int:
    """Returns the most bytes that the head needs for one chunk of logits of a microbatch of `budget` tokens.

    First the logits and their gradient are in memory. Later the logits are gone, and a gradient of the head's matrix is
    there instead (unless only adapters are trained).
    """
    c = demand.model
    logits = min(GPU_CHUNK_LOGITS, budget * c.vocab_size)
    head_gradient = 4 * c.vocab_size * c.hidden if demand.num_trained is None else 0
    return logits * demand.bytes_per_number + max(4 * logits, head_gradient)


def update_bytes(demand: MemoryDemand, budget: int, recompute: bool) -> int:
    """Returns the bytes that training needs besides the state, with microbatches of `budget` tokens.

    They are the gradients of the masters, what is kept for the backward, and the work of head or layers, whichever
    needs more: head and layers run one after the other. `recompute` = activations are computed again in the backward.
    """
    num_trained = num_params(demand.model) if demand.num_trained is None else demand.num_trained
    if demand.tensor > 1:
        demand = replace(demand, model=_slice_model(demand.model, demand.tensor))
        num_trained = -(-num_trained // demand.tensor)
    c, bytes_per_number = demand.model, demand.bytes_per_number
    work = max(head_bytes(demand, budget), budget * work_bytes_per_token(c, bytes_per_number, recompute))
    passes = budget * kept_bytes_per_token(c, bytes_per_number, recompute) + work
    gradients = 4 * num_trained
    if _divides(demand, "optimizer"):
        # After the last pass the sum for a rank's slice is formed, while the rank's whole gradient is there.
        return gradients + max(passes, _part(gradients, demand))
    if _divides(demand, "full"):
        return _part(gradients, demand) + gathered_bytes(demand) + passes
    return gradients + passes


def _slice_model(c: ModelConfig, tensor: int) -> ModelConfig:
    """Returns the sizes of a slice of a model that `tensor` ranks hold together. The hidden size is not divided."""
    return replace(
        c,
        num_heads=c.num_heads // tensor,
        num_kv_heads=max(1, c.num_kv_heads // tensor),
        ff=c.ff // tensor,
        vocab_size=-(-c.vocab_size // tensor),
    )


def gathered_bytes(demand: MemoryDemand) -> int:
    """Returns the bytes of whole parameters and gradients that are there during a pass if the ranks divide everything.

    They hold the layer that runs and the one that is gathered meanwhile, embedding and head, and the gradients of a
    layer and of embedding and head: as they are formed, and once more in fp32 while they are summed over ranks.
    """
    c, bytes_per_number = demand.model, demand.bytes_per_number
    layer = count_layer_params(c) // c.num_layers
    ends = num_params(c) - count_layer_params(c)
    return (2 * layer + ends) * bytes_per_number + (layer + ends) * (bytes_per_number + 4)


def choose_shard(demand: MemoryDemand, available: int, token_budget: int = 0) -> str:
    """Returns the first of none, optimizer and full with which training fits into `available` bytes per rank.

    `demand.shard` is not used. `token_budget` is as in `plan_memory`. What cannot be divided is not chosen: the weights
    of a run that trains adapters, and a feed-forward size that is no multiple of the number of ranks. Raises
    ConfigError if nothing fits.
    """
    shards = ["none"] if demand.ranks == 1 else ["none", "optimizer"]
    if demand.ranks > 1 and demand.num_trained is None and demand.model.ff % demand.ranks == 0:
        shards.append("full")
    for shard in shards[:-1]:
        try:
            plan_memory(replace(demand, shard=shard), available, token_budget)
        except ConfigError:
            continue
        return shard
    # The last one's error says what is missing.
    plan_memory(replace(demand, shard=shards[-1]), available, token_budget)
    return shards[-1]


def plan_memory(demand: MemoryDemand, available: int, token_budget: int = 0) -> MemoryPlan:
    """Returns the fastest plan that fits into `available` bytes, of which the share USABLE_SHARE is planned.

    `token_budget` is taken as given; 0 = the plan chooses the largest that fits, up to MAX_BUDGET, the whole batch, or
    a longer sample. Four ways are tried in this order: nothing recomputed and KV kept; KV released between rollouts;
    activations recomputed; both. The first that allows microbatches of GOOD_BUDGET tokens (or of the whole batch) is
    taken, or else the first into which the longest sample fits. Raises ConfigError where that sample, or a given
    budget, does not fit.
    """
    state = state_bytes(demand)
    kv = count_kv_bytes(demand.model, demand.bytes_per_number) * demand.kv_tokens
    most = token_budget or max(demand.longest, min(MAX_BUDGET, demand.batch_tokens))
    least = token_budget or demand.longest
    for enough in (token_budget or min(GOOD_BUDGET, most), least):
        for recompute, keep in ((False, True), (False, False), (True, True), (True, False)):
            room = int(USABLE_SHARE * available) - WORKSPACE_BYTES - state - (kv if keep else 0)
            budget = _largest_fitting_budget(demand, room, recompute, most)
            if budget >= max(enough, least):
                return MemoryPlan(
                    token_budget=budget,
                    recompute=recompute,
                    keep_kv=keep,
                    state=state,
                    update=update_bytes(demand, budget, recompute),
                    per_token=kept_bytes_per_token(demand.model, demand.bytes_per_number, recompute),
                    kv=kv,
                    available=available,
                )
    need = state + update_bytes(demand, least, True) + WORKSPACE_BYTES
    needs = f"{need / USABLE_SHARE / 2**30:.1f} GiB ({state / 2**30:.1f} for weights and optimizer)"
    if token_budget:
        raise ConfigError(
            f"training with token_budget = {token_budget} needs {needs} of GPU memory, and {available / 2**30:.1f} GiB "
            "are available: lower the budget (cohort train: --learner.token_budget; cohort bench learner: "
            "--token-budget), or use a smaller model (--model)."
        )
    if demand.num_trained is not None:
        raise ConfigError(
            f"training adapters on samples of {least} tokens needs {needs} of GPU memory, and {available / 2**30:.1f} "
            "GiB are available: use a smaller model (--model) or shorter samples (--sampling.max_tokens)."
        )
    raise ConfigError(
        f"training on samples of {least} tokens needs {needs} of GPU memory, and {available / 2**30:.1f} GiB are "
        "available: use a smaller model (--model) or shorter samples (--sampling.max_tokens; cohort bench: "
        "--completion-tokens), or in cohort train adapters (--learner.lora.rank 16)."
    )


def _largest_fitting_budget(demand: MemoryDemand, room: int, recompute: bool, most: int) -> int:
    """Returns the largest token budget up to `most` whose update needs at most `room` bytes; 0 if none does.

    `recompute` = activations are computed again in the backward.
    """
    # Bisection: the need grows with the budget.
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if update_bytes(demand, middle, recompute) <= room:
            low = middle
        else:
            high = middle - 1
    return low if update_bytes(demand, low, recompute) <= room else 0
