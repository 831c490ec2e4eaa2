"""Who sees whom in a stream, without a mask over all pairs.

A stream is cut into spans. A token sees its span up to itself, and all of the span's prompt where that is another
span, which several share. Two forms of the same: `blocks` for plain products, `runs` for attention that takes
sequences of any length end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
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
    """Every span as a causal sequence, and the completions of each shared prompt as queries to it.

    The stream begins with the shared prompts and ends with their completions, both in the prompts' order, so that
    all three are slices of it. Edges are [n + 1] int32: where each begins, and the end.
    """

    spans: Tensor  # edges of all spans
    longest: int  # span
    prompts: Tensor  # edges of the shared prompts, from 0
    longest_prompt: int  # 0 = nothing is shared
    groups: Tensor  # edges of the prompts' completions, taken together, from `first`
    longest_group: int
    num_prompt: int  # tokens of the shared prompts
    first: int  # where their completions begin


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
        shared = [s for s in self.spans if s.size]
        users = [(prompt, list(members)) for prompt, members in groupby(shared, key=lambda s: (s.prompt, s.size))]
        sizes = [size for (_, size), _ in users]
        groups = [sum(s.length for s in members) for _, members in users]
        assert [start for (start, _), _ in users] == _edges(sizes)[:-1], "shared prompts come first, in order"
        assert sum(groups) == sum(s.length for s in self.spans[len(self.spans) - len(shared) :]), "and their users last"

        def edges(lengths: list[int]) -> Tensor:
            return put(_edges(lengths), device, torch.int32)

        lengths = [s.length for s in self.spans]
        return Runs(
            spans=edges(lengths),
            longest=max(lengths),
            prompts=edges(sizes),
            longest_prompt=max(sizes, default=0),
            groups=edges(groups),
            longest_group=max(groups, default=0),
            num_prompt=sum(sizes),
            first=self.num_tokens - sum(groups),
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
