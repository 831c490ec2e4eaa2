"""`cohort sweep RECIPE --a.b v1,v2 [--seeds N] [--jobs N] [--dry-run] ...`: trains a recipe with many settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cohort.cli.sweep_output import describe_sweep, find_short_name, print_dry_run, print_table, wrap_lines
from cohort.config import flags
from cohort.config.rules import check_option_bounds
from cohort.config.section import at_least, at_most
from cohort.errors import ConfigError, RunError
from cohort.logs.escape import join_command
from cohort.logs.printing import print_note, print_result
from cohort.recipes import RECIPES
from cohort.run.machine import program_name
from cohort.sweep.directory import SweepDirectory, find_sweep, is_sweep, require_free
from cohort.sweep.plan import MAX_RUNS, Plan
from cohort.sweep.prepare import SweepRequest, prepare_plan
from cohort.sweep.rules import StopRule, read_rule

HELP = """usage: cohort sweep RECIPE --a.b v1,v2 [--c.d x,y] [--seeds N] [options]
       cohort sweep NAME [--json]         Print the table of a sweep once more.

Train a recipe with every combination of the given values, and compare the results. RECIPE and its settings are those of
cohort train. A setting with several values is swept; a list is written [a,b], a text with a comma "a,b".

  --seeds N                          Train each combination with N seeds (default: 1).
  --random N                         Train only N combinations, drawn at random. Then a setting may also be a range:
                                     --optim.lr 1e-5..1e-3 (log: every factor is as likely), lin:0.1..0.9, 4..32.
  --random-seed S                    Seed of that drawing (default: 0).
  --jobs N                           Runs at once (default: 1); the processor's cores are divided among them.
  --stop-below METRIC VALUE at STEP  Stop a run after that step if the metric is lower, for example accuracy 0.5 at 20.
  --stop-above METRIC VALUE at STEP  The same if it is higher. Any metric of run.db can be named.
  --dry-run                          Print the runs and how long they will take, and do nothing else.
  --name NAME                        Name of the sweep's folder (default: made of date and recipe).
  --out DIR                          The folder in which it is made (default: runs).
  --json                             Print the table as JSON.

A sweep that was stopped or killed goes on with: cohort resume FOLDER, or with the same command and its --name. cohort
train RECIPE --help lists every setting of a recipe."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of the command itself."""

    out: str = "runs"
    name: str = ""
    seeds: Annotated[int | None, at_least(1), at_most(MAX_RUNS)] = None
    random: Annotated[int | None, at_least(1), at_most(MAX_RUNS)] = None
    random_seed: Annotated[int | None, at_least(0), at_most(2**63 - 1)] = None
    jobs: Annotated[int, at_least(1), at_most(256)] = 1
    dry_run: bool = False
    json: bool = False


def run(args: list[str]) -> None:
    """Runs `cohort sweep` with `args`, the words after it: a new sweep, the continuation of one, or a dry run.

    Raises ConfigError for wrong flags and settings, and SystemExit(1) if a run failed.
    """
    if flags.wants_help(args):
        print_result(HELP)
        return
    if not args or args[0].startswith("-"):
        raise ConfigError(
            "the recipe is missing. Name it first, for example: cohort sweep quickstart --optim.lr 1e-4,3e-4. Recipes: "
            f"{', '.join(sorted(RECIPES))}."
        )
    recipe, *rest = args
    sweep = find_sweep(recipe)
    # Nothing is swept without a setting, so a recipe of the same name is not meant.
    if sweep is not None and rest in ([], ["--json"]):
        show_sweep(SweepDirectory.open(sweep), as_json=bool(rest))
        return
    if sweep is not None and recipe not in RECIPES:
        raise ConfigError(
            f"{recipe} is a sweep, not a recipe. See its table with: cohort sweep {recipe}. Continue it with: cohort "
            f"resume {recipe}."
        )
    words, given = flags.split_args(rest)
    given, rules, options = _split_options(given)
    if any(flag.name == "recipe" for flag in given):
        raise ConfigError(
            "--recipe: the recipe is the first word, and a sweep has one: cohort sweep RECIPE --optim.lr 1e-4,3e-4. "
            "Remove --recipe; make one sweep per recipe."
        )
    if words:
        raise ConfigError(f'unexpected word "{words[0]}". Write settings as flags: --optim.lr 1e-4,3e-4.')
    if options.random_seed is not None and options.random is None:
        raise ConfigError("--random-seed has no effect without --random N. Add that, or remove --random-seed.")
    if options.json and options.dry_run:
        raise ConfigError("--json has no effect with --dry-run, which makes no table. Remove one of them.")
    request = SweepRequest(
        recipe=recipe,
        given=given,
        seeds=options.seeds or 0,
        random=options.random or 0,
        random_seed=options.random_seed or 0,
        rules=rules,
        jobs=options.jobs,
    )
    _run_request(request, options)


