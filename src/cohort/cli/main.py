"""`cohort COMMAND ...`: finds the command, imports only its module, and prints an error as one line.

Nothing here imports torch, tyro or rich, so that `cohort --help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress

from cohort import __version__
from cohort.cli.interrupt import INTERRUPTED, exit_from_imports
from cohort.errors import CohortError, RankError, UserCodeError, suggest_name
from cohort.logs.printing import flush_output, prepare_output, print_note, print_result, show_records
from cohort.ranks.environment import has_place, read_place
from cohort.system import process
from cohort.system.secrets import hide_named_variables, remove_hidden

COMMANDS = {
    "train": ("RECIPE [--flags]", "Train a model with a recipe."),
    "resume": ("RUN [--steps N]", "Continue a run, or a sweep, exactly where it stopped."),
    "sweep": ("RECIPE --a.b v1,v2", "Train a recipe with many combinations of settings, and compare them."),
    "runs": ("[FOLDER ...]", "List runs with their state, accuracy and reward."),
    "eval": ("TASK ... [--model M]", "Measure a model's accuracy or reward on the held-out problems of tasks."),
    "chat": ("M [M ...]", "Chat with one model, or with several side by side."),
    "compare": ("A B", "Compare two evaluations of the same problems."),
    "models": ("", "List the models that can be loaded."),
    "pull": ("MODEL", "Fetch a model ahead of time."),
    "export": ("RUN OUT [--step N|best]", "Write a run's model as a Hugging Face folder."),
    "data": ("TASK --out FILE", "Write a task's prompts as JSONL."),
    "check": ("RECIPE [--flags]", "Test the reward and the update of a recipe before a run; estimate memory and time."),
    "explain": ("RUN [--step N]", "Show a step's rewards, and what its update did to each token."),
    "plot": ("RUN ... [--out FILE.svg]", "Draw the curves of runs, overlaid, as one picture."),
    "replay": (
        "RUN --step N [--flags]",
        "Do a step's update again from its rollouts, with the same or other settings.",
    ),
    "bench": ("engine|learner|step", "Measure throughput and compare it with the limit of the hardware."),
}
# Commands that must not run in several ranks.
_ONE_PROCESS = ("sweep", "chat", "check", "replay")
# Errors of the operating system that a user can fix. They are printed as one line; others keep their traceback.
_REPORTED_OS_ERRORS = (
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 = done, 1 = the reader of a pipe left, 2 = an error that the user can fix (printed to stderr as one line), 130 =
    interrupted. `argv` are the words after `cohort`; None = those of this process. Other exceptions pass through, also
    SystemExit: `cohort check` raises it (code 1) for failed checks, some commands raise it (code 0) after --help, and
    `cohort chat` (code 128 + its number) after a signal.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    prepare_output()
    hide_named_variables(args)
    process.keep_freed_memory()
    try:
        process.require_unix()
        # Long work on the data of a task, in any command.
        with exit_from_imports(), show_records("cohort.tasks.progress"):
            code = _dispatch(args)
        sys.stdout.flush()
        return code
    except UserCodeError as error:
        return _report(error, error.args[0], error.place)
    except CohortError as error:
        return _report(error, str(error))
    # The reader of a pipe has left, as in `cohort models | head`.
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.errno not in _REPORTED_OS_ERRORS:
            raise
        place = error.filename or "while writing"
        return _print_error(f"{error.strerror}: {place}. Use another path, or give this one space and permissions.")
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        flush_output()


def _dispatch(args: list[str]) -> int:
    """Runs the command that `args` begin with, or prints help or version. Returns 0, the exit code.

    Raises CohortError for an unknown command, ConfigError for some commands in a process that torchrun started, and
    what the command raises.
    """
    if not args or args[0] in ("-h", "--help", "help"):
        print_result(format_usage())
        return 0
    if args[0] == "--version":
        print_result(f"cohort {__version__}")
        return 0
    command, *rest = args
    if command not in COMMANDS:
        raise _make_unknown_command_error(command)
    # Here ranks do not work together: each process would do all of the work.
    if command in _ONE_PROCESS:
        process.require_one_process()
    # Each command has a module of its name with a function `run`.
    importlib.import_module(f"cohort.cli.{command}").run(rest)
    return 0


def _make_unknown_command_error(command: str) -> CohortError:
    """Returns the error for a first word that is no command; the caller raises it."""
    if command in ("-v", "-V"):
        return CohortError(f'unknown flag "{command}". Did you mean cohort --version?')
    if command.startswith("-"):
        return CohortError(
            f'unknown flag "{command}". Write a command first: cohort COMMAND [--flags]; cohort --help lists them.'
        )
    # Imported here because it imports the settings of all runs: help must not wait for that.
    from cohort.config.hints import find_command_remedy

    remedy = find_command_remedy(command)
    return CohortError(f'unknown command "{command}".' + (f" {remedy}" if remedy else suggest_name(command, COMMANDS)))


def format_usage() -> str:
    """Returns the text of `cohort --help`: one line per command."""
    width = max(len(f"{name} {args}") for name, (args, _) in COMMANDS.items())
    lines = [f"  {f'{name} {args}':<{width}}  {about}" for name, (args, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: cohort COMMAND ...",
            "",
            "Teach language models by reinforcement learning with verifiable rewards.",
            "",
            *lines,
            "",
            "cohort COMMAND --help shows a command's options. Start with:",
            "  cohort train quickstart",
        ]
    )


def _report(error: CohortError, message: str, place: Sequence[str] = ()) -> int:
    """Prints an error as `_print_error` does, and returns the exit code 2. Of several ranks one says it."""
    if not has_place():
        return _print_error(message, place)
    # Imported here because it imports torch.
    from cohort.ranks.agree import should_say

    if should_say(error):
        rank = read_place()[0]
        is_named = rank == 0 or isinstance(error, RankError)
        _print_error(message if is_named else f"rank {rank}: {message}", place)
    return 2


def _print_error(message: str, place: Sequence[str] = ()) -> int:
    """Prints "cohort: " and a message to stderr as one line, then the lines of `place`, and returns the exit code 2.

    `place` shows where a user's own code raised. Flushes standard output first, so that the message comes last.
    """
    flush_output()
    # Where the message cannot be written, the exit code still tells.
    with suppress(OSError):
        print_note(remove_hidden("\n".join(["cohort: " + " ".join(message.split()), *place])))
    return 2
