"""Drafts of the native engines, and the queue of drafts that wait for a slot."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from cohort.engines.draft import Draft
from cohort.engines.native.kept import KeptDraft
from cohort.engines.native.kv import Prefix


@dataclass(eq=False, kw_only=True, slots=True)
class NativeDraft(Draft):
    """A draft whose leading tokens are stored once for its whole group.

    Its own tokens are the others: the rest of the prompt (`own_prompt`), then what was drawn (`tokens`).
    """

    prefix: Prefix
    own_prompt: list[int]  # the request's tokens after the shared prefix
    kept: KeptDraft | None = None  # KV of its first own tokens, from the request that it continues, until it has a slot

    @property
    def num_shared(self) -> int:
        """Number of tokens in the shared prefix."""
        return len(self.prefix.tokens)

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens after the shared prefix: the rest of the prompt, and what was drawn."""
        return len(self.own_prompt) + len(self.tokens)

    @property
    def num_kept(self) -> int:
        """Number of own tokens whose KV comes from the request that the draft continues, while it has no slot."""
        return 0 if self.kept is None else len(self.kept.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Number of own tokens whose KV must be computed before a draft without a slot can continue."""
        return self.num_own_tokens - self.num_kept


class WaitingDrafts:
    """The drafts that wait for a slot, grouped by prefix.

    A group that has begun is served to its end before the next one, so that few prompts are in memory at once.
    """

    def __init__(self) -> None:
        self.groups: OrderedDict[Prefix, deque[NativeDraft]] = OrderedDict()
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[NativeDraft]:
        """Yields the drafts in the order in which `pop_next` would return them, without removing them."""
        for group in self.groups.values():
            yield from group

    def add(self, draft: NativeDraft) -> None:
        """Adds a draft as the last of its group (the drafts with its prefix). A new group comes after all others."""
        self.groups.setdefault(draft.prefix, deque()).append(draft)
        self.num += 1

    def put_back_first(self, drafts: list[NativeDraft]) -> None:
        """Puts drafts that had a slot back into the queue. Their groups come first, in the given order.

        Within each group these drafts come first, in the given order, and then those that waited already.
        """
        # The last one first, because each goes before all that are there.
        for draft in reversed(drafts):
            self.groups.setdefault(draft.prefix, deque()).appendleft(draft)
            self.groups.move_to_end(draft.prefix, last=False)
        self.num += len(drafts)

    def pop_next(self, num: int) -> list[NativeDraft]:
        """Removes and returns the next `num` drafts, group by group, or all if there are fewer."""
        taken: list[NativeDraft] = []
        while self.groups and len(taken) < num:
            key, group = next(iter(self.groups.items()))
            taken.append(group.popleft())
            # An empty group is removed, so that the next one comes first.
            if not group:
                del self.groups[key]
        self.num -= len(taken)
        return taken

    def remove(self, draft: NativeDraft) -> None:
        """Removes a draft from anywhere in the queue. Raises KeyError or ValueError if it is not waiting."""
        group = self.groups[draft.prefix]
        group.remove(draft)
        if not group:
            del self.groups[draft.prefix]
        self.num -= 1
