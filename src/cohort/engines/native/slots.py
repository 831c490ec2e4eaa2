"""The state of every slot as tensors, so that a decode step looks at no single sample in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.data.transfer import put
from cohort.engines.draft import Draft
from cohort.engines.native.random import uniforms
from cohort.engines.native.sampler import Drawn, Settings

STREAM, POSITION, LAST, LENGTH, BASE, LEFT, FILLED, TOP_K = range(8)
TEMPERATURE, TOP_P, MIN_P = range(3)


class Slots:
    """One column a slot. `window` tokens a slot are held until they are read back in bulk."""

    def __init__(self, num: int, window: int, wide: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.ints = torch.zeros(8, num, dtype=torch.int64, device=device)
        self.reals = torch.zeros(3, num, dtype=torch.float64, device=device)
        self.stops = torch.full((num, 1), -1, device=device)
        self.tokens = torch.zeros(num, window, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num, window, dtype=wide, device=device)
        self.kept = torch.ones(num, window, dtype=wide, device=device)
        self.scaled = self.greedy = self.truncated = self.sorted = False
        # rows of `ints` under their names
        self.stream = self.ints[STREAM]  # of random numbers
        self.position = self.ints[POSITION]  # in the stream, of the next draw
        self.last = self.ints[LAST]  # token drawn last, not yet in the cache
        self.length = self.ints[LENGTH]  # own tokens in the cache
        self.base = self.ints[BASE]  # length of the shared prefix
        self.left = self.ints[LEFT]  # tokens that may still be drawn
        self.filled = self.ints[FILLED]  # tokens in the window

    def place(self, drafts: Sequence[Draft], first: int) -> None:
        """Put drafts into the slots from `first` on. Nothing of them is cached yet."""
        ints, reals = [], []
        widest = max(len(d.request.sampling.stop_ids) for d in drafts)
        if widest > self.stops.shape[1]:
            wider = self.stops.new_full((len(self.stops), widest), -1)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        width, stops = self.stops.shape[1], []
        for d in drafts:
            s, drawn = d.request.sampling, len(d.tokens)
            ints.append([d.stream, d.request.start + drawn, 0, 0, d.num_shared, s.max_tokens - drawn, 0, s.top_k])
            reals.append([s.temperature, s.top_p, s.min_p])
            stops.append([*s.stop_ids, *[-1] * (width - len(s.stop_ids))])
        here = slice(first, first + len(drafts))
        self.ints[:, here] = put(ints, self.device).T
        self.reals[:, here] = put(reals, self.device, torch.float64).T
        self.stops[here] = put(stops, self.device)

    def move(self, source: list[int], target: list[int]) -> None:
        old, new = put(source, self.device), put(target, self.device)
        self.ints[:, new] = self.ints[:, old]
        self.reals[:, new] = self.reals[:, old]
        for held in (self.stops, self.tokens, self.logprobs, self.kept):
            held[new] = held[old]

    def survey(self, drafts: Sequence[Draft]) -> None:
        """Note what nobody among these asks for, so that no step pays for it."""
        asked = [d.request.sampling for d in drafts]
        self.scaled = any(s.temperature not in (0.0, 1.0) for s in asked)
        self.greedy = any(s.temperature == 0.0 for s in asked)
        self.truncated = any(s.truncates for s in asked)
        self.sorted = any(s.top_p < 1.0 or s.top_k > 0 for s in asked)

    def settings(self, here: slice) -> Settings:
        return Settings(
            temperature=self.reals[TEMPERATURE, here],
            top_p=self.reals[TOP_P, here],
            min_p=self.reals[MIN_P, here],
            top_k=self.ints[TOP_K, here],
            scaled=self.scaled,
            greedy=self.greedy,
            truncated=self.truncated,
            sorted=self.sorted,
        )

    def uniforms(self, here: slice) -> Tensor:
        return uniforms(self.stream[here], self.position[here])

    def record(self, here: slice, drawn: Drawn) -> Tensor:
        """Store one drawn token a slot; tells which slots are done, [B] bool."""
        at = self.filled[here][:, None]
        self.last[here] = drawn.tokens
        self.tokens[here].scatter_(1, at, drawn.tokens[:, None])
        self.logprobs[here].scatter_(1, at, drawn.logprobs[:, None])
        if drawn.kept is not None:
            self.kept[here].scatter_(1, at, drawn.kept[:, None])
        self.position[here] += 1
        self.left[here] -= 1
        self.filled[here] += 1
        return (drawn.tokens[:, None] == self.stops[here]).any(dim=1) | (self.left[here] == 0)

    def read_back(self, slots: Sequence[int]) -> list[tuple[list[int], list[float], list[float]]]:
        """The windows of these slots (tokens, logprobs, kept mass), emptied."""
        which = torch.tensor(list(slots), device=self.device)
        filled = self.filled[which].tolist()
        tokens, logprobs = self.tokens[which].tolist(), self.logprobs[which].tolist()
        kept = self.kept[which].tolist() if self.truncated else [[]] * len(slots)
        self.filled[which] = 0
        return [(t[:n], lp[:n], k[:n]) for n, t, lp, k in zip(filled, tokens, logprobs, kept, strict=True)]
