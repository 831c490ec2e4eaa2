"""A recorded step, read from its run directory, with the effect of its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cohort.algos.algorithm import Algorithm, build_algorithm
from cohort.config.kinds import RL, require_rl
from cohort.config.recorded import get_recorded_name
from cohort.config.schema import RunConfig
from cohort.errors import CohortError, RunError, suggest_name
from cohort.inspect.explain.effect import StepEffect, compute_step_effect, make_unknown_effect
from cohort.inspect.explain.words import format_ranges
from cohort.jobs.models import find_model
from cohort.logs.escape import escape_line
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts, make_rollout_path
from cohort.text import Tokenizer
from cohort.types import Group, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFiles:
    """What the files of a run of any kind have of a step."""

    config: RunConfig
    number: int
    groups: list[Group]
    metrics: dict[str, float]  # that the run recorded for this step; empty if they cannot be read
    problem: str = ""  # why there are no metrics; "" = there are some
    tokenizer: Tokenizer | None

    def note_missing_tokenizer(self) -> list[str]:
        """Returns a note if the run's tokenizer was not found, else an empty list."""
        return [] if self.tokenizer else ["the run's tokenizer was not found: tokens are shown as ids."]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep(StepFiles):
    """A step of reinforcement learning, with what its algorithm did."""

    config: RL
    algo: Algorithm | None  # None = it is foreign code, which is not run
    effect: StepEffect
    num_changed: int  # samples that the algorithm would give another advantage or fate today


def read_step_files(path: Path, number: int | None) -> StepFiles:
    """Reads what the run in `path` recorded of a step. No foreign code is run.

    `number` None = the newest step whose rollouts are kept. Raises RunError if there is no such run, or the rollouts of
    the step are not kept.
    """
    directory = RunDirectory.open(path)
    kept = list_rollout_steps(directory.rollouts)
    if not kept:
        raise RunError(
            f"{path} keeps no rollouts: the run has not finished a step yet, or they were removed. Wait while it "
            f"trains, continue it with `cohort resume {path}` (a complete run needs a larger --steps), or name "
            "another run."
        )
    number = kept[-1] if number is None else number
    if number not in kept:
        steps = format_ranges(kept)
        raise RunError(f"{path} has no rollouts of step {number}; use --step with one of these: {steps}.")
    groups = load_rollouts(make_rollout_path(directory.rollouts, number))
    metrics: dict[str, float] = {}
    problem = f"run.db does not have them; `cohort resume {path}` writes them again."
    # The rollouts tell nearly everything, so a damaged database or one of another version is no reason to stop.
    try:
        with Reader(directory.database, once=True) as reader:
            metrics = {row.name: row.value for row in reader.read_metrics(step=number)}
    except RunError as error:
        problem = str(error)
    return StepFiles(
        config=directory.config,
        number=number,
        groups=groups,
        metrics=metrics,
        problem="" if metrics else f"the metrics that the run recorded are not shown: {problem}",
        tokenizer=_load_tokenizer(directory),
    )


def load_step(path: Path, number: int | None) -> RecordedStep:
    """Loads a step of reinforcement learning from the files of the run in `path`.

    Raises what `read_step_files` raises, and ConfigError for a run of another kind.
    """
    return add_effect(read_step_files(path, number))


def add_effect(files: StepFiles) -> RecordedStep:
    """Returns a step of reinforcement learning with the effect of its loss on every token.

    No foreign code is run: of an algorithm in a user's file the effect is not known. Raises ConfigError for a run of
    another kind.
    """
    config, groups = require_rl(files.config, "cohort explain"), files.groups
    algo = _build_algorithm(config, files.metrics)
    return RecordedStep(
        config=config,
        number=files.number,
        groups=groups,
        algo=algo,
        effect=compute_step_effect(groups, algo, config.learner.minibatches) if algo else make_unknown_effect(groups),
        metrics=files.metrics,
        problem=files.problem,
        num_changed=count_changed_samples(groups, algo) if algo else 0,
        tokenizer=files.tokenizer,
    )


def _build_algorithm(config: RL, metrics: Mapping[str, float]) -> Algorithm | None:
    """Returns the algorithm of a run as it was in a step with these metrics; None if it is foreign code."""
    if get_recorded_name(config.algo):
        return None
    algo = build_algorithm(config.algo, config.max_sampled_tokens)
    # A run with a KL target changes its KL coefficient from step to step: use that of this step.
    if "kl/weight" in metrics:
        algo.load_state({**algo.state(), "kl": metrics["kl/weight"]})
    return algo


def count_changed_samples(groups: Sequence[Group], algo: Algorithm) -> int:
    """Computes the advantages of copies of the groups anew, and returns how many samples differ from what is stored.

    A sample differs if an advantage, its mask or the exclusion of its group is another one.
    """
    again = algo.advantages([replace(g, samples=[replace(s) for s in g.samples]) for g in groups])
    pairs = [
        (g, s, h, t) for g, h in zip(groups, again, strict=True) for s, t in zip(g.samples, h.samples, strict=True)
    ]
    return sum(
        (g.excluded, s.masked) != (h.excluded, t.masked)
        or not all(map(_is_close, _list_advantages(s), _list_advantages(t)))
        for g, s, h, t in pairs
    )


def _list_advantages(sample: Sample) -> list[float]:
    """Returns the advantage of each token of a sample, and that of the sample in front."""
    return [sample.advantage, *(sample.token_advantages or [sample.advantage] * len(sample.tokens))]


def _is_close(a: float, b: float) -> bool:
    """Returns whether two advantages are equal but for rounding."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def _load_tokenizer(directory: RunDirectory) -> Tokenizer | None:
    """Returns the run's tokenizer; None if it is not found.

    Takes that of the newest checkpoint or, if there is none or it cannot be read, that of the model which the config
    names.
    """
    newest = checkpoint.find_latest(directory.checkpoints)
    if newest is not None:
        with suppress(CohortError):
            return Tokenizer.load(newest / "model")
    with suppress(CohortError):
        return Tokenizer.load(find_model(directory.config.model).folder)
    return None


def find_named_group(groups: Sequence[Group], wanted: str, importance: Sequence[float]) -> int:
    """Returns the index of the group that `wanted` names: an index or, if there is no such index, a prompt id.

    "" = the group with the largest `importance`. Raises RunError if no group fits.
    """
    if not wanted:
        return max(range(len(groups)), key=lambda i: importance[i])
    if wanted.isdecimal() and int(wanted) < len(groups):
        return int(wanted)
    for i, group in enumerate(groups):
        if group.prompt.id == wanted:
            return i
    ids = escape_line(suggest_name(wanted, [g.prompt.id for g in groups]))
    raise RunError(
        f'the step has no group "{wanted}"; give --group an index from 0 to {len(groups) - 1} or a prompt id.{ids}'
    )


def describe_fate(group: Group, sample: Sample) -> str:
    """Returns why a sample is out of the loss, such as "failed" or "masked: truncated"; "" = it is in the loss."""
    if sample.failure:
        return "failed"
    if group.excluded:
        return f"in a group left out: {group.excluded}"
    if sample.masked:
        return f"masked: {sample.masked}"
    return "" if sample.num_sampled else "empty"
