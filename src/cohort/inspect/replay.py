"""Replay of a recorded step: its update is done again from the stored rollouts, with the same or with other settings.

The replay begins from the nearest kept checkpoint before the step, or from the initial model. The steps between are
applied again from their own rollouts, with the run's own settings. Nothing is sampled or scored. The run is only read.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from cohort.algos.algorithm import Algorithm
from cohort.config import flags
from cohort.config.document import diff_configs, list_mixed_specs, load_variant
from cohort.config.kinds import RL, require_rl
from cohort.config.load import change_config
from cohort.errors import CohortError, ConfigError, RunError
from cohort.fates import Fate
from cohort.inspect.explain.words import format_ranges
from cohort.jobs.build import RLJob, build_rl_job
from cohort.learner.base import Snapshot
from cohort.loops.reuse import reset_sample
from cohort.loops.rl import update_policy
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts, make_rollout_path
from cohort.types import Group
from cohort.user_code import split_spec

_SECTIONS = ("algo", "optim", "learner")  # of the config: their settings can be changed in a replay
# Settings that act from one step to the next, so a replay of one step cannot show their effect.
_STEERING = ("algo.kl.target", "algo.kl.refresh", "algo.entropy_target")
# Prefixes of metrics that an update does not determine: times, evaluations, and sizes of rollout files.
_NOT_COMPARED = ("time/", "eval/", "rollouts/")

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricComparison:
    """A metric of the run and of the replay; None = that side does not have it."""

    name: str
    stored: float | None
    replayed: float | None

    @property
    def is_same(self) -> bool:
        """Whether both values are equal to the last bit. NaN equals NaN; a value that only one side has does not."""
        a, b = self.stored, self.replayed
        return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))

    @property
    def difference(self) -> float | None:
        """Replayed value minus stored value; None if one is missing."""
        return None if self.stored is None or self.replayed is None else self.replayed - self.stored


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """Result of the replay of one step."""

    step: int
    base: int  # step of the checkpoint that the replay began from; 0 = the initial model
    changed: dict[str, tuple[Any, Any]]  # by name of the setting: its value in the run and in the replay
    rows: list[MetricComparison]
    notes: list[str] = field(default_factory=list)

    @property
    def differing_rows(self) -> list[MetricComparison]:
        """The metrics whose stored and replayed values are not equal to the last bit, or that one side lacks."""
        return [row for row in self.rows if not row.is_same]

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `--json` prints, made of dicts, lists, texts and numbers, which may be NaN.

        "exact" says whether all metrics are equal to the last bit; None if settings were changed.
        """
        return {
            "step": self.step,
            "base": self.base,
            "reapplied": list(range(self.base + 1, self.step)),
            "changed": {name: {"run": old, "replay": new} for name, (old, new) in self.changed.items()},
            "exact": None if self.changed else not self.differing_rows,
            "metrics": {
                row.name: {"stored": row.stored, "replayed": row.replayed, "difference": row.difference}
                for row in self.rows
            },
            "notes": self.notes,
        }


def replay_step(
    path: Path, step: int, settings: Sequence[str], report_progress: Progress, trust: bool = False
) -> ReplayResult:
    """Does the update of `step` (counted from 1) of the run in `path` again, and compares its metrics with the stored.

    `settings` are flags like "--optim.lr=1e-5" that apply to this step alone. Steps between the nearest kept checkpoint
    before it and `step` are done again first. Calls `report_progress` with a text when each step begins. `trust` = the
    Python files that the run's config names may be run; without it, `settings` must name them. Raises RunError if the
    step cannot be replayed, ConfigError for a setting that cannot be changed, for a run of another kind than RL, and
    for a run whose code is not trusted.
    """
    trusted = TrustedFiles(settings, trust)
    directory = RunDirectory.open(path, trusted.find)
    config = require_rl(directory.config, "cohort replay")
    settings = trusted.remove_task(settings)
    changed = apply_settings(config, settings)
    differences = diff_configs(config, changed)
    # Refuses a step that cannot be replayed before the model is loaded.
    _find_base(directory, step)
    job = _build_job(config)
    base = _restore_base(job, directory, step)
    notes: list[str] = []
    for number in range(base + 1, step):
        report_progress(f"re-applying step {number}: {number - base} of {step - 1 - base} before step {step}")
        _, metrics = _redo_update(job, _load_groups(directory, number))
        rows = _compare_metrics(directory, number, metrics)
        if strayed := [row.name for row in rows if not row.is_same]:
            notes.append(f"step {number}, which was re-applied first, was not reproduced: {', '.join(strayed)} differ.")
    report_progress(f"replaying step {step}")
    if differences:
        state = _TrainingState.capture(job)
        # The memory of a GPU may not hold two jobs.
        del job
        job = state.build_job_with(changed)
    stored = _load_groups(directory, step)
    groups, metrics = _redo_update(job, stored)
    rows = _compare_metrics(directory, step, metrics)
    # In a run, a group that the algorithm does not accept is replaced by another one. A replay samples nothing.
    if num_missing := _count_not_accepted(groups) - _count_not_accepted(stored):
        notes.append(
            f"groups that a run would have replaced by others, and that are only left out here: {num_missing}."
        )
    if not differences and any(not row.is_same for row in rows):
        notes += _explain_differences(directory, {row.name for row in rows if not row.is_same})
    return ReplayResult(step=step, base=base, changed=differences, rows=rows, notes=notes)