def _run_request(request: SweepRequest, options: Options) -> None:
    """Prepares the plan, and prints it or runs it."""
    # Imported here, because it imports much that a mistake need not wait for.
    from cohort.run.directory import make_run_name, make_slug

    name = _check_name(options.name) or make_run_name(f"sweep-{make_slug(request.recipe)}")
    path = Path(options.out) / name
    earlier = SweepDirectory.open(path) if is_sweep(path) else None
    if earlier is None:
        require_free(path)
    elif not options.dry_run:
        earlier.lock()
    checked = prepare_plan(request, earlier.plan if earlier else None)
    if earlier is not None:
        _require_same_plan(earlier.plan, checked.plan, path)
    if options.dry_run:
        print_dry_run(checked, Path(options.out), options.jobs)
        return
    continue_sweep(earlier or SweepDirectory.create(path, checked.plan), options.jobs, as_json=options.json)


def _split_options(given: list[flags.Flag]) -> tuple[list[flags.Flag], list[StopRule], Options]:
    """Separates the flags of the command from the settings of the runs. Returns (settings, stop rules, options)."""
    valid = flags.collect_settings(Options())
    own: list[flags.GivenSetting] = []
    rules: list[StopRule] = []
    others: list[flags.Flag] = []
    for flag in given:
        if flag.name in ("stop_below", "stop_above"):
            rules.append(read_rule(flag.name.removeprefix("stop_"), flag.values))
        elif flag.name not in valid:
            others.append(flag)
        elif valid[flag.name].type is bool and not flag.values:
            own.append(flags.Flag(flag.name, ("True",)))
        else:
            own.append(flag)
    options = flags.apply_settings(Options(), own)
    check_option_bounds(options)
    return others, rules, options


def _check_name(name: str) -> str:
    """Returns the name of a sweep. Raises ConfigError if it cannot be that of a folder."""
    # The form of the names of runs, too.
    if name and not re.fullmatch(r"\w[\w.=+,-]{0,99}", name):
        raise ConfigError(
            f'--name "{name}" cannot be the name of a sweep: it must begin with a letter or digit, and may have '
            "letters, digits and any of . = + , _ - after it, 100 characters in all. Change it; its folder is --out."
        )
    return name


def _require_same_plan(old: Plan, new: Plan, path: Path) -> None:
    """Raises RunError if a sweep of this name has another plan."""
    names = [name for name in Plan.__dataclass_fields__ if getattr(old, name) != getattr(new, name)]
    if names:
        raise RunError(
            f"{path} is a sweep with another plan (its {names[0]} differ), and a sweep keeps its plan. Choose another "
            f"--name, or continue it as it is: cohort resume {path}."
        )


def continue_sweep(directory: SweepDirectory, jobs: int, *, as_json: bool = False) -> None:
    """Runs every run of a sweep that has no result, or failed before, then writes and prints the table.

    The caller holds the lock. Raises KeyboardInterrupt after a signal, when everything is saved, and SystemExit(1) if a
    run failed.
    """
    from cohort.cli.sweep_progress import open_progress
    from cohort.sweep.collect import collect_table, load_record, write_table
    from cohort.sweep.run import run_sweep

    directory.make_folders()
    runs = directory.plan.list_runs()
    records = [record for run in runs if not (record := load_record(directory, run)).has_result]
    left = [record.run for record in records]
    print_note(wrap_lines(describe_sweep(directory, len(left), jobs)))
    for record in records:
        if record.result is not None and record.result.state == "missing":
            print_note(f"{record.run.name}  is tried again: {record.result.why}")
            # Else a kill would leave a result beside half a run.
            directory.remove_result(record.run)
    try:
        with open_progress(len(runs), len(runs) - len(left)) as progress:
            is_complete = run_sweep(directory, left, jobs, progress)
        if not is_complete:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        resume = join_command([program_name(), "resume", str(directory.shown_path)])
        print_note(f"the sweep is stopped, and nothing is lost; go on with: {resume}")
        raise
    table = collect_table(directory, runs)
    write_table(directory, table)
    print_table(directory, table, as_json=as_json)
    if any(row.state in ("failed", "missing") for row in table.runs):
        raise SystemExit(1)


def show_sweep(directory: SweepDirectory, *, as_json: bool) -> None:
    """Prints the table of a sweep from what its runs have reached so far. Nothing is run or written."""
    from cohort.sweep.collect import collect_table

    table = collect_table(directory, directory.plan.list_runs())
    print_table(directory, table, as_json=as_json)
    left = sum(row.state == "missing" for row in table.runs)
    if left:
        resume = join_command([program_name(), "resume", find_short_name(directory)])
        print_note(f"{left} of {len(table.runs)} runs have no result yet; go on with: {resume}")
