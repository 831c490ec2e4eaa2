"""A whole chat as a file: Markdown for people, or JSON with every token for programs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.chat.conversation import Conversation, Exchange, ModelTurn
from cohort.chat.options import ChatOptions
from cohort.chat.playing import describe_speaker
from cohort.errors import ConfigError, RunError
from cohort.logs.escape import escape_all
from cohort.system.disk import write_atomically
from cohort.system.paths import expand_home
from cohort.types import Finish

FORMAT = 2  # of the JSON; 1 had the last conversation alone
_FINISHES = {
    Finish.ABORT: "(stopped)",
    Finish.LENGTH: "(cut off at the limit of tokens)",
    Finish.TURNS: "(ended at the limit of turns)",
    Finish.CALLS: "(ended at the limit of calls)",
    Finish.TOTAL: "(ended at the limit of tokens of the conversation)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """What a file tells about a model. It holds no weights, so that a model that has left the chat can be freed."""

    name: str
    label: str
    folder: Path
    context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedConversation:
    """A conversation of a chat, with its models and settings."""

    conversation: Conversation
    models: tuple[SavedModel, ...]
    options: ChatOptions


def choose_path(text: str) -> Path:
    """Returns the path of the file that the user names. A name without an extension gets that of Markdown.

    Raises ConfigError if it names a folder.

    >>> choose_path("talk"), choose_path("talk.json")
    (PosixPath('talk.md'), PosixPath('talk.json'))
    """
    path = expand_home(text)
    # Unlike `Path.is_dir`, it does not raise an error for a name that is too long.
    if text.endswith("/") or os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; name a file in it, such as {path / 'chat.md'}.")
    return path if path.suffix else path.with_name(f"{path.name}.md")


def save_chat(path: Path, talks: Sequence[SavedConversation], *, overwrite: bool) -> None:
    """Writes all conversations of a chat to a file: as JSON if its name ends in .json, else as Markdown.

    Raises ConfigError if the file exists, unless `overwrite`, if its folder does not, or if it cannot be written.
    """
    if path.suffix.lower() == ".json":
        document = {"format": FORMAT, "conversations": [_describe_talk(talk) for talk in talks]}
        text = json.dumps(document, indent=2) + "\n"
    else:
        text = format_markdown(talks)
    try:
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} exists already; choose another name, or remove that file first.")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent}; make it, or choose another name.")
        write_atomically(path, text)
    # The name is too long, or the folder cannot be written to.
    except (RunError, OSError) as error:
        raise ConfigError(f"{path} cannot be written ({error.__cause__ or error}); choose another file.") from error


def _describe_talk(talk: SavedConversation) -> dict[str, Any]:
    """Returns a conversation as JSON values: models, settings, and per exchange the messages and all answers."""
    return {
        "models": [
            {"name": model.name, "folder": str(model.folder), "context": model.context} for model in talk.models
        ],
        "settings": {**dataclasses.asdict(talk.options), "system": talk.conversation.system},
        "exchanges": [
            {
                "messages": list(exchange.messages),
                "row": exchange.row,
                "attempt": exchange.attempt,
                "taken_back": is_taken_back,
                "answers": [None if turn is None else _describe_turn(turn) for turn in exchange.turns],
                "counts": [{"right": right, "scored": scored} for right, scored in exchange.counts],
            }
            for exchange, is_taken_back in talk.conversation.list_all()
        ],
    }


def _describe_turn(turn: ModelTurn) -> dict[str, Any]:
    """Returns one answer as JSON values. `asked` and `written` are token ids.

    An episode with tools or an environment also has its messages, and where each token in `written` comes from.
    """
    outcome = turn.outcome
    played = {}
    if turn.messages:
        played = {
            "messages": list(turn.messages),
            "provenance": list(turn.provenance),
            "calls": dict(turn.calls),
            "earned": list(turn.earned),
        }
    return {
        "text": turn.forced_text + turn.text,
        "finish": str(turn.finish),
        "restarts": turn.restarts,
        "asked": list(turn.asked),
        "written": list(turn.written),
        "seconds": round(turn.seconds, 3),
        "verdict": outcome and {"parts": outcome.parts, "reason": outcome.reason, "failure": outcome.failure},
        **played,
    }


def format_markdown(talks: Sequence[SavedConversation]) -> str:
    """Returns the conversations of a chat as Markdown. Characters that act on a terminal are escaped."""
    lines: list[str] = []
    for number, talk in enumerate(talks, start=1):
        names = ", ".join(model.name for model in talk.models)
        lines += [f"# Conversation {number} of {len(talks)}: {names}" if len(talks) > 1 else f"# Chat with {names}", ""]
        options = talk.options
        lines += [f"temperature {options.temperature:g}, top-p {options.top_p:g}, seed {options.seed}", ""]
        if talk.conversation.system:
            lines += ["## System prompt", "", talk.conversation.system, ""]
        for exchange, is_taken_back in talk.conversation.list_all():
            lines += _format_exchange(exchange, talk.models, " (taken back)" if is_taken_back else "")
    return escape_all("\n".join(lines))


def _format_exchange(exchange: Exchange, models: Sequence[SavedModel], remark: str) -> list[str]:
    """Returns the lines of an exchange. `remark` stands behind its headings."""
    lines: list[str] = []
    for message in exchange.messages:
        lines += [f"## {str(message['role']).capitalize()}{remark}", "", str(message["content"]), ""]
    for model, turn in zip(models, exchange.turns, strict=True):
        lines += [f"## {model.name}{remark}", ""]
        if turn is None:
            lines += ["(no answer: the context of the model was full)", ""]
            continue
        lines += _format_episode(turn, model.name, remark) if turn.messages else [turn.forced_text + turn.text, ""]
        if turn.finish != "stop":
            lines += [_FINISHES[turn.finish], ""]
        if turn.outcome is not None:
            verdict = turn.outcome.failure or turn.outcome.reason
            parts = ", ".join(f"{part} {value:g}" for part, value in turn.outcome.parts.items())
            lines += [f"Verdict: {parts}{': ' if parts and verdict else ''}{verdict}", ""]
    if exchange.counts:
        lines += [format_counts([model.label for model in models], exchange.counts), ""]
    return lines


def _format_episode(turn: ModelTurn, name: str, remark: str) -> list[str]:
    """Returns the lines of an episode: the first turn without a heading, replies and later turns under headings."""
    lines: list[str] = []
    for number, message in enumerate(turn.messages):
        speaker = name if message["role"] == "assistant" else describe_speaker(message)
        lines += [f"## {speaker}{remark}", ""] if number else []
        lines += [str(message["content"]), ""]
    return lines


def format_counts(labels: Sequence[str], counts: Sequence[tuple[int, int]]) -> str:
    """Returns how many problems each model has answered rightly.

    >>> format_counts(["tiny", "other"], [(3, 5), (4, 5)])
    'right so far: tiny 3 of 5, other 4 of 5'
    """
    told = (f"{label} {right} of {scored}" for label, (right, scored) in zip(labels, counts, strict=True))
    return "right so far: " + ", ".join(told)
