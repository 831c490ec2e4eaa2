"""Rotary position embedding: the frequencies that follow from the parameters in a config.json. Does not import torch.

Frequencies are rounded to fp32 after every operation, as in transformers. Each rounding is exact, so the numbers are
the same on every machine. They differ from those of torch's vectorised power by at most one unit in the last place.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cohort.errors import ModelError
from cohort.system.json_text import show_value

DEFAULT_THETA = 10000.0
_MOST = 1e15  # the largest parameter that is read; fp32 has room for its square


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The numbers of a rotary embedding, computed once from the config."""

    inv_freq: tuple[float, ...]  # [head_dim / 2], radians per position
    scale: float = 1.0  # factor on cos and sin
    parameters: dict[str, Any] = field(default_factory=dict, compare=False)  # as in config.json, for export


def make_rope(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """Returns the rotary embedding that `parameters` of a config.json (rope_type, rope_theta, ...) describe.

    `head_dim` is the size of a head. `max_positions` is the context before scaling, if the parameters do not name it. A
    missing rope_theta is 10000. Raises ModelError for what is not supported, and for numbers that are missing or wrong.

    >>> make_rope({"rope_theta": 100.0}, head_dim=4, max_positions=8).inv_freq == (1.0, _round_to_fp32(0.1))
    True
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in _SCALERS:
        raise ModelError(
            f"rope type {show_value(kind)} in config.json is not supported: use a model with one of these: "
            f"{', '.join(_SCALERS)}"
        )
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ModelError(
            f"partial_rotary_factor {show_value(partial)} in config.json is not supported, only 1 is: use another model"
        )
    theta = _read_number(parameters, "rope_theta", DEFAULT_THETA)
    plain = [_round_to_fp32(1.0 / _round_to_fp32(theta ** _round_to_fp32(i / head_dim))) for i in range(0, head_dim, 2)]
    # Defaults for what a scaling needs and the parameters may lack.
    known = {"rope_theta": theta, "original_max_position_embeddings": max_positions, **parameters}
    inv_freq, scale = _SCALERS[kind](plain, known)
    # "type" is the old name of rope_type and is not written again.
    written = {"rope_type": kind, "rope_theta": theta, **{k: v for k, v in parameters.items() if k != "type"}}
    return Rope(inv_freq=tuple(_round_to_fp32(f) for f in inv_freq), scale=scale, parameters=written)


# Each of the following functions takes the plain frequencies and the parameters. It returns the frequencies to use and
# the factor on cos and sin.


def _keep_frequencies(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    """Returns the unscaled frequencies unchanged, and the factor 1 on cos and sin (rope_type "default")."""
    return plain, 1.0


def _divide_frequencies(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    """Returns all frequencies divided by "factor" of `p`, and the factor 1 on cos and sin (rope_type "linear")."""
    factor = _read_number(p, "factor")
    return [f / factor for f in plain], 1.0


def _scale_for_llama3(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    """Returns the frequencies as Llama 3.1 scales them, and the factor 1 on cos and sin (rope_type "llama3").

    Low frequencies are divided by "factor" of the parameters `p`, high ones are kept, and those between are blended.
    """
    factor, low, high = (_read_number(p, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = _read_number(p, "original_max_position_embeddings")
    if not high > low:
        raise ModelError(
            f"config.json has the rope parameters low_freq_factor = {low} and high_freq_factor = {high}, but the "
            "second must be larger: correct the file, or use another model"
        )

    def stretch(f: float) -> float:
        """Returns the stretched frequency for f."""
        wavelength = 2 * math.pi / f  # in tokens
        if wavelength < context / high:
            return f
        if wavelength > context / low:
            return f / factor
        # Between the two limits: the share of the frequency that is kept grows as the wave gets shorter.
        keep = (context / wavelength - low) / (high - low)
        return (1 - keep) * f / factor + keep * f

    return [stretch(f) for f in plain], 1.0


def _scale_for_yarn(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    """Returns the frequencies as YaRN scales them, and its factor on cos and sin (rope_type "yarn", arXiv:2309.00071).

    High frequencies are kept, low ones are divided by "factor" of the parameters `p`, with a linear ramp between.
    """
    theta = _read_number(p, "rope_theta")
    context = _read_number(p, "original_max_position_embeddings")
    factor = _read_number(p, "factor")
    if theta <= 1:
        raise ModelError(
            f"config.json has the rope parameter rope_theta = {theta}, but YaRN needs one above 1: correct the file, "
            "or use another model"
        )
    dims = 2 * len(plain)

    def find_dimension(rotations: float) -> float:
        """Returns the dimension, as a fraction, whose wave makes this many rotations within the context."""
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    # Dimensions below `low` are kept, those above `high` are divided by the factor, with a ramp between.
    low = find_dimension(_read_number(p, "beta_fast", 32) if p.get("beta_fast") else 32)
    high = find_dimension(_read_number(p, "beta_slow", 1) if p.get("beta_slow") else 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    # A ramp without width becomes a step. 0.001 avoids a division by zero.
    width = high - low if high != low else 0.001
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
    return [f * (1 - r) + f / factor * r for f, r in zip(plain, ramp, strict=True)], _compute_yarn_factor(factor, p)


def _compute_yarn_factor(factor: float, p: Mapping[str, Any]) -> float:
    """Returns YaRN's factor on cos and sin: "attention_factor" of the parameters `p`, if it is there.

    Else it is computed from `factor`, by which the context is stretched, and from "mscale" and "mscale_all_dim" if `p`
    has both.
    """
    if p.get("attention_factor") is not None:
        return _read_number(p, "attention_factor")

    def temperature(mscale: float) -> float:
        """Returns the attention temperature of the paper, 0.1 ln(factor) + 1, with `mscale` on its first term."""
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return temperature(_read_number(p, "mscale")) / temperature(_read_number(p, "mscale_all_dim"))
    return temperature(1.0)


def _read_number(p: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Returns the positive number under `key` of the rope parameters, or the default where it is missing or null.

    Raises ModelError for any other value, and where there is neither a value nor a default.
    """
    value = p.get(key)
    if value is None:
        value = default
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / _MOST <= value <= _MOST:
        raise ModelError(
            f"config.json has the rope parameter {key} = {show_value(value)} (None = missing), but it must be a "
            f"positive number of at most {_MOST:g}: correct the file, or use another model"
        )
    return float(value)


def _round_to_fp32(x: float) -> float:
    """Returns x rounded to the nearest fp32 number. Raises OverflowError if x is finite and too large for fp32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


_SCALERS = {
    "default": _keep_frequencies,
    "linear": _divide_frequencies,
    "llama3": _scale_for_llama3,
    "yarn": _scale_for_yarn,
}
