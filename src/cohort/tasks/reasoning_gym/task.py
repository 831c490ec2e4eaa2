"""The task reasoning_gym: problems that the package reasoning-gym generates and grades.

Parts: `correct` (the package's grader gives full marks) and `score` (its score from 0 to 1, which has partial credit).
Only `correct` is paid unless the recipe or a flag says otherwise: --reward.score 1 --reward.correct 0 pays the score.

Each row names its place in the package's stream of rows, and the grader makes it anew, because rows of the package hold
objects that are no JSON. If the row comes out differently, scoring stops: it never grades another problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from typing import Any, ClassVar, Literal, get_args

from cohort.errors import TaskError
from cohort.tasks.answers import find_last_tag, remove_thoughts
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.reasoning_gym import package
from cohort.tasks.reasoning_gym.faults import WITHOUT_GOLD, find_fault, find_setting_fault
from cohort.tasks.reasoning_gym.mixture import interleave, read_mixture
from cohort.tasks.reasoning_gym.screens import find_code
from cohort.tasks.splits import MAX_ROWS
from cohort.types import Answer, Message, Row

Format = Literal["tags", "plain"]
Instructions = Literal["short", "package", "none"]

SHORT: dict[Format, str] = {
    "tags": "\nThink first, then write the final answer between <answer> and </answer>.",
    "plain": "\nWrite only the final answer.",
}
MAX_CHARS = 20_000  # a longer answer is wrong
# After this many rows of the package in a row without a new problem, all problems of these settings count as found.
MAX_FRUITLESS = 2_000
_MAX_SEED = 2**31


@task("reasoning_gym")
class ReasoningGym:
    """Problems of the package reasoning-gym; the settings of the chosen data set are settings of the task."""

    dataset: str = ""
    """The data set, or several with their shares, as in chain_sum:2,leg_counting:1. `cohort data reasoning_gym` lists
    them. The settings of one data set are --task.x, those of several --task.DATASET-x."""
    level: int = package.OWN_LEVEL
    """Level of the data set's curriculum, from 0: every attribute of it gets that level, or its highest. It changes the
    defaults of the data set's own settings. -1 = the package's defaults."""
    seed: int = 0
    """Where the package's stream of rows begins."""
    train_size: int = 2_000
    test_size: int = 200
    format: Format = "tags"
    """Where the answer stands: tags = in the last <answer>...</answer>; plain = all text after the thoughts."""
    instructions: Instructions = "short"
    """What follows the question: short = one sentence about the answer; package = reasoning-gym's own system prompt,
    which asks for tags; none = nothing."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "score")
    coefficients: ClassVar[Mapping[str, float]] = {"score": 0.0}
    packages: ClassVar[Mapping[str, str]] = {"reasoning_gym": package.INSTALL}
    work_seconds: ClassVar[float] = 5.0
    max_tokens: ClassVar[int] = 1024
    # The settings of data sets that the class has as fields: data set and setting by field. Classes that `choose_class`
    # makes have some.
    places: ClassVar[Mapping[str, tuple[str, str]]] = {}
    chosen: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        need = partial(require, "reasoning_gym")
        sizes = (self.train_size, self.test_size)
        need(
            all(1 <= size <= MAX_ROWS for size in sizes), f"train_size and test_size from 1 to {MAX_ROWS}, not {sizes}"
        )
        need(0 <= self.seed < _MAX_SEED, f"a seed from 0 to {_MAX_SEED - 1}, not {self.seed}")
        need(self.level >= package.OWN_LEVEL, f"a level of 0 or more, or -1 for none, not {self.level}")
        for setting, kind in {"format": Format, "instructions": Instructions}.items():
            known = get_args(kind)
            value = getattr(self, setting)
            need(value in known, f"{setting} among {', '.join(known)}, not {value!r}")
        need(
            (self.format, self.instructions) != ("plain", "package"),
            "--task.instructions short or none with --task.format plain: the package's prompt asks for tags",
        )
        need(bool(self.dataset) or self.level == package.OWN_LEVEL, "a data set for the level: --task.dataset NAME")
        names = tuple(share.name for share in read_mixture(self.dataset))
        if self.chosen not in ((), names):
            raise TaskError(
                f"this class of the task reasoning_gym has the settings of {', '.join(self.chosen)}, but dataset is "
                f'"{self.dataset}"; make the task with make_task(dataset=...)'
            )
        for name in names:
            check_usable(name)
            # A data set refuses settings when it is made.
            dataset = package.open_piece(self.make_key(name), self.seed)
            if fault := find_setting_fault(name, dataset.config):
                raise TaskError(f"the data set {name} of reasoning-gym is refused with these settings: {fault}")

    @classmethod
    def choose_class(cls, settings: Mapping[str, Any]) -> type[ReasoningGym]:
        """Returns the class whose fields include the settings of the data sets that `settings` name.

        Of the settings, texts of a command line or values, only `dataset` and `level` matter. Raises TaskError for
        unknown or refused data sets and levels, and if the package is not installed.
        """
        names = tuple(share.name for share in read_mixture(str(settings.get("dataset", ""))))
        for name in names:
            check_usable(name)
        return _make_class(names, _read_level(settings)) if names else ReasoningGym

    def choose(self, settings: Mapping[str, Any]) -> ReasoningGym:
        """Returns a task of the class that changes of the settings choose; the task itself if it has that class.

        A new task keeps what does not depend on the data set. Raises what `choose_class` raises.
        """
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(ReasoningGym)}
        wanted = own | dict(settings)
        cls = self.choose_class(wanted)
        if cls is type(self):
            return self
        return cls(**own | {"dataset": str(wanted["dataset"]), "level": _read_level(wanted)})

    def make_key(self, name: str) -> package.DatasetKey:
        """Returns the data set `name` with the settings that this task has for it."""
        options = {option: getattr(self, field) for field, (owner, option) in self.places.items() if owner == name}
        return package.DatasetKey(name=name, level=self.level, options=tuple(options.items()))

    def rows(self, split: str) -> Iterator[Row]:
        """Yields `train_size` or `test_size` different problems of a split, always the same ones.

        A hash of the question decides its split, so that no question is in both. Rows of several data sets alternate by
        their shares. Raises TaskError for an unknown split, if no data set is named, and, after the problems that there
        are, if the settings allow fewer than asked for.
        """
        if split not in ("train", "test"):
            raise TaskError(f'task "reasoning_gym" has no split "{split}"; use one of train, test')
        shares = read_mixture(self.dataset)
        if not shares:
            raise TaskError(
                "the task reasoning_gym needs a data set: add --task.dataset NAME; cohort data reasoning_gym lists them"
            )
        count = 0
        for row in self._mix_problems(split):
            yield row
            count += 1
        size = self._get_size(split)
        if count < size:
            # The other split is probably too large as well.
            other = "train" if split == "test" else "test"
            found = {split: count, other: sum(1 for _ in self._mix_problems(other))}
            remedy = " ".join(f"--task.{name}-size {found[name]}" for name in ("train", "test"))
            raise TaskError(
                f"the data set {list(islice(interleave(shares), count + 1))[-1]} of reasoning-gym has no more {split} "
                f"problems with these settings, after {count} rows of --task.{split}-size {size}; set {remedy}, or "
                "wider settings"
            )

    def _get_size(self, split: str) -> int:
        """Returns how many rows a split is to have."""
        return self.test_size if split == "test" else self.train_size

    def _mix_problems(self, split: str) -> Iterator[Row]:
        """Yields the problems of a split, of all data sets by their shares, until one of these has no more."""
        shares = read_mixture(self.dataset)
        streams = {share.name: self._iterate_problems(share.name, split) for share in shares}
        for name in islice(interleave(shares), self._get_size(split)):
            row = next(streams[name], None)
            if row is None:
                return
            yield row

    def _iterate_problems(self, name: str, split: str) -> Iterator[Row]:
        """Yields the different problems of a data set in a split, until MAX_FRUITLESS rows have brought no new one.

        Rows whose right answer would earn nothing are left out: an empty text, and one that the screens stop, such as
        an integral that the package could not solve.
        """
        key = self.make_key(name)
        seen: set[str] = set()
        index = last_new = -1
        while index - last_new < MAX_FRUITLESS:
            index += 1
            entry = package.make_entry(key, self.seed, index)
            digest = blake2b(f"{name}\0{entry.question}".encode(errors="replace"), digest_size=10).hexdigest()
            # A quarter of all problems is for testing.
            is_test = int(digest[:2], 16) % 4 == 0
            if is_test != (split == "test") or digest in seen or not is_answerable(name, entry.gold):
                continue
            seen.add(digest)
            last_new = index
            yield {
                "id": f"{name}-{digest}",
                "dataset": name,
                "index": index,
                "question": entry.question,
                "answer": entry.gold,
            }

    def prompt(self, row: Row) -> list[Message]:
        """Returns the question as a user message, with instructions after it, or before it in a system message."""
        if self.instructions == "package":
            return [
                {"role": "system", "content": package.get_system_prompt()},
                {"role": "user", "content": row["question"]},
            ]
        after = SHORT[self.format] if self.instructions == "short" else ""
        return [{"role": "user", "content": row["question"] + after}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns the parts "correct" (0 or 1) and "score" (from 0 to 1), with the reason why an answer is not right.

        A missing or empty answer, one that is too long, one that the package's grader raises on, and one that must not
        be handed to it because it would be run as a program have 0 in both parts. Raises TaskError if the package no
        longer makes the row's problem.
        """
        text, reason = self._find_text(answer.text)
        reason = reason or find_code(row["dataset"], text)
        if reason:
            return Verdict({"correct": 0.0, "score": 0.0}, reason)
        key = self.make_key(row["dataset"])
        result = package.score_text(
            key, self.seed, _make_entry_again(key, self.seed, row["index"], row["question"]), text
        )
        if result.error:
            reason = f"the grader cannot read the answer ({result.error})"
        elif result.value < 1:
            reason = f"wrong, score {result.value:g}"
        return Verdict({"correct": float(result.value == 1), "score": result.value}, reason)

    def _find_text(self, completion: str) -> tuple[str, str]:
        """Returns the answer in a completion, and why there is none that can be graded, "" if there is one."""
        said, is_open = remove_thoughts(completion)
        text = said
        if self.format == "tags":
            span = find_last_tag(said)[0]
            if span is None:
                return "", "the thought does not end" if is_open else "no closed <answer> tag"
            text = said[slice(*span)]
        elif is_open:
            return "", "the thought does not end"
        text = text.strip()
        if not _is_visible(text):
            return "", "the answer is empty"
        return text, f"the answer is longer than {MAX_CHARS} characters" if len(text) > MAX_CHARS else ""

    def gold(self, row: Row) -> str:
        """Returns the package's right answer in the form that `format` asks for."""
        return f"<answer>{row['answer']}</answer>" if self.format == "tags" else str(row["answer"])

    def summary(self, rows: Sequence[Row], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Returns the mean score, and for several data sets also accuracy and mean score of each."""
        means = {"mean score": _mean([part["score"] for part in parts])}
        names = [share.name for share in read_mixture(self.dataset)]
        for name in names if len(names) > 1 else []:
            own = [part for row, part in zip(rows, parts, strict=True) if row["dataset"] == name]
            if own:
                means |= {f"{name}, {part}": _mean([each[part] for each in own]) for part in self.parts}
        return means

    def list_choices(self) -> list[tuple[str, str]]:
        """Returns the data sets with a description of each, if none is chosen; else nothing."""
        if self.dataset:
            return []
        return [(info.name, _describe(info)) for info in package.list_datasets()]


def _read_level(settings: Mapping[str, Any]) -> int:
    """Returns the level in settings of a task, values or texts; that for none if it is missing or no whole number.

    Its type is checked where the settings are read.
    """
    try:
        return int(settings.get("level", package.OWN_LEVEL))
    except (TypeError, ValueError):
        return package.OWN_LEVEL


def make_task(**settings: Any) -> ReasoningGym:
    """Returns the task with these settings, those of its data sets included, for recipes and scripts.

    Raises TaskError for settings that are not allowed or that neither the task nor the data set has.
    """
    cls = ReasoningGym.choose_class(settings)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in settings:
        if name not in known:
            raise TaskError(f'the task reasoning_gym has no setting "{name}" here; use one of {", ".join(known)}')
    return cls(**settings)


def check_usable(name: str) -> None:
    """Raises TaskError if there is no data set `name`, or if it is refused."""
    package.check_name(name)
    if fault := find_fault(name):
        raise TaskError(f"the data set {name} of reasoning-gym is refused: {fault}. Choose another --task.dataset")


@lru_cache(maxsize=256)
def _make_class(names: tuple[str, ...], level: int) -> type[ReasoningGym]:
    """Returns the task's class with the settings of these data sets as fields, whose defaults are those of a level.

    The class is that of the registered task to everyone who asks for its name or its source.
    """
    fields: list[Any] = []
    places: dict[str, tuple[str, str]] = {}
    for name in names:
        for option in package.list_options(name, level):
            field = option.name if len(names) == 1 else f"{name}_{option.name}"
            if field in places or field in {f.name for f in dataclasses.fields(ReasoningGym)}:
                raise TaskError(f"the data sets {', '.join(names)} cannot be mixed: two settings are named {field}")
            places[field] = (name, option.name)
            fields.append((field, option.type, option.default))
    attributes: dict[str, Any] = {
        "__module__": ReasoningGym.__module__,
        "__qualname__": ReasoningGym.__qualname__,
        "__doc__": f"Problems of the package reasoning-gym: {', '.join(names)}.",
        "places": places,
        "chosen": names,
    }
    if WITHOUT_GOLD & {*names}:
        # Rows without a right answer: the self-check then only tries an empty one.
        attributes["gold"] = None
    made: type[ReasoningGym] = dataclasses.make_dataclass(
        ReasoningGym.__name__, fields, bases=(ReasoningGym,), namespace=attributes, frozen=True, kw_only=True
    )
    return made


@lru_cache(maxsize=512)
def _make_entry_again(key: package.DatasetKey, seed: int, index: int, question: str) -> package.Entry:
    """Returns the row of the package at a place. Raises TaskError if its question is not `question`."""
    entry = package.make_entry(key, seed, index)
    if entry.question != question:
        raise TaskError(
            f"row {index} of the data set {key.name} is not the problem that was asked: reasoning-gym, now "
            f"{package.get_version()}, or the task's settings have changed; restore them"
        )
    return entry


def is_answerable(name: str, gold: str | None) -> bool:
    """Returns whether the right answer to a row of the data set `name` can earn anything; None = it is not known."""
    return gold is None or (_is_visible(gold) and not find_code(name, gold))


def _is_visible(text: str) -> bool:
    """Returns whether a text has a character that can be seen."""
    return any(c.isprintable() and not c.isspace() for c in text)


def _mean(values: Sequence[float]) -> float:
    """Returns the mean of numbers, of which there is at least one."""
    return sum(values) / len(values)


def _describe(info: package.DatasetDescription) -> str:
    """Returns one line about a data set: what it is, its levels, and why it is refused."""
    levels = f"levels 0 to {info.levels - 1}" if info.levels else "no levels"
    fault = find_fault(info.name)
    return f"{info.category}: {info.description or info.name} ({levels}){f' REFUSED: {fault}' if fault else ''}"
