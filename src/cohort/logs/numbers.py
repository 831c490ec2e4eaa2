"""Numbers as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping


def format_compact(value: float) -> str:
    """Returns a number as text in few characters, at any magnitude.

    Below 1 it has three decimals, below 100 one, below a million none. Below 0.001 and from a million on it has two
    significant digits, with an exponent where needed.

    >>> [format_compact(v) for v in (0.0, 0.5321, 12.34, 1234.5, 3e-6, -0.25, float("nan"))]
    ['0', '0.532', '12.3', '1234', '3e-06', '-0.250', 'nan']
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.2g}"
    return f"{value:.3f}" if size < 1 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Returns seconds as minutes:seconds or, from an hour on, hours:minutes:seconds. Fractions are cut off.

    "-:--" = not known (NaN or infinite).

    >>> [format_duration(s) for s in (0.4, 59, 61, 3600 * 5 + 120, float("nan"))]
    ['0:00', '0:59', '1:01', '5:02:00', '-:--']
    """
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_tokens_per_second(metrics: Mapping[str, float]) -> str:
    """Returns the tokens per second from a step's metrics as text, such as "12,345".

    Takes the sampled tokens per second of the step or, if that metric is missing, the trained tokens per second of the
    update; "" if neither is known.
    """
    value = metrics.get("time/tokens_per_s", metrics.get("time/trained_per_s", math.nan))
    return f"{value:,.0f}" if math.isfinite(value) else ""


def compute_stage_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of a step's time that each stage took, by name, largest first; stages of 0 s are left out.

    "other" is the rest and comes last; it is left out up to half a percent. Empty if no time is known.

    >>> compute_stage_shares({"time/step": 4.0, "time/stage/update": 1.0, "time/stage/rollout": 2.0, "loss": 1.0})
    {'rollout': 0.5, 'update': 0.25, 'other': 0.25}
    """
    stages = {n.removeprefix("time/stage/"): v for n, v in metrics.items() if n.startswith("time/stage/")}
    total = max(metrics.get("time/step", 0.0), sum(stages.values()))
    if total <= 0:
        return {}
    shares = {n: v / total for n, v in sorted(stages.items(), key=lambda item: -item[1]) if v > 0}
    # A rest of less than half a percent would be shown as 0%.
    rest = 1.0 - sum(shares.values())
    return {**shares, "other": rest} if rest > 0.005 else shares
