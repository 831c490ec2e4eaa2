"""A recorded step done again, from its stored rollouts and the state before it: as it was, or with other settings.

The state is that of the nearest kept checkpoint before the step, or the initial model's; the steps between are applied
again from their own rollouts, with the run's own settings. Nothing is sampled or scored, and the run is only read.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from cohort.algos.algorithm import Algorithm
from cohort.config import flags
from cohort.config.document import diff
from cohort.config.kinds import RL, require_rl
from cohort.config.load import change
from cohort.errors import CohortError, ConfigError, RunError
from cohort.fates import Fate
from cohort.inspect.explain.words import ranges
from cohort.jobs.build import Parts, assemble
from cohort.learner.base import Snapshot
from cohort.loops.reuse import scored
from cohort.loops.rl import improve
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import load_rollouts, rollout_path, rollout_steps
from cohort.types import Group

_SECTIONS = ("algo", "optim", "learner")
_STEERING = ("algo.kl.target", "algo.kl.refresh", "algo.entropy_target")
_NOT_COMPARED = ("time/", "eval/", "rollouts/")  # of the clock, of another moment, of a file

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One metric; None = there is none on that side."""

    name: str
    stored: float | None
    replayed: float | None

    @property
    def same(self) -> bool:
        """To the last bit; NaN is NaN."""
        a, b = self.stored, self.replayed
        return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))

    @property
    def difference(self) -> float | None:
        return None if self.stored is None or self.replayed is None else self.replayed - self.stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What came of a step done again."""

    step: int
    base: int  # the checkpoint it began from; 0 = the initial model
    changed: dict[str, tuple[Any, Any]]  # settings: the run's, this step's
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    @property
    def differing(self) -> list[Row]:
        return [row for row in self.rows if not row.same]

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "base": self.base,
            "reapplied": list(range(self.base + 1, self.step)),
            "changed": {name: {"run": old, "replay": new} for name, (old, new) in self.changed.items()},
            "exact": None if self.changed else not self.differing,
            "metrics": {
                row.name: {"stored": row.stored, "replayed": row.replayed, "difference": row.difference}
                for row in self.rows
            },
            "notes": self.notes,
        }


def replay(path: Path, step: int, settings: Sequence[str], tell: Tell) -> Replayed:
    """Do `step` (counted from 1) again, with the flags in `settings` applied to it alone."""
    directory = RunDirectory.open(path)
    config = require_rl(directory.config, "cohort replay")
    changed = changed_config(config, settings)
    differences = diff(config, changed)
    _base(directory, step)  # refuse before anything is loaded
    parts = _assembled(config)
    base = _begin(parts, directory, step)
    notes: list[str] = []
    for number in range(base + 1, step):
        tell(f"re-applying step {number}: {number - base} of {step - 1 - base} before step {step}")
        rows = _compared(directory, number, _again(parts, _stored(directory, number))[1])
        if strayed := [row.name for row in rows if not row.same]:
            notes.append(f"step {number}, re-applied on the way, was not reproduced: {', '.join(strayed)} differ.")
    tell(f"replaying step {step}")
    if differences:
        state = _State.of(parts)
        del parts  # the memory of a GPU may not hold both
        parts = state.under(changed)
    stored = _stored(directory, step)
    groups, metrics = _again(parts, stored)
    rows = _compared(directory, step, metrics)
    if left := _num_refused(groups) - _num_refused(stored):
        notes.append(f"groups that refill would have replaced, and that only left: {left}.")
    if not differences and any(not row.same for row in rows):
        notes += _reasons(directory, {row.name for row in rows if not row.same})
    return Replayed(step=step, base=base, changed=differences, rows=rows, notes=notes)


# ---- which settings ----------------------------------------------------------------------------------------------


def changed_config(config: RL, settings: Sequence[str]) -> RL:
    """`config` with flags applied, of which only those are taken that act on one update."""
    others = {f.name for f in fields(config)} - set(_SECTIONS)
    for flag in flags.split(settings)[1]:
        if flag.name.partition(".")[0] in others:
            raise ConfigError(
                f"{flag.shown} cannot be changed in a replay, which does one update of the run again; "
                "settings of --algo, --optim and --learner can."
            )
        if flag.name in _STEERING:
            raise ConfigError(f"{flag.shown} acts from one step to the next, a replay is of one: start a run with it.")
        if flag.name.startswith("learner.lora."):
            raise ConfigError(f"{flag.shown} decides what a run trains from its beginning: start a run with it.")
    found = change(config, settings)
    return replace(config, algo=found.algo, optim=found.optim, learner=found.learner)


# ---- which steps -------------------------------------------------------------------------------------------------


def replayable(directory: RunDirectory) -> dict[int, int]:
    """The steps that can be done again, each with the checkpoint to begin from; 0 = the initial model."""
    kept = _kept(directory)
    bases = {0, *checkpoint.steps(directory.checkpoints)}
    found: dict[int, int] = {}
    base, unbroken = 0, True
    for step in range(1, _last_step(directory) + 1):
        if step - 1 in bases:
            base, unbroken = step - 1, True
        unbroken = unbroken and step in kept
        if unbroken:
            found[step] = base
    return found


def _base(directory: RunDirectory, step: int) -> int:
    found = replayable(directory)
    if step in found:
        return found[step]
    last = _last_step(directory)
    if step < 1:
        why = "steps count from 1"
    elif step > last:
        why = f"the run has done {last}"
    elif step not in _kept(directory):
        why = "its rollouts are not kept"
    else:
        why = "rollouts of steps between it and the last checkpoint before it are not kept"
    can = f"those that can: {ranges(sorted(found))}" if found else "no other can either"
    raise RunError(f"step {step} of {directory.path} cannot be replayed: {why}; {can}.")


def _kept(directory: RunDirectory) -> set[int]:
    return set(rollout_steps(directory.rollouts)) if directory.rollouts.is_dir() else set()


def _last_step(directory: RunDirectory) -> int:
    with Reader(directory.database, once=True) as reader:
        return reader.last_step()


# ---- the state before the step -----------------------------------------------------------------------------------


def _assembled(config: RL) -> Parts:
    parts = assemble(config)
    parts.close()  # nothing is scored
    return parts


def _begin(parts: Parts, directory: RunDirectory, step: int) -> int:
    """Become the state of the nearest checkpoint before `step`; returns how many steps it had done."""
    while True:
        base = _base(directory, step)
        if not base:
            # Sums depend on the number of threads, and `threads: 0` was as many as there were cores then.
            torch.set_num_threads(int(_recorded(directory).get("threads", torch.get_num_threads())))
            return base
        path = directory.checkpoints / checkpoint.name(base)
        try:
            parts.restore(checkpoint.load(path))
            return base
        except CohortError:
            if path.is_dir():
                raise
            # a run that is under way has just removed it: see what there is now


def _recorded(directory: RunDirectory) -> dict[str, Any]:
    """The numbers of the newest checkpoint: threads, torch's version."""
    path = checkpoint.latest(directory.checkpoints)
    with suppress(OSError, ValueError, KeyError):
        return dict(json.loads((path / "state.json").read_text())["numbers"]) if path else {}
    return {}


