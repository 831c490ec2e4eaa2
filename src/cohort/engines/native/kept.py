"""KV of ended requests, kept for requests that continue them: the further turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from cohort.engines.native.kv import Prefix


@dataclass(eq=False, kw_only=True, slots=True)
class KeptKV:
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
