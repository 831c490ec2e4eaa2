"""Copies weights of another model, in another process or type, into an engine's own decoder."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from cohort.engines.base import Weights
from cohort.errors import ModelError, suggest_name
from cohort.models.decoder import Decoder, hf_views, to_hf_shape
from cohort.models.shards import TensorSpec

# (source, target) types that `allow_rounding` permits: a learner may keep its weights in a wider type than its engine.
ROUNDABLE = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
}
# The end of every message below: a user cannot repair single tensors.
FIX = "Make the engine with the same model and dtype as the learner."


@torch.no_grad()
def copy_weights(weights: Weights, decoder: Decoder, allow_rounding: bool = False) -> None:
    """Copies every tensor of `weights` into the decoder, in place, by Hugging Face name.

    Raises ModelError if a name is missing or unknown, or a shape or type differs. All are checked before the first
    tensor is copied, so that the decoder never has weights of two models. For that the specs of `weights` are read. The
    tensors are iterated once, because ranks that divide them gather them each time.
    "lm_head.weight" is skipped if the decoder has no head of its own. With `allow_rounding`, tensors of a wider type
    are rounded to the decoder's type where ROUNDABLE permits it.
    """
    views = dict(hf_views(decoder))
    # A tied head is the embedding itself: a copy that comes along under this name has no target.
    skipped = {"lm_head.weight"} - views.keys()
    for name, spec in weights.specs.items():
        if name not in skipped:
            _check_spec(name, spec, views, allow_rounding)
    _require_all(views.keys() - weights.specs.keys())
    missing = set(views)
    for name, tensor in weights:
        if name not in skipped:
            # Checked again: weights may be other than they are said to be, and must not be copied silently.
            _check_spec(name, TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype), views, allow_rounding)
            views[name].copy_(tensor.reshape(views[name].shape))
            missing.discard(name)
    _require_all(missing)


def _require_all(missing: Collection[str]) -> None:
    """Raises ModelError if there is any name in `missing`."""
    if missing:
        raise ModelError(
            f"the new weights lack {len(missing)} tensors of the engine's model, {min(missing)} among them. {FIX}"
        )


def _check_spec(name: str, spec: TensorSpec, views: Mapping[str, Tensor], allow_rounding: bool) -> None:
    """Raises ModelError unless a tensor can be copied into the view of its name. See `copy_weights`."""
    if name not in views:
        raise ModelError(
            f'the new weights have a tensor "{name}" that the model of the engine has not.'
            f"{suggest_name(name, views)} {FIX}"
        )
    view = views[name]
    shape = tuple(to_hf_shape(name, view.to("meta")).shape)
    if spec.shape != shape:
        raise ModelError(
            f'the new weights "{name}" have shape {list(spec.shape)}; the engine needs {list(shape)}. {FIX}'
        )
    if spec.dtype != view.dtype and not (allow_rounding and (spec.dtype, view.dtype) in ROUNDABLE):
        raise ModelError(
            f'the new weights "{name}" are of type {_format_dtype(spec.dtype)}; the engine needs '
            f"{_format_dtype(view.dtype)}. {FIX}"
        )


def _format_dtype(dtype: torch.dtype) -> str:
    """Returns the name of a tensor type without "torch.", such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
