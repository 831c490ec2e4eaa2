"""Weights from elsewhere into an engine's own decoder, by Hugging Face name."""

from __future__ import annotations

import torch

from cohort.engines.base import Weights
from cohort.errors import ModelError, nearest
from cohort.models.decoder import Decoder, hf_shaped, hf_views

# Where a learner keeps weights in a wider type than its engine on purpose: what may be rounded to what.
ROUNDED = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
}


@torch.no_grad()
def copy_weights(weights: Weights, decoder: Decoder, rounded: bool = False) -> None:
    """Copy every tensor in place. All names must be there, none may be unknown, shapes and types must agree.

    With `rounded`, tensors of a wider type are rounded to the decoder's, as ROUNDED allows. A tied head that comes
    along as `lm_head.weight` is left out: it is the embedding.
    """
    views = dict(hf_views(decoder))
    missing = set(views)
    for name, tensor in weights:
        if name == "lm_head.weight" and decoder.head is None:
            continue
        if name not in views:
            raise ModelError(f'weights have a tensor "{name}" that the model has not.{nearest(name, views)}')
        view = views[name]
        shape = hf_shaped(name, view.to("meta")).shape
        if tensor.shape != shape:
            raise ModelError(f'"{name}" has shape {list(tensor.shape)}; the model needs {list(shape)}.')
        if tensor.dtype != view.dtype and not (rounded and (tensor.dtype, view.dtype) in ROUNDED):
            raise ModelError(f'"{name}" is of type {_short(tensor.dtype)}; the model needs {_short(view.dtype)}.')
        view.copy_(tensor.reshape(view.shape))
        missing.discard(name)
    if missing:
        raise ModelError(f"weights lack {len(missing)} tensors of the model, {sorted(missing)[0]} among them.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
