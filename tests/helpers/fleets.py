"""Fleets of engine processes for tests, with a small model in a folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models

from cohort.config.engines import NativeEngine
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.native import ProcessModel, make_native_fleet
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder, save_folder
from cohort.models.rope import make_rope
from tests.helpers.decoders_and_groups import small_config, small_decoder

CONTEXT = 128


def write_folder(folder: Path, dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    """Writes a small model with a tokenizer that spells every id as the conformance tests do: 3, 17 -> "3.17."."""
    vocab = {f"{i}.": i for i in range(small_config().vocab_size)}
    decoder = small_decoder(dtype, rope=make_rope({}, 8, 512), **shape)
    save_folder(decoder, None, None, folder)
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="0."))
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    return folder


@cache
def shared_folder() -> Path:
    """Returns a folder with a small model, the same for all tests of this process."""
    return write_folder(Path(mkdtemp()) / "model")


def make_fleet(folder: Path, replicas: int = 1, slots: int = 4, dtype: str = "float32", **settings: Any) -> Fleet:
    """Returns a fleet of engine processes for the model in a folder."""
    model = ProcessModel(
        folder=folder,
        dtype=dtype,
        device="cpu",
        context=CONTEXT,
        vocab_size=small_config().vocab_size,
        threads=1,
        window=None,
    )
    return make_native_fleet(NativeEngine(place="process", replicas=replicas, slots=slots, **settings), model)


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns the model of a folder in this process."""
    decoder = load_folder(folder, dtype).decoder
    assert isinstance(decoder, Decoder)
    return decoder.requires_grad_(False)
