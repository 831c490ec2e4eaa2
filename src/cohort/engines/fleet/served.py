"""Serves one engine to the program at the other end of a connection: the inside of an engine process."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.config.engines import NativeEngine
from cohort.engines.base import Engine
from cohort.engines.factory import EngineModel, make_engine
from cohort.engines.fleet.base import Forgotten, LoadedWeights
from cohort.engines.fleet.checksum import compute_checksum
from cohort.engines.fleet.folder import FileWeights
from cohort.engines.fleet.incoming import IncomingWeights
from cohort.engines.fleet.wire import (
    BEAT_SECONDS,
    EngineCall,
    EngineHello,
    EngineNews,
    EngineReply,
    EngineWork,
    receive_message,
    send_message,
)
from cohort.engines.weights import copy_weights
from cohort.errors import CohortError, shorten_error
from cohort.models.auto import AnyDecoder
from cohort.models.device import DTYPES, limit_memory
from cohort.models.files import load_folder
from cohort.models.functions import multiply_wide
from cohort.models.shards import TensorSpec
from cohort.models.spinning import throttle_thread_spinning
from cohort.text import Tokenizer
from cohort.types import Sample


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """The weights of the engine's own decoder: it has nothing to copy."""

    module: AnyDecoder

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and type of every weight, by name."""
        return self.module.weight_specs()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_weights()


class EngineServer:
    """Runs one engine for the program at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # messages in the order of their arrival; None = end
        self.warnings: list[str] = []
        self.incoming: IncomingWeights | None = None  # weights that come through memory of the GPU now
        self.engine: Engine
        self.decoder: AnyDecoder
        self._last_sent = 0.0

    def run(self) -> None:
        """Loads the model that the first message names, and works until the connection ends."""
        logging.getLogger().addHandler(_WarningCollector(self.warnings))
        try:
            self._load_model(receive_message(self.connection))
        except Exception as error:
            self._send(describe_error(0, error))
            return
        self._send(EngineReply(number=0))
        # A thread reads, so that the program never waits for a step of the engine to hand something over.
        threading.Thread(target=self._read_messages, daemon=True).start()
        while self._handle_messages():
            if not self.engine.idle:
                self._step()

    def _load_model(self, hello: EngineHello) -> None:
        """Loads the model on its device, and makes the engine."""
        torch.set_num_threads(hello.threads)
        throttle_thread_spinning()
        torch.set_deterministic_debug_mode("error" if hello.device == "cpu" else "default")
        if hello.memory < 1:
            limit_memory(torch.device(hello.device, 0), hello.memory)
        loaded = load_folder(hello.folder, DTYPES[hello.dtype])
        self.decoder = loaded.decoder.to(hello.device)
        self.decoder.requires_grad_(False)
        model = EngineModel(
            decoder=self.decoder,
            decode=Tokenizer.load(hello.folder).decode,
            context=hello.context,
            window=hello.window,
        )
        self.engine = make_engine(NativeEngine(slots=hello.slots, weights=hello.weights), model)

    def _read_messages(self) -> None:
        """Puts every message into the inbox, and None when the program is gone."""
        message: Any = self
        while message is not None:
            message = receive_message(self.connection)
            self.inbox.put(message)

    def _handle_messages(self) -> bool:
        """Handles what has arrived. Waits for a message if the engine has nothing to do. Returns False at the end."""
        while True:
            try:
                # An engine with some of the new weights makes no step.
                message = self.inbox.get(block=self.engine.idle or self.incoming is not None)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, EngineWork):
                self._begin(message)
                # Nothing that arrives later belongs to the same step: results must not depend on its speed.
                return True
            self._answer(message)

    def _begin(self, work: EngineWork) -> None:
        """Hands requests to the engine. The program has checked them, so that an error is one of the model."""
        for order in work.orders:
            if isinstance(order, Forgotten):
                self.engine.forget(order.id)
            else:
                self.engine.submit(order)

    def _answer(self, call: EngineCall) -> None:
        """Does what a call asks for, and sends the reply."""
        functions: dict[str, Callable[[EngineCall], Any]] = {
            "abort": self._abort,
            "load": self._load_weights,
            "open": self._open_memory,
            "copy": self._copy_portion,
            "finish": self._finish_load,
            "logprobs": self._compute_logprobs,
        }
        try:
            value = functions[call.what](call)
        except Exception as error:
            self._send(describe_error(call.number, error))
            return
        self._send(EngineReply(number=call.number, value=value))

    def _abort(self, call: EngineCall) -> Sample | None:
        """Stops a request. Returns its partial sample, or None if it has ended."""

        # News of its end may wait in the engine, or have been sent.
        try:
            return self.engine.abort(call.id)
        except CohortError:
            return None

    def _load_weights(self, call: EngineCall) -> LoadedWeights:
        """Loads the weights in a folder. Returns their version, and the checksums of what the model has then."""
        copy_weights(FileWeights(Path(call.folder)), self.decoder)
        return self._use_weights(call.version)

    def _open_memory(self, call: EngineCall) -> None:
        """Opens the memory through which new weights come."""
        assert call.memory is not None
        if self.incoming is not None:
            # That load failed halfway.
            self.incoming.close()
        self.incoming = IncomingWeights(call.memory, call.tensors, self.decoder)

    def _copy_portion(self, call: EngineCall) -> None:
        """Copies the tensors that are in the memory now."""
        assert self.incoming is not None
        self.incoming.copy(call.tensors)

    def _finish_load(self, call: EngineCall) -> LoadedWeights:
        """Closes the memory, and uses the weights that came through it. Returns what `_load_weights` does."""
        assert self.incoming is not None
        incoming, self.incoming = self.incoming, None
        incoming.finish()
        return self._use_weights(call.version)

    def _use_weights(self, version: int) -> LoadedWeights:
        """Makes the engine sample from what the decoder has now. Returns version and checksums."""
        self.engine.load(OwnWeights(self.decoder), version)
        checksums = {name: compute_checksum(tensor) for name, tensor in self.decoder.named_weights()}
        return LoadedWeights(version=self.engine.version, checksums=checksums)

    def _compute_logprobs(self, call: EngineCall) -> list[float]:
        """Returns the log-probabilities of given tokens, at temperature 1."""
        with torch.no_grad():
            tokens = torch.tensor(call.tokens, device=self.decoder.embed.device)
            logits = multiply_wide(self.decoder.forward_one_sequence(tokens), self.decoder.head_weight)
            found: list[float] = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].tolist()
        return found

    def _step(self) -> None:
        """Lets the engine work for a moment, and sends what has ended, or now and then a sign of life."""
        try:
            ended = [event for event in self.engine.poll() if event.sample is not None]
        except Exception as error:
            self._send(describe_error(-1, error))
            raise SystemExit(1) from error
        if ended or self.warnings or time.monotonic() - self._last_sent >= BEAT_SECONDS:
            warnings, self.warnings[:] = list(self.warnings), []
            samples = [event.sample for event in ended if event.sample is not None]
            ids = [event.id for event in ended]
            self._send(EngineNews(ids=ids, samples=samples, work=self.engine.work, warnings=warnings))

    def _send(self, message: Any) -> None:
        """Sends a message. Ends this process if the program is gone."""
        self._last_sent = time.monotonic()
        try:
            send_message(self.connection, message)
        except OSError:
            raise SystemExit(0) from None


class _WarningCollector(logging.Handler):
    """Keeps warnings that are logged in this process, for the program to log."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one line."""
        self.lines.append(record.getMessage())


def describe_error(number: int, error: Exception) -> EngineReply:
    """Returns the reply to call `number` that says which error it raised. Those of Cohort keep their class.

    An error that is a bug has its traceback printed, which the program shows.
    """

    if isinstance(error, CohortError):
        return EngineReply(number=number, error=type(error).__name__, text=str(error))
    os.write(2, "".join(traceback.format_exception(error)).encode())
    return EngineReply(number=number, error="bug", text=f"{type(error).__name__}: {shorten_error(error)}")
