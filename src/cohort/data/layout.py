"""Which tokens of a packed stream see which others, without a mask over all pairs.

A packed stream is cut into spans. A token sees its own span up to itself. If the span's prompt is another span, which
several spans may share, the token sees all of that prompt too. There are two forms of this: `Blocks` for plain matrix
products, and `Runs` for attention kernels that take sequences of any length end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cohort.data.transfer import copy_to_device

# Spans are put into one block while padding adds at most this share of query-key pairs ...
MAX_PADDED_SHARE = 0.25
# ... plus this many pairs, which take about as long as the call itself.
PAIRS_PER_CALL = 8192


class Span(NamedTuple):
    """A run of tokens in the packed stream. Each token sees the span up to itself, and a shared prompt if there is one.

    A span without shared prompt (`prompt_length` 0) is a prompt, or a prompt and its completion in one.
    """

    start: int
    length: int
    prompt_start: int  # index of the shared prompt's first token in the packed stream
    prompt_length: int  # 0 = there is no shared prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Spans of similar length that are attended in one call: b spans of Lq queries over Lk keys, padded.

    Query i of span s sees keys 0 .. offsets[s] + i. The keys of a completion are its prompt and itself, and its offset
    is the prompt's length. The keys of a prompt are itself, and its offset is 0. Padding repeats an arbitrary token:
    padded keys come after every key that a real query sees, and the results of padded queries are never read.
    """

    queries: Tensor  # [b, Lq] indices into the packed stream
    keys: Tensor  # [b, Lk] indices into the packed stream
    offsets: Tensor  # [b]
    has_equal_offsets: bool  # all offsets are equal, so that one mask serves all spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A packed stream as padded blocks."""

    blocks: list[Block]
    order: Tensor  # [T] row of each token in the outputs of the blocks, laid end to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """A packed stream as sequences end to end: per span its queries, and as keys its prompt (if shared) and itself.

    Edges are [n + 1] int32: the index at which each of n sequences begins, then the end of the last. The last query of
    a span sees all keys of the span, the query before it all but the last key, and so on.
    """

    query_edges: Tensor
    max_queries: int  # of one span
    key_edges: Tensor
    max_keys: int  # of one span
    copies: Copies | None  # None = no prompt is shared, so the keys are the packed stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Where the S keys of `Runs` come from, if prompts are shared: keys of a prompt occur in all spans that see it."""

    stream_index: Tensor  # [S] index into the packed stream of each key
    # [S] The places of the copies, grouped by the token that was copied, in the order of the tokens in the stream.
    copies_by_token: Tensor
    token_edges: Tensor  # [T + 1] where the copies of each token begin in `copies_by_token`


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The spans of a packed stream."""

    spans: Sequence[Span]  # end to end, in the order of the packed stream; none is empty
    num_tokens: int

    def make_blocks(self, device: torch.device) -> Blocks:
        """Returns the spans as padded blocks for matrix products, with index tensors on `device`.

        Spans of similar length share a block, so that padding wastes little and calls are few.
        """
        blocks: list[Block] = []
        order = np.empty(self.num_tokens, dtype=np.int64)
        num_rows = 0  # in the outputs of the blocks so far
        for members in _group_similar(sorted(self.spans, key=lambda s: (s.length + s.prompt_length, s.length))):
            start, length, prompt_start, prompt_length = np.array(members).T[:, :, None]  # [b, 1] each
            lq = int(length.max())
            lk = int((length + prompt_length).max())
            column = np.arange(lk)
            row = np.arange(lq)
            # The minimum keeps the indices of padding inside the span.
            own_keys = start + np.minimum(column - prompt_length, length - 1)
            keys = np.where(column < prompt_length, prompt_start + column, own_keys)  # [b, Lk]
            queries = start + np.minimum(row, length - 1)  # [b, Lq]
            real = row < length
            order[queries[real]] = (num_rows + np.arange(len(members))[:, None] * lq + row)[real]
            num_rows += len(members) * lq
            blocks.append(
                Block(
                    queries=copy_to_device(queries, device),
                    keys=copy_to_device(keys, device),
                    offsets=copy_to_device(prompt_length[:, 0].copy(), device),
                    has_equal_offsets=bool((prompt_length == prompt_length[0]).all()),
                )
            )
        return Blocks(blocks=blocks, order=copy_to_device(order, device))

    def make_runs(self, device: torch.device) -> Runs:
        """Returns the spans as sequences of queries and keys, end to end, for attention kernels.

        There must be at least one span. Tensors are on `device`.
        """
        num_queries = [s.length for s in self.spans]
        num_keys = [s.length + s.prompt_length for s in self.spans]
        return Runs(
            query_edges=copy_to_device(_accumulate_edges(num_queries), device, torch.int32),
            max_queries=max(num_queries),
            key_edges=copy_to_device(_accumulate_edges(num_keys), device, torch.int32),
            max_keys=max(num_keys),
            copies=self._make_copies(device) if num_keys != num_queries else None,
        )

    def _make_copies(self, device: torch.device) -> Copies:
        """Returns, for the keys of all spans end to end, which token of the packed stream each key is a copy of.

        The keys of a span are those of its shared prompt, if it has one, then its own. The reverse, the copies of each
        token, is in the result too. Tensors are on `device`.
        """
        parts = ((s.prompt_start, s.prompt_length, s.start, s.length) for s in self.spans)
        order = np.concatenate([np.r_[at : at + size, start : start + n] for at, size, start, n in parts])
        return Copies(
            stream_index=copy_to_device(order, device),
            copies_by_token=copy_to_device(np.argsort(order, kind="stable"), device, torch.int32),
            token_edges=copy_to_device(
                np.r_[0, np.bincount(order, minlength=self.num_tokens).cumsum()], device, torch.int32
            ),
        )


def _accumulate_edges(lengths: Sequence[int]) -> list[int]:
    """Returns the index at which each sequence begins when all are laid end to end, and then the end of the last."""
    return [0, *accumulate(lengths)]


def _group_similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Returns the spans in groups that are attended in one call each; order is kept.

    The spans must be sorted by number of keys (with the shared prompt), then by length. A new group begins where
    padding would cost more than the call that is saved.
    """
    out: list[list[Span]] = []
    # Of the last group: most queries, most keys, and query-key pairs without padding.
    lq = lk = area = 0
    for span in spans:
        _, length, _, prompt_length = span
        q, k = max(lq, length), max(lk, length + prompt_length)
        true_area = area + length * (length + prompt_length)
        if out and (len(out[-1]) + 1) * q * k <= (1 + MAX_PADDED_SHARE) * true_area + PAIRS_PER_CALL:
            out[-1].append(span)
            lq, lk = q, k
            area = true_area
        else:
            out.append([span])
            lq, lk = length, length + prompt_length
            area = lq * lk
    return out
