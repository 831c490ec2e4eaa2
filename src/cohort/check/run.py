"""Every check of a config, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cohort import build
from cohort.check.findings import Finding
from cohort.check.plan import memory, one_step
from cohort.check.reward import check_reward
from cohort.check.trial import give_signal, sample
from cohort.check.update import check_update
from cohort.config.schema import RunConfig

NUM_PROMPTS, NUM_SAMPLES = 3, 4


def check(config: RunConfig, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Findings as they come. `progress` is told what is under way."""
    progress("loading the model and the task")
    parts = build.assemble(config)
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
        yield from check_update(trial)
        progress("measuring a step")
        yield memory(trial)
        yield one_step(trial, seconds)
    finally:
        parts.close()