@dataclass(kw_only=True, slots=True)
class _State:
    """What parts under other settings take over, on the host."""

    config: RL
    learner: Snapshot
    algo: dict[str, float]
    threads: int

    @classmethod
    def of(cls, parts: Parts) -> _State:
        return cls(
            config=parts.config,
            learner=parts.learner.snapshot(),
            algo=parts.algo.state(),
            threads=torch.get_num_threads(),
        )

    def under(self, config: RL) -> Parts:
        """New parts in this state. The schedule stays the run's: its length, and where it stands."""
        if config.device == "cuda":  # what the old parts had, before the new ones' memory is planned
            gc.collect()
            torch.cuda.empty_cache()
        parts = _assembled(config)
        torch.set_num_threads(self.threads)
        parts.learner.restore(self.learner)
        parts.algo.load_state(parts.algo.state() | self._steered(config))
        return parts

    def _steered(self, config: RL) -> dict[str, float]:
        """Weights that the run had steered away from their settings stay so, unless these settings are others now."""
        old, new = self.config.algo, config.algo
        kl = ("kl",) if (old.kl.weight, old.kl.target) == (new.kl.weight, new.kl.target) else ()
        same = (old.entropy, old.entropy_target) == (new.entropy, new.entropy_target)
        entropy = ("entropy", "low_entropy") if same else ()
        return {name: self.algo[name] for name in (*kl, *entropy)}


# ---- a step ------------------------------------------------------------------------------------------------------


def _again(parts: Parts, stored: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """A step's update on its stored groups; returns these as they are graded now, and its metrics."""
    config, algo = parts.config, parts.algo
    groups = [as_sampled(group, algo) for group in stored]  # also those that were used again
    groups, stats = improve(parts.learner, algo, groups, config.learner)
    return groups, stats.metrics


def _stored(directory: RunDirectory, step: int) -> list[Group]:
    return load_rollouts(rollout_path(directory.rollouts, step))


def as_sampled(group: Group, algo: Algorithm) -> Group:
    """A stored group as it came from sampling: scored, accepted or not, and nothing more."""
    excluded = Fate.TRAINED if group.excluded.by_algorithm else group.excluded
    if not excluded and not group.reused and not algo.accept(group):
        excluded = Fate.NOT_ACCEPTED
    return replace(group, excluded=excluded, samples=[scored(s) for s in group.samples])


def _num_refused(groups: Sequence[Group]) -> int:
    return sum(g.excluded == Fate.NOT_ACCEPTED for g in groups)


def _compared(directory: RunDirectory, step: int, replayed: Mapping[str, float]) -> list[Row]:
    with Reader(directory.database, once=True) as reader:
        stored = {row.name: row.value for row in reader.metrics(step=step)}
    names = [n for n in dict.fromkeys([*stored, *replayed]) if not n.startswith(_NOT_COMPARED)]
    return [Row(name=n, stored=stored.get(n), replayed=float(replayed[n]) if n in replayed else None) for n in names]


def _reasons(directory: RunDirectory, differing: set[str]) -> list[str]:
    """What is known to make the same step come out differently."""
    notes = []
    if directory.config.device != "cpu":
        notes.append("on a GPU sums have no fixed order: equal updates are not equal to the last bit.")
    version = _recorded(directory).get("torch", torch.__version__)
    if version != torch.__version__:
        notes.append(f"the run used torch {version}, this is {torch.__version__}.")
    if "lr" in differing:
        notes.append("the learning rate differs: the run was extended since, which stretches its schedule.")
    return notes
