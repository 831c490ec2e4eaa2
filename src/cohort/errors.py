"""Errors that a user can act on. Any other exception that reaches the user is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CohortError(Exception):
    """One line that says what is wrong and what to do. The command line prints it and exits with code 2."""


class ConfigError(CohortError, ValueError):
    """A setting is unknown, has the wrong type, or cannot be combined with another."""


class ModelError(CohortError):
    """A model folder, checkpoint or download cannot be used."""


class TaskError(CohortError):
    """A task's rows, prompts or scores break the rules for tasks."""


class RunError(CohortError):
    """A run directory is missing, locked, full, read-only or not one of Cohort's."""


class SandboxError(CohortError):
    """A program of a model could not be run, because its sandbox is missing, failed to start or is forbidden."""


class EngineError(CohortError):
    """An engine has died or was closed and takes no more requests. The run that used it can be resumed."""


class RankError(CohortError):
    """Another rank has ended, hangs or cannot be reached, so that the ranks cannot go on. The run can be resumed."""


class AgreedError(CohortError):
    """An error that all ranks know of and raise together. The first rank says it."""


class ServiceError(CohortError):
    """An outside service that a grader asks, such as a judge, gave no usable reply. The answer has no score then.

    `lasting` says that asking again will not help until the user has changed something, such as a key or an address.
    """

    def __init__(self, message: str, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class TrainingStopped(CohortError):
    """Training stopped on purpose (non-finite gradients, too many failures). The run can be resumed."""


class UserCodeError(CohortError):
    """An exception of a user's own code: its file, recipe, task or algorithm. `place` has lines that show where.

    The text of the error is its message, then those lines.
    """

    def __init__(self, message: str, place: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.place = tuple(place)

    def __str__(self) -> str:
        return "\n".join([str(self.args[0]), *self.place])


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the most similar of the `valid` names, or else all of them.

    All are listed, sorted, where none is similar enough. The text begins with a space.

    >>> suggest_name("grop", ["grpo", "dr_grpo"])
    ' Did you mean "grpo"?'
    >>> suggest_name("zzz", ["b", "a"])
    ' Valid: a, b.'
    """
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    return f' Did you mean "{close[0]}"?' if close else f" Valid: {', '.join(valid)}."


def shorten_error(error: BaseException) -> str:
    """Returns an error's text in one line; its class name where it has no text.

    More than 300 characters are cut to the first 300 and "...".

    >>> shorten_error(ValueError("max_model_len is\\n  too large"))
    'max_model_len is too large'
    """
    return shorten_text(str(error)) or type(error).__name__


def shorten_text(text: str) -> str:
    """Returns a text in one line. More than 300 characters are cut to the first 300 and "..."."""
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}..."
