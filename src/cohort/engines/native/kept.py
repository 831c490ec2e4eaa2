"""KV of ended requests, kept for requests that continue them: the further turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cohort.engines.base import Request
from cohort.engines.native.kv import Prefix, PrefixStore


@dataclass(eq=False, kw_only=True, slots=True)
class KeptDraft:
    """The KV of a draft that has ended. It counts as one user of the draft's prefix.

    The draft's own tokens are those after the prefix. The last of them has no KV, because nothing was drawn after it.
    """

    prefix: Prefix
    tokens: list[int]  # own tokens whose KV is kept
    kv: Tensor | None = None  # [2, L, K, len(tokens), D]; None in engines that keep it elsewhere

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those of the prefix included."""
        return len(self.prefix.tokens) + len(self.tokens)

    def cut_to(self, tokens: Sequence[int]) -> bool:
        """Keeps only what a request with these tokens can use. Returns False if it can use nothing.

        That is the prefix and the own tokens that both have in common from the start. A request that has no token after
        the prefix can use nothing. At least its last token is left to be computed, because the next one is drawn from
        its hidden state.
        """
        before = len(self.prefix.tokens)
        if len(tokens) <= before or tuple(tokens[:before]) != self.prefix.tokens:
            return False
        new = tokens[before:-1]
        pairs = zip(self.tokens, new, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(new)))
        del self.tokens[common:]
        return True


class KeptStore:
    """What is kept of ended requests that no other request continues yet, by request id.

    Adding and removing counts users of prefixes, so it may move other prefixes in their pools.
    """

    def __init__(self, prefixes: PrefixStore) -> None:
        self.prefixes = prefixes
        self.by_id: dict[str, KeptDraft] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, id: str) -> bool:
        return id in self.by_id

    def add(self, id: str, prefix: Prefix, tokens: list[int], kv: Tensor) -> None:
        """Keeps the KV of own tokens after a prefix for the ended request `id`, as one more user of the prefix."""
        self.by_id[id] = KeptDraft(prefix=self.prefixes.add_user(prefix.tokens), tokens=tokens, kv=kv)

    def take_kept(self, request: Request) -> KeptDraft | None:
        """Removes and returns the KV that the request continues, without what it cannot use. None = there is none.

        The caller becomes the user of its prefix.
        """
        kept = self.by_id.get(request.continues)
        if kept is not None and not kept.cut_to(request.tokens):
            self.remove(request.continues)
        return self.by_id.pop(request.continues, None)

    def remove(self, id: str) -> None:
        """Drops what is kept of the request `id`. Its prefix is freed if nothing else uses it."""
        self.prefixes.remove_user(self.by_id.pop(id).prefix)

    def clear(self) -> None:
        """Drops everything that is kept."""
        for id in list(self.by_id):
            self.remove(id)
