"""Helpers between a training loop and its learner.

A learner may run in another process, so it returns records and writes into none. These functions store what it
returned in the samples, and pass its times and notices on to this process's clock and log.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from cohort.learner.base import Learner, TokenLogprobs, Update
from cohort.system import clock
from cohort.types import Group, Provenance

# Not this module's name: the notices come from the learner, and the log shows where a line comes from.
log = logging.getLogger("cohort.learner")


def annotate(
    learner: Learner, groups: list[Group], needs: Collection[str], loss_on: Provenance = Provenance.SAMPLED
) -> None:
    """Asks the learner for log-probabilities of tokens of `loss_on`, and stores them in the samples, in place.

    `needs` names the policies: "old" is the policy before the update (stored as `old_logprobs`), "ref" the reference
    policy (`ref_logprobs`). Adds the seconds that it took to this process's clock.
    """
    annotations = learner.annotate(groups, needs, loss_on)
    store_logprobs(groups, "old_logprobs", annotations.old)
    store_logprobs(groups, "ref_logprobs", annotations.ref)
    clock.add_seconds(annotations.seconds)


def store_update(groups: list[Group], update: Update) -> None:
    """Stores the log-probabilities that an update returned as `old_logprobs` of the samples, in place.

    They are as in `Update`, and for samples that had none. Then calls `report_update`: the update's
    times go to the clock, its notices to the log.
    """
    store_logprobs(groups, "old_logprobs", update.old)
    report_update(update)


def report_update(update: Update) -> None:
    """Adds the seconds that an update took to this process's clock, and writes its notices to the log."""
    clock.add_seconds(update.seconds)
    for level, text in update.notices:
        log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)


def store_logprobs(groups: list[Group], field: str, logprobs: TokenLogprobs | None) -> None:
    """Sets the attribute `field` ("old_logprobs" or "ref_logprobs") of the samples to their log-probabilities.

    Samples are matched by id; those without log-probabilities are not changed. `logprobs` None changes no sample.
    """
    by_id = {} if logprobs is None else logprobs.by_id()
    for group in groups if by_id else ():
        for id, sample in zip(group.ids(), group.samples, strict=True):
            if id in by_id:
                setattr(sample, field, by_id[id])
