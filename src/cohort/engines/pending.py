"""What vLLM has drawn for a request so far, and how much of it may be reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from cohort.engines.base import Event, Request
from cohort.engines.draft import Draft
from cohort.text import TextStream, Tokenizer


@dataclass(kw_only=True, slots=True)
class PendingOutput:
    """What vLLM has drawn for a request. With stop strings, tokens whose text is not complete are not reported yet."""

    request: Request
    text_stream: TextStream | None  # decodes token by token, to find stop strings; None = the request has none
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_complete: int = 0  # tokens whose text is complete: no stop string ends inside them
    num_reported: int = 0  # tokens in events so far
    versions: list[tuple[int, int]] = field(default_factory=list)  # (index of first token, version), in order
    tail: str = ""  # the end of the text, as long as the part of a stop string that may be in it

    def add_tokens(self, tokens: list[int], logprobs: list[float]) -> bool:
        """Appends new tokens. Returns whether their text, with the end of the text before, has a stop string.

        A stop string may be noticed some tokens late, because text waits for whole characters. Always False without
        stop strings. `num_complete` and `tail` change too.
        """
        self.tokens += tokens
        self.logprobs += logprobs
        text = "" if self.text_stream is None else self.text_stream.push(tokens)
        if self.text_stream is None or text:
            self.num_complete = len(self.tokens)
        # A stop string may begin in the text before: keep as much of it as a stop string can reach back.
        stops = self.request.sampling.stop_strings
        seen = self.tail + text
        reach = max(map(len, stops), default=1) - 1
        self.tail = seen[max(0, len(seen) - reach) :]
        return bool(text) and any(stop in seen for stop in stops)

    def make_draft(self, tokenizer: Tokenizer) -> Draft:
        """Returns all tokens, reported or not, as a new Draft. `self` does not change.

        The draft is cut after a stop string. Its `finish` is None if nothing (stop string, stop id, length) ended it.
        """
        draft = Draft(request=self.request)
        draft.add_all_tokens(self.tokens, self.logprobs, tokenizer.decode)
        # A stop string may have cut tokens of the newest version.
        draft.versions = [span for span in self.versions if span[0] < len(draft.tokens)] or self.versions[:1]
        return draft

    def set_version(self, version: int) -> None:
        """Records that tokens added from now on come from weights of `version`."""
        if self.versions and self.versions[-1][0] == len(self.tokens):
            # No token was drawn with the version before.
            self.versions.pop()
        self.versions.append((len(self.tokens), version))

    def make_event(self, num: int) -> Event:
        """Returns an event with those of the first `num` tokens that were not reported, and counts them as reported.

        Its `sample` is None.
        """
        new = slice(self.num_reported, num)
        self.num_reported = num
        return Event(id=self.request.id, tokens=self.tokens[new], logprobs=self.logprobs[new])
