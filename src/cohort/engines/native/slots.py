"""The state of all slots as tensors, so that a decode step looks at no single sample in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.data.transfer import copy_to_device
from cohort.engines.draft import Draft
from cohort.engines.native.random import draw_uniforms
from cohort.engines.native.sampler import DrawnTokens, SamplingSettings

# Rows of `Slots.ints` and of `Slots.reals`.
STREAM, POSITION, LAST, LENGTH, BASE, REMAINING, NUM_FILLED, TOP_K = range(8)
TEMPERATURE, TOP_P, MIN_P = range(3)


class Slots:
    """State of all decoding slots, as tensors with one column or row per slot.

    Up to `window` drawn tokens per slot stay on the device before they are copied to the host together.
    """

    def __init__(self, num: int, window: int, float_dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.ints = torch.zeros(8, num, dtype=torch.int64, device=device)
        self.reals = torch.zeros(3, num, dtype=torch.float64, device=device)
        self.stop_ids = torch.full((num, 1), -1, device=device)  # [num, most stop ids], filled up with -1
        self.tokens = torch.zeros(num, window, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num, window, dtype=float_dtype, device=device)
        self.kept_mass = torch.ones(num, window, dtype=float_dtype, device=device)
        self.has_temperature = self.has_greedy = self.has_truncation = self.needs_sorting = False
        # Views of the rows of `ints`, each [num].
        self.random_stream = self.ints[STREAM]
        self.position = self.ints[POSITION]  # of the next draw, in the random stream
        self.last_token = self.ints[LAST]  # token drawn last, not yet in the cache
        self.own_length = self.ints[LENGTH]  # own tokens in the cache
        self.prefix_length = self.ints[BASE]  # tokens of the shared prefix
        self.remaining = self.ints[REMAINING]  # tokens that may still be drawn
        self.num_filled = self.ints[NUM_FILLED]  # tokens in the window

    def place_drafts(self, drafts: Sequence[Draft], first: int) -> None:
        """Writes the drafts' sampling state into the slots from `first` on, as if none of their tokens were cached.

        The slots' windows become empty, and `last_token` and `own_length` 0. There must be at least one draft. The
        tensor `stop_ids` is replaced by a wider one if a draft has more stop ids than any before.
        """
        ints, reals = [], []
        # The table of stop ids grows to the longest list that was ever needed.
        widest = max(len(d.request.sampling.stop_ids) for d in drafts)
        if widest > self.stop_ids.shape[1]:
            wider = self.stop_ids.new_full((len(self.stop_ids), widest), -1)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        width, stop_ids = self.stop_ids.shape[1], []
        for d in drafts:
            s, drawn = d.request.sampling, len(d.tokens)
            # In the order of the row constants above.
            ints.append(
                [d.random_stream, d.request.start + drawn, 0, 0, d.num_shared, s.max_tokens - drawn, 0, s.top_k]
            )
            reals.append([s.temperature, s.top_p, s.min_p])
            stop_ids.append([*s.stop_ids, *[-1] * (width - len(s.stop_ids))])
        here = slice(first, first + len(drafts))
        self.ints[:, here] = copy_to_device(ints, self.device).T
        self.reals[:, here] = copy_to_device(reals, self.device, torch.float64).T
        self.stop_ids[here] = copy_to_device(stop_ids, self.device)

    def move_slots(self, source: list[int], target: list[int]) -> None:
        """Copies the state of the source slots over the target slots, pair by pair. The two may overlap."""
        # Indexing with a tensor copies the sources first, so sources and targets may overlap.
        old, new = copy_to_device(source, self.device), copy_to_device(target, self.device)
        self.ints[:, new] = self.ints[:, old]
        self.reals[:, new] = self.reals[:, old]
        for held in (self.stop_ids, self.tokens, self.logprobs, self.kept_mass):
            held[new] = held[old]

    def note_used_options(self, drafts: Sequence[Draft]) -> None:
        """Sets the flags that say which sampling options (temperature, greedy, truncation) these drafts use.

        The decode step skips the work for all other options.
        """
        asked = [d.request.sampling for d in drafts]
        self.has_temperature = any(s.temperature not in (0.0, 1.0) for s in asked)
        self.has_greedy = any(s.temperature == 0.0 for s in asked)
        self.has_truncation = any(s.truncates for s in asked)
        self.needs_sorting = any(s.top_p < 1.0 or s.top_k > 0 for s in asked)

    def get_settings(self, here: slice) -> SamplingSettings:
        """Returns the sampling settings of the slots in the range `here`, as views.

        The flags are those that `note_used_options` set last, for all drafts.
        """
        return SamplingSettings(
            temperature=self.reals[TEMPERATURE, here],
            top_p=self.reals[TOP_P, here],
            min_p=self.reals[MIN_P, here],
            top_k=self.ints[TOP_K, here],
            has_temperature=self.has_temperature,
            has_greedy=self.has_greedy,
            has_truncation=self.has_truncation,
            needs_sorting=self.needs_sorting,
        )

    def draw_uniforms(self, here: slice) -> Tensor:
        """Returns the uniform number in [0, 1) for the next draw of each slot in the range `here`. Changes no state."""
        return draw_uniforms(self.random_stream[here], self.position[here])

    def record_tokens(self, here: slice, drawn: DrawnTokens) -> Tensor:
        """Stores one drawn token for each slot in the range `here` in its window, and as its `last_token`.

        Advances `position`, `remaining` and `num_filled`, but not `own_length`. The window must have room. Returns
        which of these slots have ended, by a stop id or by length: [B] bool.
        """
        column = self.num_filled[here][:, None]
        self.last_token[here] = drawn.tokens
        self.tokens[here].scatter_(1, column, drawn.tokens[:, None])
        self.logprobs[here].scatter_(1, column, drawn.logprobs[:, None])
        if drawn.kept_mass is not None:
            self.kept_mass[here].scatter_(1, column, drawn.kept_mass[:, None])
        self.position[here] += 1
        self.remaining[here] -= 1
        self.num_filled[here] += 1
        return (drawn.tokens[:, None] == self.stop_ids[here]).any(dim=1) | (self.remaining[here] == 0)

    def read_and_clear(self, slots: Sequence[int]) -> list[tuple[list[int], list[float], list[float]]]:
        """Copies the tokens drawn since the last read from these slots to the host and empties the slots' windows.

        Returns (tokens, log-probabilities, kept probability mass) per slot, in the given order. Kept mass is [] if no
        running request truncates; of a request that does not truncate it may mean nothing.
        """
        which = torch.tensor(list(slots), device=self.device)
        filled = self.num_filled[which].tolist()
        tokens, logprobs = self.tokens[which].tolist(), self.logprobs[which].tolist()
        kept = self.kept_mass[which].tolist() if self.has_truncation else [[]] * len(slots)
        self.num_filled[which] = 0
        return [(t[:n], lp[:n], k[:n]) for n, t, lp, k in zip(filled, tokens, logprobs, kept, strict=True)]
