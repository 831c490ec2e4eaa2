"""What a stand-in can be told to do wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# Of weights that are loaded, until `clear`.
WEIGHT_KINDS = {
    "skip_tensor": "leaves one tensor out",
    "stale_weights": "keeps the old weights and reports success",
    "transpose": "transposes a square matrix",
    "round_to_bf16": "rounds all numbers to bf16",
    # What vLLM does on a CPU, with no fault: its head is a packed copy, which is made at the start only.
    "stale_head": "keeps the head where that is the embedding",
}
# Of sampling, until `clear`.
SAMPLING_KINDS = {
    "raw_logprobs": "reports log-probabilities at temperature 1",
    "slow": "waits `seconds` after each decode step",
    "die": "ends the process after `tokens` more drawn tokens",
}
# Of replies to requests for `path`, `times` times.
REPLY_KINDS = {
    "hang": "never answers",
    "drop": "closes the connection without an answer",
    "malformed": "answers with half of the JSON",
    "error_500": "answers with status 500",
    "extra_token": "answers with one token more than log-probabilities",
    "short_logprobs": "answers with one log-probability less than tokens",
}
VARIABLE = "STAND_IN_FAULTS"


@dataclass(kw_only=True)
class Fault:
    """One thing that goes wrong. Which fields count depends on the kind."""

    kind: str
    path: str = ""  # beginning of the paths that it concerns; "" = that of generation
    times: int = 1
    tokens: int = 0
    seconds: float = 0.0
    tensor: str = ""  # Hugging Face name; "" = the first that fits


class Faults:
    """The faults that a stand-in has now."""

    def __init__(self, generate_path: str) -> None:
        self.generate_path = generate_path
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, given: Any) -> None:
        """Adds a fault from a JSON object. Raises ValueError for one that does not exist."""
        names = {field.name for field in fields(Fault)}
        if not isinstance(given, Mapping) or not given.keys() <= names:
            raise ValueError(f"{given!r} is no fault: its fields are {', '.join(sorted(names))}")
        if given.get("kind") not in {**WEIGHT_KINDS, **SAMPLING_KINDS, **REPLY_KINDS}:
            raise ValueError(f"{given.get('kind')!r} is no kind of fault")
        fault = Fault(**given)
        fault.path = fault.path or self.generate_path
        with self._lock:
            self._faults.append(fault)

    def add_from_variable(self, text: str) -> None:
        """Adds the faults of the environment variable: a JSON list, or "" for none."""
        for given in json.loads(text or "[]"):
            self.add(given)

    def clear(self) -> None:
        """Drops all faults."""
        with self._lock:
            self._faults.clear()

    def get(self, kind: str) -> Fault | None:
        """Returns the first fault of the kind."""
        with self._lock:
            return next((fault for fault in self._faults if fault.kind == kind), None)

    def use_reply_fault(self, path: str) -> str:
        """Returns the kind of the first fault for a reply to `path`, and counts its use. "" = there is none."""
        with self._lock:
            for fault in self._faults:
                if fault.kind in REPLY_KINDS and path.startswith(fault.path):
                    fault.times -= 1
                    if fault.times == 0:
                        self._faults.remove(fault)
                    return fault.kind
        return ""