# ---- whose code --------------------------------------------------------------------------------------------------


class TrustedFiles:
    """Decides which code that a run's config names may be run: all of it, or what the user names in flags.

    `settings` are the flags of the command; `--task` and `--algo` with `file.py:name` name code. The files may be other
    ones than those in the config, because a file can be moved.
    """

    def __init__(self, settings: Sequence[str], trust: bool) -> None:
        self.trust = trust
        given = {f.name: f.values[0] for f in flags.split_args(settings)[1] if len(f.values) == 1}
        self.named = {
            name: spec for name, spec in given.items() if name in ("task", "algo") and split_spec(spec) is not None
        }
        self._needs_task = False  # whether the config's task is in a file that the user named

    def find(self, field: str, name: str, settings: Mapping[str, Any]) -> type[Any]:
        """Returns the class that a config file names with these settings. Runs its file if it is trusted.

        Raises ConfigError if it is not, also if a mixture of tasks names such a file in its `settings`.
        """
        where = split_spec(name)
        if where is None:
            cls = load_variant(field, name, settings)
            mixed = [spec for spec in list_mixed_specs(cls, settings) if split_spec(spec) is not None]
            if mixed and not self.trust:
                raise ConfigError(
                    f"this run's {field} is a mixture with Python code in a file ({', '.join(mixed)}), and a replay "
                    "runs it. If you trust that file, add --trust."
                )
            return cls
        named = split_spec(self.named.get(field, ""))
        if named is not None and named[1] == where[1]:
            self._needs_task = self._needs_task or field == "task"
            return load_variant(field, self.named[field], settings)
        if self.trust:
            return load_variant(field, name, settings)
        raise ConfigError(
            f"this run's {field} is Python code in the file {where[0]}, and a replay runs it. If you trust that file, "
            f"add --trust, or name it yourself: --{field} {name}."
        )

    def remove_task(self, settings: Sequence[str]) -> list[str]:
        """Returns the flags without `--task`, if that named the code of the run: it changes no setting."""
        if not self._needs_task:
            return list(settings)
        words, given = flags.split_args(settings)
        return words + [word for f in given if f.name != "task" for word in (f.spelling, *f.values)]


# ---- which settings ----------------------------------------------------------------------------------------------


def apply_settings(config: RL, settings: Sequence[str]) -> RL:
    """Returns a copy of `config` with the flags in `settings` applied, such as "--optim.lr=1e-5".

    Raises ConfigError for an unknown flag, a wrong value, a flag outside of --algo, --optim and --learner, and one that
    does not act on a single update (targets, refresh of the reference, LoRA).
    """
    others = {f.name for f in fields(config)} - set(_SECTIONS)
    for flag in flags.split_args(settings)[1]:
        if flag.name.partition(".")[0] in others:
            raise ConfigError(
                f"{flag.spelling} cannot be changed in a replay, which does one update of the run again; "
                "only settings of --algo, --optim and --learner can. Remove the flag."
            )
        if flag.name in _STEERING:
            raise ConfigError(
                f"{flag.spelling} acts from one step to the next, but a replay does one step. Remove the flag, or "
                "start a new run with it: `cohort train`."
            )
        if flag.name.startswith("learner.lora."):
            raise ConfigError(
                f"{flag.spelling} decides what a run trains from its beginning, so a replay cannot change it. Remove "
                "the flag, or start a new run with it: `cohort train`."
            )
    changed = change_config(config, settings, is_recorded=True)
    return replace(config, algo=changed.algo, optim=changed.optim, learner=changed.learner)


# ---- which steps -------------------------------------------------------------------------------------------------


