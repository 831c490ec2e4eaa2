"""The plan of a sweep: which runs there are, with which settings. Everything that decides their results is in it.

The plan is written to sweep.yaml before the first run starts, and never changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cohort.config.document import dump_config
from cohort.config.flags import Flag, format_flag, format_setting
from cohort.config.load import is_config_file, load_config
from cohort.config.lookup import find_recipe
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError, RunError, TaskError
from cohort.logs.escape import join_command
from cohort.sweep.rules import StopRule
from cohort.sweep.values import Span, Value, format_value

FORMAT = 1
MAX_RUNS = 1000
_MAX_DRAWS = 200  # per wanted combination, until a random sweep gives up
_MAX_NAME = 120  # characters of the name of a run's folder


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSetting:
    """A setting that all runs of a sweep share, by its full name, with the words that would follow its flag."""

    name: str
    words: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How the combinations were chosen: all of them, or `number` of them drawn at random with `seed`."""

    kind: str = "grid"  # or "random"
    number: int = 0  # 0 = all
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All runs of a sweep: combinations of values of the swept settings, each with every seed."""

    format: int = FORMAT
    recipe: str  # a name, or a file with its whole path
    folder: str  # the working directory, to which paths in settings are relative
    settings: list[FixedSetting]
    axes: list[str]  # full names of the swept settings
    combinations: list[list[Value]]  # one value per axis
    seeds: list[int]
    method: Method = field(default_factory=Method)
    rules: list[StopRule] = field(default_factory=list)
    threads: int = 0  # per run; 0 = the user or the recipe decides
    split: str = ""  # "validation" = the sweep sets eval.split; "" = it leaves eval.split alone
    split_note: str = ""  # why it leaves it alone, if the runs are not evaluated on the validation split
    date: str = ""  # the day that chat templates which ask for it see as today
    digest: str = ""  # of the settings of all combinations, by which a changed recipe is found

    @property
    def num_runs(self) -> int:
        """The number of runs: combinations x seeds."""
        return len(self.combinations) * len(self.seeds)

    def list_runs(self) -> list[PlannedRun]:
        """Returns all runs, numbered from 1: the seeds of the first combination, then those of the next one."""
        pairs = itertools.product(enumerate(self.combinations), self.seeds)
        return [
            PlannedRun(
                number=number,
                combination=index,
                values=dict(zip(self.axes, values, strict=True)),
                seed=seed,
                name=_make_name(number, self, values, seed),
            )
            for number, ((index, values), seed) in enumerate(pairs, 1)
        ]

    def make_flags(self, values: Mapping[str, Value], seed: int) -> list[Flag]:
        """Returns the settings of a run as flags: the fixed ones, those of the sweep itself, and its own."""
        own = {"seed": [str(seed)]}
        if self.threads:
            own["threads"] = [str(self.threads)]
        if self.split:
            own["eval.split"] = [self.split]
        words = {setting.name: setting.words for setting in self.settings} | own | dict(values)
        return [Flag(name, tuple(value)) for name, value in words.items()]

    def load_config(self, values: Mapping[str, Value], seed: int) -> RunConfig:
        """Returns the config of a run, checked. Raises ConfigError or TaskError if its settings are wrong."""
        return load_config(self.recipe, (), self.make_flags(values, seed))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a plan."""

    number: int  # from 1 on
    combination: int  # its index in the plan
    values: dict[str, Value]  # of the swept settings, by full name
    seed: int
    name: str  # of its folder

    @property
    def label(self) -> str:
        """The swept values in words; "" if nothing but the seed is swept."""
        return format_combination(self.values)


def format_combination(values: Mapping[str, Value]) -> str:
    """Returns the values of swept settings in words.

    >>> format_combination({"optim.lr": ["1e-4"], "learner.lora.targets": ["q_proj", "v_proj"]})
    'optim.lr=1e-4 learner.lora.targets=[q_proj,v_proj]'
    """
    return " ".join(f"{name}={format_value(value)}" for name, value in values.items())


def _make_name(number: int, plan: Plan, values: Sequence[Value], seed: int) -> str:
    """Returns the name of a run's folder, such as "003-optim.lr=1e-4-seed=1". It has only safe characters."""
    parts = [f"{name}={'+'.join(value)}" for name, value in zip(plan.axes, values, strict=True)]
    parts += [f"seed={seed}"] if len(plan.seeds) > 1 or not parts else []
    # Of a path only its end tells something.
    safe = [re.sub(r"[^A-Za-z0-9.=+_-]+", "_", re.sub(r"=.*/", "=", part)).strip("_") for part in parts]
    return "-".join([f"{number:03d}", *safe])[:_MAX_NAME].rstrip(".-_")


def find_recipe_spec(recipe: str) -> str:
    """Returns the name of a recipe so that it means the same in every working directory.

    Raises ConfigError if there is no such recipe.
    """
    return str(Path(recipe).expanduser().resolve()) if is_config_file(recipe) else find_recipe(recipe)[0]


