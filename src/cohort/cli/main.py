"""`cohort COMMAND ...`: finds the command, imports only its module, and prints an error as one line.

Nothing here imports torch, tyro or rich, so that `cohort --help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from cohort import __version__
from cohort.errors import CohortError, suggest_name
from cohort.system import process

COMMANDS = {
    "train": ("RECIPE [--flags]", "Train a model with a recipe."),
    "resume": ("RUN [--steps N]", "Continue a run exactly where it stopped."),
    "eval": ("TASK ... [--model M]", "Measure a model's accuracy on the held-out problems of tasks."),
    "compare": ("A B", "Compare two evaluations of the same problems."),
    "models": ("", "List the models that can be loaded."),
    "pull": ("MODEL", "Fetch a model ahead of time."),
    "export": ("RUN OUT [--step N|best]", "Write a run's model as a Hugging Face folder."),
    "data": ("TASK --out FILE", "Write a task's prompts as JSONL."),
    "check": ("RECIPE [--flags]", "Test the reward and the update of a recipe before a run; estimate memory and time."),
    "explain": ("RUN [--step N]", "Show a step's rewards, and what its update did to each token."),
    "replay": (
        "RUN --step N [--flags]",
        "Do a step's update again from its rollouts, with the same or other settings.",
    ),
    "bench": ("engine|learner|step", "Measure throughput and compare it with the limit of the hardware."),
}
_ONE_PROCESS = ("train", "resume", "eval", "check", "replay")  # commands that must not run in several ranks
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
    SystemExit: `cohort check` raises it (code 1) for failed checks, and some commands raise it (code 0) after --help.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    process.shorten_thread_spinning()
    process.keep_freed_memory()
    try:
        code = _dispatch(args)
        sys.stdout.flush()
        return code
    except CohortError as error:
        return _print_error(str(error))
    # The reader of a pipe has left, as in `cohort models | head`. Python flushes stdout once more when it ends, and
    # must not fail then: so stdout becomes /dev/null.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _REPORTED_OS_ERRORS:
            raise
        place = error.filename or "while writing"
        return _print_error(f"{error.strerror}: {place}. Use another path, or give this one space and permissions.")
    except KeyboardInterrupt:
        return 130


def _dispatch(args: list[str]) -> int:
    """Runs the command that `args` begin with, or prints help or version. Returns 0, the exit code.

    Raises CohortError for an unknown command, ConfigError for some commands in a process that torchrun started, and
    what the command raises.
    """
    if not args or args[0] in ("-h", "--help", "help"):
        print(format_usage())
        return 0
    if args[0] == "--version":
        print(f"cohort {__version__}")
        return 0
    command, *rest = args
    if command not in COMMANDS:
        kind = "flag" if command.startswith("-") else "command"
        raise CohortError(f'unknown {kind} "{command}".{suggest_name(command, COMMANDS)}')
    # Ranks do not work together yet: each process would make the same run.
    if command in _ONE_PROCESS:
        process.require_one_process()
    # Each command has a module of its name with a function `run`.
    importlib.import_module(f"cohort.cli.{command}").run(rest)
    return 0


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
            "cohort COMMAND --help shows a command's options. Start with: cohort train quickstart",
        ]
    )


def _print_error(message: str) -> int:
    """Prints "cohort: " and a message to stderr as one line, and returns the exit code 2.

    Flushes standard output first, so that the message comes last.
    """
    sys.stdout.flush()
    print("cohort: " + " ".join(message.split()), file=sys.stderr)
    return 2