def find_replayable_steps(directory: RunDirectory) -> dict[int, int]:
    """Returns the steps that can be replayed, each with the step of the checkpoint to begin from (0 = initial model).

    A step can be replayed if its rollouts are kept, and those of all steps between it and the nearest checkpoint before
    it.
    """
    kept = _find_kept_steps(directory)
    bases = {0, *checkpoint.list_steps(directory.checkpoints)}
    replayable: dict[int, int] = {}
    base = 0
    is_unbroken = True
    for step in range(1, _read_last_step(directory) + 1):
        if step - 1 in bases:
            base = step - 1
            is_unbroken = True
        is_unbroken = is_unbroken and step in kept
        if is_unbroken:
            replayable[step] = base
    return replayable


def _find_base(directory: RunDirectory, step: int) -> int:
    """Returns the step of the checkpoint from which `step` is replayed (0 = initial model).

    Raises RunError if `step` cannot be replayed, with the reason and the steps that can.
    """
    replayable = find_replayable_steps(directory)
    if step in replayable:
        return replayable[step]
    last = _read_last_step(directory)
    if step < 1:
        why = "steps count from 1"
    elif step > last:
        why = f"the run has done {last} steps"
    elif step not in _find_kept_steps(directory):
        why = "its rollouts are not kept"
    else:
        why = "rollouts of steps between it and the last checkpoint before it are not kept"
    if not last:
        raise RunError(
            f"no step of {directory.path} can be replayed: the run has not finished a step. Wait while it trains, or "
            f"continue it with `cohort resume {directory.path}`."
        )
    if not replayable:
        raise RunError(
            f"step {step} of {directory.path} cannot be replayed: {why}; no other step can either. Start a new run "
            "with `cohort train` and --save.rollouts 0, which keeps the rollouts of all steps."
        )
    raise RunError(
        f"step {step} of {directory.path} cannot be replayed: {why}. Use --step with one that can: "
        f"{format_ranges(sorted(replayable))}."
    )


def _find_kept_steps(directory: RunDirectory) -> set[int]:
    """Returns the steps whose rollouts are kept in the run directory; empty if it has none."""
    return set(list_rollout_steps(directory.rollouts))


def _read_last_step(directory: RunDirectory) -> int:
    """Returns the number of the last step that run.db has metrics of or that has a checkpoint; 0 if there is none."""
    with Reader(directory.database, once=True) as reader:
        return max([reader.find_last_step(), *checkpoint.list_steps(directory.checkpoints)])


# ---- the state before the step -----------------------------------------------------------------------------------


def _build_job(config: RL) -> RLJob:
    """Builds the job of a config and returns it with model, learner and algorithm ready for updates.

    Its scoring workers and its engine are closed at once: a replay neither samples nor scores.
    """
    job = build_rl_job(config)
    job.close()
    return job


def _restore_base(job: RLJob, directory: RunDirectory, step: int) -> int:
    """Restores the nearest checkpoint before `step` into the job and returns its step.

    0 = the initial model, which the job has from the start; then only the run's number of threads is set. Raises
    RunError if `step` cannot be replayed or the checkpoint is damaged.
    """
    while True:
        base = _find_base(directory, step)
        if not base:
            # The result of a sum depends on the number of threads. With `threads: 0` the run used as many as its
            # machine had cores, which may be another number than here. Its checkpoints record the number.
            torch.set_num_threads(int(_read_checkpoint_numbers(directory).get("threads", torch.get_num_threads())))
            return base
        path = directory.checkpoints / checkpoint.folder_name(base)
        try:
            job.restore(checkpoint.load(path))
            return base
        except CohortError:
            if path.is_dir():
                raise
            # A run that is still training has just removed this checkpoint: look for another one.


def _read_checkpoint_numbers(directory: RunDirectory) -> dict[str, Any]:
    """Returns the values that the newest checkpoint stores beside tensors, by name, such as "threads" and "torch".

    "torch" is the version of torch. Empty if there is no checkpoint or it cannot be read.
    """
    path = checkpoint.find_latest(directory.checkpoints)
    problem, state = checkpoint.read_state(path) if path else ("", {})
    return {} if problem else dict(state.get("numbers", {}))


