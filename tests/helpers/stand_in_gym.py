"""A stand-in for the package reasoning-gym: small data sets with the interfaces and faults of the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest

from cohort.tasks.reasoning_gym import package, task


@dataclass
class SumsConfig:
    min_terms: int = 2
    max_terms: int = 3
    style: Literal["plain", "loud"] = "plain"
    signs: list[str] = field(default_factory=lambda: ["+"])
    limit: int | None = None
    chance: int = 0.5  # type: ignore[assignment]  # the annotation is wrong, as in the package
    board: dict[str, int] = field(default_factory=dict)  # of a type that no flag has
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert isinstance(self.signs, list), "signs must be a list"
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"


class Sums:
    """Sums of a few numbers.

    More about them.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.graded: list[str] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        print("noise that must not reach the output")
        random = Random(self.config.seed + index)
        terms = [random.randint(0, 99) for _ in range(random.randint(self.config.min_terms, self.config.max_terms))]
        question = f"Add {self.config.signs[0].join(map(str, terms))}."
        return {"question": question, "answer": str(sum(terms)), "metadata": {"terms": tuple(terms), 1: "odd key"}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> Any:
        entry["metadata"].pop("terms")  # some graders change the entry; a second call would fail
        if answer == "boom":
            raise ValueError("boom")
        if answer == "much":
            return 2.0
        return 1.0 if answer == entry["answer"] else 0.5 if entry["answer"] in answer else 0.05


class Words(Sums):
    """A few words"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        word = "abcdefgh"[(self.config.seed + index) % 8]
        return {"question": f"Repeat {word}.", "answer": "" if word == "a" else word, "metadata": {"terms": ()}}


class Queens(Words):
    """Answers that are run as Python"""

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        self.graded.append(answer)
        return super().score_answer(answer, entry)


class Boxes(Words):
    """Rows without a right answer"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "answer": None}


class SumsCurriculum:
    """Two attributes: one with three levels, one with two."""

    def __init__(self) -> None:
        self.attributes = {"terms": SimpleNamespace(levels=[2, 3, 4]), "style": SimpleNamespace(levels=[0, 1])}
        self.level = 0

    def set_global_level(self, level: int) -> None:
        self.level = level

    def generate_configuration(self, defaults: dict[str, Any]) -> SumsConfig:
        style: Any = "loud" if self.level else "plain"
        return SumsConfig(min_terms=2, max_terms=2 + self.level, style=style, **defaults)


def make_module() -> ModuleType:
    """Returns a new module with the data sets."""
    module = ModuleType("reasoning_gym")
    module.__spec__ = ModuleSpec("reasoning_gym", None)
    classes = {
        "sums": Sums,
        "words": Words,
        "n_queens": Queens,
        "boxnet": Boxes,
        "puzzle24": Sums,
        "word_ladder": Words,
    }
    module.factory = SimpleNamespace(  # type: ignore[attr-defined]
        DATASETS={name: (cls, SumsConfig) for name, cls in classes.items()},
        CURRICULA={"sums": SumsCurriculum},
        create_curriculum=lambda name: SumsCurriculum(),
    )
    module.utils = SimpleNamespace(SYSTEM_PROMPTS={"default": "Answer in <answer> tags.\n"})  # type: ignore[attr-defined]
    return module


def forget() -> None:
    """Empties everything that remembers the package."""
    for cached in (package.load_package, package.list_options, package.open_piece):
        cached.cache_clear()
    task._make_class.cache_clear()
    task._make_entry_again.cache_clear()


@contextmanager
def installed(module: ModuleType | None) -> Iterator[None]:
    """Puts a module in the place of the package; None = the package is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "reasoning_gym", module)  # type: ignore[arg-type]
        patch.setattr(package, "get_version", lambda: package.TRIED)
        patch.delenv("PYTHONHASHSEED", raising=False)
        forget()
        yield
    forget()
