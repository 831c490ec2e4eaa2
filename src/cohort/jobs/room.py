"""The memory that models need, from the heads of their files, compared with what is free before any is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.errors import ConfigError
from cohort.learner.plan import USABLE_SHARE
from cohort.models.config import ModelConfig
from cohort.models.files import find_weight_files, is_native, read_config
from cohort.models.limits import count_kv_bytes
from cohort.models.sizes import check_native_size, read_shapes

KV_TOKENS = 8192  # tokens of a conversation for which room is planned, as far as the model's context allows


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDemand:
    """The bytes that a model needs while it samples one answer at a time."""

    weights: int
    kv: int  # keys and values of a conversation; 0 = not known, for models of transformers

    @property
    def total(self) -> int:
        """The bytes of weights, keys and values together."""
        return self.weights + self.kv


def compute_demand(folder: Path, width: int) -> SamplingDemand:
    """Returns the bytes that the model in a folder needs, at `width` bytes per number. Reads no weights.

    Raises ModelError if its files are missing, damaged, or do not fit together.
    """
    hf_config = read_config(folder)
    shapes = read_shapes(find_weight_files(folder))
    if not is_native(hf_config):
        return SamplingDemand(weights=width * sum(map(math.prod, shapes.values())), kv=0)
    config = ModelConfig.from_hf(hf_config)
    check_native_size(folder, config, shapes)
    kv = count_kv_bytes(config, width) * min(config.context, KV_TOKENS)
    return SamplingDemand(weights=width * config.num_weights, kv=kv)


def check_room(demands: Sequence[SamplingDemand], free: int | None, device: str) -> None:
    """Raises ConfigError, with the numbers, if the models do not fit together into the free memory.

    `free` has bytes; None = not known, and nothing is refused. `device` is "cpu" or "cuda". On a GPU some memory is
    left to the driver and the libraries.
    """
    if free is None:
        return
    usable = int(USABLE_SHARE * free) if device == "cuda" else free
    if sum(demand.total for demand in demands) <= usable:
        return
    sizes = " + ".join(format_gigabytes(demand.total) for demand in demands)
    where = "the GPU" if device == "cuda" else "this machine"
    models = "these models need" if len(demands) > 1 else "the model needs"
    advice = "name fewer or smaller models" if len(demands) > 1 else "name a smaller model"
    smaller = "" if device == "cuda" else ", or add --dtype bfloat16, which takes half the memory"
    raise ConfigError(f"{models} {sizes} GB, and {format_gigabytes(usable)} GB are free on {where}: {advice}{smaller}.")


def format_gigabytes(num_bytes: int) -> str:
    """Returns a number of bytes in GB (10^9), with two digits after the point below 1 GB and one above.

    >>> format_gigabytes(14_210_000_000), format_gigabytes(12_000_000)
    ('14.2', '0.01')
    """
    return f"{num_bytes / 1e9:.1f}" if num_bytes >= 1e9 else f"{num_bytes / 1e9:.2f}"
