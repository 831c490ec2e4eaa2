"""A run directory: its layout, its lock, its config and its evaluations.

runs/2026-11-15-countdown-k3f9/
  config.yaml    every setting that has an effect; its format number is that of the whole directory
  run.db         metrics, prompts, groups, samples, events
  metrics.jsonl  the metrics of run.db, one JSON object per line
  rollouts/      one file per step
  checkpoints/   one folder per checkpoint
  eval/          one file per evaluation, with every answer
  outcomes.jsonl  what an outside service said of answers; it only grows, see `cohort.scoring.journal`
  reference.safetensors  log-probabilities of a stored reference, see `cohort.jobs.reference`
  run.md         the run card
  curves.svg     the picture in the card, see `cohort.plot`
"""

from __future__ import annotations

import json
import re
import secrets
import string
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from cohort.config.document import (
    FORMAT,
    VariantFinder,
    diff_configs,
    dump_config,
    keep_recorded,
    parse_config,
    read_format,
)
from cohort.config.resuming import may_change
from cohort.config.schema import RunConfig
from cohort.errors import RunError
from cohort.evaluation.records import Evaluation
from cohort.run.finding import require_run
from cohort.run.lock import Lock
from cohort.run.store.db import Store
from cohort.run.store.rollouts import remove_rollouts
from cohort.system.disk import explain_disk_errors, write_atomically
from cohort.system.json_text import read_json_file

_EVALUATION = re.compile(r"step-(\d{6,})\.json")
_LETTERS = string.ascii_lowercase + string.digits


class RunDirectory:
    """The directory of a run. Reading it needs no lock; a process that writes must call `lock` first."""

    def __init__(self, path: Path, config: RunConfig, format: int = FORMAT) -> None:
        self.path = path
        self.config = config
        self.format = format  # the version of the file formats in this directory
        self.config_file = path / "config.yaml"
        self.database = path / "run.db"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.eval = path / "eval"
        self.outcomes = path / "outcomes.jsonl"
        self.card = path / "run.md"
        self._lock = Lock(path / ".lock")

    @classmethod
    def create(cls, root: Path, config: RunConfig, name: str | None = None, *, command: str = "") -> RunDirectory:
        """Makes a new run directory under `root`, locks it and returns it.

        It has the config, and a database with one event: the command. `name` is the name of the directory; None = a new
        one from date and recipe. `command` is what the user typed; it is recorded now, because a resume does not know
        it ("" = a command made from the recipe). Raises RunError if the directory exists or the disk fails.
        """
        path = root / (name or make_run_name(config.recipe))
        text = dump_config(config)
        with explain_disk_errors(path):
            root.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                raise RunError(
                    f"{path} exists already, so no new run can be made there. Move it away and repeat the command, or, "
                    f"if it is a run, continue it with `cohort resume {path}`."
                ) from None
        directory = cls(path, config)
        directory.make_folders()
        directory.lock()
        store = Store(directory.database)
        store.write_event(0, "command", command or f"cohort train {config.recipe}".strip())
        store.close()
        # Written last: a directory with a config.yaml is a run, whenever a kill comes.
        write_atomically(directory.config_file, text)
        return directory

    @classmethod
    def open(cls, path: Path, find: VariantFinder = keep_recorded) -> RunDirectory:
        """Returns the run in the directory `path`, not locked.

        `find` finds the classes that the config names. By default no foreign code is run: a task or an algorithm of a
        user's file is what was recorded of it. Raises RunError if there is no run or config.yaml cannot be read. Raises
        ConfigError if the config has errors or is from a later version of Cohort.
        """
        path = Path(path)
        require_run(path)
        file = path / "config.yaml"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(
                f"{file} cannot be read: {error}. Repair its permissions, or restore it from a copy."
            ) from error
        return cls(path, parse_config(text, str(file), find=find), read_format(text))

    def lock(self) -> None:
        """Locks the run until `unlock` or the end of the process. Does nothing if this object holds the lock.

        Does not wait: raises RunError if another process, or another object of this process, has the lock.
        """
        self._lock.acquire()

    def unlock(self) -> None:
        """Releases the lock, if this object holds it."""
        self._lock.release()

    def make_folders(self) -> None:
        """Makes those of the folders rollouts, checkpoints and eval that are not there."""
        with explain_disk_errors(self.path):
            for folder in (self.rollouts, self.checkpoints, self.eval):
                folder.mkdir(exist_ok=True)

    def require_same_settings(self, config: RunConfig) -> None:
        """Raises RunError if `config` differs from the settings of the run in one that may not change.

        `steps` may only grow; for the others see `config.resuming`. Differences in sections that are off do not count.
        """
        # Names of settings that differ, with (value of the run, new value).
        changed = diff_configs(self.config, config)
        old_steps, new_steps = changed.get("steps", (0, 0))
        changed = {name: values for name, values in changed.items() if not may_change(name)}
        if changed:
            name, (old, new) = next(iter(changed.items()))
            more = f" ({len(changed) - 1} other settings differ too)" if len(changed) > 1 else ""
            raise RunError(
                f"{self.path} was started with {name} = {old}, not {new}{more}. A run keeps its settings (only steps, "
                f"engine, learner.shard, learner.tensor and scoring may change): put the old values back into "
                f"{self.config_file}, or start a new run with `cohort train`."
            )
        if new_steps < old_steps:
            raise RunError(
                f"the run {self.path} has {old_steps} steps, and --steps is {new_steps}: a run can be extended, not "
                f"shortened. Use --steps {old_steps} or more, or leave out --steps."
            )

    def adopt(self, config: RunConfig) -> list[str]:
        """Takes over the settings of `config` that may change, here and in config.yaml. The caller must hold the lock.

        Returns how settings other than `steps` have changed, such as "learner.shard: none -> full". Raises RunError if
        a setting differs that may not change. Also brings config.yaml to the current format.
        """
        self.require_same_settings(config)
        changed = diff_configs(self.config, config)
        # A directory of an older format gets the new number as well: its next files will have the new format.
        if config != self.config or self.format < FORMAT:
            write_atomically(self.config_file, dump_config(config))
            self.config = config
            self.format = FORMAT
        return [f"{name}: {old} -> {new}" for name, (old, new) in changed.items() if name != "steps"]

    def dump_settings(self) -> dict[str, Any]:
        """Returns the settings of the run as config.yaml has them: nested dicts, lists, strings and numbers.

        They come from `self.config`, not from the file. They contain no secrets.
        """
        settings: dict[str, Any] = yaml.safe_load(dump_config(self.config))
        return settings

    def save_evaluation(self, evaluation: Evaluation) -> Path:
        """Writes an evaluation to eval/step-NNNNNN.json of this run and returns that path. Replaces an earlier one."""
        path = self.eval / f"step-{evaluation.step:06d}.json"
        # The folder may have been removed while the run goes on.
        self.make_folders()
        write_atomically(path, json.dumps(evaluation.to_json(), indent=1))
        return path

    def load_evaluations(self) -> dict[int, Evaluation]:
        """Returns all evaluations of the run as a dict from step to evaluation, oldest first.

        Raises RunError if a file is damaged.
        """
        return load_evaluations(self.path)

    def remove_after(self, step: int) -> None:
        """Removes rollout files and evaluations of steps after `step`, and temporary files of killed processes."""
        with explain_disk_errors(self.path):
            remove_rollouts(self.rollouts, lambda s: s <= step)
            for path in self.eval.glob("*.json"):
                match = _EVALUATION.fullmatch(path.name)
                if match and int(match[1]) > step:
                    path.unlink()
            for folder in (self.path, self.rollouts, self.eval):
                for path in folder.glob(".*.tmp"):
                    path.unlink()


