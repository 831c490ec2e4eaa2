"""Who sees whom in a stream, without a mask over all pairs.

A stream is cut into spans. A token sees its span up to itself, and all of the span's prompt where that is another
span, which several share. Two forms of the same: `blocks` for plain products, `runs` for attention that takes
sequences of any length end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cohort.data.transfer import put

WASTE = 0.25  # share of padded query-key pairs in a block worth a call less
CALL = 8192  # pairs computed in about the time that a call itself costs


class Span(NamedTuple):
    """A run of tokens that sees its prompt, where that lies elsewhere in the stream, and itself up to each."""

    start: int
    length: int
    prompt: int  # where it starts
    size: int  # of the prompt; 0 = the span has no other


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Segments of similar length attended in one call: b segments of Lq queries over Lk keys, padded.

    Query i of segment s sees keys 0 .. offsets[s] + i. A completion's keys are its prompt and itself with
    offset = prompt length; a prompt's keys are itself with offset 0. Padding repeats an arbitrary token: padded
    keys lie beyond every real query's reach, padded queries are never read.
    """

    queries: Tensor  # [b, Lq] indices into the stream
    keys: Tensor  # [b, Lk] indices into the stream
    offsets: Tensor  # [b]
    alike: bool  # all offsets are equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    blocks: list[Block]
    order: Tensor  # [T] row of each token in the blocks' outputs laid end to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Every span as a sequence of queries, and what it sees, end to end: its prompt (once a span) and itself.

    Edges are [n + 1] int32: where each begins, and the end. The last query of a span sees all of its keys, the one
    before all but the last, and so on.
    """

    queries: Tensor  # edges of the spans
    longest: int
    keys: Tensor  # edges of what they see
    most_seen: int
    copies: Copies | None  # None = nothing is shared, the keys are the stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """The keys that sequences see, where a shared prompt's come once a sibling."""

    order: Tensor  # [S] where in the stream each lies
    back: Tensor  # [S] the copies of the stream's first token, of its second, ...
    edges: Tensor  # [T + 1] of those


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    spans: Sequence[Span]  # end to end, in the stream's order; none is empty
    num_tokens: int

    def blocks(self, device: torch.device) -> Blocks:
        """Batch spans of similar shape, so that padding wastes little and calls are few."""
        blocks: list[Block] = []
        order = np.empty(self.num_tokens, dtype=np.int64)
        taken = 0
        for members in _similar(sorted(self.spans, key=lambda s: (s.length + s.size, s.length))):
            start, length, shared, size = np.array(members).T[:, :, None]  # [b, 1] each
            lq, lk = int(length.max()), int((length + size).max())
            column, row = np.arange(lk), np.arange(lq)
            own = start + np.minimum(column - size, length - 1)
            keys = np.where(column < size, shared + column, own)  # [b, Lk]
            queries = start + np.minimum(row, length - 1)  # [b, Lq]
            real = row < length
            order[queries[real]] = (taken + np.arange(len(members))[:, None] * lq + row)[real]
            taken += len(members) * lq
            blocks.append(
                Block(
                    queries=put(queries, device),
                    keys=put(keys, device),
                    offsets=put(size[:, 0].copy(), device),
                    alike=bool((size == size[0]).all()),
                )
            )
        return Blocks(blocks=blocks, order=put(order, device))

    def runs(self, device: torch.device) -> Runs:
        lengths, seen = [s.length for s in self.spans], [s.length + s.size for s in self.spans]
        return Runs(
            queries=put(_edges(lengths), device, torch.int32),
            longest=max(lengths),
            keys=put(_edges(seen), device, torch.int32),
            most_seen=max(seen),
            copies=self._copies(device) if seen != lengths else None,
        )

    def _copies(self, device: torch.device) -> Copies:
        parts = ((s.prompt, s.size, s.start, s.length) for s in self.spans)
        order = np.concatenate([np.r_[at : at + size, start : start + n] for at, size, start, n in parts])
        return Copies(
            order=put(order, device),
            back=put(np.argsort(order, kind="stable"), device, torch.int32),
            edges=put(np.r_[0, np.bincount(order, minlength=self.num_tokens).cumsum()], device, torch.int32),
        )


def _edges(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Cut a sorted list of spans where padding would cost more than the calls it saves."""
    out: list[list[Span]] = []
    lq = lk = area = 0
    for span in spans:
        _, length, _, size = span
        q, k = max(lq, length), max(lk, length + size)
        true = area + length * (length + size)
        if out and (len(out[-1]) + 1) * q * k <= (1 + WASTE) * true + CALL:
            out[-1].append(span)
            lq, lk, area = q, k, true
        else:
            out.append([span])
            lq, lk, area = length, length + size, length * (length + size)
    return out
