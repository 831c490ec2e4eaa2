"""A sample that the native engines write, and the line of those that wait for a slot."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from cohort.engines.draft import Draft
from cohort.engines.native.kv import Prefix


@dataclass(eq=False, kw_only=True, slots=True)
class NativeDraft(Draft):
    """A draft whose leading tokens are stored once for its whole group."""

    prefix: Prefix
    own: list[int]  # the request's tokens after the shared prefix

    @property
    def num_shared(self) -> int:
        return len(self.prefix.tokens)

    @property
    def num_cached(self) -> int:
        """Tokens of its own to be computed before it can go on."""
        return len(self.own) + len(self.tokens)


class Line:
    """Drafts that wait, by prefix: a group begun is finished first, so few prompts are in memory at once."""

    def __init__(self) -> None:
        self.groups: OrderedDict[Prefix, deque[NativeDraft]] = OrderedDict()
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[NativeDraft]:
        for group in self.groups.values():
            yield from group

    def join(self, draft: NativeDraft) -> None:
        self.groups.setdefault(draft.prefix, deque()).append(draft)
        self.num += 1

    def return_first(self, drafts: list[NativeDraft]) -> None:
        """Put drafts that had a slot before everybody else, in their order."""
        for draft in reversed(drafts):
            self.groups.setdefault(draft.prefix, deque()).appendleft(draft)
            self.groups.move_to_end(draft.prefix, last=False)
        self.num += len(drafts)

    def take(self, num: int) -> list[NativeDraft]:
        """The next `num`, or as many as there are."""
        taken: list[NativeDraft] = []
        while self.groups and len(taken) < num:
            key, group = next(iter(self.groups.items()))
            taken.append(group.popleft())
            if not group:
                del self.groups[key]
        self.num -= len(taken)
        return taken

    def leave(self, draft: NativeDraft) -> None:
        group = self.groups[draft.prefix]
        group.remove(draft)
        if not group:
            del self.groups[draft.prefix]
        self.num -= 1
