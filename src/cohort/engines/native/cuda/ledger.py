"""Records which pages belong to which prefix and to which running draft."""

from __future__ import annotations

from cohort.engines.native.cuda.pages import PageArena, PagedPrefix, PageTables, count_pages
from cohort.engines.native.draft import NativeDraft


def count_own_pages(draft: NativeDraft) -> int:
    """Returns how many pages the draft's own tokens (all after its prefix) need at its greatest possible length."""
    return count_pages(len(draft.own_prompt) + draft.request.sampling.max_tokens)


class PageLedger:
    """Reservations of pages in an arena.

    A prefix is known as long as it has users. Its pages may be freed earlier, while no running draft reads them.
    """

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables
        self.arena: PageArena | None = None
        self.prefixes: dict[tuple[int, ...], PagedPrefix] = {}  # by their tokens
        self.running: dict[str, tuple[NativeDraft, list[int]]] = {}  # by request id: a draft and its own pages
        self.uncomputed: list[PagedPrefix] = []  # prefixes that have pages and are not computed yet

    def add_user(self, tokens: tuple[int, ...]) -> PagedPrefix:
        """Returns the prefix with these tokens, made now if it is unknown, and counts one more request that uses it.

        No pages are taken.
        """
        prefix = self.prefixes.setdefault(tokens, PagedPrefix(tokens=tokens))
        prefix.num_users += 1
        return prefix

    def remove_draft(self, draft: NativeDraft) -> None:
        """Frees the draft's own pages, if it has any.

        If no other draft, running or waiting, uses its prefix, frees and forgets that too.
        """
        self.free_pages(draft)
        prefix = _get_prefix(draft)
        prefix.num_users -= 1
        if prefix.num_users == 0:
            self._free_prefix(prefix)
            del self.prefixes[prefix.tokens]

    def reserve(self, draft: NativeDraft) -> bool:
        """Takes pages for the draft, and for its prefix if that has none. Takes none if they do not suffice.

        Returns whether they sufficed. May free the pages of prefixes that only waiting drafts use. A prefix that gets
        pages here is added to `uncomputed`; the caller must compute it.
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
        self.running[draft.request.id] = (draft, self.arena.take_pages(count_own_pages(draft)))
        return True

    def has_room_for(self, draft: NativeDraft) -> bool:
        """Returns whether enough pages are free for `draft`, and for its prefix if that has no pages.

        If not at first, frees the pages of all prefixes that only waiting drafts use, never of that of `draft` itself.
        Takes no pages. A prefix without pages needs a free entry of the table too.
        """
        if self._has_free_pages(draft):
            return True
        # Prefixes that a running draft reads must stay, and the one that `draft` is about to read.
        read = {id(_get_prefix(d)) for d, _ in self.running.values()} | {id(draft.prefix)}
        for prefix in self.prefixes.values():
            if id(prefix) not in read:
                self._free_prefix(prefix)
        return self._has_free_pages(draft)

    def _has_free_pages(self, draft: NativeDraft) -> bool:
        """Returns whether enough pages are free right now for the draft, and for its prefix if that has no pages.

        Such a prefix needs a free entry of the table too. Changes nothing.
        """
        assert self.arena is not None
        prefix, need = _get_prefix(draft), count_own_pages(draft)
        if not _needs_pages(prefix):
            return need <= len(self.arena.free_pages)
        enough = need + count_pages(len(prefix.tokens)) <= len(self.arena.free_pages)
        return enough and bool(self.tables.free_entries)

    def get_pages(self, draft: NativeDraft) -> list[int]:
        """Returns the indices of the pages that hold a running draft's own tokens (all after its prefix)."""
        return self.running[draft.request.id][1]

    def free_pages(self, draft: NativeDraft) -> None:
        """Frees the draft's own pages, if it has any, and no longer counts it as running. Those of its prefix stay."""
        # A waiting draft has no pages.
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
        """Frees the pages of all drafts and prefixes, whose KV is lost. The prefixes and their counts of users stay."""
        for draft, _ in list(self.running.values()):
            self.free_pages(draft)
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


def _needs_pages(prefix: PagedPrefix) -> bool:
    """Returns whether the prefix has tokens but no pages. An empty prefix (of a prompt of one token) needs none."""
    return prefix.entry < 0 and bool(prefix.tokens)
