"""`cohort train RECIPE [--a.b value ...] [--out DIR] [--log live|plain|json] [--sinks NAME,...]`: trains a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from cohort.cli.output import Log, choose_log, parse_sink_names
from cohort.config import flags, load
from cohort.errors import ConfigError
from cohort.recipes import RECIPES

HELP = """usage: cohort train RECIPE [--a.b value ...] [--out DIR] [--log live|plain|json] [--sinks NAME,...]

Train a model. RECIPE is one of these, or path/to/file.py:function that returns a config (cohort.RL):

{recipes}

  --out DIR               The folder in which the run directory is made (default: runs).
  --log live|plain|json   How progress is shown (default: live on a terminal, plain elsewhere).
  --sinks NAME,...        Send metrics to wandb, tensorboard, trackio too; metrics.jsonl is always written.

cohort train RECIPE --help lists every setting of a recipe."""


def run(args: list[str]) -> None:
    """Runs `cohort train` with `args`, the words after it: trains a recipe, or prints help.

    Raises ConfigError without a recipe and for wrong flags.
    """
    if not args or args[0].startswith("-"):
        if flags.wants_help(args):
            print(HELP.format(recipes=format_recipes()))
            return
        raise ConfigError(
            "the recipe is missing; name it first: cohort train RECIPE [--flags]. "
            f"Recipes: {', '.join(sorted(RECIPES))}."
        )
    recipe, *rest = args
    if flags.wants_help(rest):
        load.print_help(recipe, [arg for arg in rest if arg not in flags.HELP])
        return
    rest, out, log, sinks = _split_command_flags(rest)
    config = load.load_config(recipe, rest)
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.jobs import build

    build.train(config, Path(out), log, *sinks)


def format_recipes() -> str:
    """Returns the built-in recipes as lines of text: name and first line of the docstring, sorted by name."""
    width = max(map(len, RECIPES))
    return "\n".join(
        f"  {name:<{width}}  {(f.__doc__ or '').strip().splitlines()[0]}" for name, f in sorted(RECIPES.items())
    )


def _split_command_flags(args: list[str]) -> tuple[list[str], str, str, tuple[str, ...]]:
    """Separates `--out`, `--log` and `--sinks` from the settings of the run.

    Returns (the other words and flags, folder for run directories, kind of progress view, names of the sinks). Without
    `--log` the view is live on a terminal, plain elsewhere. Raises ConfigError for a wrong value of one of the three.
    """
    words, given = flags.split_args(args)
    own = {
        "out": flags.Setting("out", str, "runs"),
        "log": flags.Setting("log", Log, ""),
        "sinks": flags.Setting("sinks", str, ""),
    }
    mine = [flag for flag in given if flag.name in own]
    flags.check_flags(mine, own)
    values = {flag.name: flag.values[0] for flag in mine}
    log = values.get("log", "")
    if log and log not in get_args(Log):
        raise ConfigError(f'--log must be {flags.describe_type(Log)}, not "{log}". Correct the value.')
    # The other flags are put together again. A single value is joined with =, because it may begin with dashes.
    rest = list(words)
    for flag in given:
        if flag.name not in own:
            rest += [flag.spelling, *flag.values] if len(flag.values) != 1 else [f"{flag.spelling}={flag.values[0]}"]
    sinks = parse_sink_names(values.get("sinks"))
    return rest, values.get("out", "runs"), choose_log(log, sys.stdout.isatty()), sinks
