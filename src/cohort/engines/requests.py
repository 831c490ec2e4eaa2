"""What every engine refuses at the door, with the numbers."""

from __future__ import annotations

import math
from collections.abc import Container

from cohort.engines.base import Request
from cohort.errors import CohortError, ConfigError, EngineError, ModelError


def check_engine(slots: int, window: int, max_context: int, max_positions: int) -> None:
    """Raise for an engine that could serve nobody."""
    if slots < 1 or window < 1:
        raise ConfigError(f"engine.slots = {slots}, window = {window}: both must be at least 1.")
    if max_context > max_positions:
        raise ConfigError(f"max_context = {max_context} is more than the {max_positions} positions of the model.")


def check_request(request: Request, max_context: int, vocab_size: int, under_way: Container[str]) -> None:
    """Raise for a request that can never be served, or has the id of one under way."""
    s, num = request.sampling, len(request.tokens)
    who = f'request "{request.id}"'
    if request.id in under_way:
        raise ConfigError(f"{who} is already under way; ids must be unique.")
    if num == 0:
        raise ConfigError(f"{who} has an empty prompt; give at least one token.")
    if s.max_tokens < 1:
        raise ConfigError(f"{who}: max_tokens = {s.max_tokens} must be at least 1.")
    if num + s.max_tokens > max_context:
        raise ConfigError(
            f"{who} cannot fit: {num} prompt tokens + max_tokens {s.max_tokens} = {num + s.max_tokens} is "
            f"more than the context of {max_context}; shorten the prompt or lower max_tokens."
        )
    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        raise ConfigError(f"{who}: temperature = {s.temperature} must be a finite number >= 0 (0 = greedy).")
    if not 0 < s.top_p <= 1:
        raise ConfigError(f"{who}: top_p = {s.top_p} must be above 0 and at most 1 (1 = off).")
    if s.top_k < 0:
        raise ConfigError(f"{who}: top_k = {s.top_k} must not be negative (0 = off).")
    if not 0 <= s.min_p <= 1:
        raise ConfigError(f"{who}: min_p = {s.min_p} must be between 0 (off) and 1.")
    if "" in s.stop_strings:
        raise ConfigError(f"{who}: an empty stop string would stop at once; remove it.")
    if not -1 <= request.shared <= num:
        raise ConfigError(f"{who}: shared = {request.shared} must be between -1 (all) and the {num} tokens it has.")
    if request.start < 0:
        raise ConfigError(f"{who}: start = {request.start} must not be negative.")
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ConfigError(f"{who}: token id {bad} is outside the vocabulary of {vocab_size}.")


def not_under_way(id: str) -> CohortError:
    return CohortError(f'request "{id}" is not under way: never submitted, ended or aborted.')


def closed(name: str) -> EngineError:
    return EngineError(f"the {name} engine is closed: make a new one.")


def damaged(version: int) -> ModelError:
    return ModelError(
        f"the model (version {version}) gives logits that are not finite: its weights are damaged; "
        "go back to an earlier checkpoint."
    )
