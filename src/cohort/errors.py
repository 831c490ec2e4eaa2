"""Errors a user can act on. Anything else that escapes is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CohortError(Exception):
    """One line that says what is wrong and what to do. The command line prints it and exits with 2."""


class ConfigError(CohortError, ValueError):
    """A setting is unknown, has the wrong type, or cannot work together with another."""


class ModelError(CohortError):
    """A model folder, checkpoint or download cannot be used."""


class TaskError(CohortError):
    """A task's rows, prompts or scores break the contract."""


class RunError(CohortError):
    """A run directory is missing, locked, full, read-only or from something else."""


class EngineError(CohortError):
    """An engine has died or was closed: it answers nothing any more. A run it belonged to can be resumed."""


class TrainingStopped(CohortError):
    """Training gave up on purpose (non-finite gradients, too many failures); the run can be resumed."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean "x"?' or the list of valid names: the tail of an unknown-name message.

    >>> nearest("grop", ["grpo", "dr_grpo"])
    ' Did you mean "grpo"?'
    >>> nearest("zzz", ["b", "a"])
    ' Valid: a, b.'
    """
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    return f' Did you mean "{close[0]}"?' if close else f" Valid: {', '.join(valid)}."


def brief(error: BaseException) -> str:
    """An error's text in one line of reasonable length.

    >>> brief(ValueError("max_model_len is\\n  too large"))
    'max_model_len is too large'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
