"""All checks of a config, in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from cohort.config.kinds import RL
from cohort.config.schema import RunConfig
from cohort.errors import UserCodeError
from cohort.inspect.check.drift import check_drift
from cohort.inspect.check.findings import Finding, fail, ok
from cohort.inspect.check.given import check_given_update, make_given_trial
from cohort.inspect.check.judge import check_judge
from cohort.inspect.check.plan import check_example_time, check_memory, check_ranks, check_step_time, check_warmup
from cohort.inspect.check.reward import check_reward
from cohort.inspect.check.rows import check_rows, check_template
from cohort.inspect.check.source import check_overlap
from cohort.inspect.check.trial import give_distinct_rewards, sample_trial
from cohort.inspect.check.update import check_update
from cohort.jobs import build
from cohort.jobs.dpo import DPOJob
from cohort.jobs.sft import SFTJob
from cohort.logs.escape import escape_line

NUM_PROMPTS = 3
NUM_SAMPLES = 4  # per prompt


def run_checks(config: RunConfig, progress: Callable[[str], None], num_ranks: int = 1) -> Iterator[Finding]:
    """Runs all checks on the config of a run and yields each finding as soon as its check is done.

    With `num_ranks` above 1 it also says what each of so many ranks needs. Calls `progress` with the name of each stage
    as it begins, such as "computing gradients". An exception in the checks of the update becomes a FAIL, after which no
    check is run; errors in loading and sampling are raised.
    """
    if isinstance(config, RL):
        yield from _check_rollouts(config, progress, num_ranks)
    else:
        yield from _check_given_answers(config, progress, num_ranks)


def _check_rollouts(config: RL, progress: Callable[[str], None], num_ranks: int) -> Iterator[Finding]:
    """Yields the findings about a run of reinforcement learning."""
    progress("loading the model and the task")
    job = build.build_rl_job(config)
    try:
        if (overlap := job.producer.stream.overlap) is not None:
            yield check_overlap(overlap)
        if notice := job.notice_if_fewer_problems():
            yield ok("evaluation/problems", f"{notice}.")
        progress("sampling a few groups")
        trial = sample_trial(job, NUM_PROMPTS, NUM_SAMPLES)
        yield from check_drift(trial)
        progress("rehearsing the reward")
        # The estimate of a step's time needs that of its scores. None = it was not measured.
        scoring: float | None = None
        for finding in check_reward(trial):
            scoring = finding.details.get("step", scoring) if finding.name == "reward/speed" else scoring
            yield finding
        yield from check_judge(config.task)
        progress("computing gradients")
        give_distinct_rewards(trial)
        if not (yield from _guard_update(check_update(trial))):
            return
        progress("measuring a step")
        yield check_memory(trial)
        if num_ranks > 1:
            yield check_ranks(trial, num_ranks)
        # This check comes last because it moves the weights.
        yield check_step_time(trial, scoring)
    finally:
        job.close()


def _check_given_answers(config: RunConfig, progress: Callable[[str], None], num_ranks: int) -> Iterator[Finding]:
    """Yields the findings about a run that learns from given answers: SFT or DPO."""
    progress("loading the model and the rows")
    job = build.build_job(config)
    assert isinstance(job, SFTJob | DPOJob), f"nothing checks the kind {config.kind}"
    try:
        trial = make_given_trial(job)
        yield from check_warmup(job.config)
        yield from check_rows(trial)
        yield from check_template(trial)
        progress("computing gradients")
        if not (yield from _guard_update(check_given_update(trial))):
            return
        progress("measuring a step")
        yield check_memory(trial)
        if num_ranks > 1:
            yield check_ranks(trial, num_ranks)
        # This check comes last because it moves the weights.
        yield check_example_time(trial)
    finally:
        job.close()


def _guard_update(findings: Iterator[Finding]) -> Generator[Finding, None, bool]:
    """Yields findings about the update, and returns whether all of them were made. An exception becomes a FAIL."""
    try:
        yield from findings
    # Any exception is a finding here: a user's loss or model that breaks is what this command looks for.
    except Exception as error:
        # The error of a user's loss names its exception itself, and has several lines.
        kind = "" if isinstance(error, UserCodeError) else f"{type(error).__name__}: "
        reason = escape_line(" ".join(f"{kind}{error}".split()), 300)
        yield fail("update/raises", f"computing the update failed: {reason}. The checks after this did not run.")
        return False
    return True
