"""The boundary to the package reasoning-gym, which is imported only here.

Its data sets make row number i from their seed plus i, so that two seeds which lie close together share most rows. Some
also depend on the size that they are made with. So one stream of rows per seed is read here, in pieces of fixed size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import logging
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

from cohort.errors import TaskError, suggest_name
from cohort.tasks.reasoning_gym.faults import EXAMPLE_KEYS, TRIED

PIECE = 10_000  # rows of a piece of the stream
INSTALL = "cohort[reasoning-gym]"
OWN_LEVEL = -1  # stands for the settings that a data set has by itself

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One setting of a data set, as a field of the task: its name, type and default."""

    name: str
    type: Any
    default: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetDescription:
    """What the package says of a data set. `levels` is the number of levels of its curriculum; 0 = it has none."""

    name: str
    category: str
    description: str
    levels: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetKey:
    """A data set with all that decides its rows but the seed. `options` are pairs of name and value."""

    name: str
    level: int = OWN_LEVEL
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One row as the package made it. `gold` is a right answer; None if the package knows none."""

    question: str
    gold: str | None
    raw: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageVerdict:
    """What the package's grader said about an answer: its score, or 0 and what it raised."""

    value: float
    error: str = ""


@lru_cache(maxsize=1)
def load_package() -> Any:
    """Returns the module reasoning_gym. Raises TaskError if it is not installed or cannot be imported.

    A warning is logged if its version is not the one that was tried.
    """
    try:
        with _silence():
            import reasoning_gym
    except ImportError as error:
        if getattr(error, "name", "") == "reasoning_gym":
            raise TaskError(
                f"the task reasoning_gym needs the package reasoning-gym, which is not installed; run pip install "
                f"'{INSTALL}'"
            ) from None
        raise TaskError(
            f"the package reasoning-gym cannot be imported ({error}); install what it needs: pip install '{INSTALL}'"
        ) from error
    if (version := get_version()) != TRIED:
        log.warning(
            "reasoning-gym %s is installed, but its graders were checked in version %s; check this one with "
            "benchmarks/reasoning_gym_check.py, or run pip install reasoning-gym==%s",
            *(version, TRIED, TRIED),
        )
    return reasoning_gym


