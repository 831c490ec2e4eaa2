"""What all scoring pools have in common, as training, evaluation and chat use them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from cohort.errors import TaskError
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.environment import Past
from cohort.types import Answer, Outcome, Row


class Ranks(Protocol):
    """What a pool needs of the ranks that score together. See `cohort.world.World`."""

    size: int

    def share(self, value: Any) -> Any:
        """Returns the value that the first rank passes."""

    def gather_on_first(self, value: Any) -> list[Any]:
        """Returns the values of all ranks on the first rank, and [] on the others."""


class Pool(ABC):
    """Scores answers, driven like an engine: `submit` answers, then `poll` for outcomes. For one thread only."""

    num_failures = 0  # outcomes that were failures
    num_over_limit = 0  # answers that were wrong because they took too much work
    last_failure = ""  # why the last try failed, if nothing was scored since
    conversation: ConversationRules | None = None  # rules of tools and environments; None = the task has none
    scores_groups = False  # whether the answers of a group must be submitted together

    @abstractmethod
    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        """Queues an answer to a row for scoring. Calls of `poll` return its outcome with `id`.

        `past` holds the key and the earlier answers of the same episode; None = the answer stands alone. `closing` is
        the limit (a Finish) that ends an episode whose newest answer was stepped already; "" = the answer is new.
        Raises ValueError if the pool is closed, or if another answer with this id is neither finished nor dropped.
        """

    @abstractmethod
    def submit_group(self, id: str, row: Row, answers: Sequence[Answer]) -> None:
        """Queues all answers of a group, to be scored together. `poll` returns the outcome of number i as "ID/i"."""

    @abstractmethod
    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        """Returns the (id, outcome) pairs that have finished and were not returned before.

        Waits up to `timeout` seconds for the first one, if any answer is under way; returns [] if none finished.
        An answer whose grader failed has an outcome with `failure`. Raises TaskError if the task cannot be loaded, if
        workers do not start, or if a grader returned something that is not a score; finished outcomes then stay for
        the next call.
        """

    @abstractmethod
    def drop(self, id: str) -> None:
        """Forgets the answer or group with this id: `poll` will not return its outcome. Unknown ids are ignored."""

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """The number of submitted answers and groups whose outcome `poll` still has to return."""

    def keep_outcomes(self, path: Path | None, world: Ranks | None = None) -> None:  # noqa: B027  (most keep nothing)
        """Keeps outcomes of outside services in the file at `path` from now on, and uses those that are in it.

        Of several ranks in `world` only the first has a path. Does nothing if the task asks no outside service.
        """

    def share_outcomes(self, world: Ranks) -> None:  # noqa: B027  (most keep nothing)
        """Brings outcomes of outside services to the file of the first rank. Every rank must call it."""

    @abstractmethod
    def close(self) -> None:
        """Ends the worker processes and forgets what is not finished. `submit` then raises ValueError.

        Outcomes that are finished can still be polled. A second call does nothing.
        """

    def score(self, items: Iterable[tuple[Row, Answer]]) -> list[Outcome]:
        """Scores all (row, answer) pairs, waits for the last one, and returns their outcomes in the same order.

        Where groups are scored together, each answer is a group of its own. Raises ValueError if submitted answers are
        still pending or the pool is closed. A TaskError of `poll` closes the pool and is raised. An answer whose grader
        failed has an outcome with `failure`.
        """
        if self.num_pending:
            raise ValueError(f"{self.num_pending} submitted answers are pending; call poll until none is left")
        ids: list[str] = []
        for row, answer in items:
            name = str(len(ids))
            if self.scores_groups:
                self.submit_group(name, row, [answer])
            else:
                self.submit(name, row, answer)
            ids.append(f"{name}/0" if self.scores_groups else name)
        outcomes: dict[str, Outcome] = {}
        try:
            while len(outcomes) < len(ids):
                outcomes.update(self.poll(timeout=1.0))
        except TaskError:
            self.close()
            raise
        return [outcomes[id] for id in ids]

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
