"""Python's log as events of a run."""

from __future__ import annotations

import logging

from cohort.logs.forward import forwarded


def test_messages_of_the_parts_become_events():
    events: list[tuple[str, str]] = []
    log = logging.getLogger("cohort.engines.native.cuda.engine")
    with forwarded(lambda kind, text: events.append((kind, text))):
        log.info("arena of %d pages", 3)
        log.debug("a step was captured")
        logging.getLogger("cohort.learner.local").warning("out of memory")
        logging.getLogger("another.library").warning("not ours")
    log.warning("after the run")
    assert events == [("engine", "arena of 3 pages"), ("learner", "out of memory")]
    assert logging.getLogger("cohort").level == logging.NOTSET
