"""An engine that says what it is told: for tests of everything that drives engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cohort.engines.base import Abilities, Event, Request, Weights, Work
from cohort.engines.draft import Draft
from cohort.engines.requests import check_request, closed, not_under_way
from cohort.errors import ConfigError, EngineError
from cohort.types import Finish, Sample

LOGPROB = -1.0  # of a token whose script gives none


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What a request is answered with. Stop ids, stop strings and max_tokens still apply."""

    tokens: list[int]
    logprobs: list[float] | None = None


Answers = Callable[[Request], Script] | Mapping[str, Script]


class ScriptedEngine:
    """Answers requests from a function, or from a mapping by request id.

    `at_once` requests run together and get `window` tokens a poll, so that partial samples, refills and loads
    under way happen as in a real engine. A script that runs out before anything stops it is a mistake. As an engine
    elsewhere may, it says nothing in `late` polls before each that says something, and dies after `lives` polls.
    """

    name = "scripted"
    abilities = Abilities()

    def __init__(
        self,
        answers: Answers,
        tokenizer_decode: Callable[[list[int]], str],
        max_context: int = 4096,
        vocab_size: int = 1 << 20,
        at_once: int = 64,
        window: int = 4,
        late: int = 0,
        lives: int | None = None,
    ) -> None:
        self.answers, self.decode = answers, tokenizer_decode
        self.max_context, self.vocab_size = max_context, vocab_size
        self.at_once, self.window = at_once, window
        self.late, self.lives = late, lives
        self.num_polls = 0
        self.version = 0
        self._closed = False
        self.work = Work()
        self.drafts: dict[str, tuple[Draft, Script]] = {}  # in the order they were submitted

    def submit(self, request: Request) -> None:
        self._check_alive()
        if self._closed:
            raise closed(self.name)
        check_request(request, self.max_context, self.vocab_size, self.drafts)
        script = self.answers(request) if callable(self.answers) else self.answers[request.id]
        self.drafts[request.id] = (Draft(request=request), script)

    @property
    def idle(self) -> bool:
        return not self.drafts

    def poll(self, timeout: float = 0.0) -> list[Event]:
        self._check_alive()
        self.num_polls += 1
        if self.num_polls % (self.late + 1):
            return []
        events = []
        for draft, script in list(self.drafts.values())[: self.at_once]:
            before = len(draft.tokens)
            draft.begin(self.version)
            while len(draft.tokens) < before + self.window and draft.finish is None:
                self._say_one(draft, script)
            event = Event(id=draft.request.id, tokens=draft.tokens[before:], logprobs=draft.logprobs[before:])
            if draft.finish is not None:
                event.sample = draft.sample(self.decode)
                del self.drafts[draft.request.id]
            events.append(event)
        return events

    def _say_one(self, draft: Draft, script: Script) -> None:
        at = len(draft.tokens)
        if at == len(script.tokens):
            raise ConfigError(f'the script of request "{draft.request.id}" ends after {at} tokens, before any stop.')
        logprob = LOGPROB if script.logprobs is None else script.logprobs[at]
        draft.extend([script.tokens[at]], [logprob], [1.0], self.decode)

    def abort(self, id: str) -> Sample:
        if id not in self.drafts:
            raise not_under_way(id)
        draft, _ = self.drafts.pop(id)
        draft.finish = Finish.ABORT
        return draft.sample(self.decode)

    def load(self, weights: Weights, version: int) -> None:
        self._check_alive()
        self.version = version

    def close(self) -> None:
        self.drafts.clear()
        self._closed = True

    def _check_alive(self) -> None:
        if self.lives is not None and self.num_polls >= self.lives:
            raise EngineError(f"the scripted engine died with {len(self.drafts)} requests under way.")
