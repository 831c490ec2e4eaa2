"""Requests for the engines under test, and the native engine that they are compared with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cohort
from cohort.engines.base import Request
from cohort.engines.native import NativeEngine
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder
from cohort.text import Tokenizer
from cohort.types import Key, Sampling

TINY = Path(cohort.__file__).parent / "models" / "tiny"
CONTEXT = 200


@cache
def decoder() -> Decoder:
    """Returns the decoder of the bundled model, loaded once."""
    return load_folder(TINY).decoder


def make_native() -> NativeEngine:
    """Returns a native engine for the bundled model."""
    return NativeEngine(decoder(), Tokenizer.load(TINY).decode, slots=16, max_context=CONTEXT)


def make_requests(num: int = 16, **sampling: Any) -> list[Request]:
    """Returns requests that the model can answer, every fourth with an opened thought. Greedy unless changed."""
    tokenizer = Tokenizer.load(TINY)
    values = {"max_tokens": 48, "temperature": 0.0, "stop_ids": tokenizer.stop_ids, **sampling}
    requests = []
    for i in range(num):
        messages = [{"role": "user", "content": f"Compute {3 * i + 2}+{7 * i % 30}-{i}."}]
        if i % 4 == 3:
            messages.append({"role": "assistant", "content": "<think>"})
        key = Key(seed=5, purpose="eval", task="t", prompt_id=str(i // 2), visit=0, sample=i % 2)
        tokens = tokenizer.render(messages).tokens
        requests.append(Request(id=str(i), tokens=tokens, sampling=Sampling(**values), key=key, messages=messages))
    return requests
