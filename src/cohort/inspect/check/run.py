"""Every check of a config, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cohort.config.kinds import require_rl
from cohort.config.schema import RunConfig
from cohort.inspect.check.findings import Finding, fail
from cohort.inspect.check.plan import memory, one_step
from cohort.inspect.check.reward import check_reward
from cohort.inspect.check.trial import give_signal, sample
from cohort.inspect.check.update import check_update
from cohort.jobs import build
from cohort.logs.escape import one_line

NUM_PROMPTS, NUM_SAMPLES = 3, 4


def check(config: RunConfig, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Findings as they come. `progress` is told what is under way."""
    progress("loading the model and the task")
    parts = build.assemble(require_rl(config, "cohort check"))
    try:
        progress("sampling a few groups")
        trial = sample(parts, NUM_PROMPTS, NUM_SAMPLES)
        progress("rehearsing the reward")
        seconds = 0.0
        for finding in check_reward(trial):
            seconds = finding.details.get("seconds", seconds)
            yield finding
        progress("taking gradients")
        give_signal(trial)
        try:
            yield from check_update(trial)
        except Exception as error:  # a loss or model that breaks is what this command is there to find
            said = one_line(f"{type(error).__name__}: {error}", 300)
            yield fail("update/raises", f"{said}. Nothing after this was checked.")
            return
        progress("measuring a step")
        yield memory(trial)
        yield one_step(trial, seconds)
    finally:
        parts.close()
