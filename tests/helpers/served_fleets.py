"""Fleets of stand-ins for servers of vLLM and SGLang, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cohort.config.engines import ServedEngine, SglangEngine, VllmEngine
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.servers import ServedModel, make_server_fleet
from tests.helpers.decoders_and_groups import small_config
from tests.helpers.engine_conformance import spell
from tests.helpers.engine_servers.base import StandIn
from tests.helpers.engine_servers.starting import Address, serve_here
from tests.helpers.fleets import CONTEXT

KINDS = ("vllm", "sglang")
VARIANTS: dict[str, type[ServedEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
# What a server for training is started with. SGLang keeps some tokens of its context for itself.
FLAGS = {
    "vllm": ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-model-len", str(CONTEXT)),
    "sglang": ("--context-length", str(CONTEXT + 8), "--enable-deterministic-inference"),
}


def describe_model(folder: Path, dtype: str = "float32") -> ServedModel:
    """Returns the small model in a folder as servers load it."""
    return ServedModel(
        folder=folder,
        dtype=dtype,
        device="cpu",
        context=CONTEXT,
        vocab_size=small_config().vocab_size,
        threads=1,
        decode=spell,
    )


def show(address: Address) -> str:
    """Returns an address as users write it."""
    return (
        f"unix:{address.place}" if isinstance(address.place, str) else f"http://{address.place[0]}:{address.place[1]}"
    )


def make_fleet_of(kind: str, folder: Path, *addresses: Address, **settings: Any) -> Fleet:
    """Returns a fleet of servers that run already."""
    variant = VARIANTS[kind](urls=tuple(map(show, addresses)), **{"patience": 20.0, **settings})
    return make_server_fleet(kind, variant, describe_model(folder))


@contextmanager
def serve(kind: str, folder: Path, *flags: str, place: str | None = None) -> Iterator[tuple[Address, StandIn]]:
    """Runs a stand-in in a thread of this process, with what training needs. `flags` come after those of FLAGS."""
    with pytest.MonkeyPatch.context() as patch:
        # A test may have set it.
        if "VLLM_SERVER_DEV_MODE" not in os.environ:
            patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with serve_here(kind, folder, *FLAGS[kind], *flags, place=place) as served:
            yield served
