"""Filters and orders of a table of runs, as users write them: `accuracy>0.5`, `optim.lr=1e-4`, `name~word`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cohort.errors import ConfigError, suggest_name
from cohort.run.summary import STATES, RunSummary

_FILTER = re.compile(r"\s*([^\s=<>!~]+)\s*(!=|<=|>=|==?|<|>|!?~)\s*(.*?)\s*", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# What can be asked of every run, besides its settings and metrics.
_FIELDS: dict[str, Callable[[RunSummary], Any]] = {
    "name": lambda run: run.name,
    "state": lambda run: run.state,
    "recipe": lambda run: run.recipe,
    "model": lambda run: run.model,
    "kind": lambda run: run.kind,
    "note": lambda run: run.note,
    "date": lambda run: run.started,
    "updated": lambda run: run.updated,
    "step": lambda run: run.step,
    "steps": lambda run: run.num_steps,
    "accuracy": lambda run: run.accuracy,
    "best": lambda run: run.best_eval_reward if math.isnan(run.best_accuracy) else run.best_accuracy,
    "eval_reward": lambda run: run.eval_reward,
    "reward": lambda run: run.metrics.get("reward/mean", math.nan),
}
_RESULTS = ("accuracy", "best", "eval/accuracy", "eval_reward", "eval/reward")
_TIMES = ("date", "updated")
_OTHER_STATES = {"finished": "done", "failed": "crashed"}  # words that mean the same as a state
_TEXTS = ("name", "state", "recipe", "model", "kind", "note")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFilter:
    """One condition on runs."""

    name: str  # of a field, a setting or a metric
    sign: str  # =, !=, <, <=, >, >=, ~ (contains) or !~
    value: str

    def accepts(self, run: RunSummary) -> bool:
        """Returns whether a run fulfils the condition. What a run does not have is unequal to everything."""
        value = get_value(run, self.name)
        if self.sign in ("~", "!~"):
            return (self.value.lower() in format_plain(value).lower()) == (self.sign == "~")
        if self.sign in ("=", "!="):
            return _is_equal(value, self.value) == (self.sign == "=")
        wanted = parse_time(self.value) if self.name in _TIMES else float(self.value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # False for NaN, which a run has where it has no such metric.
        return is_number and bool(_ORDERS[self.sign](value, wanted))


def is_filter(text: str) -> bool:
    """Returns whether a text looks like a filter, such as "state=running"."""
    return _FILTER.fullmatch(text) is not None


def parse_filter(text: str) -> RunFilter:
    """Returns the filter that a text such as "accuracy>0.5" describes. Raises ConfigError if it describes none."""
    match = _FILTER.fullmatch(text)
    if match is None:
        raise ConfigError(
            f'--filter "{text}" is no condition. Write NAME, one of = != < <= > >= ~, and a value, in quotes: '
            '--filter "accuracy>0.5". Folders stand before the flags.'
        )
    name, sign, value = match.groups()
    name = name.removeprefix("--").replace("-", "_") if "/" not in name else name
    if name == "state":
        value = _OTHER_STATES.get(value, value)
    if name == "state" and sign in ("=", "==", "!=") and value not in STATES:
        raise ConfigError(f'unknown state "{value}" in --filter "{text}".{suggest_name(value, STATES)}')
    if sign in _ORDERS:
        _check_number(text, name, value)
    return RunFilter(name=name, sign="=" if sign == "==" else sign, value=value)


def _check_number(text: str, name: str, value: str) -> None:
    """Raises ConfigError if the value of a filter with < or > is no number, or for a time no date."""
    if name in _TEXTS:
        raise ConfigError(f'--filter "{text}" asks for an order, but {name} is a text. Use =, != or ~ (contains).')
    try:
        if name in _TIMES:
            parse_time(value)
        elif math.isnan(float(value)):
            raise ValueError
    except (ValueError, OverflowError):
        what = "a date like 2026-01-31 or 2026-01-31T18:00" if name in _TIMES else "a number"
        raise ConfigError(f'--filter "{text}": "{value}" is not {what}. Correct it.') from None


def parse_time(text: str) -> float:
    """Returns a date, or a date with a time of day, as seconds since 1970. Local time, if it names no zone.

    Raises ValueError if it is none.
    """
    return datetime.fromisoformat(text).timestamp()


def select_runs(runs: Sequence[RunSummary], filters: Sequence[RunFilter]) -> list[RunSummary]:
    """Returns the runs that fulfil all filters, in their order. Raises ConfigError for a name that no run has."""
    for chosen in filters:
        check_name("--filter", chosen.name, runs)
    return [run for run in runs if all(chosen.accepts(run) for chosen in filters)]


def sort_runs(runs: Sequence[RunSummary], name: str, reverse: bool) -> list[RunSummary]:
    """Returns the runs in the order of a field, a setting or a metric: largest numbers first, texts by alphabet.

    So the newest and the best runs come first. `reverse` turns the order around. Runs without the value come last in
    either order. Raises ConfigError for a name that no run has.
    """
    check_name("--sort", name, runs)
    known = {id(run): value for run in runs if not _is_missing(value := get_value(run, name))}
    numbers = [run for run in runs if isinstance(known.get(id(run)), int | float)]
    texts = [run for run in runs if id(run) in known and not isinstance(known[id(run)], int | float)]
    # Equal ones stay in the order of names.
    numbers.sort(key=lambda run: run.name)
    numbers.sort(key=lambda run: known[id(run)], reverse=not reverse)
    texts.sort(key=lambda run: (format_plain(known[id(run)]), run.name), reverse=reverse)
    return [*numbers, *texts, *(run for run in runs if id(run) not in known)]


def describe_splits(runs: Sequence[RunSummary], order: str) -> list[str]:
    """Returns what a reader must know of the results in a table; `order` is the name by which it is sorted."""
    splits = {run.split for run in runs if not (math.isnan(run.accuracy) and math.isnan(run.eval_reward))}
    what = "accuracy" if any(not math.isnan(run.accuracy) for run in runs) else "reward"
    notes = []
    if "validation" in splits:
        many = "accuracies" if what == "accuracy" else "rewards"
        others = f"; the other {many} are on the test split, and cannot be compared with it"
        notes.append(f"v = measured on the validation split{others if 'test' in splits else ''}")
    if order in _RESULTS and "test" in splits:
        notes.append(
            f"Choosing a run by its {what} on the test split makes that {what} too high. To choose, train with "
            "--eval.split validation (docs/evaluation.md)."
        )
    return notes


def check_name(flag: str, name: str, runs: Sequence[RunSummary]) -> None:
    """Raises ConfigError if `name`, given with a flag, is no field, and no setting or metric of any run."""
    if not runs or name in _FIELDS or any(name in run.settings or name in run.metrics for run in runs):
        return
    valid = {*_FIELDS, *(key for run in runs for key in (*run.settings, *run.metrics))}
    same = sorted(key for key in valid if re.split(r"[./]", key)[-1] == re.split(r"[./]", name)[-1])
    if same:
        hint = f" Did you mean {' or '.join(same[:3])}?"
    else:
        hint = suggest_name(name, valid)
        # All names of settings and metrics would fill the screen.
        if "Did you mean" not in hint:
            hint = f" Valid: {', '.join(_FIELDS)}, a setting such as optim.lr, a metric such as entropy."
    raise ConfigError(f'{flag}: no run has "{name}".{hint}')


def get_value(run: RunSummary, name: str) -> Any:
    """Returns a field, a setting or a metric of a run; None if it has none of that name."""
    if name in _FIELDS:
        return _FIELDS[name](run)
    return run.settings[name] if name in run.settings else run.metrics.get(name)


def format_plain(value: Any) -> str:
    """Returns the value of a setting as a user would write it on a command line; "off" for None.

    >>> format_plain(1e-4), format_plain(True), format_plain(["a", "b"]), format_plain(0.30000000000000004)
    ('1e-4', 'true', 'a,b', '0.3')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, list | tuple):
        return ",".join(map(format_plain, value))
    # A number of thousands of digits has no text.
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a huge number"
    return "off" if value is None else str(value)


def format_number(value: float) -> str:
    """Returns a number as people write it, with six digits at most.

    >>> [format_number(value) for value in (1e-4, 0.00015, 0.01, 0.05, 2.5, 1e6, 0.0, float("nan"))]
    ['1e-4', '1.5e-4', '0.01', '0.05', '2.5', '1e6', '0', 'nan']
    """
    plain = f"{value:.6g}"
    if not math.isfinite(value):
        return plain
    digits, _, exponent = f"{value:.5e}".partition("e")
    short = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return short if len(short) < len(plain) else plain


def _is_missing(value: Any) -> bool:
    """Returns whether a value says nothing: None, NaN, or an empty text."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _is_equal(value: Any, text: str) -> bool:
    """Returns whether a value is the one that a text stands for. Numbers may differ in the last digits."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return math.isclose(value, float(text), rel_tol=1e-6)
        except (ValueError, OverflowError):
            return False
    return value is not None and format_plain(value) == (text.lower() if isinstance(value, bool) else text)


def list_metrics(runs: Iterable[RunSummary]) -> list[str]:
    """Returns the names of all metrics that a run has, sorted."""
    return sorted({name for run in runs for name in run.metrics})
