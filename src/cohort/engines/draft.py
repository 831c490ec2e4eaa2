"""A sample being written: what every engine that draws tokens knows of a request, its stops and its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cohort.engines.base import Event, Request
from cohort.types import Finish, Provenance, Sample


@dataclass(eq=False, kw_only=True, slots=True)
class Draft:
    """What a request has so far. From it alone the cached state can be computed again."""

    request: Request
    stream: int = 0  # of random numbers, where this process draws them
    tokens: list[int] = field(default_factory=list)  # drawn
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish: Finish | None = None
    cut: int = -1  # where in the text a stop string begins; -1 = nowhere

    @property
    def num_shared(self) -> int:
        """Leading tokens of the request that are stored once for all who share them."""
        return len(self.request.tokens)

    @property
    def known(self) -> tuple[int, ...]:
        """All its tokens so far, the prompt's among them."""
        return (*self.request.tokens, *self.tokens)

    def begin(self, version: int) -> None:
        """The next token is drawn by this version."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))

    def extend(
        self, tokens: list[int], logprobs: list[float], kept: list[float], decode: Callable[[list[int]], str]
    ) -> None:
        """Take newly drawn tokens and notice an end. What was drawn beyond a stop string is discarded."""
        sampling, before = self.request.sampling, len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        self.kept += kept if sampling.truncates else []
        stopped = bool(sampling.stop_strings) and self._find(before, decode)
        if stopped or (self.tokens and self.tokens[-1] in sampling.stop_ids):
            self.finish = Finish.STOP
        elif len(self.tokens) >= sampling.max_tokens:
            self.finish = Finish.LENGTH

    def hear(
        self, tokens: list[int], logprobs: list[float], kept: list[float], decode: Callable[[list[int]], str]
    ) -> Event:
        """Take newly drawn tokens; what there is to report of them."""
        before = len(self.tokens)
        self.extend(tokens, logprobs, kept, decode)
        ended = None if self.finish is None else self.sample(decode)
        return Event(id=self.request.id, tokens=self.tokens[before:], logprobs=self.logprobs[before:], sample=ended)

    def _find(self, before: int, decode: Callable[[list[int]], str]) -> bool:
        """Cut after the first token, of those from `before` on, that completes a stop string."""
        if self._match(decode(self._spoken())) < 0:
            return False
        for end in range(before + 1, len(self.tokens) + 1):
            self.cut = self._match(decode(self.tokens[:end]))
            if self.cut >= 0:
                del self.tokens[end:], self.logprobs[end:], self.kept[end:]
                return True
        raise AssertionError("a stop string was found in the whole but in no part")

    def _match(self, text: str) -> int:
        found = [at for stop in self.request.sampling.stop_strings if (at := text.find(stop)) >= 0]
        return min(found, default=-1)

    def _spoken(self) -> list[int]:
        """The drawn tokens without a final stop id."""
        stopped = self.tokens and self.tokens[-1] in self.request.sampling.stop_ids
        return self.tokens[:-1] if stopped else self.tokens

    def sample(self, decode: Callable[[list[int]], str]) -> Sample:
        assert self.finish is not None
        text = decode(self.tokens)[: self.cut] if self.cut >= 0 else decode(self._spoken())
        return Sample(
            tokens=self.tokens,
            provenance=[int(Provenance.SAMPLED)] * len(self.tokens),
            sampler_logprobs=self.logprobs,
            kept_mass=self.kept,
            versions=self.versions,
            finish=self.finish,
            text=text,
        )
