"""`cohort COMMAND ...`: find the command, import only its module, turn errors into one line.

Nothing here imports torch, tyro or rich, so that `cohort --help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from cohort import __version__
from cohort.errors import CohortError, nearest
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
    "check": ("RECIPE [--flags]", "Rehearse the reward and prove the update right on your own config."),
    "explain": ("RUN --step N", "Show what a step's samples were paid, and what each token did."),
    "replay": ("RUN --step N [--flags]", "Redo a step's update from its rollouts, with other settings if asked."),
    "bench": ("engine|learner|step", "Measure throughput against the hardware limit."),
}
_ONE_PROCESS = ("train", "resume", "eval", "check", "replay")  # commands that several ranks cannot share
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
    """Run one command and return the exit code: 0 done, 2 the user can fix it, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    process.wait_briefly()
    process.keep_memory()
    try:
        code = _dispatch(args)
        sys.stdout.flush()
        return code
    except CohortError as error:
        return _complain(str(error))
    except BrokenPipeError:  # `cohort models | head`: the reader has left, which is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _REPORTED_OS_ERRORS:
            raise
        return _complain(f"{error.strerror}: {error.filename or 'while writing'}")
    except KeyboardInterrupt:
        return 130


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] == "--version":
        print(f"cohort {__version__}")
        return 0
    command, *rest = args
    if command not in COMMANDS:
        kind = "flag" if command.startswith("-") else "command"
        raise CohortError(f'unknown {kind} "{command}".{nearest(command, COMMANDS)}')
    if command in _ONE_PROCESS:
        process.require_one_process()
    importlib.import_module(f"cohort.cli.{command}").run(rest)
    return 0


def usage() -> str:
    """The text of `cohort --help`."""
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


def _complain(message: str) -> int:
    sys.stdout.flush()
    print("cohort: " + " ".join(message.split()), file=sys.stderr)
    return 2
