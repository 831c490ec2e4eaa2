"""A run directory: its layout, its lock, its evaluations.

runs/2026-11-15-countdown-k3f9/
  config.yaml    resolved, every value that acts; its format is that of the directory
  run.db         metrics, prompts, groups, samples, events
  metrics.jsonl  the metrics of run.db as lines
  rollouts/      one file a step
  checkpoints/   one folder each
  eval/          evaluations with per-item results
  run.md         the run card
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from cohort.config.document import FORMAT, diff, dump, format_of, parse
from cohort.config.schema import RunConfig
from cohort.errors import RunError, nearest
from cohort.evaluation.records import Evaluation
from cohort.run.lock import Lock
from cohort.run.store.db import Store
from cohort.run.store.rollouts import remove_rollouts
from cohort.system.disk import disk_errors, write_atomic

_EVALUATION = re.compile(r"step-(\d{6,})\.json")
_LETTERS = string.ascii_lowercase + string.digits


class RunDirectory:
    """Where a run lives. Reading needs no lock; whoever writes takes it first."""

    def __init__(self, path: Path, config: RunConfig, format: int = FORMAT) -> None:
        self.path = path
        self.config = config
        self.format = format  # of what is in it
        self.config_file = path / "config.yaml"
        self.database = path / "run.db"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.eval = path / "eval"
        self.card = path / "run.md"
        self._lock = Lock(path / ".lock")

    @classmethod
    def create(cls, root: Path, config: RunConfig, name: str | None = None, *, command: str = "") -> RunDirectory:
        """Make a new run under `root`, locked. It becomes a run with its config.yaml, written last.

        `command` is what the user typed: it is there from the beginning, because no resume could tell it.
        """
        path = root / (name or new_name(config.recipe))
        text = dump(config)
        with disk_errors(path):
            root.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                raise RunError(f"{path} exists already: resume it, or choose another name.") from None
            for folder in ("rollouts", "checkpoints", "eval"):
                (path / folder).mkdir()
        directory = cls(path, config)
        directory.lock()
        store = Store(directory.database)
        store.write_event(0, "command", command or f"cohort train {config.recipe}".strip())
        store.close()
        write_atomic(directory.config_file, text)
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run, not locked."""
        path = Path(path)
        if not path.is_dir():
            siblings = [p.name for p in path.parent.glob("*/") if (p / "config.yaml").is_file()]
            hint = nearest(path.name, siblings) if siblings else f" {path.parent} holds no runs."
            raise RunError(f"there is no run {path}.{hint}")
        file = path / "config.yaml"
        if not file.is_file():
            raise RunError(f"{path} is not a run: it has no config.yaml. Give the directory that `cohort train` named.")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{file} cannot be read: {error}.") from error
        return cls(path, parse(text, str(file)), format_of(text))

    def lock(self) -> None:
        """Become the only writer, until `unlock` or death; refused, naming the other, if there is one."""
        self._lock.acquire()

    def unlock(self) -> None:
        self._lock.release()

    def require_same(self, config: RunConfig) -> None:
        """Refuse to go on with other settings than the run was started with; only `steps` may grow."""
        changed = diff(self.config, config)
        old_steps, new_steps = changed.pop("steps", (0, 0))
        if changed:
            name, (old, new) = next(iter(changed.items()))
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise RunError(
                f"{self.path} was started with {name} = {old}, not {new}{more}: a run keeps its settings,"
                " only --steps may change on resume. Start a new run for others."
            )
        if new_steps < old_steps:
            raise RunError(f"{self.path} has {old_steps} steps: a run can be extended, not cut to {new_steps}.")

    def extend(self, steps: int) -> None:
        """Change the number of steps, the one setting that may change. Needs the lock."""
        config = dataclasses.replace(self.config, steps=steps)
        self.require_same(config)
        if config != self.config or self.format < FORMAT:  # its next checkpoint is of this version
            write_atomic(self.config_file, dump(config))
            self.config = config
            self.format = FORMAT

    def settings(self) -> dict[str, Any]:
        """What config.yaml says, as plain values: `dump` has refused everything secret."""
        settings: dict[str, Any] = yaml.safe_load(dump(self.config))
        return settings

    def save_evaluation(self, evaluation: Evaluation) -> Path:
        path = self.eval / f"step-{evaluation.step:06d}.json"
        write_atomic(path, json.dumps(evaluation.to_json(), indent=1))
        return path

    def evaluations(self) -> dict[int, Evaluation]:
        """Every evaluation of the run itself, by step."""
        return load_evaluations(self.path)

    def remove_after(self, step: int) -> None:
        """Remove rollouts and evaluations of later steps, and what a killed writer left half done."""
        with disk_errors(self.path):
            remove_rollouts(self.rollouts, lambda s: s <= step)
            for path in self.eval.glob("*.json"):
                match = _EVALUATION.fullmatch(path.name)
                if match and int(match[1]) > step:
                    path.unlink()
            for folder in (self.path, self.rollouts, self.eval):
                for path in folder.glob(".*.tmp"):
                    path.unlink()


def load_evaluation(path: Path) -> Evaluation:
    try:
        return Evaluation.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged or not an evaluation: {error}.") from error


def load_evaluations(run: Path) -> dict[int, Evaluation]:
    """By step. They stand for themselves: the run's config, and the task's file that it names, are not needed."""
    named = ((_EVALUATION.fullmatch(path.name), path) for path in (run / "eval").glob("*.json"))
    return dict(sorted((int(match[1]), load_evaluation(path)) for match, path in named if match))


def new_name(recipe: str) -> str:
    """Today, the recipe, and four characters that keep runs apart: 2026-11-15-countdown-k3f9."""
    tail = "".join(secrets.choice(_LETTERS) for _ in range(4))
    return f"{datetime.now():%Y-%m-%d}-{slug(recipe)}-{tail}"


def slug(recipe: str) -> str:
    """A recipe's name as part of a file name.

    >>> slug("recipes/my_file.py:big run"), slug("countdown"), slug("")
    ('big-run', 'countdown', 'run')
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", recipe.rpartition(":")[2].rpartition("/")[2]).strip("-") or "run"
