"""Fleets of engine processes for tests, with a small model in a folder."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models

from cohort.config.engines import NativeEngine
from cohort.engines.base import POLL_TIMEOUT, Request, sample
from cohort.engines.fleet.engine import Fleet
from cohort.engines.fleet.native import ProcessModel, make_native_fleet
from cohort.engines.fleet.process import ProcessReplica
from cohort.engines.native.engine import NativeEngine as EngineHere
from cohort.learner.base import LiveWeights
from cohort.models.decoder import Decoder
from cohort.models.files import load_folder, save_folder
from cohort.models.rope import make_rope
from cohort.system.kernel import list_children
from tests.helpers.decoders_and_groups import small_config, small_decoder
from tests.helpers.engine_conformance import request, spell

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


def find_process(fleet: Fleet, number: int = 0) -> int:
    """Returns the process id of an engine process: the child of its guard. Raises IndexError if it has none now."""
    replica = fleet._posts[number].replica
    assert isinstance(replica, ProcessReplica)
    made = replica._connection
    return list_children(made.guard.pid if made is not None else -1)[0]


@dataclass(kw_only=True, slots=True)
class Campaign:
    """What became of a kill campaign."""

    kills: int = 0
    kills_in_loads: int = 0
    kills_while_sampling: int = 0  # of a process that had requests under way
    rounds: int = 0
    requests: int = 0
    restarts: int = 0
    lost: int = 0  # requests that never ended
    doubled: int = 0  # samples beyond the first of a request
    wrong: int = 0  # samples with other tokens than those of an engine that nothing disturbed
    unequal_versions: int = 0  # samples with another version of the weights than the newest


def run_kill_campaign(folder: Path, num_kills: int, seed: int, replicas: int = 2) -> Campaign:
    """Kills engine processes at random moments, while they sample and while they load weights, so many times.

    The model in the folder should be slow enough that a round takes a good part of a second. Everything is in float64,
    so that tokens do not depend on what shares a batch.
    """
    rng = random.Random(seed)
    done = Campaign()
    decoder = load_decoder(folder, torch.float64)
    requests = [request(n % 3, n // 3, max_tokens=30 + 5 * n) for n in range(12)]
    expected = sample(EngineHere(decoder, spell, 4, CONTEXT), requests)
    fleet = make_fleet(folder, replicas, dtype="float64", restarts=10_000)
    try:
        for r in requests:
            fleet.submit(r)
        seconds = _run_round(fleet, requests, expected, 0, done)
        while done.kills < num_kills:
            version = done.rounds
            loads = rng.random() < 0.25
            wait = rng.random() * (0.1 if loads else 0.8 * seconds)
            striker = threading.Thread(target=_strike, args=(fleet, wait, rng, done))
            if loads:
                striker.start()
            fleet.load(LiveWeights(decoder), version)
            for r in requests:
                fleet.submit(r)
            if not loads:
                striker.start()
            took = _run_round(fleet, requests, expected, version, done)
            # The quickest round is the one that nothing disturbed most.
            seconds = min(seconds, took)
            striker.join()
            done.kills += 1
            done.kills_in_loads += loads
        done.restarts = fleet.num_restarts
    finally:
        fleet.close()
    return done


def _run_round(fleet: Fleet, requests: list[Request], expected: Any, version: int, done: Campaign) -> float:
    """Polls until all requests have ended, and counts what is wrong. Returns the seconds that it took."""
    begin = time.monotonic()
    ended: Counter[str] = Counter()
    while not fleet.idle:
        for event in fleet.poll(POLL_TIMEOUT):
            ended[event.id] += 1
            assert event.sample is not None
            done.wrong += event.sample.tokens != expected[event.id].tokens
            done.unequal_versions += event.sample.versions != [(0, version)]
    done.rounds += 1
    done.requests += len(requests)
    done.lost += sum(not ended[r.id] for r in requests)
    done.doubled += sum(n - 1 for n in ended.values() if n > 1)
    return time.monotonic() - begin


def _strike(fleet: Fleet, seconds: float, rng: random.Random, done: Campaign) -> None:
    """Kills one engine process after some seconds: another one if the chosen one is being started."""
    time.sleep(seconds)
    numbers = list(range(len(fleet._posts)))
    rng.shuffle(numbers)
    while True:
        for number in numbers:
            with suppress(IndexError, ProcessLookupError):
                pid = find_process(fleet, number)
                done.kills_while_sampling += bool(fleet._posts[number].owned)
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)
