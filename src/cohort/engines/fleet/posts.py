"""The places of replicas in a fleet, and what is done for several of them side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cohort.engines.base import Request
from cohort.engines.fleet.base import Replica
from cohort.errors import CohortError


@dataclass(kw_only=True, slots=True)
class Post:
    """The place of a replica in the fleet, and the work that it has."""

    replica: Replica
    is_ready: bool = True  # whether it takes requests; False = it is being started again
    owned: dict[str, Request] = field(default_factory=dict)  # requests under way, by id
    starter: threading.Thread | None = None  # starts it again


def run_on_posts(call: Callable[[Post], object], posts: Sequence[Post]) -> list[CohortError | None]:
    """Calls a function for posts, side by side, and returns the error of each; None where there was none."""

    def run(post: Post) -> CohortError | None:
        try:
            call(post)
        except CohortError as error:
            return error
        return None

    if len(posts) == 1:
        return [run(posts[0])]
    pool = ThreadPoolExecutor(max(1, len(posts)))
    try:
        return list(pool.map(run, posts))
    finally:
        # After Ctrl-C this program does not wait for a replica that does not answer: `Fleet.close` ends it.
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneReplica:
    """A replica alone, as a canary compares it."""

    replica: Replica

    def compute_logprobs(self, tokens: list[int]) -> list[list[float]]:
        """Returns one list: the log-probability of every token after the first, at temperature 1."""
        return [self.replica.compute_logprobs(tokens)]


def make_group_key(request: Request) -> tuple[str, str, int]:
    """Returns what the requests of a group have in common: task, prompt and visit."""
    return (request.key.task, request.key.prompt_id, request.key.visit)
