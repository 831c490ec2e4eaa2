"""`cohort chat M [M ...] [--system TEXT --temperature X --task T ...]`: a chat with models side by side."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from cohort.chat.lines import hide_typing
from cohort.chat.options import ChatOptions
from cohort.cli.pull import pull_with_progress
from cohort.cli.tasks import read_task_flag
from cohort.config.flags import split_args
from cohort.errors import ConfigError
from cohort.logs.printing import print_note, show_grader_output
from cohort.system.ending import EndSignals
from cohort.tasks.base import check_packages, has_conversations

if TYPE_CHECKING:
    from cohort.chat.session import ChatSession


def run(args: list[str]) -> None:
    """Runs `cohort chat` with `args`, the words after it, until the user leaves or standard input ends.

    Raises ConfigError for wrong flags, before a model is loaded, and for models that do not fit into memory, and
    SystemExit after SIGTERM, SIGHUP or SIGQUIT.
    """
    about = (
        "Chat with one model, or with several side by side. M is a name that `cohort models` lists, a folder in "
        "Hugging Face format, a .gguf file, a run (its last checkpoint), RUN@STEP or RUN@best. With --task, every "
        "Enter asks the next problem of a task, and the grader's verdict on each answer is shown, after all turns of "
        "a conversation if the task has tools or an environment; --task T --help shows the task's settings. Without "
        "a terminal, every line of standard input is a message; one that ends in \\ goes on in the next line."
    )
    if any(flag.name in ("model", "models") for flag in split_args(args)[1]):
        raise ConfigError("models are named without a flag: cohort chat M [M ...]. Remove --model.")
    names, task, options = read_task_flag("chat", ["M", "..."], about, ChatOptions(), args)
    options.check()
    options.check_conversation(options.task, task is not None and has_conversations(task))
    if task is not None:
        check_packages(task)
        options.scoring.require_keys(task)
    # Imported here because it takes longer. A wrong name is found before torch is imported.
    from cohort.jobs.models import find_model

    for name in names:
        # A .gguf file may have to be converted first.
        if not name.endswith(".gguf"):
            find_model(name)
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with EndSignals() as ends, show_grader_output(), ExitStack() as stack:
        with hide_typing():
            if is_interactive:
                print_note(f"loading {', '.join(names)} ...")
            session = _prepare(names, task, options, is_interactive, stack, ends)
        session.run()
        ends.leave()


def _prepare(
    names: list[str], task: Any, options: ChatOptions, is_interactive: bool, stack: ExitStack, ends: EndSignals
) -> ChatSession:
    """Loads the models, and returns a chat with them. `task` is None if no problems are to be asked.

    `stack` closes at its end what was opened here, and `ends` are the signals that end the chat.
    """
    # Imported here because they import torch: help and mistakes must not wait for that.
    from dataclasses import replace

    from cohort.chat.models import ChatModels
    from cohort.chat.problems import TaskProblems
    from cohort.chat.screen import Screen
    from cohort.chat.session import ChatSession

    if task is not None and not options.max_tokens:
        options = replace(options, max_tokens=task.max_tokens)
    problems = None
    if task is not None:
        # Errors in a task's rows show before the models are loaded, which takes longer.
        problems = stack.enter_context(
            closing(TaskProblems(task, options.split, options.validation_share, options.scoring))
        )
    models = stack.enter_context(closing(ChatModels(options, pull_with_progress, print_note)))
    models.swap(names)
    screen = stack.enter_context(closing(Screen(is_interactive, options.plain)))
    return ChatSession(models, options, screen, problems, ends)
