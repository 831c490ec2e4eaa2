"""Preparation of a sweep: from what the user asked for to a plan whose every combination is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from cohort.config.flags import Flag, format_flag
from cohort.config.imitation import DPO, SFT
from cohort.config.kinds import RL
from cohort.config.load import call_recipe
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.sweep.plan import (
    FixedSetting,
    Method,
    Plan,
    digest_configs,
    draw_combinations,
    find_recipe_spec,
    load_combinations,
    make_grid,
)
from cohort.sweep.rules import StopRule, check_rules
from cohort.sweep.values import Span, Value, read_values
from cohort.system.kernel import count_cores
from cohort.tasks.base import check_packages, load_rows
from cohort.tasks.splits import cut_validation

MIN_VALIDATION = 20  # problems; with fewer the validation split chooses little better than chance


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRequest:
    """What a user asks for."""

    recipe: str
    given: Sequence[Flag]  # settings, fixed and swept
    seeds: int = 0  # number of seeds; 0 = not given
    random: int = 0  # number of combinations to draw; 0 = all of them
    random_seed: int = 0
    rules: Sequence[StopRule] = ()
    jobs: int = 1  # runs at once


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPlan:
    """A plan, and the config of every combination with the first seed."""

    plan: Plan
    configs: list[RunConfig] = field(default_factory=list)


def prepare_plan(request: SweepRequest, earlier: Plan | None = None) -> CheckedPlan:
    """Returns the plan of a sweep, checked: every combination can be trained, as far as settings tell.

    `earlier` is the plan of the sweep that is continued: its threads and its date are kept. Raises ConfigError for
    wrong settings and values, and TaskError for a task whose rows cannot be read.
    """
    recipe = find_recipe_spec(request.recipe)
    base = call_recipe(recipe)
    fixed, axes, seeds = _split_settings(request, base)
    combinations = draw_combinations(axes, request.random, request.random_seed) if request.random else make_grid(axes)
    names = {setting.name for setting in fixed} | axes.keys()
    has_threads = "threads" in names or bool(base.threads)
    plan = Plan(
        recipe=recipe,
        folder=os.getcwd(),
        settings=fixed,
        axes=list(axes),
        combinations=combinations,
        seeds=seeds,
        method=Method(kind="random", number=request.random, seed=request.random_seed) if request.random else Method(),
        rules=list(request.rules),
        threads=0 if has_threads else earlier.threads if earlier else max(1, count_cores() // request.jobs),
        date=earlier.date if earlier else f"{date.today():%Y-%m-%d}",
    )
    plan, configs = _choose_split(plan, names, base)
    check_rules(plan.rules, configs)
    return CheckedPlan(plan=replace(plan, digest=digest_configs(configs)), configs=configs)


def _split_settings(
    request: SweepRequest, base: RunConfig
) -> tuple[list[FixedSetting], dict[str, list[Value] | Span], list[int]]:
    """Returns the settings that all runs share, the values of the swept ones by name, and the seeds.

    Raises ConfigError if a flag is given twice, or if nothing is swept.
    """
    fixed: list[FixedSetting] = []
    axes: dict[str, list[Value] | Span] = {}
    seeds: list[int] = []
    for flag in request.given:
        if flag.name in axes or flag.name in {setting.name for setting in fixed} or (flag.name == "seed" and seeds):
            raise ConfigError(f"{flag.spelling} is given twice; give it once, with its values as v1,v2.")
        if not flag.values:
            raise ConfigError(f"{flag.spelling} has no value. Write {flag.spelling} v1,v2 (an empty list: []).")
        values = read_values(flag.spelling, flag.values)
        if flag.name == "seed":
            seeds = _read_seeds(values)
        elif isinstance(values, Span) or len(values) > 1:
            axes[flag.name] = values
        else:
            fixed.append(FixedSetting(name=flag.name, words=values[0]))
    if len(seeds) > 1 and request.seeds:
        raise ConfigError("--seed has several values, and --seeds makes seeds too. Remove one of them.")
    first = seeds[0] if seeds else base.seed
    seeds = seeds if len(seeds) > 1 else list(range(first, first + max(1, request.seeds)))
    if not axes and len(seeds) == 1:
        raise ConfigError(
            "nothing is swept: every setting has one value. Write values with commas, for example --optim.lr "
            "1e-4,3e-4, or add --seeds 3; one run alone is cohort train RECIPE."
        )
    if request.random and not axes:
        raise ConfigError(f"--random {request.random} has no effect: no setting has several values. Remove it.")
    return fixed, axes, seeds


def _read_seeds(values: list[Value] | Span) -> list[int]:
    """Returns the values of --seed as numbers. Raises ConfigError if they are none."""
    texts = [] if isinstance(values, Span) else [word for value in values for word in value]
    if not texts or not all(text.isdecimal() and len(text) < 19 for text in texts):
        raise ConfigError(f"{format_flag('seed')} takes whole numbers. Write for example --seed 0,1,2, or --seeds 3.")
    return [int(text) for text in texts]


def _choose_split(plan: Plan, names: set[str], base: RunConfig) -> tuple[Plan, list[RunConfig]]:
    """Returns the plan with the validation split where that is possible, and the configs of its combinations.

    `names` are those of the settings that the user gave. A sweep that chose on the test split would leave no problems
    to measure the winner.
    """
    if not base.has_splits:
        return plan, load_combinations(plan)
    if "eval.split" in names or base.eval.split == "validation":
        configs = load_combinations(plan)
        asked = any(config.eval.split == "test" for config in configs)
        return replace(plan, split_note="as --eval.split asks for" if asked else ""), configs
    wanted = replace(plan, split="validation")
    configs = load_combinations(wanted)
    why = _find_obstacle(configs)
    if not why:
        return wanted, configs
    plan = replace(plan, split_note=why)
    return plan, load_combinations(plan)


def _find_obstacle(configs: Sequence[RunConfig]) -> str:
    """Returns why the configs cannot be evaluated on a validation split; "" if they can. Reads the training rows."""
    seen: Mapping[tuple[str, int, float], None] = {}
    for config in configs:
        assert isinstance(config, RL | SFT | DPO), "only these have a task"
        # Of the training rows a step of reinforcement learning needs so many. Examples are repeated if there are few.
        needed = config.batch.prompts if isinstance(config, RL) else 1
        key = (repr(config.task), needed, config.eval.validation_share)
        if key in seen:
            continue
        seen = {**seen, key: None}
        check_packages(config.task)
        rows = load_rows(config.task, "train")
        rest, held = cut_validation(rows, config.eval.validation_share)
        if len(held) < MIN_VALIDATION or len(rest) < needed:
            return (
                f"the task {config.task.name} has {len(rows)} training rows, too few for a validation split of at "
                f"least {MIN_VALIDATION}"
            )
    return ""