def make_grid(axes: Mapping[str, list[Value] | Span]) -> list[list[Value]]:
    """Returns all combinations of the values of the axes; the last axis changes fastest.

    Raises ConfigError for a range, which has no end, and if there are more than MAX_RUNS.
    """
    values: list[list[Value]] = []
    for name, axis in axes.items():
        if isinstance(axis, Span):
            raise ConfigError(
                f"{format_flag(name)} is a range, from which values can only be drawn. Add --random N, or write its "
                "values: v1,v2."
            )
        values.append(axis)
    _require_few_runs(_count_grid(values))
    return [list(combination) for combination in itertools.product(*values)]


def draw_combinations(axes: Mapping[str, list[Value] | Span], number: int, seed: int) -> list[list[Value]]:
    """Returns `number` distinct combinations, drawn at random from values and ranges.

    Raises ConfigError if there are not so many.
    """
    _require_few_runs(number)
    rng = random.Random(seed)
    lists = [axis for axis in axes.values() if not isinstance(axis, Span)]
    if len(lists) == len(axes):
        total = _count_grid(lists)
        if number > total:
            raise ConfigError(f"--random {number} is more than the {total} combinations that there are. Lower it.")
        return [_pick_combination(lists, index) for index in rng.sample(range(total), number)]
    found: list[list[Value]] = []
    for _ in range(_MAX_DRAWS * number):
        drawn = [axis.draw_value(rng) if isinstance(axis, Span) else rng.choice(axis) for axis in axes.values()]
        if drawn not in found:
            found.append(drawn)
        if len(found) == number:
            return found
    raise ConfigError(f"--random {number} is more than the combinations of these values and ranges. Lower it.")


def _count_grid(values: Iterable[Sequence[Value]]) -> int:
    """Returns the number of combinations of the values of all axes."""
    total = 1
    for axis in values:
        total *= len(axis)
    return total


def _pick_combination(lists: Sequence[list[Value]], index: int) -> list[Value]:
    """Returns the combination with this index in the grid of the lists, without making the grid."""
    picked: list[Value] = []
    for values in reversed(lists):
        index, place = divmod(index, len(values))
        picked.insert(0, values[place])
    return picked


def _require_few_runs(number: int) -> None:
    """Raises ConfigError if a sweep has more than MAX_RUNS runs."""
    if number > MAX_RUNS:
        raise ConfigError(f"the sweep has {number} runs, more than {MAX_RUNS}. Sweep fewer values, or add --random N.")


def load_combinations(plan: Plan) -> list[RunConfig]:
    """Returns the config of every combination with the first seed, all of them checked.

    Raises ConfigError that names the first combination whose settings are wrong, how many others are, and two
    combinations that have the same settings.
    """
    _require_few_runs(plan.num_runs)
    if len(set(plan.seeds)) < len(plan.seeds):
        raise ConfigError(f"--seed has a seed twice: {', '.join(map(str, plan.seeds))}. Give each once.")
    for seed in plan.seeds[1:]:
        plan.load_config(dict(zip(plan.axes, plan.combinations[0], strict=True)), seed)
    configs: list[RunConfig] = []
    refused: list[tuple[str, Exception]] = []
    seen: dict[str, str] = {}
    for combination in plan.combinations:
        values = dict(zip(plan.axes, combination, strict=True))
        label = format_combination(values)
        try:
            config = plan.load_config(values, plan.seeds[0])
        except (ConfigError, TaskError) as error:
            refused.append((label, error))
            continue
        text = dump_config(config)
        if text in seen:
            raise ConfigError(f"two runs would be the same: {seen[text]} and {label}. Give each value once.")
        seen[text] = label
        configs.append(config)
    if refused:
        raise _make_refusal(refused, len(plan.combinations))
    return configs


def _make_refusal(refused: Sequence[tuple[str, Exception]], num_combinations: int) -> ConfigError:
    """Returns the error for combinations that cannot be trained: their labels and the message of the first."""
    label, error = refused[0]
    if len(refused) == num_combinations or not label:
        return ConfigError(str(error))
    others = ", ".join(label for label, _ in refused[1:4]) + (", ..." if len(refused) > 4 else "")
    more = f" (also refused: {others})" if others else ""
    return ConfigError(f"the combination {label} is refused: {error}{more}")


def digest_configs(configs: Iterable[RunConfig]) -> str:
    """Returns a digest of all settings of the configs."""
    return hashlib.sha256("\n".join(map(dump_config, configs)).encode()).hexdigest()[:16]


def check_recipe(plan: Plan) -> None:
    """Raises RunError if the recipe of a sweep gives other settings than at the start: its file was changed."""
    folder = plan.folder if Path(plan.folder).is_dir() else os.getcwd()
    with contextlib.chdir(folder):
        digest = digest_configs(load_combinations(plan))
    if digest != plan.digest:
        raise RunError(
            f"the recipe {plan.recipe} gives other settings than when the sweep was started. Put back what was there, "
            "or start a new sweep."
        )


def format_train_command(plan: Plan, run: PlannedRun) -> str:
    """Returns the command that trains one run of a sweep alone."""
    flags = plan.make_flags(run.values, run.seed)
    words = [word for f in flags for word in format_setting(f.name, f.values[0] if len(f.values) == 1 else f.values)]
    return join_command(["cohort", "train", plan.recipe, *words])
