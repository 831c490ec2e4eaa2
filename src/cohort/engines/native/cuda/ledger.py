"""Who has which pages: prefixes by their tokens, running drafts by themselves."""

from __future__ import annotations

from cohort.engines.native.cuda.pages import Arena, PagedPrefix, Tables, pages_for
from cohort.engines.native.draft import NativeDraft


def own_pages(draft: NativeDraft) -> int:
    """Pages for the longest the draft may become, without its prefix."""
    return pages_for(len(draft.own) + draft.request.sampling.max_tokens)


class Ledger:
    """Reservations in an arena. A prefix lives as long as it has users; its pages may go earlier, while none runs."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.arena: Arena | None = None
        self.prefixes: dict[tuple[int, ...], PagedPrefix] = {}
        self.running: dict[str, tuple[NativeDraft, list[int]]] = {}  # by request id: those with pages of their own
        self.fresh: list[PagedPrefix] = []  # have pages and are not computed yet

    def join(self, tokens: tuple[int, ...]) -> PagedPrefix:
        """One more user of these tokens."""
        prefix = self.prefixes.setdefault(tokens, PagedPrefix(tokens=tokens))
        prefix.users += 1
        return prefix

    def leave(self, draft: NativeDraft) -> None:
        """The draft is gone: its pages, and its prefix when it was the last user."""
        self.give(draft)
        prefix = _prefix(draft)
        prefix.users -= 1
        if prefix.users == 0:
            self._drop(prefix)
            del self.prefixes[prefix.tokens]

    def reserve(self, draft: NativeDraft) -> bool:
        """Take the draft's pages, and its prefix's if it has none; False when there are too few."""
        if not self.fits(draft):
            return False
        assert self.arena is not None
        prefix = _prefix(draft)
        if _absent(prefix):
            prefix.pages = self.arena.take(pages_for(len(prefix.tokens)))
            prefix.entry = self.tables.entries.pop()
            self.fresh.append(prefix)
        self.running[draft.request.id] = (draft, self.arena.take(own_pages(draft)))
        return True

    def fits(self, draft: NativeDraft) -> bool:
        """Is there room? Prefixes that only waiting drafts will need make way, this draft's own stays."""
        if self._room(draft):
            return True
        read = {id(_prefix(d)) for d, _ in self.running.values()} | {id(draft.prefix)}
        for prefix in self.prefixes.values():
            if id(prefix) not in read:
                self._drop(prefix)
        return self._room(draft)

    def _room(self, draft: NativeDraft) -> bool:
        assert self.arena is not None
        prefix, need = _prefix(draft), own_pages(draft)
        if not _absent(prefix):
            return need <= len(self.arena.free)
        return need + pages_for(len(prefix.tokens)) <= len(self.arena.free) and bool(self.tables.entries)

    def pages(self, draft: NativeDraft) -> list[int]:
        return self.running[draft.request.id][1]

    def give(self, draft: NativeDraft) -> None:
        """The draft's own pages back, if it has some."""
        _, pages = self.running.pop(draft.request.id, (draft, []))
        if self.arena is not None:
            self.arena.give(pages)

    def undo(self, drafts: list[NativeDraft]) -> None:
        """Reservations that came to nothing."""
        for draft in drafts:
            self.give(draft)
        for prefix in self.fresh:
            self._drop(prefix)
        self.fresh.clear()

    def forget(self) -> None:
        """Everybody's pages back; users stay."""
        for draft, _ in list(self.running.values()):
            self.give(draft)
        for prefix in self.prefixes.values():
            self._drop(prefix)
        self.fresh.clear()

    def _drop(self, prefix: PagedPrefix) -> None:
        if prefix.entry >= 0 and self.arena is not None:
            self.arena.give(prefix.pages)
            self.tables.entries.append(prefix.entry)
            prefix.pages, prefix.entry = [], -1


def _prefix(draft: NativeDraft) -> PagedPrefix:
    assert isinstance(draft.prefix, PagedPrefix)
    return draft.prefix


def _absent(prefix: PagedPrefix) -> bool:
    """It has tokens and no pages. A prompt of one token has an empty prefix, which needs none."""
    return prefix.entry < 0 and bool(prefix.tokens)
