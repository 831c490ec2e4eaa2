"""Where the environments of episodes are: the next answer of an episode goes to the worker that has its environment.

Another worker would have to play the episode again from its answers, with all its calls of tools.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from cohort.scoring.wire import Item
from cohort.tasks.environment import MAX_LIVE
from cohort.types import Key


class EpisodeHomes:
    """The worker that has the environment of each episode under way, by its serial."""

    def __init__(self) -> None:
        self._serials: dict[Key, int] = {}

    def pop_item(self, waiting: deque[Item], serial: int, living: Collection[int]) -> Item | None:
        """Removes and returns the first waiting item for the worker `serial`; None if there is none.

        These are items of episodes that it has, and of those that no living worker has.
        """
        for index, item in enumerate(waiting):
            home = self._serials.get(item.past.key) if item.past is not None and item.past.answers else None
            if home is None or home == serial or home not in living:
                del waiting[index]
                return item
        return None

    def note(self, item: Item, serial: int | None) -> None:
        """Notes that the worker `serial` has the environment of an item's episode; None = the episode has ended."""
        if item.past is None:
            return
        self._serials.pop(item.past.key, None)
        if serial is not None:
            self._serials[item.past.key] = serial
        # Episodes that were given up are never ended. A worker keeps no more environments than this either.
        if len(self._serials) > MAX_LIVE:
            del self._serials[next(iter(self._serials))]
