"""Between a loop and its learner: what the learner found is stored in the samples, what it has to tell is passed on."""

from __future__ import annotations

import logging
from collections.abc import Collection

from cohort.learner.base import Found, Learner, Update
from cohort.system import clock
from cohort.types import Group

log = logging.getLogger("cohort.learner")  # notices are the learner's


def annotate(learner: Learner, groups: list[Group], needs: Collection[str]) -> None:
    """Ask the learner for log-probabilities and store them in the samples."""
    found = learner.annotate(groups, needs)
    store_logprobs(groups, "old_logprobs", found.old)
    store_logprobs(groups, "ref_logprobs", found.ref)
    clock.add(found.seconds)


def record(groups: list[Group], update: Update) -> None:
    """Store what an update found in the samples, and pass on the rest."""
    store_logprobs(groups, "old_logprobs", update.old)
    pass_on(update)


def pass_on(update: Update) -> None:
    """Count an update's times, and log its notices: the learner may be in another process."""
    clock.add(update.seconds)
    for level, text in update.notices:
        log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)


def store_logprobs(groups: list[Group], field: str, found: Found | None) -> None:
    """Write log-probabilities into the samples they are of."""
    known = {} if found is None else found.by_id()
    for group in groups if known else ():
        for id, sample in zip(group.ids(), group.samples, strict=True):
            if id in known:
                setattr(sample, field, known[id])
