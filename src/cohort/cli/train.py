"""`cohort train RECIPE [--a.b value ...] [--ranks N] [--name NAME] [--out DIR] [--log ...]`: trains a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from cohort.cli.output import Log, choose_log, parse_sink_names
from cohort.cli.ranks import notice_idle_gpus, start_ranks
from cohort.config import flags, load
from cohort.errors import ConfigError
from cohort.logs.legend import format_legend
from cohort.logs.printing import print_result
from cohort.recipes import RECIPES
from cohort.run.finding import require_new_name
from cohort.user_code import load_plugins

HELP = """usage: cohort train RECIPE [--a.b value ...] [--ranks N] [--name NAME] [--out DIR] [--log live|plain|json]
                    [--sinks NAME,...]

Train a model. RECIPE is one of these, path/to/file.py:function that returns a config (cohort.RL), or the config.yaml of
a run, whose settings it takes:

{recipes}

  --ranks N               Train with N processes on this machine (default: 1); 0 = one per GPU.
  --name NAME             The name of the run (default: date, recipe and four random characters). Other commands take
                          it, or a part of it that no other run has.
  --out DIR               The folder in which the run directory is made (default: runs).
  --log live|plain|json   How progress is shown (default: live on a terminal, plain elsewhere).
  --sinks NAME,...        Send metrics to wandb, tensorboard, trackio too; metrics.jsonl is always written.

cohort train RECIPE --help lists every setting of a recipe. What the line of a step shows:

{legend}"""


def run(args: list[str]) -> None:
    """Runs `cohort train` with `args`, the words after it: trains a recipe, or prints help.

    Raises ConfigError without a recipe and for wrong flags.
    """
    if not args or args[0].startswith("-"):
        if flags.wants_help(args):
            print_result(HELP.format(recipes=format_recipes(), legend=format_legend()))
            return
        raise ConfigError(
            "the recipe is missing. Name it first, for example: cohort train quickstart [--flags]. Recipes: "
            f"{', '.join(sorted(RECIPES))}."
        )
    recipe, *rest = args
    if flags.wants_help(rest):
        load.print_help(recipe, [arg for arg in rest if arg not in flags.HELP])
        return
    words, given = flags.split_args(rest)
    given, late, own = _split_command_flags(given)
    config = load.load_config(recipe, [*words, *late], given)
    if own.name:
        require_new_name(own.out, own.name)
    if own.ranks is not None and start_ranks(["train", *args], own.ranks):
        return
    # Imported here because it takes longer. A wrong name is found before torch is imported.
    from cohort.jobs.models import find_model

    find_model(config.model)
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.jobs import build

    notice_idle_gpus(config.device)
    build.train(config, own.out, own.log, *own.sinks, name=own.name)


def format_recipes() -> str:
    """Returns all recipes as lines of text: name and first line of the docstring, sorted by name.

    Plugins are imported for theirs.
    """
    load_plugins()
    width = max(map(len, RECIPES))
    return "\n".join(
        f"  {name:<{width}}  {(f.__doc__ or '').strip().splitlines()[0]}" for name, f in sorted(RECIPES.items())
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandFlags:
    """The flags of the command itself: all others are settings of the run."""

    name: str | None  # of the run; None = a new one is made
    out: Path  # the folder for run directories
    log: str  # kind of progress view
    sinks: tuple[str, ...]
    ranks: int | None  # processes to start; 0 = one per GPU, None = this one


def _split_command_flags(given: list[flags.Flag]) -> tuple[list[flags.Flag], list[str], CommandFlags]:
    """Separates the flags of the command itself from the settings of the run.

    Returns (the settings, words behind the values of the command's own flags, those flags). Without `--log` the view is
    live on a terminal, plain elsewhere. Raises ConfigError for a wrong value of one of them.
    """
    own = {
        "name": flags.Setting("name", str, None),
        "out": flags.Setting("out", str, "runs"),
        "log": flags.Setting("log", Log, ""),
        "sinks": flags.Setting("sinks", str, None),
        "ranks": flags.Setting("ranks", int, None),
    }
    # Words behind the one value of a flag are not its own, such as `steps=3`.
    late = [word for flag in given if flag.name in own for word in flag.values[1:]]
    mine = [flags.Flag(flag.name, flag.values[:1]) for flag in given if flag.name in own]
    flags.check_given(mine, own)
    values = {name: setting.value for name, setting in own.items()}
    values |= {flag.name: flag.read_value(own[flag.name]) for flag in mine}
    others = [flag for flag in given if flag.name not in own]
    command = CommandFlags(
        name=values["name"],
        out=Path(values["out"]),
        log=choose_log(values["log"], sys.stdout.isatty()),
        sinks=parse_sink_names(values["sinks"]),
        ranks=values["ranks"],
    )
    return others, late, command
