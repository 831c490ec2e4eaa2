"""The checksum of a run's metrics, which a checkpoint keeps. By it a resume knows the files of this run from others."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping


def extend_checksum(checksum: str, metrics: Mapping[str, float]) -> str:
    """Returns the checksum of all steps up to one with these metrics.

    `checksum` is that of the steps before; "" = there are none. Clock times do not count, so that a repeated run has
    the same checksum. Names and order do not either, because a later version may rename a metric.
    """
    values = [float(value) for name, value in metrics.items() if not name.startswith("time/")]
    finite = [value for value in values if math.isfinite(value)]
    # + 0.0 turns -0.0 into 0.0, as SQLite does. metrics.jsonl has null for all values that are not finite.
    content = [sorted(value + 0.0 for value in finite), len(values) - len(finite)]
    return f"{zlib.crc32(json.dumps(content).encode(), int(checksum or '0', 16)):08x}"


def compute_metrics_checksum(steps: Mapping[int, Mapping[str, float]], last: int) -> str | None:
    """Returns the checksum of the steps from 1 to `last`, given their metrics by step; None if one is missing."""
    checksum = ""
    for step in range(1, last + 1):
        if step not in steps:
            return None
        checksum = extend_checksum(checksum, steps[step])
    return checksum
