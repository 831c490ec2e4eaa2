"""Rotary position embedding: frequencies from the parameters in a config.json. No torch.

Frequencies are rounded to fp32 after every operation, as transformers computes them, but correctly: the same
numbers on every machine, at most one unit in the last place from those torch's vectorised power gives.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cohort.errors import ModelError, nearest

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: inverse frequencies and the factor on cos and sin. Derived once from the config."""

    inv_freq: tuple[float, ...]  # [head_dim / 2]
    scale: float = 1.0
    parameters: dict[str, Any] = field(default_factory=dict, compare=False)  # as in config.json; for export


def make_rope(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """The rope that `parameters` (rope_type, rope_theta, factor, ...) describe.

    >>> make_rope({"rope_theta": 100.0}, head_dim=4, max_positions=8).inv_freq == (1.0, _f32(0.1))
    True
    """
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind not in _KINDS:
        raise ModelError(f'rope type "{kind}" is not supported.{nearest(kind, _KINDS)}')
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported: only 1 is")
    theta = _number(parameters, "rope_theta", DEFAULT_THETA)
    plain = [_f32(1.0 / _f32(theta ** _f32(i / head_dim))) for i in range(0, head_dim, 2)]
    known = {"rope_theta": theta, "original_max_position_embeddings": max_positions, **parameters}
    inv_freq, scale = _KINDS[kind](plain, known)
    written = {"rope_type": kind, "rope_theta": theta, **{k: v for k, v in parameters.items() if k != "type"}}
    return Rope(inv_freq=tuple(_f32(f) for f in inv_freq), scale=scale, parameters=written)


def _default(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    return plain, 1.0


def _linear(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    factor = _number(p, "factor")
    return [f / factor for f in plain], 1.0


def _llama3(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    """Long waves are stretched by the factor, short ones kept, and a smooth passage between (Llama 3.1)."""
    factor, low, high = (_number(p, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = _number(p, "original_max_position_embeddings")

    def stretch(f: float) -> float:
        wavelength = 2 * math.pi / f
        if wavelength < context / high:
            return f
        if wavelength > context / low:
            return f / factor
        keep = (context / wavelength - low) / (high - low)
        return (1 - keep) * f / factor + keep * f

    return [stretch(f) for f in plain], 1.0


def _yarn(plain: list[float], p: Mapping[str, Any]) -> tuple[list[float], float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp over the dimensions, and a factor on cos and sin."""
    theta, context = _number(p, "rope_theta"), _number(p, "original_max_position_embeddings")
    factor = _number(p, "factor")
    dims = 2 * len(plain)

    def dimension(rotations: float) -> float:
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(p.get("beta_fast") or 32))
    high = dimension(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001  # a ramp of no width is a step
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
    return [f * (1 - r) + f / factor * r for f, r in zip(plain, ramp, strict=True)], _yarn_scale(factor, p)


def _yarn_scale(factor: float, p: Mapping[str, Any]) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return temperature(float(p["mscale"])) / temperature(float(p["mscale_all_dim"]))
    return temperature(1.0)


def _number(p: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = p.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"rope parameter {key} = {value!r} in config.json: a positive number is needed")
    return float(value)


def _f32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