def get_version() -> str:
    """Returns the version of the installed distribution; "unknown" if there is none.

    The attribute __version__ of the package is older than the package.
    """
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def list_datasets() -> list[DatasetDescription]:
    """Returns all data sets of the package, sorted by name."""
    found = []
    for name, (dataset, _) in sorted(load_package().factory.DATASETS.items()):
        about = (dataset.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        words = dataset.__module__.split(".")
        category = words[1] if len(words) > 2 else "other"
        found.append(DatasetDescription(name=name, category=category, description=about, levels=count_levels(name)))
    return found


def check_name(name: str) -> None:
    """Raises TaskError if the package has no data set `name`."""
    known = load_package().factory.DATASETS
    if name not in known:
        raise TaskError(
            f'reasoning-gym has no data set "{name}".{suggest_name(name, known)} Correct --task.dataset; cohort data '
            "reasoning_gym lists all data sets."
        )


def count_levels(name: str) -> int:
    """Returns how many levels the curriculum of a data set has: that of its attribute with the most; 0 = none."""
    factory = load_package().factory
    if name not in factory.CURRICULA:
        return 0
    attributes = factory.create_curriculum(name).attributes.values()
    return max((len(attribute.levels) for attribute in attributes), default=0)


@lru_cache(maxsize=256)
def list_options(name: str, level: int) -> tuple[Option, ...]:
    """Returns the settings of a data set that can be given as flags, with their defaults at a level.

    Left out are `seed` and `size`, and settings that are no numbers, texts, truth values or tuples of these.
    """
    config = _make_config(name, level)
    hints = typing.get_type_hints(type(config))
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        hint = _simplify_type(hints[field.name], value)
        if field.name not in ("seed", "size") and hint is not None:
            default = tuple(value) if isinstance(value, list | tuple) else value
            found.append(Option(name=field.name, type=hint, default=default))
    return tuple(found)


def _simplify_type(hint: Any, value: Any) -> Any:
    """Returns the type of a data set's setting as a flag can have it; None if none can. `value` is its default."""
    plain = (int, float, bool, str, int | None, str | None, float | None)
    if hint in plain:
        # A few fields are annotated as whole numbers and have a fraction as their default.
        return float if hint is int and isinstance(value, float) else next(t for t in plain if t == hint)
    if get_origin(hint) is Literal:
        return hint
    tuples: dict[Any, Any] = {int: tuple[int, ...], float: tuple[float, ...], str: tuple[str, ...]}
    item = (get_args(hint) or (str,))[0]
    is_sequence = hint in (tuple, list) or get_origin(hint) in (tuple, list, Sequence)
    # A default may be of another type than its annotation says.
    if is_sequence and isinstance(value, list | tuple) and all(isinstance(v, str) == (item is str) for v in value):
        return tuples.get(item)
    return None


def _make_config(name: str, level: int) -> Any:
    """Returns the config that a data set has at a level of its curriculum, or by itself, with the size of a piece.

    Raises TaskError for a level that the data set does not have.
    """
    factory = load_package().factory
    if level == OWN_LEVEL:
        return factory.DATASETS[name][1](size=PIECE)
    levels = count_levels(name)
    if not levels:
        raise TaskError(
            f"the data set {name} of reasoning-gym has no curriculum, so it has no levels; remove --task.level, or set "
            "its own settings"
        )
    if not 0 <= level < levels:
        raise TaskError(
            f"the data set {name} of reasoning-gym has the levels 0 to {levels - 1}, not {level}; correct --task.level"
        )
    curriculum = factory.create_curriculum(name)
    curriculum.set_global_level(level)
    return curriculum.generate_configuration({"size": PIECE})


@lru_cache(maxsize=64)
def open_piece(key: DatasetKey, seed: int) -> Any:
    """Returns the package's data set for `key` and a seed. Raises TaskError if it refuses its settings.

    The errors of a config are assertions and ValueErrors, whose text says what is not allowed.
    """
    config = _make_config(key.name, key.level)
    lists = {f.name for f in dataclasses.fields(config) if isinstance(getattr(config, f.name), list)}
    given = {name: list(value) if name in lists else value for name, value in key.options}
    try:
        config = dataclasses.replace(config, **given, seed=seed)
        if hasattr(config, "validate"):
            config.validate()
        with _silence():
            return load_package().factory.DATASETS[key.name][0](config)
    except Exception as error:
        raise TaskError(
            f"the data set {key.name} of reasoning-gym refuses its settings: {error or type(error).__name__}. Correct "
            "them (--task.SETTING)"
        ) from error


def make_entry(key: DatasetKey, seed: int, index: int) -> Entry:
    """Returns row number `index` of the stream of a seed. Raises TaskError if the package raises."""
    piece, place = divmod(index, PIECE)
    dataset = open_piece(key, seed + piece * PIECE)
    try:
        with _silence():
            raw = dataset[place]
    except Exception as error:
        raise TaskError(
            f"the data set {key.name} of reasoning-gym cannot make row {index} with these settings "
            f"({type(error).__name__}: {error}); set another --task.seed or other settings"
        ) from error
    return Entry(question=str(raw["question"]), gold=_find_gold(key.name, raw), raw=raw)


def _find_gold(name: str, raw: Mapping[str, Any]) -> str | None:
    """Returns a right answer to a row: that of the package, or the example in its metadata; None if it has neither."""
    gold = raw["answer"]
    if gold is None and name in EXAMPLE_KEYS:
        example = raw["metadata"].get(EXAMPLE_KEYS[name])
        gold = json.dumps(example) if isinstance(example, dict) else example
    return gold if gold is None else str(gold)


def score_text(key: DatasetKey, seed: int, entry: Entry, text: str) -> PackageVerdict:
    """Returns what the package's grader says about an answer. What it raises is part of the result.

    MemoryError passes through, because it belongs to the limits of the process.
    """
    try:
        with _silence():
            # Some graders change the entry.
            value = open_piece(key, seed).score_answer(text, deepcopy(dict(entry.raw)))
        value = float(value)
    except MemoryError:
        raise
    except Exception as error:
        return PackageVerdict(value=0.0, error=f"{type(error).__name__}: {error}"[:200])
    if not 0 <= value <= 1:
        return PackageVerdict(value=0.0, error=f"the score {value}, which is not between 0 and 1")
    return PackageVerdict(value=value)


def get_system_prompt() -> str:
    """Returns the system prompt with which the package asks for answer tags."""
    return str(load_package().utils.SYSTEM_PROMPTS["default"]).strip()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps what the package prints and warns of out of the output."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
