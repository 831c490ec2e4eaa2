"""Copies weights of another model, in another process or type, into an engine's own decoder."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from cohort.engines.base import Weights
from cohort.errors import ModelError, suggest_name
from cohort.models.auto import AnyDecoder
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


def copy_weights(weights: Weights, decoder: AnyDecoder, allow_rounding: bool = False) -> None:
    """Copies every tensor of `weights` into the decoder, in place. See `WeightCopy`.

    The tensors are iterated once, because ranks that divide them gather them each time.
    """
    copy = WeightCopy(weights.specs, decoder, allow_rounding)
    for name, tensor in weights:
        copy.add(name, tensor)
    copy.finish()


class WeightCopy:
    """Copies weights into a decoder, in place, one tensor after another, by Hugging Face name.

    `specs` are those of all tensors that will come. Raises ModelError if a name is missing or unknown, or a shape or
    type differs: before the first tensor is copied, so that the decoder never has weights of two models.
    "lm_head.weight" is skipped if the decoder has no head of its own. With `allow_rounding`, tensors of a wider type
    are rounded to the decoder's type where ROUNDABLE permits it.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], decoder: AnyDecoder, allow_rounding: bool = False) -> None:
        if isinstance(decoder, Decoder):
            self._views = dict(hf_views(decoder))
            shapes = {name: to_hf_shape(name, view.to("meta")).shape for name, view in self._views.items()}
        else:
            self._views = {name: p.detach() for name, p in decoder.named_weights()}
            shapes = {name: view.shape for name, view in self._views.items()}
        self._expected = {
            name: TensorSpec(shape=tuple(shapes[name]), dtype=view.dtype) for name, view in self._views.items()
        }
        self._allow_rounding = allow_rounding
        self._missing = set(self._views)
        for name, spec in specs.items():
            if not self._is_skipped(name):
                self._check(name, spec)
        _require_all(self._views.keys() - specs.keys())

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies one tensor. Raises ModelError if it does not fit."""
        if self._is_skipped(name):
            return
        # Checked again: weights may be other than they are said to be, and must not be copied silently.
        self._check(name, TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype))
        view = self._views[name]
        with torch.no_grad():
            view.copy_(tensor.reshape(view.shape))
        self._missing.discard(name)

    def finish(self) -> None:
        """Raises ModelError if any tensor of the decoder has not come."""
        _require_all(self._missing)

    def _is_skipped(self, name: str) -> bool:
        """Returns whether a tensor has no target: a tied head is the embedding itself."""
        return name == "lm_head.weight" and name not in self._views

    def _check(self, name: str, spec: TensorSpec) -> None:
        """Raises ModelError unless a tensor can be copied into the view of its name."""
        if name not in self._expected:
            raise ModelError(
                f'the new weights have a tensor "{name}" that the model of the engine has not.'
                f"{suggest_name(name, self._expected)} {FIX}"
            )
        needed = self._expected[name]
        if spec.shape != needed.shape:
            raise ModelError(
                f'the new weights "{name}" have shape {list(spec.shape)}; the engine needs {list(needed.shape)}. {FIX}'
            )
        can_round = self._allow_rounding and (spec.dtype, needed.dtype) in ROUNDABLE
        if spec.dtype != needed.dtype and not can_round:
            raise ModelError(
                f'the new weights "{name}" are of type {_format_dtype(spec.dtype)}; the engine needs '
                f"{_format_dtype(needed.dtype)}. {FIX}"
            )


def _require_all(missing: Collection[str]) -> None:
    """Raises ModelError if there is any name in `missing`."""
    if missing:
        raise ModelError(
            f"the new weights lack {len(missing)} tensors of the engine's model, {min(missing)} among them. {FIX}"
        )


def _format_dtype(dtype: torch.dtype) -> str:
    """Returns the name of a tensor type without "torch.", such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
