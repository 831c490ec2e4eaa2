"""A recorded step, read from its run directory and judged again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cohort.algos.algorithm import Algorithm, build_algorithm
from cohort.config.kinds import RL, require_rl
from cohort.errors import CohortError, RunError
from cohort.inspect.explain.effect import StepEffect, step_effect
from cohort.inspect.explain.words import ranges
from cohort.models.catalog import resolve
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import load_rollouts, rollout_path, rollout_steps
from cohort.text import Tokenizer
from cohort.types import Group, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A recorded step, loaded."""

    config: RL
    number: int
    groups: list[Group]
    algo: Algorithm
    effect: StepEffect
    metrics: dict[str, float]  # what the run recorded of it
    num_changed: int  # samples whose stored advantage or fate the algorithm would not give today
    tokenizer: Tokenizer | None


def load(path: Path, number: int | None) -> Step:
    """A step of a run by its number; None = the newest whose rollouts are kept."""
    directory = RunDirectory.open(path)
    config = require_rl(directory.config, "cohort explain")
    kept = rollout_steps(directory.rollouts) if directory.rollouts.is_dir() else []
    if not kept:
        raise RunError(f"{path} keeps no rollouts: it has not finished a step yet, or they were removed.")
    number = kept[-1] if number is None else number
    if number not in kept:
        raise RunError(f"{path} has no rollouts of step {number}; those of step {ranges(kept)} are kept.")
    groups = load_rollouts(rollout_path(directory.rollouts, number))
    metrics: dict[str, float] = {}
    # the rollouts tell nearly everything: a database of another version is no reason to stop
    with suppress(RunError), Reader(directory.database, once=True) as reader:
        metrics = {row.name: row.value for row in reader.metrics(step=number)}
    algo = build_algorithm(config.algo, config.max_sampled)
    if "kl/weight" in metrics:  # steered from step to step: the one that was in force
        algo.load_state({**algo.state(), "kl": metrics["kl/weight"]})
    return Step(
        config=config,
        number=number,
        groups=groups,
        algo=algo,
        effect=step_effect(groups, algo, config.learner.minibatches),
        metrics=metrics,
        num_changed=num_changed(groups, algo),
        tokenizer=_tokenizer(directory),
    )


def num_changed(groups: Sequence[Group], algo: Algorithm) -> int:
    """Samples that the algorithm, asked again, would give another advantage or fate than is stored."""
    again = algo.advantages([replace(g, samples=[replace(s) for s in g.samples]) for g in groups])
    pairs = [
        (g, s, h, t) for g, h in zip(groups, again, strict=True) for s, t in zip(g.samples, h.samples, strict=True)
    ]
    return sum(
        (g.excluded, s.masked) != (h.excluded, t.masked)
        or not math.isclose(s.advantage, t.advantage, rel_tol=1e-9, abs_tol=1e-12)
        for g, s, h, t in pairs
    )


def _tokenizer(directory: RunDirectory) -> Tokenizer | None:
    """Of the newest checkpoint, which is surely the run's own, or of the model the run names; None = of neither."""
    newest = checkpoint.latest(directory.checkpoints)
    if newest is not None:
        with suppress(CohortError):
            return Tokenizer.load(newest / "model")
    with suppress(CohortError):
        return Tokenizer.load(resolve(directory.config.model))
    return None


def fate_of(group: Group, sample: Sample) -> str:
    """Why a sample is out of the loss; "" = it is in."""
    if sample.failure:
        return "failed"
    if group.excluded:
        return f"in a group left out: {group.excluded}"
    if sample.masked:
        return f"masked: {sample.masked}"
    return "" if sample.num_sampled else "empty"
