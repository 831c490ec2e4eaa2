"""Records of Python's log as events of a run."""

from __future__ import annotations

import logging

from cohort.logs.forward import forward_logs


def test_messages_of_the_parts_become_events_and_notices():
    events: list[tuple[str, str]] = []
    notices: list[tuple[str, str]] = []
    log = logging.getLogger("cohort.engines.native.cuda.engine")
    with forward_logs(lambda *told: events.append(told), lambda *told: notices.append(told)):
        log.info("arena of %d pages", 3)
        log.debug("a step was captured")
        logging.getLogger("cohort.learner.local").warning("out of memory")
        logging.getLogger("another.library").warning("not ours")
    log.warning("after the run")
    assert notices == [("engine", "arena of 3 pages")]
    assert events == [("learner", "out of memory")]
    assert logging.getLogger("cohort").level == logging.NOTSET
