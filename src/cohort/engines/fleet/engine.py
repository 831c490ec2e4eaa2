"""One engine made of several: requests are divided among replicas, and those of a lost replica go to others.

A replica that is lost is started again, within a budget. It gets the current weights, which are proved, before it gets
requests. A request of a lost replica begins again from its first token, with the same random numbers: so nothing of it
may have been reported, and samples are reported only when they have ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from cohort.engines.base import ENGINE_HERE, Abilities, ComparableEngine, Event, Request, Weights, WorkCounters
from cohort.engines.fleet.base import Forgotten, LoadedWeights, News, NewsQueue, Order, Replica, ReplicaLost
from cohort.engines.fleet.posts import OneReplica, Post, make_group_key, run_on_posts
from cohort.engines.fleet.transfer import Transfer, find_difference
from cohort.engines.requests import check_request, closed_engine_error, unknown_request_error
from cohort.errors import CohortError, EngineError
from cohort.types import Finish, Sample

log = logging.getLogger(__name__)

# How often replicas are looked after while nothing is reported. A process that ends is noticed at once.
LOOK_SECONDS = 0.2
REPEAT = "Continue: cohort resume RUN, or repeat the cohort eval command."


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLimits:
    """What requests may be, and how often replicas are started again."""

    context: int  # most tokens of a prompt and its completion
    vocab_size: int
    restarts: int  # of all replicas together


class Fleet:
    """An engine of replicas, all of which have the same model. `name` is what evaluations record of it.

    `news` is the queue that the replicas report through. `transfer` brings new weights to them. All replicas are
    started at once; the first error of one is raised.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        news: NewsQueue,
        transfer: Transfer,
        limits: FleetLimits,
        abilities: Abilities,
    ) -> None:
        self.name = name
        self.abilities = abilities
        self.version = 0
        self.transfer = transfer
        self.limits = limits
        self.num_restarts = 0
        self.late_proof: Callable[[ComparableEngine], object] | None = None  # None = not proved yet
        self._posts = [Post(replica=replica) for replica in replicas]
        self._news = news
        self._orders: list[Order] = []  # not handed to a replica yet, in the order of their arrival
        self._homes: dict[str, Post] = {}  # where the KV of ended requests may be kept, by id
        self._events: list[Event] = []
        self._failure: CohortError | None = None  # why a replica could not be started again
        self._closed = False
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    # ---- protocol

    @property
    def work(self) -> WorkCounters:
        """The sums over the replicas, since their last start."""
        total = WorkCounters()
        for post in self._posts:
            for field_ in fields(WorkCounters):
                setattr(total, field_.name, getattr(total, field_.name) + getattr(post.replica.work, field_.name))
        return total

    def submit(self, request: Request) -> None:
        """Queues a request. The next `poll` hands all queued ones over, so that they may share a batch.

        Raises ConfigError for a request that can never be served or whose id is under way, EngineError after `close`.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        check_request(request, self.limits.context, self.limits.vocab_size, self._list_ids())
        self._orders.append(request)

    @property
    def idle(self) -> bool:
        """Whether no request is under way and no event waits to be reported."""
        return not self._events and not self._list_ids()

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Hands queued requests over, waits up to `timeout` seconds for samples that end, and returns their events.

        Raises EngineError if a replica is lost and the budget of restarts is used up, and the model's own errors.
        """
        self._hand_over()
        deadline = time.monotonic() + timeout
        self._take_news()
        while not self._events and not self.idle and (rest := deadline - time.monotonic()) > 0:
            self._look_after_replicas()
            self._take_news(min(rest, LOOK_SECONDS))
        self._look_after_replicas()
        events, self._events = self._events, []
        return events

    def abort(self, id: str) -> Sample:
        """Stops a request and returns its sample so far, with finish = abort. Raises CohortError for an unknown id.

        The sample is empty if the replica that worked on it is lost, or if no replica had begun with it.
        """
        nothing = Sample(tokens=[], provenance=[], sampler_logprobs=[], finish=Finish.ABORT)
        waiting = next((order for order in self._orders if isinstance(order, Request) and order.id == id), None)
        if waiting is not None:
            self._orders.remove(waiting)
            return nothing
        post = next((post for post in self._posts if id in post.owned), None)
        if post is not None:
            try:
                sample = post.replica.abort(id)
            except ReplicaLost as lost:
                del post.owned[id]
                self._replace(post, str(lost))
                return nothing
            if sample is not None:
                self._check_sample(post, post.owned.pop(id), sample)
                return sample
            # It had ended before the replica was told.
            self._take_news()
        ended = next((event for event in self._events if event.id == id), None)
        if ended is None or ended.sample is None:
            raise unknown_request_error(id)
        self._events.remove(ended)
        return replace(ended.sample, finish=Finish.ABORT)

    def forget(self, id: str) -> None:
        """Tells the replica that may keep the KV of an ended request to drop it. `poll` hands that over too."""
        if id in self._homes:
            self._orders.append(Forgotten(id=id))

    def load(self, weights: Weights, version: int) -> None:
        """Makes all replicas load the weights, side by side.

        Version, names and checksums are compared. Requests under way go on with the new weights. Raises EngineError if
        a replica has something else than was sent.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        # A replica that is being started loads the weights before.
        self._wait_for_starters()
        self.late_proof = None
        self._homes.clear()
        self.transfer.offer(weights, version)
        self._run_on_ready(lambda post: self._load_into(post.replica))
        self._wait_for_starters()
        self.version = version

    def compute_logprobs(self, tokens: list[int]) -> list[list[float]]:
        """Returns per replica the log-probability of every token after the first, at temperature 1."""
        self._wait_for_starters()
        found: dict[int, list[float]] = {}

        def compute(post: Post) -> None:
            found[id(post)] = post.replica.compute_logprobs(tokens)

        # One that was lost meanwhile has the weights again when it is back.
        while missing := [post for post in self._posts if id(post) not in found]:
            self._run_on_ready(compute, missing)
            self._wait_for_starters()
        return [found[id(post)] for post in self._posts]

    def close(self) -> None:
        """Ends all replicas, and lets go of the weights. A later `submit` raises EngineError.

        A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._orders = []
        self._events = []
        for post in self._posts:
            post.owned = {}
        run_on_posts(lambda post: post.replica.end(), self._posts)
        self.transfer.close()

    # ---- requests

    def _list_ids(self) -> set[str]:
        """Returns the ids of all requests under way."""
        waiting = {order.id for order in self._orders if isinstance(order, Request)}
        return waiting.union(*(post.owned for post in self._posts))

    def _hand_over(self) -> None:
        """Gives queued orders to replicas that are ready: those of a group to one, which stores their prompt once."""
        ready = [post for post in self._posts if post.is_ready]
        if not self._orders or not ready:
            return
        orders, self._orders = self._orders, []
        parts: dict[int, list[Order]] = {}
        loads = [sum(r.sampling.max_tokens for r in post.owned.values()) for post in self._posts]
        groups = {make_group_key(r): n for n, post in enumerate(self._posts) for r in post.owned.values()}
        for order in orders:
            home = self._homes.pop(order.id if isinstance(order, Forgotten) else order.continues, None)
            if isinstance(order, Forgotten):
                if home is not None and home.is_ready:
                    parts.setdefault(self._posts.index(home), []).append(order)
                continue
            n = self._choose(order, home, groups, loads)
            groups[make_group_key(order)] = n
            loads[n] += order.sampling.max_tokens
            self._posts[n].owned[order.id] = order
            parts.setdefault(n, []).append(order)
        for n, part in parts.items():
            try:
                self._posts[n].replica.send(part)
            except ReplicaLost as lost:
                self._replace(self._posts[n], str(lost))

    def _choose(
        self, request: Request, home: Post | None, groups: dict[tuple[str, str, int], int], loads: list[int]
    ) -> int:
        """Returns the number of the replica for a request: the one that has its conversation, else that of its group,
        else the one with the fewest tokens to draw.
        """
        if home is not None and home.is_ready:
            return self._posts.index(home)
        n = groups.get(make_group_key(request), -1)
        if n >= 0 and self._posts[n].is_ready:
            return n
        return min((n for n, post in enumerate(self._posts) if post.is_ready), key=lambda n: loads[n])

    def _take_news(self, timeout: float = 0.0) -> None:
        """Waits up to `timeout` seconds for news, and adds an event for each sample that has ended.

        Raises the error of a model.
        """
        with suppress(queue.Empty):
            news = self._news.get(timeout=timeout) if timeout > 0 else self._news.get_nowait()
            while True:
                self._add_event(news)
                news = self._news.get_nowait()

    def _add_event(self, news: News) -> None:
        """Adds the event of a sample that has ended. News of an earlier start of a replica are ignored."""
        post = self._posts[news.replica]
        if news.serial != post.replica.serial:
            return
        if news.error is not None:
            if isinstance(news.error, ReplicaLost):
                self._replace(post, str(news.error))
                return
            raise news.error
        request = post.owned.pop(news.id, None)
        # One that was aborted has no event.
        if request is None or news.sample is None:
            return
        if request.keep:
            self._homes[news.id] = post
        sample = news.sample
        self._check_sample(post, request, sample)
        self._events.append(Event(id=news.id, tokens=sample.tokens, logprobs=sample.sampler_logprobs, sample=sample))

    def _check_sample(self, post: Post, request: Request, sample: Sample) -> None:
        """Raises EngineError for a sample that cannot be one of the request: the learner would fail, or be misled."""
        num, most = len(sample.tokens), request.sampling.max_tokens
        fault = f"drew {num} tokens where at most {most} were asked for" if num > most else ""
        if any(token >= self.limits.vocab_size for token in sample.tokens):
            fault = f"drew the token {max(sample.tokens)}, and the model has {self.limits.vocab_size}"
        if fault:
            raise EngineError(
                f'{post.replica.where} {fault} (request "{request.id}"). Is it of another model? {REPEAT}'
            )

    # ---- replicas

    def _start_all(self) -> None:
        """Starts all replicas. Raises the first error."""
        for post, error in zip(self._posts, run_on_posts(lambda post: post.replica.start(), self._posts), strict=True):
            if isinstance(error, ReplicaLost):
                raise EngineError(f"{post.replica.where} did not start: it {error}. Or use {ENGINE_HERE}.") from error
            if error is not None:
                raise error

    def _look_after_replicas(self) -> None:
        """Replaces replicas that are lost, and hands requests to those that are ready again.

        Raises the error because of which a replica could not be started again.
        """
        for post in self._posts:
            if post.is_ready and (fault := post.replica.find_fault(is_busy=bool(post.owned))):
                # What it reported before counts.
                self._take_news()
                self._replace(post, fault)
        self._collect_starters()
        self._hand_over()

    def _replace(self, post: Post, reason: str) -> None:
        """Begins to start a lost replica again, and puts its requests back into the queue.

        Raises EngineError if the budget is used up, or the current weights cannot be kept for it.
        """
        if not post.is_ready:
            return
        post.is_ready = False
        self._homes = {id: home for id, home in self._homes.items() if home is not post}
        requests, post.owned = list(post.owned.values()), {}
        # In front, in the order in which they came. The KV of the turns before is gone.
        self._orders[:0] = [replace(r, continues="") if r.continues else r for r in requests]
        self._count_restart(post, reason, len(requests))
        # It starts in its own time, and the learner does not wait for it.
        self.transfer.keep()
        post.starter = threading.Thread(target=self._start_again, args=(post,), daemon=True)
        post.starter.start()

    def _count_restart(self, post: Post, reason: str, num_requests: int) -> None:
        """Counts a restart and logs it. Raises EngineError if none is left."""
        where = post.replica.where
        if self.num_restarts >= self.limits.restarts:
            raise EngineError(
                f"{where} {reason}. Engines were started again {self.num_restarts} times before, and --engine.restarts "
                f"allows no more. {REPEAT}"
            )
        self.num_restarts += 1
        how = "started again" if post.replica.is_ours else "waited for"
        again = f"it is {how} ({self.num_restarts} of {self.limits.restarts} restarts)"
        requests = {0: "", 1: ", and its request begins again"}.get(
            num_requests, f", and its {num_requests} requests begin again"
        )
        log.warning("%s %s: %s%s", where, reason, again, requests)

    def _is_closed(self) -> bool:
        """Returns whether `close` was called, by another thread perhaps."""
        return self._closed

    def _start_again(self, post: Post) -> None:
        """Starts a replica again, gives it the current weights, and proves them. Runs in a thread of its own."""
        while not self._is_closed():
            try:
                post.replica.end()
                post.replica.start()
                if self._is_closed():
                    post.replica.end()
                    return
                if self.transfer.version >= 0:
                    self._load_into(post.replica)
                if self.late_proof is not None:
                    self.late_proof(OneReplica(replica=post.replica))
                return
            except ReplicaLost as lost:
                if self._is_closed():
                    return
                try:
                    self._count_restart(post, str(lost), 0)
                except EngineError as error:
                    self._failure = error
                    return
            except CohortError as error:
                self._failure = error
                return
            except Exception as error:
                # What has not been proved takes no requests, whatever the reason is.
                words = f"{type(error).__name__}: {error}"
                self._failure = EngineError(f"{post.replica.where} could not be started again ({words}). {REPEAT}")
                return

    def _collect_starters(self) -> None:
        """Makes replicas that were started again ready. Raises the error of one that could not be."""
        for post in self._posts:
            if post.starter is not None and not post.starter.is_alive():
                post.starter = None
                post.is_ready = self._failure is None
        if self._failure is not None:
            raise self._failure

    def _wait_for_starters(self) -> None:
        """Waits until every replica is ready. Everything that a starter does has a time limit."""
        for post in self._posts:
            if post.starter is not None:
                post.starter.join()
        self._collect_starters()

    def _load_into(self, replica: Replica) -> None:
        """Makes a replica load the current weights, and compares what it says of them."""
        loaded = self.transfer.load_into(replica)
        if fault := self._find_wrong_load(loaded):
            raise EngineError(
                f"version {self.transfer.version} of the weights did not arrive whole in {replica.where}: {fault}. "
                f"Continue from the last checkpoint with another engine: cohort resume RUN {ENGINE_HERE}."
            )

    def _find_wrong_load(self, loaded: LoadedWeights) -> str:
        """Returns what is wrong with weights that a replica has loaded; "" = nothing that it can tell."""
        if loaded.version != self.transfer.version:
            return f"it has version {loaded.version}"
        return find_difference(self.transfer.checksums, loaded.checksums) if loaded.checksums else ""

    def _run_on_ready(self, call: Callable[[Post], None], posts: Sequence[Post] = ()) -> None:
        """Calls a function for every replica that is ready, side by side. Those that are lost are replaced.

        Raises the first other error.
        """
        ready = [post for post in posts or self._posts if post.is_ready]
        for post, error in zip(ready, run_on_posts(call, ready), strict=True):
            if isinstance(error, ReplicaLost):
                self._replace(post, str(error))
            elif error is not None:
                raise error