def load_evaluation(path: Path) -> Evaluation:
    """Returns the evaluation in the JSON file `path`. Raises RunError if it is missing, damaged or no evaluation."""
    if path.exists() and not path.is_file():
        # Reading a pipe would wait for a writer that may never come.
        raise RunError(f"{path} is not a regular file, so it holds no evaluation; name a .json file.")
    try:
        return Evaluation.from_json(read_json_file(path))
    except OSError as error:
        raise RunError(
            f"the evaluation {path} cannot be read: {error}. Repair its permissions, or name another file that "
            "`cohort eval` wrote."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged or not an evaluation ({type(error).__name__}: {error}). Name another file that `cohort "
            "eval` wrote; if this one was an evaluation, restore it from a copy or delete it."
        ) from error


def load_evaluations(run: Path | str) -> dict[int, Evaluation]:
    """Returns all evaluations of the run in the directory `run` as a dict from step to evaluation, oldest first.

    {} if there are none. It does not read the run's config, so it works also if a file that the config names is gone.
    Raises RunError if an evaluation is damaged.
    """
    files = ((_EVALUATION.fullmatch(path.name), path) for path in (Path(run) / "eval").glob("*.json"))
    return dict(sorted((int(match[1]), load_evaluation(path)) for match, path in files if match))


def make_run_name(recipe: str) -> str:
    """Returns a name for a new run: date, recipe and four random characters, like "2026-11-15-countdown-k3f9".

    The date is today's in local time, the recipe is shortened by `make_slug`.
    """
    tail = "".join(secrets.choice(_LETTERS) for _ in range(4))
    return f"{datetime.now():%Y-%m-%d}-{make_slug(recipe)}-{tail}"


def make_slug(recipe: str) -> str:
    """Returns the end of a recipe's or model's name, after its last ":" and "/", for use in a file name.

    What is not an ASCII letter, a digit or "_" becomes "-": one per run of such characters, none at the ends. "run" if
    nothing is left.

    >>> make_slug("recipes/my_file.py:big run"), make_slug("countdown"), make_slug("")
    ('big-run', 'countdown', 'run')
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", recipe.rpartition(":")[2].rpartition("/")[2]).strip("-") or "run"