@dataclass(kw_only=True, slots=True)
class _TrainingState:
    """State of a job, on the host, that a job with other settings takes over."""

    config: RL
    learner: Snapshot
    algo: dict[str, float]
    threads: int

    @classmethod
    def capture(cls, job: RLJob) -> _TrainingState:
        """Returns a copy of a job's state: learner, coefficients of the algorithm, number of threads."""
        return cls(
            config=job.config,
            learner=job.learner.snapshot(),
            algo=job.algo.state(),
            threads=torch.get_num_threads(),
        )

    def build_job_with(self, config: RL) -> RLJob:
        """Builds a job with other settings, gives it this state and returns it.

        Sets torch's number of threads to that of the state. The learning rate schedule keeps the run's length and
        position. KL and entropy coefficients whose settings changed begin with the new settings.
        """
        # The memory of the old job must be free before that of the new one is planned.
        if config.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        job = _build_job(config)
        torch.set_num_threads(self.threads)
        job.learner.restore(self.learner)
        job.algo.load_state(job.algo.state() | self._select_kept_coefficients(config))
        return job

    def _select_kept_coefficients(self, config: RL) -> dict[str, float]:
        """Returns the KL and entropy coefficients that the run had changed from step to step and the replay keeps.

        A coefficient is not kept if its own setting or its target is another one in `config`.
        """
        old, new = self.config.algo, config.algo
        kl = ("kl",) if (old.kl.weight, old.kl.target) == (new.kl.weight, new.kl.target) else ()
        has_same_entropy = (old.entropy, old.entropy_target) == (new.entropy, new.entropy_target)
        entropy = ("entropy", "low_entropy") if has_same_entropy else ()
        return {name: self.algo[name] for name in (*kl, *entropy)}


# ---- a step ------------------------------------------------------------------------------------------------------


def _redo_update(job: RLJob, stored: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """Does the update of a step on copies of its stored groups, which changes weights and coefficients of the job.

    Returns the copies with their new advantages, and the metrics of the step. `stored` is not changed.
    """
    # Groups reused from earlier steps are reset too: every update computes their advantages anew.
    groups = [reset_to_sampled(group, job.algo) for group in stored]
    groups, stats = update_policy(job.learner, job.algo, groups, job.config.learner)
    return groups, stats.metrics


def _load_groups(directory: RunDirectory, step: int) -> list[Group]:
    """Reads the groups of a step from its rollout file. Raises RunError if that is missing or damaged."""
    return load_rollouts(make_rollout_path(directory.rollouts, step))


def reset_to_sampled(group: Group, algo: Algorithm) -> Group:
    """Returns a copy of a stored group as it was before its update: scored, without what the algorithm decided then.

    Advantages, masks and the learner's log-probabilities are removed; those of the sampler stay. A group that was not
    accepted or stale stays so. Another group that `algo` does not accept is marked as not accepted, as in a run, unless
    it was reused from an earlier step.
    """
    excluded = Fate.TRAINED if group.excluded.is_set_by_algorithm else group.excluded
    if not excluded and not group.reused and not algo.accept(group):
        excluded = Fate.NOT_ACCEPTED
    return replace(group, excluded=excluded, samples=[reset_sample(s) for s in group.samples])


def _count_not_accepted(groups: Sequence[Group]) -> int:
    """Returns how many groups have the fate "not accepted": the algorithm refused them before the update."""
    return sum(g.excluded == Fate.NOT_ACCEPTED for g in groups)


def _compare_metrics(directory: RunDirectory, step: int, replayed: Mapping[str, float]) -> list[MetricComparison]:
    """Returns the stored and the replayed value of each metric that an update determines; None where one side lacks it.

    `replayed` are the replayed values by name; the stored ones are read from run.db. Times, evaluations and file sizes
    are left out.
    """
    with Reader(directory.database, once=True) as reader:
        stored = {row.name: row.value for row in reader.read_metrics(step=step)}
    if not stored:
        raise RunError(
            f"{directory.database} has no metrics of step {step}, although the run has done it, so there is nothing to "
            f"compare with. `cohort resume {directory.path}` writes them again from metrics.jsonl; then repeat the "
            "command."
        )
    names = [n for n in dict.fromkeys([*stored, *replayed]) if not n.startswith(_NOT_COMPARED)]
    return [
        MetricComparison(name=n, stored=stored.get(n), replayed=float(replayed[n]) if n in replayed else None)
        for n in names
    ]


def _explain_differences(directory: RunDirectory, differing: set[str]) -> list[str]:
    """Returns sentences with known reasons why an unchanged replay did not give the stored metrics; empty if none.

    `differing` are the names of the metrics that differ.
    """
    notes = []
    if directory.config.device != "cpu":
        notes.append("on a GPU sums have no fixed order, so the same update done twice differs in the last bits.")
    version = _read_checkpoint_numbers(directory).get("torch", torch.__version__)
    if version != torch.__version__:
        notes.append(f"the run used torch {version}, this is {torch.__version__}.")
    if "lr" in differing:
        notes.append("the learning rate differs: the run was extended since, which lengthened its schedule.")
    return notes
