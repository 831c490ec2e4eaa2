"""Records which pages belong to which prefix, to which running draft, and to KV that is kept of ended drafts."""

from __future__ import annotations

from collections.abc import Sequence

from cohort.engines.base import Request
from cohort.engines.native.cuda.pages import KeptPages, PageArena, PagedPrefix, PageTables, count_pages
from cohort.engines.native.draft import NativeDraft


def count_own_pages(draft: NativeDraft) -> int:
    """Returns how many pages the draft's own tokens (all after its prefix) need at its greatest possible length."""
    return count_pages(len(draft.own_prompt) + draft.request.sampling.max_tokens)


def count_arena_pages(drafts: Sequence[NativeDraft], slots: int) -> tuple[int, int]:
    """Returns how many pages an arena for these drafts should have, and how many it must have; page 0 is counted.

    It should have room for the largest `slots` drafts and the largest prefixes, which can run together, and must have
    room for any single draft.
    """
    own = sorted(map(count_own_pages, drafts), reverse=True)[:slots]
    distinct = {id(d.prefix): count_pages(len(d.prefix.tokens)) for d in drafts}
    shared = sorted(distinct.values(), reverse=True)[:slots]
    return 1 + sum(own) + sum(shared), 1 + max(own) + max(shared)


class PageLedger:
    """Reservations of pages in an arena.

    A prefix is known as long as it has users. Its pages may be freed earlier, while no running draft reads them. So may
    those of kept KV: the tokens of ended drafts, which drafts that continue them do not compute again.
    """

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables
        self.arena: PageArena | None = None
        self.prefixes: dict[tuple[int, ...], PagedPrefix] = {}  # by their tokens
        self.running: dict[str, tuple[NativeDraft, list[int]]] = {}  # by request id: a draft and its own pages
        self.uncomputed: list[PagedPrefix] = []  # prefixes that have pages and are not computed yet
        self.kept: dict[str, KeptPages] = {}  # of ended requests that no other one continues yet, by request id
        self.idle_kept: list[KeptPages] = []  # what has pages that no running draft uses: `kept`, or of waiting drafts

    def add_user(self, tokens: tuple[int, ...]) -> PagedPrefix:
        """Returns the prefix with these tokens, made now if it is unknown, and counts one more request that uses it.

        No pages are taken.
        """
        prefix = self.prefixes.setdefault(tokens, PagedPrefix(tokens=tokens))
        prefix.num_users += 1
        return prefix

    def remove_draft(self, draft: NativeDraft) -> None:
        """Frees the draft's own pages, if it has any.

        If nothing else uses its prefix, frees and forgets that too.
        """
        self.free_pages(draft)
        self._remove_user(_get_prefix(draft))

    def keep_draft(self, draft: NativeDraft) -> None:
        """Ends a running draft and keeps its KV where it is. Pages without KV of its tokens are freed.

        What is kept uses the draft's prefix from now on.
        """
        assert self.arena is not None
        _, pages = self.running.pop(draft.request.id)
        # The last token was drawn and not computed.
        tokens = [*draft.own_prompt, *draft.tokens][:-1]
        num = count_pages(len(tokens))
        self.arena.return_pages(pages[num:])
        kept = KeptPages(prefix=draft.prefix, tokens=tokens, pages=pages[:num])
        self.kept[draft.request.id] = kept
        self.idle_kept.append(kept)

    def take_kept(self, request: Request) -> KeptPages | None:
        """Removes and returns the KV that the request continues, without what it cannot use. None = there is none."""
        kept = self.kept.get(request.continues)
        if kept is not None and not kept.cut_to(request.tokens):
            self.remove_kept(request.continues)
            return None
        return self.kept.pop(request.continues, None)

    def remove_kept(self, id: str) -> None:
        """Frees the KV that is kept of the request `id`, if any, and its prefix if nothing else uses that."""
        kept = self.kept.pop(id, None)
        if kept is not None:
            self._free_kept(kept)
            assert isinstance(kept.prefix, PagedPrefix)
            self._remove_user(kept.prefix)

    def _free_kept(self, kept: KeptPages) -> None:
        """Frees the pages of kept KV, unless a running draft has taken them over. Its tokens must be computed again."""
        if kept in self.idle_kept:
            self.idle_kept.remove(kept)
            # Without an arena the pages are gone already.
            if self.arena is not None:
                self.arena.return_pages(kept.pages)
        kept.tokens, kept.pages = [], []

    def _remove_user(self, prefix: PagedPrefix) -> None:
        """Counts one user of the prefix less. After the last one, frees and forgets it."""
        prefix.num_users -= 1
        if prefix.num_users == 0:
            self._free_prefix(prefix)
            del self.prefixes[prefix.tokens]

    def reserve(self, draft: NativeDraft) -> bool:
        """Takes pages for the draft, and for its prefix if that has none. Takes none if they do not suffice.

        Returns whether they sufficed. May free pages as `has_room_for` does. A prefix that gets pages here is added to
        `uncomputed`; the caller must compute it. Pages of KV that the draft continues become its first ones.
        """
        if not self.has_room_for(draft):
            return False
        assert self.arena is not None
        prefix = _get_prefix(draft)
        # The first draft of a group also takes the pages of the prefix; its siblings find it there.
        if _needs_pages(prefix):
            prefix.pages = self.arena.take_pages(count_pages(len(prefix.tokens)))
            prefix.entry = self.tables.free_entries.pop()
            self.uncomputed.append(prefix)
        kept, need = _get_kept(draft), count_own_pages(draft)
        pages: list[int] = []
        if kept is not None and kept.pages:
            self.idle_kept.remove(kept)
            # The draft may need fewer pages than the one that it continues.
            self.arena.return_pages(kept.pages[need:])
            pages, kept.pages = kept.pages[:need], []
        self.running[draft.request.id] = (draft, pages + self.arena.take_pages(need - len(pages)))
        return True

    def has_room_for(self, draft: NativeDraft) -> bool:
        """Returns whether enough pages are free for `draft`, and for its prefix if that has no pages.

        If not at first, frees the pages of all prefixes that no running draft reads, never of that of `draft` itself.
        Then it frees kept KV, as much as is needed, if that helps. Takes no pages. A prefix without pages needs a free
        entry of the table too.
        """
        if self._has_free_pages(draft):
            return True
        # Prefixes that a running draft reads must stay, and the one that `draft` is about to read.
        read = {id(_get_prefix(d)) for d, _ in self.running.values()} | {id(draft.prefix)}
        for prefix in self.prefixes.values():
            if id(prefix) not in read:
                self._free_prefix(prefix)
        others = [kept for kept in self.idle_kept if kept is not draft.kept]
        assert self.arena is not None
        if self._count_needed(draft) > len(self.arena.free_pages) + sum(len(kept.pages) for kept in others):
            return False
        # The newest first: the oldest are continued first.
        while not self._has_free_pages(draft) and others:
            self._free_kept(others.pop())
        return self._has_free_pages(draft)

    def _count_needed(self, draft: NativeDraft) -> int:
        """Returns how many pages the draft needs beside those that it has, with those of a prefix without pages."""
        prefix, kept = _get_prefix(draft), _get_kept(draft)
        own = max(0, count_own_pages(draft) - (0 if kept is None else len(kept.pages)))
        return own + (count_pages(len(prefix.tokens)) if _needs_pages(prefix) else 0)

    def _has_free_pages(self, draft: NativeDraft) -> bool:
        """Returns whether enough pages are free right now for the draft, and for its prefix if that has no pages.

        Such a prefix needs a free entry of the table too. Changes nothing.
        """
        assert self.arena is not None
        enough = self._count_needed(draft) <= len(self.arena.free_pages)
        return enough and (bool(self.tables.free_entries) or not _needs_pages(_get_prefix(draft)))

    def get_pages(self, draft: NativeDraft) -> list[int]:
        """Returns the indices of the pages that hold a running draft's own tokens (all after its prefix)."""
        return self.running[draft.request.id][1]

    def free_pages(self, draft: NativeDraft) -> None:
        """Frees the draft's own pages, if it has any, and no longer counts it as running. Those of its prefix stay."""
        if (kept := _get_kept(draft)) is not None:
            self._free_kept(kept)
            draft.kept = None
        # A waiting draft has no other pages.
        _, pages = self.running.pop(draft.request.id, (draft, []))
        # Without an arena the pages are gone already.
        if self.arena is not None:
            self.arena.return_pages(pages)

    def cancel_reservations(self, drafts: list[NativeDraft]) -> None:
        """Frees the own pages of these drafts, and the pages of all prefixes that are not computed yet."""
        for draft in drafts:
            self.free_pages(draft)
        for prefix in self.uncomputed:
            self._free_prefix(prefix)
        self.uncomputed.clear()

    def free_all(self) -> None:
        """Frees the pages of all drafts, kept KV and prefixes, whose KV is lost.

        The prefixes that drafts use stay, with their counts of users.
        """
        for draft, _ in list(self.running.values()):
            self.free_pages(draft)
        for id in list(self.kept):
            self.remove_kept(id)
        # The others belong to waiting drafts.
        for kept in list(self.idle_kept):
            self._free_kept(kept)
        for prefix in self.prefixes.values():
            self._free_prefix(prefix)
        self.uncomputed.clear()

    def _free_prefix(self, prefix: PagedPrefix) -> None:
        """Frees the pages and the table entry of a prefix, if it has any. The prefix itself stays known.

        Does nothing if there is no arena.
        """
        if prefix.entry >= 0 and self.arena is not None:
            self.arena.return_pages(prefix.pages)
            self.tables.free_entries.append(prefix.entry)
            prefix.pages, prefix.entry = [], -1


def _get_prefix(draft: NativeDraft) -> PagedPrefix:
    """Returns `draft.prefix`, after asserting that it is a PagedPrefix, as all prefixes of this engine are."""
    assert isinstance(draft.prefix, PagedPrefix)
    return draft.prefix


def _get_kept(draft: NativeDraft) -> KeptPages | None:
    """Returns `draft.kept`, after asserting that it is in pages, as all kept KV of this engine is."""
    assert draft.kept is None or isinstance(draft.kept, KeptPages)
    return draft.kept


def _needs_pages(prefix: PagedPrefix) -> bool:
    """Returns whether the prefix has tokens but no pages. An empty prefix (of a prompt of one token) needs none."""
    return prefix.entry < 0 and bool(prefix.tokens)
