"""Checks that every engine makes before it takes a request, and the errors that engines share."""

from __future__ import annotations

import math
from collections.abc import Container

from cohort.engines.base import Request
from cohort.errors import CohortError, ConfigError, EngineError, ModelError


def check_engine_limits(slots: int, window: int, max_context: int, max_positions: int) -> None:
    """Raises ConfigError for engine settings that are out of range.

    `slots` and `window` must be at least 1. `max_context` must be at most `max_positions`, the longest context of the
    model, in tokens. No least value of `max_context` is checked.
    """
    if slots < 1 or window < 1:
        raise ConfigError(f"an engine got slots = {slots} and window = {window}: set both to at least 1.")
    if max_context > max_positions:
        raise ConfigError(
            f"prompt and completion may have {max_context} tokens together, but the model's context has "
            f"{max_positions}: lower max_context of the engine (cohort bench: --prompt-tokens or --completion-tokens)."
        )


def check_request(request: Request, max_context: int, vocab_size: int, under_way: Container[str]) -> None:
    """Raises ConfigError for a request that can never be served, or whose id is already in `under_way`.

    Such a request has an empty prompt; a sampling setting, `shared` or `start` out of range; an empty stop string; a
    token id that is not in 0 .. `vocab_size` - 1; or prompt plus `max_tokens` are more than `max_context` tokens.
    """
    s, num = request.sampling, len(request.tokens)
    if request.id in under_way:
        raise ConfigError(f'a request "{request.id}" is already under way; give every request an id of its own.')
    if num == 0:
        raise ConfigError(
            f'request "{request.id}" has an empty prompt; give it at least one token (in a task: let the method '
            "`prompt` return a message with text)."
        )
    if s.max_tokens < 1:
        raise ConfigError(
            f'request "{request.id}" has max_tokens = {s.max_tokens}; set at least 1 (cohort train: '
            "--sampling.max_tokens; cohort eval: --max-tokens)."
        )
    if num + s.max_tokens > max_context:
        raise ConfigError(
            f'request "{request.id}" cannot fit: {num} prompt tokens + max_tokens {s.max_tokens} = '
            f"{num + s.max_tokens} is more than the context of {max_context}; shorten the prompt or lower max_tokens "
            "(cohort train: --sampling.max_tokens; cohort eval: --max-tokens)."
        )
    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        raise ConfigError(
            f'request "{request.id}" has temperature = {s.temperature}; set a finite number of at least 0 (0 = greedy).'
        )
    if not 0 < s.top_p <= 1:
        raise ConfigError(f'request "{request.id}" has top_p = {s.top_p}; set it above 0 and at most 1 (1 = off).')
    if s.top_k < 0:
        raise ConfigError(f'request "{request.id}" has top_k = {s.top_k}; set 0 (off) or more.')
    if not 0 <= s.min_p <= 1:
        raise ConfigError(f'request "{request.id}" has min_p = {s.min_p}; set it between 0 (off) and 1.')
    if "" in s.stop_strings:
        raise ConfigError(
            f'request "{request.id}" has an empty stop string, which would end every sample at once; remove it.'
        )
    if not -1 <= request.shared <= num:
        raise ConfigError(
            f'request "{request.id}" has shared = {request.shared}; set it between -1 (all tokens) and {num}, the '
            "number of its prompt tokens."
        )
    if request.start < 0:
        raise ConfigError(f'request "{request.id}" has start = {request.start}; set 0 (a new sample) or more.')
    # An id outside the vocabulary would read beyond the embedding table.
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ConfigError(
            f'request "{request.id}" has the token id {bad}, but the model has a vocabulary of {vocab_size}; '
            "make the tokens with this model's tokenizer."
        )


def unknown_request_error(id: str) -> CohortError:
    """Returns (does not raise) the error for an abort of request `id`, which is not under way."""
    return CohortError(f'request "{id}" is not under way: it was never submitted, or has ended or been aborted.')


def closed_engine_error(name: str) -> EngineError:
    """Returns (does not raise) the error for a request that is submitted to the engine `name` after its `close`."""
    return EngineError(f"the {name} engine is closed and takes no more requests: make a new one.")


def damaged_weights_error(version: int) -> ModelError:
    """Returns (does not raise) the error for log-probabilities of weights `version` that are infinite or NaN."""
    return ModelError(
        f"the model (version {version}) gives log-probabilities that are not finite: its weights are damaged, or "
        "sampling.temperature is too close to 0. Go back to an earlier checkpoint; as temperature use 0 (greedy) or "
        "at least 0.01."
    )
