"""Checks of the reward on what the model itself says: samples of a few groups, scored as a run scores them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from cohort.errors import TaskError
from cohort.inspect.check.cases import Case, advise_on_failure, is_failed, score_cases
from cohort.inspect.check.findings import Finding, fail, ok, quote, warn
from cohort.inspect.check.trial import Trial
from cohort.logs.escape import escape_line
from cohort.models.catalog import notice_if_not_taught
from cohort.rollout.episode import make_answer
from cohort.types import Answer, Group, Outcome


def score_samples(trial: Trial, seconds: float) -> list[Case]:
    """Scores the trial's samples, stores their rewards in them, and returns them as scored cases of the kind sample.

    A sample's reward is None if the grader failed on it, or if `seconds` had passed before it; then it is not returned.
    Raises TaskError if the grader gives something that is no score.
    """
    job = trial.job
    samples = [(group, s) for group in trial.sampled for s in group.samples]
    cases = [Case(prompt=group.prompt, kind="sample", answer=make_answer(group.prompt, s)) for group, s in samples]
    if job.scorer.conversation is not None:
        # Conversations were scored when they ended.
        return [
            replace(
                case.with_outcome(job, Outcome(parts=s.parts, reason=s.reason, failure=s.failure)),
                reward=s.reward or 0.0,
            )
            for case, (_, s) in zip(cases, samples, strict=True)
        ]
    if job.scorer.scores_groups:
        scored = _score_groups(trial, cases, seconds)
    else:
        scored = list(score_cases(job, job.scorer, cases, seconds))
    for _, s in samples:
        s.reward = None
    for (_, s), case in zip(samples, scored, strict=False):
        s.reward = None if case.outcome.failure else case.reward
    return scored


def _score_groups(trial: Trial, cases: Sequence[Case], seconds: float) -> list[Case]:
    """Returns the samples of the groups that were scored within `seconds`: each group together, as in a run."""
    job, begin = trial.job, time.perf_counter()
    scored: list[Case] = []
    for number, group in enumerate(trial.sampled):
        if time.perf_counter() - begin > seconds:
            break
        own = cases[len(scored) : len(scored) + len(group.samples)]
        outcomes = _score_group(trial, str(number), group, [case.answer for case in own])
        scored += [case.with_outcome(job, outcome) for case, outcome in zip(own, outcomes, strict=True)]
    return scored


def _score_group(trial: Trial, id: str, group: Group, answers: list[Answer]) -> list[Outcome]:
    """Returns the outcomes of the answers of a group, in their order. A TaskError closes the pool and is raised."""
    pool = trial.job.scorer
    pool.submit_group(id, group.prompt.row, answers)
    outcomes: dict[str, Outcome] = {}
    try:
        while len(outcomes) < len(answers):
            outcomes.update(pool.poll(timeout=1.0))
    except TaskError:
        pool.close()
        raise
    return [outcomes[f"{id}/{index}"] for index in range(len(answers))]


def check_signal(trial: Trial, scored: Sequence[Case]) -> Finding:
    """Reports how many groups have differing rewards. `scored` is what `score_samples` returned.

    Returns FAIL if the grader failed on some sample, warn if no group has rewards that differ, else ok.
    """
    name = "reward/signal"
    job = trial.job
    if failed := [case for case in scored if is_failed(case)]:
        problem = escape_line(failed[0].outcome.failure, 300)
        first = f'the first, {quote(failed[0].answer.text)}: "{problem}"'
        text = f"{len(failed)} of {len(scored)} samples of the model could not be scored; {first}"
        return fail(name, f"{text}{advise_on_failure(problem)}", failed=len(failed))
    rewards = [s.reward for g in trial.sampled for s in g.samples if s.reward is not None]
    alive = sum(len({s.reward for s in g.samples} - {None}) > 1 for g in trial.sampled)
    if not rewards:
        return warn(name, "not checked: no sample of the model could be scored.")
    mean = statistics.fmean(rewards)
    text = f"{alive} of {len(trial.sampled)} sampled groups have rewards that differ, mean reward {mean:.2f}"
    if alive:
        return ok(name, text, groups=alive, mean=mean)
    advice = (
        "equal rewards train nothing: try an easier or harder task, more samples, or a model that solves some problems."
    )
    notice = notice_if_not_taught(job.config.model, job.config.task.name)
    return warn(name, f"{text}; {advice}" + (f" Note: {notice}." if notice else ""), groups=0, mean=mean)
