"""`cohort train RECIPE [--a.b value ...] [--out DIR] [--log live|plain|json] [--sinks NAME,...]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from cohort.cli.output import Log, choose_log, choose_sinks
from cohort.config import flags, load
from cohort.errors import ConfigError
from cohort.recipes import RECIPES

HELP = """usage: cohort train RECIPE [--a.b value ...] [--out DIR] [--log live|plain|json] [--sinks NAME,...]

RECIPE is one of these, or path/to/file.py:function returning a config (cohort.RL):

{recipes}

  --out DIR               Where the run directory is made (default: runs).
  --log live|plain|json   Progress (default: live on a terminal, plain elsewhere).
  --sinks NAME,...        Metrics also to wandb, tensorboard, trackio; metrics.jsonl is always there.

cohort train RECIPE --help lists every setting of a recipe."""


def run(args: list[str]) -> None:
    if not args or args[0].startswith("-"):
        if flags.wants_help(args):
            print(HELP.format(recipes=recipe_list()))
            return
        where = "" if not args else " first"
        raise ConfigError(
            f"name a recipe{where}: cohort train RECIPE [--flags]. Recipes: {', '.join(sorted(RECIPES))}."
        )
    recipe, *rest = args
    if flags.wants_help(rest):
        load.print_help(recipe, [arg for arg in rest if arg not in flags.HELP])
        return
    rest, out, log, sinks = _take_own(rest)
    config = load.load(recipe, rest)
    from cohort.jobs import build

    build.train(config, Path(out), log, *sinks)


def recipe_list() -> str:
    """The built-in recipes with the first line of their docstrings."""
    width = max(map(len, RECIPES))
    return "\n".join(
        f"  {name:<{width}}  {(f.__doc__ or '').strip().splitlines()[0]}" for name, f in sorted(RECIPES.items())
    )


def _take_own(args: list[str]) -> tuple[list[str], str, str, tuple[str, ...]]:
    """Take `--out`, `--log` and `--sinks`, which are not settings of the run, out of the flags."""
    words, given = flags.split(args)
    own = {
        "out": flags.Leaf("out", str, "runs"),
        "log": flags.Leaf("log", Log, ""),
        "sinks": flags.Leaf("sinks", str, ""),
    }
    mine = [flag for flag in given if flag.name in own]
    flags.check(mine, own)
    values = {flag.name: flag.values[0] for flag in mine}
    log = values.get("log", "")
    if log and log not in get_args(Log):
        raise ConfigError(f'--log must be {flags.describe(Log)}, not "{log}".')
    rest = list(words)
    for flag in given:
        if flag.name not in own:
            rest += [flag.shown, *flag.values] if len(flag.values) != 1 else [f"{flag.shown}={flag.values[0]}"]
    sinks = choose_sinks(values.get("sinks"))
    return rest, values.get("out", "runs"), choose_log(log, sys.stdout.isatty()), sinks
