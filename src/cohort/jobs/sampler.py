"""Models that only sample, outside any run: loaded from a folder into an engine of this process."""

from __future__ import annotations

from pathlib import Path

import torch

from cohort.config.engines import NativeEngine
from cohort.engines.base import Engine
from cohort.engines.factory import EngineModel, make_engine
from cohort.models.device import DTYPES
from cohort.models.files import LoadedModel, load_folder
from cohort.text import Tokenizer


def load_on_device(folder: Path, dtype: str, device: torch.device) -> LoadedModel:
    """Returns the model in a folder with its weights in `dtype`, a name in DTYPES, on the device."""
    loaded = load_folder(folder, DTYPES[dtype])
    loaded.decoder.to(device)
    return loaded


def make_sampler(
    model: LoadedModel, tokenizer: Tokenizer, *, slots: int, window: int | None = None, reserve: int = 0
) -> Engine:
    """Returns an engine that samples from a loaded model, with the model's whole context.

    `slots` is the most requests that are decoded together, `window` the most decode steps between two reports (None =
    the engine's usual number), `reserve` the bytes of GPU memory that others need while the engine is idle.
    """
    subject = EngineModel(
        decoder=model.decoder,
        decode=tokenizer.decode,
        context=model.config.context,
        window=window,
        reserve=reserve,
    )
    return make_engine(NativeEngine(slots=slots), subject)
