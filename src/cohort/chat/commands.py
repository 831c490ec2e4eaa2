"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cohort.chat.saving import choose_path
from cohort.config.flags import Flag, apply_settings
from cohort.config.rules import check_option_bounds
from cohort.errors import ConfigError, suggest_name

if TYPE_CHECKING:
    from cohort.chat.session import ChatSession

Action = Callable[["ChatSession", str], None]
"""Called with the session and the text after the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCommand:
    """A command: what follows its name, what it does in words, and the function that does it."""

    usage: str
    about: str
    action: Action


def run_command(session: ChatSession, line: str) -> None:
    """Runs the command in a line that begins with a slash.

    Raises ConfigError for an unknown command, and what the command raises.
    """
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(name.lower())
    if command is None:
        hint = suggest_name(f"/{name}", [f"/{known}" for known in COMMANDS])
        raise ConfigError(
            f'unknown command "/{name}".{hint} A line that begins with // sends a text that begins with /.'
        )
    command.action(session, rest.strip())


def _show_help(session: ChatSession, text: str) -> None:
    """Lists all commands."""
    width = max(len(f"/{name} {command.usage}") for name, command in COMMANDS.items())
    lines = [f"{f'/{name} {command.usage}':<{width}}  {command.about}" for name, command in COMMANDS.items()]
    session.screen.show_note("\n".join(lines))
    session.screen.show_note(
        "// at the beginning of a line sends a text that begins with /; \\ at its end continues it."
    )


def _reset(session: ChatSession, text: str) -> None:
    """Begins a new conversation."""
    session.begin_anew()
    kept = "; /save writes what came before too" if session.list_talks() else ""
    session.screen.show_note(f"the conversation begins anew{kept}.")


def _undo(session: ChatSession, text: str) -> None:
    """Takes the last exchange back."""
    if not session.conversation.exchanges:
        raise ConfigError("there is nothing to take back: the conversation is empty.")
    session.conversation = session.conversation.undo()
    num = len(session.conversation.exchanges)
    session.screen.show_note(f"took the last exchange back; {num} {'is' if num == 1 else 'are'} left.")


def _retry(session: ChatSession, text: str) -> None:
    """Asks the last message again, with other random numbers."""
    if not session.conversation.exchanges:
        raise ConfigError("there is nothing to ask again: the conversation is empty.")
    before = session.conversation
    last = before.exchanges[-1]
    session.conversation = before.undo()
    try:
        session.ask(last.messages, attempt=last.attempt + 1, row=last.row)
    except BaseException:
        session.conversation = before
        raise


def _save(session: ChatSession, text: str) -> None:
    """Writes the whole chat to a file."""
    if not text:
        raise ConfigError("the file is missing; write /save FILE.md, or /save FILE.json for programs.")
    session.save(choose_path(text))


def _set_system(session: ChatSession, text: str) -> None:
    """Shows or changes the system prompt."""
    if not text:
        session.screen.show_note(f"system prompt: {session.conversation.system or '(none)'}")
        return
    session.set_system("" if text == "none" else text)
    session.screen.show_note("there is no system prompt now." if text == "none" else f"system prompt: {text}")


def _make_setter(name: str) -> Action:
    """Returns the action of a command that shows or changes the option `name`."""
    flag = Flag(name, ())

    def set_option(session: ChatSession, text: str) -> None:
        """Shows the option, or changes it to the value in `text`."""
        if text:
            try:
                options = apply_settings(session.options, [Flag(name, (text,))])
                check_option_bounds(options)
            except ConfigError as error:
                raise ConfigError(str(error).replace(flag.spelling, f"/{flag.spelling[2:]}")) from None
            session.options = options
        session.screen.show_note(f"{flag.spelling[2:]} {getattr(session.options, name):g}")

    return set_option


def _swap_models(session: ChatSession, text: str) -> None:
    """Shows the models, or loads others."""
    if text:
        try:
            names = shlex.split(text)
        except ValueError as error:
            raise ConfigError(
                f"the names cannot be read: {error}. Write /model M M, with quotes that are closed."
            ) from None
        session.swap_models(names)
        session.screen.show_note("the conversation begins anew, with:")
    session.show_models()


def _quit(session: ChatSession, text: str) -> None:
    """Ends the chat."""
    session.is_over = True


COMMANDS = {
    "help": ChatCommand(usage="", about="Lists the commands.", action=_show_help),
    "reset": ChatCommand(usage="", about="Begins a new conversation.", action=_reset),
    "undo": ChatCommand(usage="", about="Takes the last exchange back.", action=_undo),
    "retry": ChatCommand(usage="", about="Asks the last message again.", action=_retry),
    "system": ChatCommand(usage="[TEXT|none]", about="Shows or sets the system prompt.", action=_set_system),
    "temperature": ChatCommand(usage="[X]", about="Shows or sets it; 0 = greedy.", action=_make_setter("temperature")),
    "top-p": ChatCommand(usage="[X]", about="Shows or sets it; 1 = off.", action=_make_setter("top_p")),
    "max-tokens": ChatCommand(usage="[N]", about="Longest answer; 0 = default.", action=_make_setter("max_tokens")),
    "seed": ChatCommand(usage="[N]", about="Seed of the random numbers.", action=_make_setter("seed")),
    "model": ChatCommand(usage="[M ...]", about="Shows the models, or loads others.", action=_swap_models),
    "save": ChatCommand(usage="FILE", about="Writes the whole chat: Markdown, or *.json.", action=_save),
    "next": ChatCommand(
        usage="", about="Asks the next problem of --task.", action=lambda session, _: session.ask_next_problem()
    ),
    "quit": ChatCommand(usage="", about="Ends the chat, as Ctrl-D does.", action=_quit),
}
