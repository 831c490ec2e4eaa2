"""A sample that is still being written: the tokens drawn for a request so far, and the rules that end it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cohort.engines.base import Event, Request
from cohort.types import Finish, Provenance, Sample

# A stop string may be noticed this many tokens late, because text waits for whole characters: these have at most four.
MAX_LATE_TOKENS = 8


@dataclass(eq=False, kw_only=True, slots=True)
class Draft:
    """A request and what was drawn for it so far. All cached state can be recomputed from a draft."""

    request: Request
    random_stream: int = 0  # the key's stream of random numbers; 0 in engines that draw in another program
    tokens: list[int] = field(default_factory=list)  # drawn tokens, without the prompt
    logprobs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)  # empty unless the request truncates
    versions: list[tuple[int, int]] = field(default_factory=list)  # (index of first token, version), in order
    finish: Finish | None = None  # None while it runs
    stop_offset: int = -1  # character at which a stop string begins in the text; -1 = no stop string

    @property
    def num_shared(self) -> int:
        """Number of leading prompt tokens that the group shares: all of them, unless a subclass says otherwise."""
        return len(self.request.tokens)

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The tokens of the prompt followed by those drawn so far."""
        return (*self.request.tokens, *self.tokens)

    def set_version(self, version: int) -> None:
        """Records that tokens added from now on come from weights of `version`.

        Nothing changes if `version` is the last one that was recorded.
        """
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))

    def add_tokens(
        self, tokens: list[int], logprobs: list[float], kept: list[float], decode: Callable[[list[int]], str]
    ) -> None:
        """Appends newly drawn tokens and sets `finish` if they end the sample: by a stop, or by length.

        Tokens after the one that completes a stop string are discarded. Nothing else is cut: a stop id counts only as
        the last token, and the caller must not add more than `max_tokens` in all. `kept` is per token the probability
        mass that top-k, top-p and min-p kept, or []; it is ignored if the request uses none of them. `decode` turns
        token ids into text.
        """
        sampling, before = self.request.sampling, len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        self.kept_mass += kept if sampling.truncates else []
        stopped = bool(sampling.stop_strings) and self._cut_after_stop_string(before, decode)
        # A stop on the last allowed token counts as a stop, not as a length limit.
        if stopped or (self.tokens and self.tokens[-1] in sampling.stop_ids):
            self.finish = Finish.STOP
        elif len(self.tokens) >= sampling.max_tokens:
            self.finish = Finish.LENGTH

    def add_all_tokens(self, tokens: list[int], logprobs: list[float], decode: Callable[[list[int]], str]) -> None:
        """Calls `add_tokens` with tokens of which only the last few can complete a stop string.

        That is so where another program has looked for stop strings while it drew the tokens. To find the token that
        completes one, `add_tokens` decodes again and again, which is slow for many.
        """
        sure = max(0, len(tokens) - MAX_LATE_TOKENS)
        for part in (slice(sure), slice(sure, None)):
            if self.finish is None:
                self.add_tokens(tokens[part], logprobs[part], [], decode)

    def add_and_report(
        self, tokens: list[int], logprobs: list[float], kept: list[float], decode: Callable[[list[int]], str]
    ) -> Event:
        """Calls `add_tokens`, with the same parameters, and returns the event to report.

        The event has the new tokens that were not discarded, their log-probabilities, and the sample if it has ended.
        """
        before = len(self.tokens)
        self.add_tokens(tokens, logprobs, kept, decode)
        ended = None if self.finish is None else self.to_sample(decode)
        return Event(id=self.request.id, tokens=self.tokens[before:], logprobs=self.logprobs[before:], sample=ended)

    def _cut_after_stop_string(self, before: int, decode: Callable[[list[int]], str]) -> bool:
        """Discards all tokens, with their log-probabilities, after the first one that completes a stop string.

        Only tokens from index `before` on can complete one, since the earlier ones were checked before. Returns whether
        the text has a stop string; if so, `stop_offset` is set to its first character. A final stop id is no text.
        """
        # One decode of the whole text is enough in the usual case that there is no stop string.
        if self._find_stop_string(decode(self._visible_tokens())) < 0:
            return False
        for end in range(before + 1, len(self.tokens) + 1):
            self.stop_offset = self._find_stop_string(decode(self.tokens[:end]))
            if self.stop_offset >= 0:
                del self.tokens[end:], self.logprobs[end:], self.kept_mass[end:]
                return True
        raise AssertionError("a stop string was found in the whole but in no part")

    def _find_stop_string(self, text: str) -> int:
        """Returns the index of the character at which the earliest stop string begins in `text`; -1 = there is none."""
        offsets = [offset for stop in self.request.sampling.stop_strings if (offset := text.find(stop)) >= 0]
        return min(offsets, default=-1)

    def _visible_tokens(self) -> list[int]:
        """Returns the drawn tokens without a final stop id, which is not part of the text.

        If there is none, returns the list `tokens` itself, not a copy.
        """
        stopped = self.tokens and self.tokens[-1] in self.request.sampling.stop_ids
        return self.tokens[:-1] if stopped else self.tokens

    def to_sample(self, decode: Callable[[list[int]], str]) -> Sample:
        """Returns the ended draft as a Sample; `finish` must be set.

        Its tokens include the stop string or stop id, its text ends before it. Its lists are those of the draft, not
        copies.
        """
        assert self.finish is not None
        text = decode(self.tokens)[: self.stop_offset] if self.stop_offset >= 0 else decode(self._visible_tokens())
        return Sample(
            tokens=self.tokens,
            provenance=[int(Provenance.SAMPLED)] * len(self.tokens),
            sampler_logprobs=self.logprobs,
            kept_mass=self.kept_mass,
            versions=self.versions,
            finish=self.finish,
            text=text,
        )
