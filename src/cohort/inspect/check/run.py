"""All checks of a config, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cohort.config.kinds import require_rl
from cohort.config.schema import RunConfig
from cohort.errors import UserCodeError
from cohort.inspect.check.drift import check_drift
from cohort.inspect.check.findings import Finding, fail, ok
from cohort.inspect.check.plan import check_memory, check_step_time
from cohort.inspect.check.reward import check_reward
from cohort.inspect.check.source import check_overlap
from cohort.inspect.check.trial import give_distinct_rewards, sample_trial
from cohort.inspect.check.update import check_update
from cohort.jobs import build
from cohort.logs.escape import escape_line

NUM_PROMPTS = 3
NUM_SAMPLES = 4  # per prompt


def run_checks(config: RunConfig, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Runs all checks on the config of an RL run and yields each finding as soon as its check is done.

    Calls `progress` with the name of each stage as it begins, such as "computing gradients". An exception in the checks
    of the update becomes a FAIL, after which no check is run; errors in loading and sampling are raised. Raises
    ConfigError for other kinds of runs.
    """
    progress("loading the model and the task")
    job = build.build_rl_job(require_rl(config, "cohort check"))
    try:
        if (overlap := job.producer.stream.overlap) is not None:
            yield check_overlap(overlap)
        if notice := job.notice_if_fewer_problems():
            yield ok("evaluation/problems", f"{notice}.")
        progress("sampling a few groups")
        trial = sample_trial(job, NUM_PROMPTS, NUM_SAMPLES)
        yield from check_drift(trial)
        progress("rehearsing the reward")
        # "reward/speed" reports seconds per score, which the estimate of a step's time needs.
        seconds = 0.0
        for finding in check_reward(trial):
            seconds = finding.details.get("seconds", seconds)
            yield finding
        progress("computing gradients")
        give_distinct_rewards(trial)
        try:
            yield from check_update(trial)
        # Any exception is a finding here: a user's loss or model that breaks is what this command looks for.
        except Exception as error:
            # The error of a user's loss names its exception itself, and has several lines.
            kind = "" if isinstance(error, UserCodeError) else f"{type(error).__name__}: "
            reason = escape_line(" ".join(f"{kind}{error}".split()), 300)
            yield fail("update/raises", f"computing the update failed: {reason}. The checks after this did not run.")
            return
        progress("measuring a step")
        yield check_memory(trial)
        # This check comes last because it moves the weights.
        yield check_step_time(trial, seconds)
    finally:
        job.close()
